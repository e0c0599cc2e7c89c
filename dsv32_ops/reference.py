"""The ops in plain PyTorch: the specification that runs, and the CPU kernels.

Arguments are those of the ops, assumed checked; positions and ids are clamped into their table
and dead slots are skipped. Arithmetic is fp32 operation by operation, with correctly rounded
divisions and square roots, and each output is rounded once. A row's bytes depend on that row
alone: not on the other rows, the strides or the chunking (the bit pattern of a NaN aside).

Tokens are processed in chunks of about a megabyte of fp32, which keeps all temporaries within
some tens of megabytes for any number of tokens and is also the fastest: larger temporaries spend
most of the time in page faults.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .codecs import FP8_DTYPES, divide, encode_fp8, finite_amax, fp8_limit, row_scale
from .layouts import IndexerCache, MlaLayout, mla_layout

_CHUNK_ELEMENTS = 1 << 18


def _chunks(num_tokens: int, row_elements: int) -> Iterator[slice]:
    step = max(1, _CHUNK_ELEMENTS // max(1, row_elements))
    for start in range(0, num_tokens, step):
        yield slice(start, min(start + step, num_tokens))


def _fp32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32, device="cpu").item()


def _required(name: str, tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise ValueError(f"{name}: expected a tensor, got None although has_indexer is set")
    return tensor


def _sum_rows(x: Tensor) -> Tensor:
    """Sum over the last dim, which is kept; x is overwritten.

    Halves are folded onto each other: unlike `Tensor.sum`, the order of the additions depends on
    the width alone.
    """
    width = x.shape[-1]
    while width > 1:
        half = (width + 1) // 2
        x[..., : width - half] += x[..., half:width]
        width = half
    return x[..., :1]


def _fma(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """`x * y + z` rounded to fp32 as by a fused multiply-add; y is float64.

    The product of two fp32 is exact in float64. The sum is rounded twice, to float64 and then to
    fp32, which changes about one of 2**29 inexact sums.
    """
    return torch.addcmul(z.double(), x.double(), y).float()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`(x * rstd) * w`, rstd = 1 / sqrt(sum(x * x) / D + eps). x, result: fp32 [n, D]."""
    mean_square = divide(_sum_rows(x * x), x.shape[-1])
    rstd = (mean_square + _fp32(eps)).double().sqrt_().float().reciprocal_()
    return (x * rstd).mul_(weight.float())


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """`fma((x - mean) * rstd, w, b)`, rstd = 1 / sqrt(biased variance + eps). x, result: fp32."""
    mean = divide(_sum_rows(x.clone()), x.shape[-1])
    centered = x - mean
    variance = divide(_sum_rows(centered * centered), x.shape[-1])
    rstd = (variance + _fp32(eps)).double().sqrt_().float().reciprocal_()
    return _fma(centered.mul_(rstd), weight.double(), bias)


def rope(x: Tensor, cos_sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first R dims of fp32 x [n, ..., D] by cos_sin [n, R]; the rest passes through.

    (a, b) becomes (fma(a, cos, -(b * sin)), fma(b, cos, a * sin)), cos = cos_sin[:, i] and
    sin = cos_sin[:, R/2 + i]. Interleaved pairs dims (2i, 2i+1), otherwise (i, i + R/2).
    """
    rope_dim = cos_sin.shape[-1]
    half = rope_dim // 2
    table = cos_sin.float().view(cos_sin.shape[0], *[1] * (x.dim() - 2), rope_dim)
    cos, sin = table[..., :half], table[..., half:]
    if interleaved:
        first, second = x[..., 0:rope_dim:2], x[..., 1:rope_dim:2]
    else:
        first, second = x[..., :half], x[..., half:rope_dim]
    first, second = first.contiguous(), second.contiguous()
    cos = cos.double()
    rotated_first = _fma(first, cos, (second * sin).neg_())
    rotated_second = _fma(second, cos, first * sin)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if interleaved:
        out[..., 0:rope_dim:2], out[..., 1:rope_dim:2] = rotated_first, rotated_second
    else:
        out[..., :half], out[..., half:rope_dim] = rotated_first, rotated_second
    out[..., rope_dim:] = x[..., rope_dim:]
    return out


def _table_rows(table: Tensor, index: Tensor) -> Tensor:
    return table.index_select(0, index.long().clamp(0, table.shape[0] - 1))


def _live_rows(slot_mapping: Tensor | None, cache: Tensor | None, rows: slice) -> Tensor:
    """Rows of the chunk, relative to it, whose slot lies within the cache."""
    if slot_mapping is None or cache is None:
        return torch.empty(0, dtype=torch.int64)
    slots = slot_mapping[rows].long()
    capacity = cache.shape[0] * cache.shape[1]
    return ((slots >= 0) & (slots < capacity)).nonzero().squeeze(1)


def _flavour(fp8_dtype: torch.dtype | None, *caches: Tensor | None) -> torch.dtype:
    typed = [cache.dtype for cache in caches if cache is not None and cache.dtype in FP8_DTYPES]
    return fp8_dtype or (typed[0] if typed else torch.float8_e4m3fn)


@torch.no_grad()
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
    """Query norm, KV norm and RoPE into the MLA cache, indexer key into its cache, top-k fill.

        q_out        = rms_norm(q_c)                                every row
        kv, k_pe     = rms_norm(kv_c), rope(k_pe)                   to outs: every row
                                                                    to mla_kv_cache: live slots
        index_k      = rope(layer_norm(index_k))                    likewise, indexer slots
        topk_indices_buffer[:N] = -1                                with has_indexer and fill_topk

    positions [N] int; q_c [N, Dq], kv_c [N, Dkv], k_pe [N, R], index_k [N, Di] bf16, fp16 or
    fp32 with any row stride; rope_cos_sin [P, R]; slot mappings [M] int, rows >= M are padding.
    A slot is live when 0 <= slot < blocks * block_size of its own cache; two live rows with one
    slot leave either row's bytes. indexer_slot_mapping defaults to slot_mapping. fp8_dtype None
    means the dtype of an fp8 cache, e4m3fn if both are uint8.

    Returns q_c_out, or a new packed [N, Dq] of q_c's dtype. q_c_out, kv_c_out and k_pe_out may
    be the inputs themselves.
    """
    fp8_dtype = _flavour(fp8_dtype, mla_kv_cache, indexer_k_cache)
    num_tokens = q_c.shape[0]
    if q_c_out is None:
        q_c_out = torch.empty(q_c.shape, dtype=q_c.dtype, device=q_c.device)
    for rows in _chunks(num_tokens, q_c.shape[1]):
        q_c_out[rows] = rms_norm(q_c[rows].float(), q_norm_weight, q_norm_eps).to(q_c_out.dtype)
    layout = None
    if mla_kv_cache is not None:
        layout = mla_layout(
            mla_kv_cache_dtype,
            kv_dim=kv_c.shape[1],
            rope_dim=k_pe.shape[1],
            dtype=mla_kv_cache.dtype,
            fp8_dtype=fp8_dtype,
        )
    _write_kv(
        positions,
        kv_c,
        kv_norm_weight,
        kv_norm_eps,
        k_pe,
        rope_cos_sin,
        slot_mapping,
        mla_kv_cache,
        layout,
        mla_k_scale,
        kv_c_out,
        k_pe_out,
    )
    if has_indexer and fill_topk:
        topk_indices_buffer[:num_tokens].fill_(-1)
    if has_indexer and (indexer_k_cache is not None or index_k_out is not None):
        index_k = _required("index_k", index_k)
        _write_indexer_keys(
            positions,
            index_k,
            _required("index_k_norm_weight", index_k_norm_weight),
            _required("index_k_norm_bias", index_k_norm_bias),
            index_k_norm_eps,
            _required("index_rope_cos_sin", index_rope_cos_sin),
            index_rope_interleave,
            slot_mapping if indexer_slot_mapping is None else indexer_slot_mapping,
            indexer_k_cache,
            IndexerCache(index_k.shape[1], index_scale_format, indexer_cache_shuffled, fp8_dtype),
            index_k_out,
        )
    return q_c_out


def _write_kv(
    positions: Tensor,
    kv_c: Tensor,
    weight: Tensor,
    eps: float,
    k_pe: Tensor,
    cos_sin: Tensor,
    slot_mapping: Tensor | None,
    cache: Tensor | None,
    layout: MlaLayout | None,
    scale: Tensor | None,
    kv_c_out: Tensor | None,
    k_pe_out: Tensor | None,
) -> None:
    for rows in _chunks(kv_c.shape[0], kv_c.shape[1] + k_pe.shape[1]):
        live = _live_rows(slot_mapping, cache, rows)
        if kv_c_out is None and k_pe_out is None and live.numel() == 0:
            continue
        kv = rms_norm(kv_c[rows].float(), weight, eps)
        rotated = rope(k_pe[rows].float(), _table_rows(cos_sin, positions[rows]), True)
        if cache is not None and layout is not None and slot_mapping is not None:
            layout.encode(cache, slot_mapping[rows][live], kv[live], rotated[live], scale)
        if kv_c_out is not None:
            kv_c_out[rows] = kv.to(kv_c_out.dtype)
        if k_pe_out is not None:
            k_pe_out[rows] = rotated.to(k_pe_out.dtype)


def _write_indexer_keys(
    positions: Tensor,
    index_k: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    cos_sin: Tensor,
    interleaved: bool,
    slot_mapping: Tensor | None,
    cache: Tensor | None,
    layout: IndexerCache,
    index_k_out: Tensor | None,
) -> None:
    for rows in _chunks(*index_k.shape):
        live = _live_rows(slot_mapping, cache, rows)
        if index_k_out is None and live.numel() == 0:
            continue
        key = layer_norm(index_k[rows].float(), weight, bias, eps)
        key = rope(key, _table_rows(cos_sin, positions[rows]), interleaved)
        if cache is not None and slot_mapping is not None:
            layout.encode(cache, slot_mapping[rows][live], key[live])
        if index_k_out is not None:
            index_k_out[rows] = key.to(index_k_out.dtype)


@torch.no_grad()
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
    """Queries of the indexer and of the attention.

        mqa_q             = e4m3([ql_nope / q_scale | rope(q_pe) / q_scale])     quantize_mqa
                          = rope(q_pe)                                           otherwise
        index_q_fp8       = e4m3(rope(index_q) / s),  s the row scale per (token, head)
        index_weights_out = ((w * s) * softmax_scale) * head_scale

    q_pe [N, H, R], ql_nope [N, H, Dnope] (not read without quantize_mqa), index_q [N, Hi, Di]:
    bf16, fp16 or fp32 of any strides; index_weights [N, Hi] bf16 or fp32; q_scale one fp32.

    Returns new packed (index_q_fp8 [N, Hi, Di] fp8_dtype, index_weights_out [N, Hi] fp32, mqa_q
    [N, H, Dnope + R] fp8_dtype, or [N, H, R] of q_pe's dtype). Without an indexer the first two
    are [N, 0, 0] and [N, 0]. fp8_dtype None means e4m3fn.
    """
    fp8_dtype = _flavour(fp8_dtype)
    num_tokens, heads, rope_dim = q_pe.shape
    nope_dim = ql_nope.shape[-1] if quantize_mqa else 0
    mqa_q = torch.empty(
        (num_tokens, heads, nope_dim + rope_dim),
        dtype=fp8_dtype if quantize_mqa else q_pe.dtype,
        device=q_pe.device,
    )
    for rows in _chunks(num_tokens, heads * (nope_dim + rope_dim)):
        cos_sin = _table_rows(q_pe_cos_sin, positions[rows])
        rotated = rope(q_pe[rows].float(), cos_sin, True)
        if quantize_mqa:
            query = torch.cat((ql_nope[rows].float(), rotated), dim=-1)
            query /= q_scale.float().reshape(())
            mqa_q.view(torch.uint8)[rows] = encode_fp8(query, fp8_dtype)
        else:
            mqa_q[rows] = rotated.to(q_pe.dtype)
    index_heads, index_dim = 0, 0
    if has_indexer:
        index_q = _required("index_q", index_q)
        index_heads, index_dim = index_q.shape[1:]
    index_q_fp8 = q_pe.new_empty((num_tokens, index_heads, index_dim), dtype=fp8_dtype)
    weights_out = q_pe.new_empty((num_tokens, index_heads), dtype=torch.float32)
    if index_q is None or not has_indexer:
        return index_q_fp8, weights_out, mqa_q
    index_q_cos_sin = _required("index_q_cos_sin", index_q_cos_sin)
    index_weights = _required("index_weights", index_weights)
    softmax_scale = _fp32(index_weights_softmax_scale)
    head_scale = _fp32(index_weights_head_scale)
    for rows in _chunks(num_tokens, index_heads * index_dim):
        cos_sin = _table_rows(index_q_cos_sin, positions[rows])
        query = rope(index_q[rows].float(), cos_sin, index_rope_interleave)
        row_scales = row_scale(finite_amax(query, -1, keepdim=True), fp8_dtype)
        codes = encode_fp8(query.div_(row_scales), fp8_dtype, fp8_limit(fp8_dtype, True))
        index_q_fp8.view(torch.uint8)[rows] = codes
        weights = index_weights[rows].float() * row_scales.squeeze(-1)
        weights_out[rows] = weights.mul_(softmax_scale).mul_(head_scale)
    return index_q_fp8, weights_out, mqa_q


@torch.no_grad()
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
    """`[rms_norm(e) | rms_norm(previous_hidden)]`, e = inputs_embeds, zero where position is 0.

    positions [N] int, inputs_embeds and previous_hidden [N, D], weights [D]. Returns out, or a
    new packed [N, 2 D] of inputs_embeds' dtype.
    """
    num_tokens, hidden = inputs_embeds.shape
    if out is None:
        out = inputs_embeds.new_empty((num_tokens, 2 * hidden))
    for rows in _chunks(num_tokens, 2 * hidden):
        # A product with zero would keep the NaN of a row that is not to be read.
        first = (positions[rows] == 0).unsqueeze(-1)
        embeds = inputs_embeds[rows].float().masked_fill(first, 0.0)
        out[rows, :hidden] = rms_norm(embeds, enorm_weight, eps).to(out.dtype)
        right = rms_norm(previous_hidden[rows].float(), hnorm_weight, eps)
        out[rows, hidden:] = right.to(out.dtype)
    return out


@torch.no_grad()
def fused_embed_norm(
    input_ids: Tensor,
    embed_table: Tensor,
    norm_weight: Tensor,
    eps: float,
    *,
    residual_out: Tensor | None = None,
    normed_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`residual = embed_table[ids]`, `normed = rms_norm(residual)`.

    input_ids [N] or [batch, length] int, clamped into the table; embed_table [V, D]; norm_weight
    [D]. Returns the outs, or new packed [N, D] of the table's dtype: (residual, normed).
    """
    input_ids = input_ids.reshape(-1)
    shape = (input_ids.shape[0], embed_table.shape[1])
    if residual_out is None:
        residual_out = embed_table.new_empty(shape)
    if normed_out is None:
        normed_out = embed_table.new_empty(shape)
    for rows in _chunks(*shape):
        residual = _table_rows(embed_table, input_ids[rows])
        residual_out[rows] = residual
        normed_out[rows] = rms_norm(residual.float(), norm_weight, eps).to(normed_out.dtype)
    return residual_out, normed_out


@torch.no_grad()
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
    """`fused_eh_norm` of `embed_table[input_ids]`, without the embeddings in memory.

    input_ids [N] or [batch, length] int, clamped into the table; embed_table [V, D]; the rest as in
    `fused_eh_norm`. Returns out, or a new packed [N, 2 D] of the table's dtype.
    """
    input_ids = input_ids.reshape(-1)
    num_tokens, hidden = input_ids.shape[0], embed_table.shape[1]
    if out is None:
        out = embed_table.new_empty((num_tokens, 2 * hidden))
    for rows in _chunks(num_tokens, 2 * hidden):
        fused_eh_norm(
            positions[rows],
            _table_rows(embed_table, input_ids[rows]),
            previous_hidden[rows],
            enorm_weight,
            hnorm_weight,
            eps,
            out=out[rows],
        )
    return out
