"""Kernel of `fused_norm_rope`: up to four tasks per token, in one launch.

    q_out   = q_c * rsqrt(mean(q_c^2) + eps) * w
    kv, kpe = RMSNorm(kv_c), rope(k_pe)                -> kv_c_out, k_pe_out, MLA cache
    k       = rope(LayerNorm(index_k))                 -> index_k_out, e4m3 -> indexer cache
    topk    = -1

Tokens are on grid axis x. The y axis, of size 1, 2 or 4, splits the tasks over programs: 4 shorten
the critical path of a small batch, 1 keeps more bytes in flight per launched program. All grids run
the same binary.
"""

import triton
import triton.language as tl

from .caches import live_slot, store_entry, store_fp8_entry, store_index_key
from .numerics import divide_by, inverse_rms, rotate, split_reciprocal, square_sum, widen
from .rows import (
    address,
    as_bytes,
    begin,
    load_cos_sin,
    load_pairs,
    load_pieces,
    load_position,
    load_row,
    row_at,
    store_normed_row,
    store_pairs,
    store_tail,
    sum_pieces,
)


@triton.jit
def tile_dims(DIM: tl.constexpr, TILE: tl.constexpr):
    """Dims of a row as [TILES, TILE]."""
    TILES: tl.constexpr = triton.cdiv(DIM, TILE)
    return tl.arange(0, TILES)[:, None] * TILE + tl.arange(0, TILE)[None, :]


@triton.jit
def norm_kv(x, weight, eps, DIM: tl.constexpr):
    """fp32 RMSNorm of a row in tiles."""
    x = widen(x)
    a, b = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    squares = tl.sum(tl.sum(square_sum(a, b), axis=1), axis=0)
    return x * inverse_rms(squares, eps, DIM, BRANCH=True) * widen(weight)


@triton.jit
def norm_index_key(
    a, b, c, d, weight_a, weight_b, weight_c, weight_d, bias_a, bias_b, bias_c, bias_d, eps,
    DIM: tl.constexpr, ROPE_DIM: tl.constexpr,
):  # fmt: skip
    """fp32 LayerNorm of a row in `load_pieces`."""
    a = widen(a)
    b = widen(b)
    c = widen(c)
    d = widen(d)
    center = divide_by(sum_pieces(a + b, c + d), DIM)[:, None]
    # Lanes past the row would add center^2 to the variance.
    pair_lanes = tl.arange(0, a.shape[1])[None, :] < ROPE_DIM // 2
    tail_lanes = tl.arange(0, c.shape[1])[None, :]
    SECOND: tl.constexpr = (DIM - ROPE_DIM) // 2
    a = tl.where(pair_lanes, a - center, 0.0)
    b = tl.where(pair_lanes, b - center, 0.0)
    c = tl.where(tail_lanes < DIM - ROPE_DIM - SECOND, c - center, 0.0)
    d = tl.where(tail_lanes < SECOND, d - center, 0.0)
    squares = sum_pieces(square_sum(a, b), square_sum(c, d))
    scale = inverse_rms(squares, eps, DIM, BRANCH=False)[:, None]
    a = tl.fma(a * scale, widen(weight_a), widen(bias_a))
    b = tl.fma(b * scale, widen(weight_b), widen(bias_b))
    c = tl.fma(c * scale, widen(weight_c), widen(bias_c))
    d = tl.fma(d * scale, widen(weight_d), widen(bias_d))
    return a, b, c, d


@triton.jit
def fill_topk_row(token, buffer_ptr, row_stride, TOPK: tl.constexpr):
    BLOCK: tl.constexpr = triton.next_power_of_2(TOPK)
    columns = tl.arange(0, BLOCK)
    minus_one = tl.full((BLOCK,), -1, tl.int32)
    row = row_at(buffer_ptr, token, row_stride)
    tl.store(row + columns, minus_one, mask=columns < TOPK)


@triton.jit(
    do_not_specialize=["num_slots", "num_index_slots"],
    do_not_specialize_on_alignment=[
        "positions_ptr", "slot_mapping_ptr", "indexer_slot_mapping_ptr", "mla_k_scale_ptr"
    ],
)  # fmt: skip
def norm_rope_kernel(
    positions_ptr,
    q_c_ptr, q_row_stride, q_norm_weight_ptr, q_eps, q_c_out_ptr, q_out_row_stride,
    kv_c_ptr, kv_row_stride, kv_norm_weight_ptr, kv_eps, kv_c_out_ptr, kv_out_row_stride,
    k_pe_ptr, k_pe_row_stride, rope_cos_sin_ptr, table_row_stride, table_rows,
    k_pe_out_ptr, k_pe_out_row_stride,
    slot_mapping_ptr, num_slots,
    mla_kv_cache_ptr, mla_block_stride, mla_entry_stride, mla_capacity, mla_k_scale_ptr,
    index_k_ptr, index_k_row_stride, index_k_norm_weight_ptr, index_k_norm_bias_ptr, index_eps,
    index_rope_cos_sin_ptr, index_table_row_stride, index_table_rows,
    index_k_out_ptr, index_k_out_row_stride,
    indexer_slot_mapping_ptr, num_index_slots,
    indexer_k_cache_ptr, index_block_stride, index_capacity,
    topk_indices_buffer_ptr, topk_row_stride,
    Q_DIM: tl.constexpr, KV_DIM: tl.constexpr, ROPE_DIM: tl.constexpr,
    MLA_MODE: tl.constexpr, MLA_BLOCK_SIZE: tl.constexpr, MLA_TILE: tl.constexpr,
    MLA_LIMIT: tl.constexpr,
    INDEX_DIM: tl.constexpr, INDEX_ROPE_DIM: tl.constexpr, INDEX_INTERLEAVED: tl.constexpr,
    INDEX_BLOCK_SIZE: tl.constexpr, INDEX_UE8M0: tl.constexpr, INDEX_SHUFFLED: tl.constexpr,
    INDEX_LIMIT: tl.constexpr,
    TOPK: tl.constexpr,
    FNUZ: tl.constexpr, SOFT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Pointers are named after the arguments of the op; one that is None switches its part off."""
    HAS_KV: tl.constexpr = (
        (mla_kv_cache_ptr is not None) or (kv_c_out_ptr is not None) or (k_pe_out_ptr is not None)
    )
    token = tl.program_id(0).to(tl.int64)
    # Task t belongs to part t modulo the size of y. In halves the query goes with KV and the key
    # with the fill, or without a fill the query alone: about the same number of bytes each.
    part = tl.program_id(1)
    last = tl.num_programs(1) - 1
    KV_TASK: tl.constexpr = 2 if topk_indices_buffer_ptr is not None else 3
    # Without a fill there are two copies of the tasks, one for a program that does them all: there
    # no load of a row is masked, and of the branches only that of KV's norm is left. ptxas has all
    # loads that are used behind a branch counted together, so that the first use of any waits for
    # the last of them (2 to 7 % from 1,024 tokens on). With a fill, whose stores hide that, the
    # copy costs 1 %.
    if topk_indices_buffer_ptr is None:
        is_split = last > 0
    else:
        is_split: tl.constexpr = True
    for SPLIT in tl.static_range(2):
        if is_split == (SPLIT == 1):
            do_query = (part == 0) | (SPLIT == 0)
            do_index = (part == (1 & last)) | (SPLIT == 0)
            do_kv = (part == (KV_TASK & last)) | (SPLIT == 0)

            q_row = row_at(q_c_ptr, token, q_row_stride)
            rows = address(q_row)
            if HAS_KV:
                kv_row = row_at(kv_c_ptr, token, kv_row_stride)
                pe_row = row_at(k_pe_ptr, token, k_pe_row_stride)
                rows |= address(kv_row) | address(pe_row) | address(slot_mapping_ptr)
            if index_k_ptr is not None:
                index_row = row_at(index_k_ptr, token, index_k_row_stride)
                rows |= address(index_row)
            if indexer_k_cache_ptr is not None:
                rows |= address(indexer_k_cache_ptr) | index_capacity
            begin(rows, PDL)

            # All loads that need no other are in flight before the first of them is used.
            position = load_position(positions_ptr, token, do_index | do_kv)
            if mla_kv_cache_ptr is not None:
                mask = do_kv & (token < num_slots)
                slot = tl.load(slot_mapping_ptr + token, mask=mask, other=-1)
                slot, live = live_slot(slot, mla_capacity)
            if indexer_k_cache_ptr is not None:
                mask = do_index & (token < num_index_slots)
                index_slot = tl.load(indexer_slot_mapping_ptr + token, mask=mask, other=-1)
                index_slot, index_live = live_slot(index_slot, index_capacity)
            q_head, q_tail = load_row(q_row, do_query, Q_DIM)
            if HAS_KV:
                kv_dims = tile_dims(KV_DIM, MLA_TILE)
                kv_mask = do_kv & (kv_dims < KV_DIM)
                kv_c = tl.load(kv_row + kv_dims, mask=kv_mask, other=0.0)
                mla_scale = tl.full((), 1.0, tl.float32)
                if mla_k_scale_ptr is not None:
                    mla_scale = tl.load(mla_k_scale_ptr)
                pe_a, pe_b = load_pairs(pe_row, do_kv, 1, ROPE_DIM, True)
            if index_k_ptr is not None:
                key_a, key_b, key_c, key_d = load_pieces(
                    index_row, do_index, 1, INDEX_DIM, INDEX_ROPE_DIM, INDEX_INTERLEAVED
                )

            if topk_indices_buffer_ptr is not None:
                if part == (3 & last):
                    fill_topk_row(token, topk_indices_buffer_ptr, topk_row_stride, TOPK)

            if SPLIT == 0:
                if HAS_KV:
                    cos, sin = load_cos_sin(
                        position, rope_cos_sin_ptr, table_row_stride, table_rows, ROPE_DIM
                    )
                if index_k_ptr is not None:
                    i_cos, i_sin = load_cos_sin(
                        position, index_rope_cos_sin_ptr,
                        index_table_row_stride, index_table_rows, INDEX_ROPE_DIM,
                    )  # fmt: skip

            if HAS_KV:
                if do_kv:
                    kv_weight = tl.load(
                        kv_norm_weight_ptr + kv_dims, mask=kv_dims < KV_DIM, other=0.0
                    )
                    if SPLIT == 1:
                        cos, sin = load_cos_sin(
                            position, rope_cos_sin_ptr, table_row_stride, table_rows, ROPE_DIM
                        )
                    if MLA_MODE == "fp8":
                        power, high, low = split_reciprocal(mla_scale)
                    kv = norm_kv(kv_c, kv_weight, kv_eps, KV_DIM)
                    k_a, k_b = rotate(pe_a, pe_b, cos, sin)
                    if mla_kv_cache_ptr is not None:
                        entry = row_at(mla_kv_cache_ptr, slot // MLA_BLOCK_SIZE, mla_block_stride)
                        entry = row_at(entry, slot % MLA_BLOCK_SIZE, mla_entry_stride)
                        if MLA_MODE == "fp8":
                            store_fp8_entry(
                                entry, live, kv, k_a, k_b, power, high, low,
                                KV_DIM, ROPE_DIM, MLA_LIMIT, FNUZ, SOFT,
                            )  # fmt: skip
                        else:
                            store_entry(
                                entry, live, kv, k_a, k_b,
                                KV_DIM, ROPE_DIM, MLA_MODE, MLA_LIMIT, FNUZ, SOFT,
                            )  # fmt: skip
                    if kv_c_out_ptr is not None:
                        out = row_at(kv_c_out_ptr, token, kv_out_row_stride)
                        kv = kv.to(kv_c_out_ptr.dtype.element_ty)
                        tl.store(out + kv_dims, kv, mask=kv_dims < KV_DIM)
                    if k_pe_out_ptr is not None:
                        dtype = k_pe_out_ptr.dtype.element_ty
                        out = row_at(k_pe_out_ptr, token, k_pe_out_row_stride)
                        store_pairs(out, True, k_a.to(dtype), k_b.to(dtype), 1, ROPE_DIM, True)

            if index_k_ptr is not None:
                if do_index:
                    w_a, w_b, w_c, w_d = load_pieces(
                        index_k_norm_weight_ptr, True,
                        1, INDEX_DIM, INDEX_ROPE_DIM, INDEX_INTERLEAVED,
                    )  # fmt: skip
                    b_a, b_b, b_c, b_d = load_pieces(
                        index_k_norm_bias_ptr, True,
                        1, INDEX_DIM, INDEX_ROPE_DIM, INDEX_INTERLEAVED,
                    )  # fmt: skip
                    if SPLIT == 1:
                        i_cos, i_sin = load_cos_sin(
                            position, index_rope_cos_sin_ptr,
                            index_table_row_stride, index_table_rows, INDEX_ROPE_DIM,
                        )  # fmt: skip
                    i_a, i_b, i_c, i_d = norm_index_key(
                        key_a, key_b, key_c, key_d, w_a, w_b, w_c, w_d, b_a, b_b, b_c, b_d,
                        index_eps, INDEX_DIM, INDEX_ROPE_DIM,
                    )  # fmt: skip
                    i_a, i_b = rotate(i_a, i_b, i_cos, i_sin)
                    if index_k_out_ptr is not None:
                        dtype = index_k_out_ptr.dtype.element_ty
                        out = row_at(index_k_out_ptr, token, index_k_out_row_stride)
                        store_pairs(
                            out, True, i_a.to(dtype), i_b.to(dtype),
                            1, INDEX_ROPE_DIM, INDEX_INTERLEAVED,
                        )  # fmt: skip
                        store_tail(
                            out, True, i_c.to(dtype), i_d.to(dtype), INDEX_DIM, INDEX_ROPE_DIM
                        )
                    if indexer_k_cache_ptr is not None:
                        block = index_slot // INDEX_BLOCK_SIZE
                        block = row_at(as_bytes(indexer_k_cache_ptr), block, index_block_stride)
                        store_index_key(
                            block, index_slot % INDEX_BLOCK_SIZE, index_live, i_a, i_b, i_c, i_d,
                            INDEX_BLOCK_SIZE, INDEX_DIM, INDEX_ROPE_DIM, INDEX_INTERLEAVED,
                            INDEX_SHUFFLED, INDEX_UE8M0, INDEX_LIMIT, FNUZ, SOFT,
                        )  # fmt: skip

            if do_query:
                q_out = row_at(q_c_out_ptr, token, q_out_row_stride)
                store_normed_row(q_out, q_head, q_tail, q_norm_weight_ptr, q_eps, Q_DIM)
