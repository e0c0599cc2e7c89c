"""Kernel of `fused_q`: query RoPE, packing and quantization, one tile of heads per program.

    mqa_q         = e4m3([ql_nope / q_scale | rope(q_pe) / q_scale]), or rope(q_pe) unquantized
    index_q_fp8   = e4m3(rope(index_q) / scale),  scale = pow2ceil(max(amax, 1e-4) / limit)
    index_weights = ((w * scale) * softmax_scale) * head_scale

Grid: tokens on x; on y the query's head tiles, then the indexer's. One program per head, as
elsewhere in the field, is bound by block launches: 5 % of bandwidth on an H200.
"""

import triton
import triton.language as tl

from .numerics import (
    divide,
    e4m3_code,
    pow2_reciprocal,
    rotate,
    row_scale,
    split_reciprocal,
    widen,
)
from .rows import (
    as_bytes,
    begin,
    finite_amax_pieces,
    grouped_program,
    load_cos_sin,
    load_pairs,
    load_pieces,
    load_position,
    store_pairs,
    store_tail,
)


@triton.jit
def pack_query(
    token, tile, positions_ptr, table_ptr, table_row_stride, table_rows,
    q_pe_ptr, q_pe_row_stride, q_pe_head_stride,
    nope_ptr, nope_row_stride, nope_head_stride, scale_ptr, out_ptr,
    HEADS: tl.constexpr, NOPE_DIM: tl.constexpr, ROPE_DIM: tl.constexpr, QUANTIZE: tl.constexpr,
    TILE: tl.constexpr, LIMIT: tl.constexpr, FNUZ: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    position = load_position(positions_ptr, token, True)
    heads = tile.to(tl.int64) * TILE + tl.arange(0, TILE)[:, None]
    mask = heads < HEADS
    q_pe = q_pe_ptr + token * q_pe_row_stride + heads * q_pe_head_stride
    a, b = load_pairs(q_pe, mask, TILE, ROPE_DIM, True)
    if QUANTIZE:
        BLOCK: tl.constexpr = triton.next_power_of_2(NOPE_DIM)
        dims = tl.arange(0, BLOCK)[None, :]
        nope = nope_ptr + token * nope_row_stride + heads * nope_head_stride
        x = tl.load(nope + dims, mask=mask & (dims < NOPE_DIM), other=0.0)
        scale = tl.load(scale_ptr)
        cos, sin = load_cos_sin(position, table_ptr, table_row_stride, table_rows, ROPE_DIM)
        a, b = rotate(a, b, cos, sin)
        out = as_bytes(out_ptr) + (token * HEADS + heads) * (NOPE_DIM + ROPE_DIM)
        power, high, low = split_reciprocal(scale)
        codes = e4m3_code(divide(widen(x), power, high, low), LIMIT, FNUZ, SOFT)
        tl.store(out + dims, codes, mask=mask & (dims < NOPE_DIM))
        a = e4m3_code(divide(a, power, high, low), LIMIT, FNUZ, SOFT)
        b = e4m3_code(divide(b, power, high, low), LIMIT, FNUZ, SOFT)
        store_pairs(out + NOPE_DIM, mask, a, b, TILE, ROPE_DIM, True)
    else:
        dtype = out_ptr.dtype.element_ty
        cos, sin = load_cos_sin(position, table_ptr, table_row_stride, table_rows, ROPE_DIM)
        a, b = rotate(a, b, cos, sin)
        out = out_ptr + (token * HEADS + heads) * ROPE_DIM
        store_pairs(out, mask, a.to(dtype), b.to(dtype), TILE, ROPE_DIM, True)


@triton.jit
def quantize_index_query(
    token, tile, positions_ptr, table_ptr, table_row_stride, table_rows,
    index_q_ptr, index_q_row_stride, index_q_head_stride,
    weights_ptr, weights_row_stride, softmax_scale, head_scale, out_ptr, weights_out_ptr,
    HEADS: tl.constexpr, DIM: tl.constexpr, ROPE_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
    TILE: tl.constexpr, LIMIT: tl.constexpr, FNUZ: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    position = load_position(positions_ptr, token, True)
    heads = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    rows = heads[:, None]
    mask = rows < HEADS
    index_q = index_q_ptr + token * index_q_row_stride + rows * index_q_head_stride
    a, b, c, d = load_pieces(index_q, mask, TILE, DIM, ROPE_DIM, INTERLEAVED)
    c = widen(c)
    d = widen(d)
    weights = weights_ptr + token * weights_row_stride + heads
    weights = widen(tl.load(weights, mask=heads < HEADS, other=0.0))
    cos, sin = load_cos_sin(position, table_ptr, table_row_stride, table_rows, ROPE_DIM)
    a, b = rotate(a, b, cos, sin)
    scale = row_scale(finite_amax_pieces(a, b, c, d), LIMIT)
    inverse = pow2_reciprocal(scale)[:, None]
    out = as_bytes(out_ptr) + (token * HEADS + rows) * DIM
    a = e4m3_code(a * inverse, LIMIT, FNUZ, SOFT)
    b = e4m3_code(b * inverse, LIMIT, FNUZ, SOFT)
    store_pairs(out, mask, a, b, TILE, ROPE_DIM, INTERLEAVED)
    c = e4m3_code(c * inverse, LIMIT, FNUZ, SOFT)
    d = e4m3_code(d * inverse, LIMIT, FNUZ, SOFT)
    store_tail(out, mask, c, d, DIM, ROPE_DIM)
    folded = weights * scale * tl.cast(softmax_scale, tl.float32) * tl.cast(head_scale, tl.float32)
    tl.store(weights_out_ptr + token * HEADS + heads, folded, mask=heads < HEADS)


@triton.jit(
    do_not_specialize=["q_pe_head_step", "nope_head_step", "index_q_head_step"],
    do_not_specialize_on_alignment=["positions_ptr", "q_scale_ptr"],
)
def query_kernel(
    positions_ptr,
    q_pe_ptr, q_pe_row_stride, q_pe_head_step,
    q_pe_cos_sin_ptr, table_row_stride, table_rows,
    ql_nope_ptr, nope_row_stride, nope_head_step, q_scale_ptr,
    mqa_q_ptr,
    index_q_ptr, index_q_row_stride, index_q_head_step,
    index_q_cos_sin_ptr, index_table_row_stride, index_table_rows,
    index_weights_ptr, weights_row_stride, softmax_scale, head_scale,
    index_q_fp8_ptr, index_weights_out_ptr,
    HEADS: tl.constexpr, NOPE_DIM: tl.constexpr, ROPE_DIM: tl.constexpr, QUANTIZE: tl.constexpr,
    INDEX_HEADS: tl.constexpr, INDEX_DIM: tl.constexpr, INDEX_ROPE_DIM: tl.constexpr,
    INDEX_INTERLEAVED: tl.constexpr,
    Q_PE_STEP: tl.constexpr, NOPE_STEP: tl.constexpr, INDEX_Q_STEP: tl.constexpr,
    GROUP: tl.constexpr, TILE: tl.constexpr, INDEX_TILE: tl.constexpr,
    MQA_LIMIT: tl.constexpr, INDEX_LIMIT: tl.constexpr,
    FNUZ: tl.constexpr, SOFT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Head strides depend on the token count (ql_nope's is N * 512), so they are not specialized:
    they come as counts of a compile-time step, which still proves 16-byte alignment."""
    begin(PDL)
    MQA_TILES: tl.constexpr = triton.cdiv(HEADS, TILE)
    TASKS: tl.constexpr = MQA_TILES + triton.cdiv(INDEX_HEADS, INDEX_TILE)
    token, task = grouped_program(GROUP, TASKS)
    if task < MQA_TILES:
        pack_query(
            token, task, positions_ptr, q_pe_cos_sin_ptr, table_row_stride, table_rows,
            q_pe_ptr, q_pe_row_stride, tl.cast(q_pe_head_step, tl.int64) * Q_PE_STEP,
            ql_nope_ptr, nope_row_stride, tl.cast(nope_head_step, tl.int64) * NOPE_STEP,
            q_scale_ptr, mqa_q_ptr,
            HEADS, NOPE_DIM, ROPE_DIM, QUANTIZE, TILE, MQA_LIMIT, FNUZ, SOFT,
        )  # fmt: skip
    else:
        if index_q_ptr is not None:
            quantize_index_query(
                token, task - MQA_TILES,
                positions_ptr, index_q_cos_sin_ptr, index_table_row_stride, index_table_rows,
                index_q_ptr, index_q_row_stride,
                tl.cast(index_q_head_step, tl.int64) * INDEX_Q_STEP,
                index_weights_ptr, weights_row_stride, softmax_scale, head_scale,
                index_q_fp8_ptr, index_weights_out_ptr,
                INDEX_HEADS, INDEX_DIM, INDEX_ROPE_DIM, INDEX_INTERLEAVED,
                INDEX_TILE, INDEX_LIMIT, FNUZ, SOFT,
            )  # fmt: skip
