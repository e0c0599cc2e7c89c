"""`fused_norm_rope`: schema, shape function, CPU, fake and GPU kernels, and the traced form."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import wrap_triton

from csrc_free_ops.norm_rope import norm_rope_kernel

from .. import checks, codecs, launch, layouts, platform, reference
from ..geometry import Grid
from ..registration import argument_names, register_traced, register_with_out

ARGUMENTS = """
    Tensor positions, Tensor q_c, Tensor q_norm_weight, float q_norm_eps,
    Tensor kv_c, Tensor kv_norm_weight, float kv_norm_eps, Tensor k_pe, Tensor rope_cos_sin,
    Tensor? index_k, Tensor? index_k_norm_weight, Tensor? index_k_norm_bias,
    float index_k_norm_eps, Tensor? index_rope_cos_sin, Tensor(a!) topk_indices_buffer,
    Tensor? slot_mapping=None, Tensor? indexer_slot_mapping=None,
    Tensor(b!)? indexer_k_cache=None, Tensor(c!)? mla_kv_cache=None,
    str mla_kv_cache_dtype="auto", Tensor? mla_k_scale=None,
    bool has_indexer=True, bool index_rope_interleave=False, bool fill_topk=True,
    str index_scale_format="fp32", bool indexer_cache_shuffled=False,
    Tensor(d!)? kv_c_out=None, Tensor(e!)? k_pe_out=None, Tensor(f!)? index_k_out=None,
    ScalarType? fp8_dtype=None
"""
MUTATES = (
    "topk_indices_buffer", "indexer_k_cache", "mla_kv_cache", "kv_c_out", "k_pe_out", "index_k_out"
)  # fmt: skip


@launch.cached
def _constants(
    q_dim: int, kv_dim: int, rope_dim: int,
    mode: str, mla_block_size: int,
    index_dim: int, index_rope_dim: int, interleaved: bool,
    index_block_size: int, ue8m0: bool, shuffled: bool, topk: int,
    fp8_dtype: torch.dtype, soft: bool, pdl: bool,
) -> dict[str, Any]:  # fmt: skip
    if mode in layouts.FLOAT_MODES:
        mode = "float"
    elif mode in layouts.FP8_MODES:
        mode = "fp8"
    tiles = {"fp8_ds_mla": layouts.Fp8DsMla.TILE, "nvfp4_ds_mla": layouts.Nvfp4DsMla.TILE}
    return {
        "Q_DIM": q_dim,
        "KV_DIM": kv_dim,
        "ROPE_DIM": rope_dim,
        "MLA_MODE": mode,
        "MLA_BLOCK_SIZE": mla_block_size,
        "MLA_TILE": tiles.get(mode, max(1 << (kv_dim - 1).bit_length(), 2)),
        "MLA_LIMIT": codecs.fp8_limit(fp8_dtype, pow2_scaled=mode == "fp8_ds_mla"),
        "INDEX_DIM": index_dim,
        "INDEX_ROPE_DIM": index_rope_dim,
        "INDEX_INTERLEAVED": interleaved,
        "INDEX_BLOCK_SIZE": index_block_size,
        "INDEX_UE8M0": ue8m0,
        "INDEX_SHUFFLED": shuffled,
        "INDEX_LIMIT": codecs.fp8_limit(fp8_dtype, pow2_scaled=True),
        "TOPK": topk,
        "FNUZ": fp8_dtype is torch.float8_e4m3fnuz,
        "SOFT": soft,
        "PDL": pdl,
    }


def prepare(
    positions: Tensor, q_c: Tensor, q_norm_weight: Tensor, q_norm_eps: float,
    kv_c: Tensor, kv_norm_weight: Tensor, kv_norm_eps: float, k_pe: Tensor, rope_cos_sin: Tensor,
    index_k: Tensor | None, index_k_norm_weight: Tensor | None, index_k_norm_bias: Tensor | None,
    index_k_norm_eps: float, index_rope_cos_sin: Tensor | None, topk_indices_buffer: Tensor,
    slot_mapping: Tensor | None = None, indexer_slot_mapping: Tensor | None = None,
    indexer_k_cache: Tensor | None = None, mla_kv_cache: Tensor | None = None,
    mla_kv_cache_dtype: str = "auto", mla_k_scale: Tensor | None = None,
    has_indexer: bool = True, index_rope_interleave: bool = False, fill_topk: bool = True,
    index_scale_format: str = "fp32", indexer_cache_shuffled: bool = False,
    kv_c_out: Tensor | None = None, k_pe_out: Tensor | None = None,
    index_k_out: Tensor | None = None, fp8_dtype: torch.dtype | None = None,
    *, q_c_out: Tensor, pdl: bool,
) -> tuple[Grid, tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """Grid, kernel arguments and compile-time constants of a checked call."""
    device = q_c.device
    fp8_dtype = checks.resolve_fp8_dtype(
        fp8_dtype, device, mla_kv_cache=mla_kv_cache, indexer_k_cache=indexer_k_cache
    )
    soft = platform.soft_fp8(device, fp8_dtype)
    mla = mla_block_stride = mla_entry_stride = mla_capacity = None
    num_slots = mla_block_size = 0
    if mla_kv_cache is not None and slot_mapping is not None:
        blocks, mla_block_size = mla_kv_cache.shape[:2]
        mla_block_stride, mla_entry_stride = mla_kv_cache.stride()[:2]
        mla_kv_cache = launch.as_codes(mla_kv_cache, soft)
        mla, mla_capacity, num_slots = slot_mapping, blocks * mla_block_size, slot_mapping.shape[0]
    if mla_kv_cache_dtype not in layouts.FP8_MODES:
        mla_k_scale = None

    index_dim = index_rope_dim = index_block_size = topk = num_index_slots = 0
    index_block_stride = index_capacity = index_slots = None
    index_k_stride = index_table_stride = index_table_rows = None
    if not has_indexer or index_k is None or index_rope_cos_sin is None:
        index_k = index_k_norm_weight = index_k_norm_bias = index_rope_cos_sin = None
        indexer_k_cache = index_k_out = None
        fill_topk = False
    else:
        index_dim, index_k_stride = index_k.shape[1], index_k.stride(0)
        index_table_rows, index_rope_dim = index_rope_cos_sin.shape
        index_table_stride = index_rope_cos_sin.stride(0)
        if indexer_k_cache is not None:
            index_slots = indexer_slot_mapping if indexer_slot_mapping is not None else slot_mapping
            assert index_slots is not None
            num_index_slots = index_slots.shape[0]
            index_block_size = indexer_k_cache.shape[1]
            index_block_stride = indexer_k_cache.stride(0)
            indexer_k_cache = launch.as_codes(indexer_k_cache, soft)
            index_capacity = indexer_k_cache.shape[0] * index_block_size
    if index_k_out is None and indexer_k_cache is None:
        # A profiling run: nothing to compute the key for.
        index_k = None
    fill = topk_indices_buffer if fill_topk and topk_indices_buffer.shape[-1] > 0 else None
    if fill is not None:
        topk = fill.shape[1]

    args = (
        positions,
        q_c, q_c.stride(0), q_norm_weight, q_norm_eps, q_c_out, q_c_out.stride(0),
        kv_c, kv_c.stride(0), kv_norm_weight, kv_norm_eps, kv_c_out, _row_stride(kv_c_out),
        k_pe, k_pe.stride(0), rope_cos_sin, rope_cos_sin.stride(0), rope_cos_sin.shape[0],
        k_pe_out, _row_stride(k_pe_out),
        mla, num_slots,
        mla_kv_cache, mla_block_stride, mla_entry_stride, mla_capacity, mla_k_scale,
        index_k, index_k_stride, index_k_norm_weight, index_k_norm_bias, index_k_norm_eps,
        index_rope_cos_sin, index_table_stride, index_table_rows,
        index_k_out, _row_stride(index_k_out),
        index_slots, num_index_slots,
        indexer_k_cache, index_block_stride, index_capacity,
        fill, _row_stride(fill),
    )  # fmt: skip
    constants = _constants(
        q_c.shape[1], kv_c.shape[1], k_pe.shape[1],
        mla_kv_cache_dtype, mla_block_size,
        index_dim, index_rope_dim, index_rope_interleave,
        index_block_size, index_scale_format == "ue8m0x4", indexer_cache_shuffled, topk,
        fp8_dtype, soft, pdl,
    )  # fmt: skip
    return launch.norm_rope_grid(q_c.shape[0], constants), args, constants


def _row_stride(t: Tensor | None) -> int | None:
    return None if t is None else t.stride(0)


def _empty_output(q_c: Tensor) -> Tensor:
    return q_c.new_empty(q_c.shape)


def _first(args: tuple[Any, ...], outs: tuple[Tensor, ...]) -> launch.Call:
    q_c_out = outs[0] if outs else None
    checks.norm_rope(*args, q_c_out=q_c_out)
    if platform.check_device_data():
        checks.norm_rope_data(*args)
    device = args[1].device
    written = _empty_output(args[1]) if q_c_out is None else q_c_out
    grid, kernel_args, constants = prepare(*args, q_c_out=written, pdl=launch.use_pdl(device))
    # Whether index_k_out overlaps index_k depends on addresses, which a shortcut does not compare.
    repeatable = dict(zip(_NAMES, args, strict=False)).get("index_k_out") is None
    return launch.Call(
        norm_rope_kernel, grid, kernel_args, constants, launch.NORM_ROPE_WARPS, device,
        () if outs else (written,), repeatable,
    )  # fmt: skip


def _cuda(*args: Any, q_c_out: Tensor | None = None) -> Tensor:
    if q_c_out is None:
        return launch.run("fused_norm_rope", args, (), _first)[0]
    # Without the defaults at their end both forms may have as many arguments.
    return launch.run("fused_norm_rope_out", args, (q_c_out,), _first)[0]


def _cpu(*args: Any, q_c_out: Tensor | None = None) -> Tensor:
    checks.norm_rope(*args, q_c_out=q_c_out)
    checks.norm_rope_data(*args)
    return reference.fused_norm_rope(*args, q_c_out=q_c_out)


def _fake(*args: Any, q_c_out: Tensor | None = None) -> Tensor:
    checks.norm_rope(*args, q_c_out=q_c_out)
    return _empty_output(args[1])


register_with_out(
    "fused_norm_rope", ARGUMENTS, "Tensor", MUTATES, ("q_c_out",), cuda=_cuda, cpu=_cpu, fake=_fake
)


def _traced(*args: Any) -> Tensor:
    checks.norm_rope(*args)
    q_c_out = _empty_output(args[1])
    grid, kernel_args, constants = prepare(*args, q_c_out=q_c_out, pdl=False)
    wrap_triton(norm_rope_kernel)[grid.launch()](
        *kernel_args, **constants, num_warps=launch.NORM_ROPE_WARPS
    )
    return q_c_out


_NAMES = argument_names("fused_norm_rope")


register_traced("fused_norm_rope", checks.norm_rope, Tensor, MUTATES, traced=_traced, cpu=_cpu)
