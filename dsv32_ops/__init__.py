"""Fused operators in front of DeepSeek-V3.2's sparse attention, as `torch.ops.dsv32.*`.

Importing this package registers the ops; it needs no GPU and compiles nothing. The functions below
are the ops with their documentation. Beside each stand

- `torch.ops.dsv32.<name>_out`, which takes the tensors to write in front of the same arguments and
  returns nothing, and
- `torch.ops.dsv32.<name>_triton`, a `triton_op` with the same arguments whose kernel the compiler
  sees: for AOTInductor packages that run without Python. The plain ops are opaque, so that a
  compiled model writes its caches in place; prefer them.

All ops run on their tensors' device and its current stream, do not synchronize, and may be captured
into CUDA graphs. Sizes: N tokens, Dq query latent, Dkv KV latent, R rotary dims, H query heads, Hi
and Di indexer heads and head dim, P rows of a cos/sin table. Float tensors are bf16, fp16 or fp32,
index tensors int32 or int64. Errors: `ValueError` for values and shapes, `TypeError` for dtypes,
both before any write and naming the argument; `IndexError` for bad slots, ids and positions, on a
CPU always and on a GPU with DSV32_OPS_CHECK=1 (without it they cannot corrupt memory: positions and
ids are clamped into their table, dead slots are skipped).
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import geometry, layouts, rope
from .ops import mtp, norm_rope, query  # noqa: F401  (importing them registers the ops)
from .version import __version__

__all__ = [
    "__version__",
    "fused_eh_norm",
    "fused_embed_eh_norm",
    "fused_embed_norm",
    "fused_norm_rope",
    "fused_q",
    "geometry",
    "layouts",
    "rope",
]


def fused_norm_rope(
    positions: Tensor,
    q_c: Tensor,
    q_norm_weight: Tensor,
    q_norm_eps: float,
    kv_c: Tensor,
    kv_norm_weight: Tensor,
    kv_norm_eps: float,
    k_pe: Tensor,
    rope_cos_sin: Tensor,
    index_k: Tensor | None,
    index_k_norm_weight: Tensor | None,
    index_k_norm_bias: Tensor | None,
    index_k_norm_eps: float,
    index_rope_cos_sin: Tensor | None,
    topk_indices_buffer: Tensor,
    slot_mapping: Tensor | None = None,
    indexer_slot_mapping: Tensor | None = None,
    indexer_k_cache: Tensor | None = None,
    mla_kv_cache: Tensor | None = None,
    mla_kv_cache_dtype: str = "auto",
    mla_k_scale: Tensor | None = None,
    has_indexer: bool = True,
    index_rope_interleave: bool = False,
    fill_topk: bool = True,
    index_scale_format: str = "fp32",
    indexer_cache_shuffled: bool = False,
    kv_c_out: Tensor | None = None,
    k_pe_out: Tensor | None = None,
    index_k_out: Tensor | None = None,
    fp8_dtype: torch.dtype | None = None,
    *,
    q_c_out: Tensor | None = None,
) -> Tensor:
    """Norms, RoPE, quantization and cache insertion of one layer's latents, in one launch.

    ::

        out  = q_c / sqrt(mean(q_c^2) + q_norm_eps) * q_norm_weight               every row
        kv   = kv_c / sqrt(mean(kv_c^2) + kv_norm_eps) * kv_norm_weight           -> MLA cache
        kpe  = rope(k_pe), pairs (2i, 2i+1)                                       -> MLA cache
        k    = rope(LayerNorm(index_k)), pairs (i, i+R/2) unless interleaved      -> indexer cache
        topk_indices_buffer[:N] = -1

    with rope turning a pair (a, b) into (a cos - b sin, b cos + a sin). Everything is fp32 inside
    and rounded once, at the store. Cache layouts: `dsv32_ops.layouts`.

    ======================  ========================  =============================================
    positions               [N]                       row of each token in the cos/sin tables
    q_c, kv_c, k_pe         [N, Dq], [N, Dkv], [N, R]  any row stride, last stride 1
    index_k                 [N, Di]                   any row stride; None without an indexer
    norm weights, bias      [Dq], [Dkv], [Di]         any float type
    rope tables             [P, R]                    cos half, then sin half; index_k rotates the
                                                      columns of its table, which may be fewer
    topk_indices_buffer     [>= N, K] int32           written in rows 0..N-1 if has_indexer and
                                                      fill_topk; any int32 tensor otherwise
    slot_mapping            [M]                       slot = block * block_size + offset. Live: 0 <=
                                                      slot < capacity of its cache; other rows and
                                                      rows >= M write no cache
    indexer_slot_mapping    [M]                       slot_mapping unless given
    mla_kv_cache            [blocks, block_size, E]   written at live slots; strides may leave gaps
    indexer_k_cache         [blocks, block_size,      written at live slots; block stride may leave
                            Di + 4]                   gaps; uint8 or fp8
    mla_k_scale             one element, fp32         divides both parts in the fp8 modes; None is 1
    kv_c_out, k_pe_out      like kv_c, k_pe           written in every row; may be the inputs
    index_k_out             like index_k              k before quantization, in every row; must not
                                                      overlap index_k
    q_c_out                 like q_c                  written instead of a new tensor, and returned;
                                                      may be q_c
    ======================  ========================  =============================================

    `mla_kv_cache_dtype` is one of `layouts.MLA_MODES`; `index_scale_format` "fp32" or "ue8m0x4";
    `indexer_cache_shuffled` selects the 16 x 16-tiled indexer layout; `fp8_dtype` the e4m3 flavour
    where neither the platform's (e4m3fnuz on gfx94x, else e4m3fn) nor a cache's own type shall
    decide. Without caches and outs only the query norm and the fill are done.

    Returns: [N, Dq], row-major, in q_c's type.

    Raises: see the package's docstring; RuntimeError if a gradient would be needed.

    Source: DeepSeek-V3.2-Exp's inference code and vLLM's deepseek_v32 model, for the semantics.
    """
    arguments = (
        positions, q_c, q_norm_weight, q_norm_eps, kv_c, kv_norm_weight, kv_norm_eps, k_pe,
        rope_cos_sin, index_k, index_k_norm_weight, index_k_norm_bias, index_k_norm_eps,
        index_rope_cos_sin, topk_indices_buffer, slot_mapping, indexer_slot_mapping,
        indexer_k_cache, mla_kv_cache, mla_kv_cache_dtype, mla_k_scale, has_indexer,
        index_rope_interleave, fill_topk, index_scale_format, indexer_cache_shuffled, kv_c_out,
        k_pe_out, index_k_out, fp8_dtype,
    )  # fmt: skip
    if q_c_out is None:
        return torch.ops.dsv32.fused_norm_rope(*arguments)
    torch.ops.dsv32.fused_norm_rope_out(q_c_out, *arguments)
    return q_c_out


def fused_q(
    positions: Tensor,
    q_pe: Tensor,
    q_pe_cos_sin: Tensor,
    index_q: Tensor | None,
    index_q_cos_sin: Tensor | None,
    ql_nope: Tensor,
    q_scale: Tensor,
    index_weights: Tensor | None,
    index_weights_softmax_scale: float,
    index_weights_head_scale: float,
    has_indexer: bool = True,
    index_rope_interleave: bool = False,
    quantize_mqa: bool = True,
    fp8_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """RoPE, packing and fp8 quantization of the attention's and the indexer's queries.

    ::

        mqa_q             = e4m3([ql_nope / q_scale | rope(q_pe) / q_scale])      quantize_mqa
                          = rope(q_pe)                                            otherwise
        scale             = pow2ceil(max(amax(rope(index_q)), 1e-4) / 448)        per token and head
        index_q_fp8       = e4m3(rope(index_q) / scale)
        index_weights_out = index_weights * scale * softmax_scale * head_scale

    ======================  ==================  =================================================
    positions               [N]                 row of each token in the cos/sin tables
    q_pe                    [N, H, R]           any strides, last 1; pairs (2i, 2i+1)
    ql_nope                 [N, H, Dnope]       any strides, last 1 (a transposed batched product);
                                                not read unless quantize_mqa
    q_scale                 one element, fp32   on the device; not read unless quantize_mqa
    index_q                 [N, Hi, Di]         any strides, last 1; None without an indexer
    index_weights           [N, Hi]             any row stride, any float type
    tables                  [P, R]              cos half, then sin half
    ======================  ==================  =================================================

    index_q rotates pairs (i, i+R/2) unless `index_rope_interleave`. No row is gated by a slot.

    Returns: index_q_fp8 [N, Hi, Di], index_weights_out [N, Hi] fp32, mqa_q [N, H, Dnope + R] e4m3
    (or [N, H, R] in q_pe's type), all row-major; without an indexer the first two have zero heads.

    Raises: see the package's docstring.

    Source: DeepSeek-V3.2-Exp's inference code and vLLM's deepseek_v32 model, for the semantics.
    """
    return torch.ops.dsv32.fused_q(
        positions, q_pe, q_pe_cos_sin, index_q, index_q_cos_sin, ql_nope, q_scale, index_weights,
        index_weights_softmax_scale, index_weights_head_scale, has_indexer, index_rope_interleave,
        quantize_mqa, fp8_dtype,
    )  # fmt: skip


def fused_eh_norm(
    positions: Tensor,
    inputs_embeds: Tensor,
    previous_hidden: Tensor,
    enorm_weight: Tensor,
    hnorm_weight: Tensor,
    eps: float,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """`[RMSNorm(inputs_embeds, zero where positions is 0) | RMSNorm(previous_hidden)]`.

    positions [N]; inputs_embeds and previous_hidden [N, hidden] of one float type, any row stride;
    weights [hidden] of any float type. Returns [N, 2 * hidden] in that type, or writes `out` (any
    row stride) and returns it. Source: the input of DeepSeek-V3's multi-token-prediction layer.
    """
    arguments = (positions, inputs_embeds, previous_hidden, enorm_weight, hnorm_weight, eps)
    if out is None:
        return torch.ops.dsv32.fused_eh_norm(*arguments)
    torch.ops.dsv32.fused_eh_norm_out(out, *arguments)
    return out


def fused_embed_norm(
    input_ids: Tensor,
    embed_table: Tensor,
    norm_weight: Tensor,
    eps: float,
    *,
    residual_out: Tensor | None = None,
    normed_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`residual = embed_table[input_ids]` exactly, and `RMSNorm(residual)`, in one pass.

    input_ids [N] or [batch, length]; embed_table [vocab, hidden], any row stride; norm_weight
    [hidden]. Returns (residual, normed), both [N, hidden] in the table's type, or writes
    `residual_out` and `normed_out` (both or neither) and returns them. An id outside the table
    reads its nearest row on a GPU and raises IndexError on a CPU or with DSV32_OPS_CHECK=1.
    """
    arguments = (input_ids, embed_table, norm_weight, eps)
    if residual_out is None and normed_out is None:
        return torch.ops.dsv32.fused_embed_norm(*arguments)
    if residual_out is None or normed_out is None:
        raise ValueError("residual_out and normed_out: expected both or neither, got one")
    torch.ops.dsv32.fused_embed_norm_out(residual_out, normed_out, *arguments)
    return residual_out, normed_out


def fused_embed_eh_norm(
    positions: Tensor,
    input_ids: Tensor,
    embed_table: Tensor,
    previous_hidden: Tensor,
    enorm_weight: Tensor,
    hnorm_weight: Tensor,
    eps: float,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """`fused_eh_norm` of the rows `embed_table[input_ids]`, which are gathered in the same launch.

    Shapes as in `fused_eh_norm` and `fused_embed_norm`; embed_table and previous_hidden have one
    float type. Bit-equal to the gather followed by `fused_eh_norm`.
    """
    arguments = (
        positions, input_ids, embed_table, previous_hidden, enorm_weight, hnorm_weight, eps
    )  # fmt: skip
    if out is None:
        return torch.ops.dsv32.fused_embed_eh_norm(*arguments)
    torch.ops.dsv32.fused_embed_eh_norm_out(out, *arguments)
    return out
