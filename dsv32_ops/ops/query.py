"""`fused_q`: schema, shape function, CPU, fake and GPU kernels, and the traced form."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import wrap_triton

from csrc_free_ops.query import query_kernel

from .. import checks, codecs, launch, platform, reference
from ..geometry import Grid
from ..registration import register, register_traced

SCHEMA = """(
    Tensor positions, Tensor q_pe, Tensor q_pe_cos_sin, Tensor? index_q, Tensor? index_q_cos_sin,
    Tensor ql_nope, Tensor q_scale, Tensor? index_weights, float index_weights_softmax_scale,
    float index_weights_head_scale, bool has_indexer=True, bool index_rope_interleave=False,
    bool quantize_mqa=True, ScalarType? fp8_dtype=None
) -> (Tensor, Tensor, Tensor)"""

Outputs = tuple[Tensor, Tensor, Tensor]


@launch.cached
def _constants(
    heads: int, nope_dim: int, rope_dim: int, quantize: bool,
    index_heads: int, index_dim: int, index_rope_dim: int, interleaved: bool,
    q_pe_step: int, nope_step: int, index_q_step: int,
    fp8_dtype: torch.dtype, soft: bool, pdl: bool,
) -> dict[str, Any]:  # fmt: skip
    return {
        "HEADS": heads,
        "NOPE_DIM": nope_dim,
        "ROPE_DIM": rope_dim,
        "QUANTIZE": quantize,
        "INDEX_HEADS": index_heads,
        "INDEX_DIM": index_dim,
        "INDEX_ROPE_DIM": index_rope_dim,
        "INDEX_INTERLEAVED": interleaved,
        "Q_PE_STEP": q_pe_step,
        "NOPE_STEP": nope_step,
        "INDEX_Q_STEP": index_q_step,
        **launch.query_tiles(heads, quantize, index_heads),
        "MQA_LIMIT": codecs.fp8_limit(fp8_dtype, pow2_scaled=False),
        "INDEX_LIMIT": codecs.fp8_limit(fp8_dtype, pow2_scaled=True),
        "FNUZ": fp8_dtype is torch.float8_e4m3fnuz,
        "SOFT": soft,
        "PDL": pdl,
    }


def prepare(
    positions: Tensor, q_pe: Tensor, q_pe_cos_sin: Tensor, index_q: Tensor | None,
    index_q_cos_sin: Tensor | None, ql_nope: Tensor, q_scale: Tensor,
    index_weights: Tensor | None, index_weights_softmax_scale: float,
    index_weights_head_scale: float, has_indexer: bool = True,
    index_rope_interleave: bool = False, quantize_mqa: bool = True,
    fp8_dtype: torch.dtype | None = None,
    *, outputs: Outputs, pdl: bool,
) -> tuple[Grid, tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """Grid, kernel arguments and compile-time constants of a checked call."""
    device = q_pe.device
    fp8_dtype = checks.resolve_fp8_dtype(fp8_dtype, device)
    soft = platform.soft_fp8(device, fp8_dtype)
    index_out, weights_out, mqa_q = outputs
    index_out, mqa_q = launch.as_codes(index_out, soft), launch.as_codes(mqa_q, soft)
    num_tokens, heads, rope_dim = q_pe.shape
    q_pe_row_stride, q_pe_head_stride, _ = q_pe.stride()
    q_pe_step = launch.largest_step(q_pe.element_size(), q_pe_head_stride, rope_dim)

    nope: tuple[Any, ...] = (None, None, 0, None)
    nope_dim, nope_step = 0, 1
    if quantize_mqa:
        nope_dim = ql_nope.shape[2]
        row_stride, head_stride, _ = ql_nope.stride()
        nope_step = launch.largest_step(ql_nope.element_size(), head_stride, nope_dim)
        nope = (ql_nope, row_stride, head_stride // nope_step, q_scale)

    index: tuple[Any, ...] = (None, None, 0, None, None, None, None, None, 0.0, 0.0, None, None)
    index_heads = index_dim = index_rope_dim = 0
    index_q_step = 1
    if (
        has_indexer
        and index_q is not None
        and index_q_cos_sin is not None
        and index_weights is not None
    ):
        _, index_heads, index_dim = index_q.shape
        row_stride, head_stride, _ = index_q.stride()
        index_q_step = launch.largest_step(index_q.element_size(), head_stride, index_dim)
        index_table_rows, index_rope_dim = index_q_cos_sin.shape
        index = (
            index_q, row_stride, head_stride // index_q_step,
            index_q_cos_sin, index_q_cos_sin.stride(0), index_table_rows,
            index_weights, index_weights.stride(0),
            index_weights_softmax_scale, index_weights_head_scale, index_out, weights_out,
        )  # fmt: skip

    args = (
        positions,
        q_pe, q_pe_row_stride, q_pe_head_stride // q_pe_step,
        q_pe_cos_sin, q_pe_cos_sin.stride(0), q_pe_cos_sin.shape[0],
        *nope,
        mqa_q,
        *index,
    )  # fmt: skip
    constants = _constants(
        heads, nope_dim, rope_dim, quantize_mqa,
        index_heads, index_dim, index_rope_dim, index_rope_interleave,
        q_pe_step, nope_step, index_q_step,
        fp8_dtype, soft, pdl,
    )  # fmt: skip
    return launch.query_grid(num_tokens, constants), args, constants


def _outputs(
    positions: Tensor, q_pe: Tensor, q_pe_cos_sin: Tensor, index_q: Tensor | None,
    index_q_cos_sin: Tensor | None, ql_nope: Tensor, q_scale: Tensor,
    index_weights: Tensor | None, index_weights_softmax_scale: float,
    index_weights_head_scale: float, has_indexer: bool = True,
    index_rope_interleave: bool = False, quantize_mqa: bool = True,
    fp8_dtype: torch.dtype | None = None,
) -> Outputs:  # fmt: skip
    """The shape function of real and fake kernels."""
    num_tokens, heads, rope_dim = q_pe.shape
    fp8_dtype = checks.resolve_fp8_dtype(fp8_dtype, q_pe.device)
    index_heads, index_dim = (0, 0)
    if has_indexer and index_q is not None:
        index_heads, index_dim = index_q.shape[1:]
    mqa_shape = (num_tokens, heads, rope_dim)
    if quantize_mqa:
        mqa_shape = (num_tokens, heads, ql_nope.shape[2] + rope_dim)
    return (
        q_pe.new_empty((num_tokens, index_heads, index_dim), dtype=fp8_dtype),
        q_pe.new_empty((num_tokens, index_heads), dtype=torch.float32),
        q_pe.new_empty(mqa_shape, dtype=fp8_dtype if quantize_mqa else q_pe.dtype),
    )


def _first(args: tuple[Any, ...], _: tuple[Tensor, ...]) -> launch.Call:
    checks.query(*args)
    if platform.check_device_data():
        checks.query_data(*args)
    outputs = _outputs(*args)
    device = args[1].device
    grid, kernel_args, constants = prepare(*args, outputs=outputs, pdl=launch.use_pdl(device))
    warps = launch.query_warps(constants)
    return launch.Call(query_kernel, grid, kernel_args, constants, warps, device, outputs)


def _cuda(*args: Any) -> Outputs:
    index_q_fp8, index_weights, mqa_q = launch.run("fused_q", args, (), _first)
    return index_q_fp8, index_weights, mqa_q


def _cpu(*args: Any) -> Outputs:
    checks.query(*args)
    checks.query_data(*args)
    return reference.fused_q(*args)


def _fake(*args: Any) -> Outputs:
    checks.query(*args)
    return _outputs(*args)


register("fused_q", SCHEMA, (), cuda=_cuda, cpu=_cpu, fake=_fake)


def _traced(*args: Any) -> Outputs:
    checks.query(*args)
    outputs = _outputs(*args)
    grid, kernel_args, constants = prepare(*args, outputs=outputs, pdl=False)
    wrap_triton(query_kernel)[grid.launch()](
        *kernel_args, **constants, num_warps=launch.query_warps(constants)
    )
    return outputs


register_traced("fused_q", checks.query, Outputs, (), traced=_traced, cpu=_cpu)
