"""Kernel of `fused_q`: query RoPE, packing and quantization, one tile of heads per program.

    mqa_q         = e4m3([ql_nope / q_scale | rope(q_pe) / q_scale]), or rope(q_pe) unquantized
    index_q_fp8   = e4m3(rope(index_q) / scale),  scale = pow2ceil(max(amax, 1e-4) / limit)
    index_weights = ((w * scale) * softmax_scale) * head_scale

Grid: tokens on x; on y the query's head tiles, then the indexer's, or without quantization shares
of both. One program per head, as elsewhere in the field, is bound by block launches: 5 % of
bandwidth on an H200.
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
    address,
    amax_pieces,
    as_bytes,
    begin,
    load_cos_sin,
    load_pairs,
    load_pieces,
    load_position,
    row_at,
    store_pairs,
    store_tail,
    token_and_task,
)


@triton.jit
def head_stride(step, STEP: tl.constexpr):
    return tl.cast(step, tl.int64) * STEP


@triton.jit
def tile_heads(tile, TILE: tl.constexpr):
    return (tile.to(tl.int64) * TILE + tl.arange(0, TILE))[:, None]


@triton.jit
def pack_query(
    token, heads, position, table_ptr, table_row_stride, table_rows,
    q_pe_ptr, q_pe_row_stride, q_pe_head_stride,
    nope_ptr, nope_row_stride, nope_head_stride, scale_ptr, out_ptr,
    HEADS: tl.constexpr, NOPE_DIM: tl.constexpr, ROPE_DIM: tl.constexpr, TILE: tl.constexpr,
    LIMIT: tl.constexpr, FNUZ: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    """e4m3([ql_nope | rope(q_pe)] / q_scale) of a tile of heads, [TILE, 1]."""
    mask = heads < HEADS
    q_pe = row_at(row_at(q_pe_ptr, token, q_pe_row_stride), heads, q_pe_head_stride)
    a, b = load_pairs(q_pe, mask, TILE, ROPE_DIM, True)
    BLOCK: tl.constexpr = triton.next_power_of_2(NOPE_DIM)
    dims = tl.arange(0, BLOCK)[None, :]
    nope = row_at(row_at(nope_ptr, token, nope_row_stride), heads, nope_head_stride)
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


@triton.jit
def load_index_query(
    token, heads, position, table_ptr, table_row_stride, table_rows,
    index_q_ptr, index_q_row_stride, index_q_head_stride, weights_ptr, weights_row_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, ROPE_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """A tile of heads, [TILE, 1], in pieces, their weights, [TILE, 1], and their cos and sin."""
    mask = heads < HEADS
    index_q = row_at(index_q_ptr, token, index_q_row_stride)
    index_q = row_at(index_q, heads, index_q_head_stride)
    a, b, c, d = load_pieces(index_q, mask, TILE, DIM, ROPE_DIM, INTERLEAVED)
    weights_row = row_at(weights_ptr, token, weights_row_stride)
    weights = tl.load(weights_row + heads, mask=mask, other=0.0)
    cos, sin = load_cos_sin(position, table_ptr, table_row_stride, table_rows, ROPE_DIM)
    return a, b, c, d, weights, cos, sin


@triton.jit
def store_index_query(
    token, heads, a, b, c, d, weights, softmax_scale, head_scale, out_ptr, weights_out_ptr,
    HEADS: tl.constexpr, DIM: tl.constexpr, ROPE_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
    TILE: tl.constexpr, LIMIT: tl.constexpr, FNUZ: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    """Quantize rotated heads, and fold their scales into their weights."""
    mask = heads < HEADS
    c = widen(c)
    d = widen(d)
    scale = row_scale(amax_pieces(a, b, c, d), LIMIT)[:, None]
    inverse = pow2_reciprocal(scale)
    out = as_bytes(out_ptr) + (token * HEADS + heads) * DIM
    a = e4m3_code(a * inverse, LIMIT, FNUZ, SOFT)
    b = e4m3_code(b * inverse, LIMIT, FNUZ, SOFT)
    store_pairs(out, mask, a, b, TILE, ROPE_DIM, INTERLEAVED)
    c = e4m3_code(c * inverse, LIMIT, FNUZ, SOFT)
    d = e4m3_code(d * inverse, LIMIT, FNUZ, SOFT)
    store_tail(out, mask, c, d, DIM, ROPE_DIM)
    folded = widen(weights) * scale
    folded = folded * tl.cast(softmax_scale, tl.float32) * tl.cast(head_scale, tl.float32)
    tl.store(weights_out_ptr + token * HEADS + heads, folded, mask=mask)


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
    FEW: tl.constexpr, TILE: tl.constexpr, INDEX_TILE: tl.constexpr,
    MQA_LIMIT: tl.constexpr, INDEX_LIMIT: tl.constexpr,
    FNUZ: tl.constexpr, SOFT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Head strides depend on the token count (ql_nope's is N * 512), so they are not specialized:
    they come as counts of a compile-time step, which still proves 16-byte alignment."""
    HAS_INDEX: tl.constexpr = index_q_ptr is not None
    MQA_TILES: tl.constexpr = triton.cdiv(HEADS, TILE)
    INDEX_TILES: tl.constexpr = triton.cdiv(INDEX_HEADS, INDEX_TILE)
    q_pe_head_stride = head_stride(q_pe_head_step, Q_PE_STEP)
    index_q_head_stride = head_stride(index_q_head_step, INDEX_Q_STEP)
    arguments = address(positions_ptr) | address(mqa_q_ptr) | address(index_weights_out_ptr)
    if QUANTIZE:
        token, task = token_and_task(MQA_TILES + INDEX_TILES, FEW)
        arguments |= address(row_at(q_pe_ptr, token, q_pe_row_stride))
        arguments |= address(row_at(ql_nope_ptr, token, nope_row_stride))
        if HAS_INDEX:
            arguments |= address(row_at(index_q_ptr, token, index_q_row_stride))
            arguments |= address(row_at(index_weights_ptr, token, weights_row_stride))
        begin(arguments, PDL)
        position = load_position(positions_ptr, token, True)
        if task < MQA_TILES:
            pack_query(
                token, tile_heads(task, TILE),
                position, q_pe_cos_sin_ptr, table_row_stride, table_rows,
                q_pe_ptr, q_pe_row_stride, q_pe_head_stride,
                ql_nope_ptr, nope_row_stride, head_stride(nope_head_step, NOPE_STEP),
                q_scale_ptr, mqa_q_ptr,
                HEADS, NOPE_DIM, ROPE_DIM, TILE, MQA_LIMIT, FNUZ, SOFT,
            )  # fmt: skip
        else:
            if HAS_INDEX:
                heads = tile_heads(task - MQA_TILES, INDEX_TILE)
                a, b, c, d, weights, cos, sin = load_index_query(
                    token, heads, position,
                    index_q_cos_sin_ptr, index_table_row_stride, index_table_rows,
                    index_q_ptr, index_q_row_stride, index_q_head_stride,
                    index_weights_ptr, weights_row_stride,
                    INDEX_HEADS, INDEX_DIM, INDEX_ROPE_DIM, INDEX_INTERLEAVED, INDEX_TILE,
                )  # fmt: skip
                a, b = rotate(a, b, cos, sin)
                store_index_query(
                    token, heads, a, b, c, d, weights, softmax_scale, head_scale,
                    index_q_fp8_ptr, index_weights_out_ptr,
                    INDEX_HEADS, INDEX_DIM, INDEX_ROPE_DIM, INDEX_INTERLEAVED,
                    INDEX_TILE, INDEX_LIMIT, FNUZ, SOFT,
                )  # fmt: skip
    else:
        # Every program has a share of both: a rope part alone is 128 bytes a head, too little for
        # the 6 programs that a multiprocessor starts per microsecond.
        TILES: tl.constexpr = MQA_TILES if MQA_TILES > INDEX_TILES else INDEX_TILES
        token, task = token_and_task(TILES, FEW)
        # Not the rows' addresses too: ptxas would load cos and sin behind a reduction.
        begin(arguments, PDL)
        position = load_position(positions_ptr, token, True)
        q_heads = tile_heads(task, TILE)
        q_pe = row_at(row_at(q_pe_ptr, token, q_pe_row_stride), q_heads, q_pe_head_stride)
        q_a, q_b = load_pairs(q_pe, q_heads < HEADS, TILE, ROPE_DIM, True)
        if HAS_INDEX:
            heads = tile_heads(task, INDEX_TILE)
            a, b, c, d, weights, cos, sin = load_index_query(
                token, heads, position,
                index_q_cos_sin_ptr, index_table_row_stride, index_table_rows,
                index_q_ptr, index_q_row_stride, index_q_head_stride,
                index_weights_ptr, weights_row_stride,
                INDEX_HEADS, INDEX_DIM, INDEX_ROPE_DIM, INDEX_INTERLEAVED, INDEX_TILE,
            )  # fmt: skip
        q_cos, q_sin = load_cos_sin(
            position, q_pe_cos_sin_ptr, table_row_stride, table_rows, ROPE_DIM
        )
        if HAS_INDEX:
            a, b = rotate(a, b, cos, sin)
        q_a, q_b = rotate(q_a, q_b, q_cos, q_sin)
        dtype = mqa_q_ptr.dtype.element_ty
        out = mqa_q_ptr + (token * HEADS + q_heads) * ROPE_DIM
        store_pairs(out, q_heads < HEADS, q_a.to(dtype), q_b.to(dtype), TILE, ROPE_DIM, True)
        if HAS_INDEX:
            store_index_query(
                token, heads, a, b, c, d, weights, softmax_scale, head_scale,
                index_q_fp8_ptr, index_weights_out_ptr,
                INDEX_HEADS, INDEX_DIM, INDEX_ROPE_DIM, INDEX_INTERLEAVED,
                INDEX_TILE, INDEX_LIMIT, FNUZ, SOFT,
            )  # fmt: skip
