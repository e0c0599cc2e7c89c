"""Kernel of `fused_norm_rope`: up to four tasks per token, in one launch.

    q_out   = q_c * rsqrt(mean(q_c^2) + eps) * w
    kv, kpe = RMSNorm(kv_c), rope(k_pe)                -> kv_c_out, k_pe_out, MLA cache
    k       = rope(LayerNorm(index_k))                 -> index_k_out, e4m3 -> indexer cache
    topk    = -1

Tokens are on grid axis x. The y axis splits the tasks over programs when its size is 4, which
shortens the critical path of a small batch; when it is 1 a program does all tasks of its token,
which keeps more bytes in flight per launched program. Both grids run the same binary.
"""

import triton
import triton.language as tl

from .caches import (
    load_slot,
    store_float_entry,
    store_fp8_ds_mla_entry,
    store_fp8_entry,
    store_index_codes,
    store_index_scale,
    store_nvfp4_ds_mla_entry,
)
from .numerics import (
    e4m3_code,
    finite_abs,
    inverse_rms,
    pow2_reciprocal,
    rotate,
    row_scale,
    square,
)
from .rows import (
    as_bytes,
    load_cos_sin,
    load_pairs,
    load_tail,
    release_dependents,
    store_pairs,
    store_tail,
    wait_for_inputs,
)


@triton.jit
def norm_query(
    token, q_c_ptr, q_row_stride, weight_ptr, eps, out_ptr, out_row_stride, DIM: tl.constexpr
):
    BLOCK: tl.constexpr = triton.next_power_of_2(DIM)
    dims = tl.arange(0, BLOCK)
    mask = dims < DIM
    x = tl.load(q_c_ptr + token * q_row_stride + dims, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + dims, mask=mask, other=0.0).to(tl.float32)
    normed = x * inverse_rms(tl.sum(square(x), axis=0), eps, DIM) * weight
    tl.store(
        out_ptr + token * out_row_stride + dims, normed.to(out_ptr.dtype.element_ty), mask=mask
    )


@triton.jit
def norm_kv(token, kv_c_ptr, kv_row_stride, weight_ptr, eps, DIM: tl.constexpr, TILE: tl.constexpr):
    """fp32 RMSNorm(kv_c), [TILES, TILE]."""
    BLOCK: tl.constexpr = triton.next_power_of_2(DIM)
    dims = tl.arange(0, BLOCK // TILE)[:, None] * TILE + tl.arange(0, TILE)[None, :]
    mask = dims < DIM
    x = tl.load(kv_c_ptr + token * kv_row_stride + dims, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + dims, mask=mask, other=0.0).to(tl.float32)
    return x * inverse_rms(tl.sum(tl.sum(square(x), axis=1), axis=0), eps, DIM) * weight


@triton.jit
def norm_index_key(
    row, weight_ptr, bias_ptr, eps,
    DIM: tl.constexpr, ROPE_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """fp32 LayerNorm(index_k) in three pieces: pair members a and b, and the unrotated tail."""
    a, b = load_pairs(row, True, 1, ROPE_DIM, INTERLEAVED)
    tail = load_tail(row, True, DIM, ROPE_DIM)
    total = tl.sum(a, axis=1) + tl.sum(b, axis=1) + tl.sum(tail, axis=1)
    mean = tl.div_rn(total, DIM * 1.0)[:, None]
    # Lanes past the row would add mean^2 to the variance.
    pair_lanes = tl.arange(0, a.shape[1])[None, :] < ROPE_DIM // 2
    tail_lanes = tl.arange(0, tail.shape[1])[None, :] < DIM - ROPE_DIM
    a = tl.where(pair_lanes, a - mean, 0.0)
    b = tl.where(pair_lanes, b - mean, 0.0)
    tail = tl.where(tail_lanes, tail - mean, 0.0)
    squares = tl.sum(square(a), axis=1) + tl.sum(square(b), axis=1) + tl.sum(square(tail), axis=1)
    scale = inverse_rms(squares, eps, DIM)[:, None]
    weight_a, weight_b = load_pairs(weight_ptr, True, 1, ROPE_DIM, INTERLEAVED)
    bias_a, bias_b = load_pairs(bias_ptr, True, 1, ROPE_DIM, INTERLEAVED)
    a = tl.fma(a * scale, weight_a, bias_a)
    b = tl.fma(b * scale, weight_b, bias_b)
    weight_tail = load_tail(weight_ptr, True, DIM, ROPE_DIM)
    bias_tail = load_tail(bias_ptr, True, DIM, ROPE_DIM)
    return a, b, tl.fma(tail * scale, weight_tail, bias_tail)


@triton.jit
def fill_topk_row(token, buffer_ptr, row_stride, TOPK: tl.constexpr):
    BLOCK: tl.constexpr = triton.next_power_of_2(TOPK)
    columns = tl.arange(0, BLOCK)
    minus_one = tl.full((BLOCK,), -1, tl.int32)
    tl.store(buffer_ptr + token * row_stride + columns, minus_one, mask=columns < TOPK)


@triton.jit(
    do_not_specialize=["num_slots", "num_index_slots"],
    do_not_specialize_on_alignment=[
        "positions_ptr", "slot_mapping_ptr", "index_slot_mapping_ptr", "mla_scale_ptr"
    ],
)  # fmt: skip
def norm_rope_kernel(
    positions_ptr,
    q_c_ptr, q_row_stride, q_weight_ptr, q_eps, q_out_ptr, q_out_row_stride,
    kv_c_ptr, kv_row_stride, kv_weight_ptr, kv_eps, kv_out_ptr, kv_out_row_stride,
    k_pe_ptr, k_pe_row_stride, table_ptr, table_row_stride, table_rows,
    k_pe_out_ptr, k_pe_out_row_stride,
    slot_mapping_ptr, num_slots,
    mla_cache_ptr, mla_block_stride, mla_entry_stride, mla_capacity, mla_scale_ptr,
    index_k_ptr, index_k_row_stride, index_weight_ptr, index_bias_ptr, index_eps,
    index_table_ptr, index_table_row_stride, index_table_rows,
    index_k_out_ptr, index_k_out_row_stride,
    index_slot_mapping_ptr, num_index_slots,
    index_cache_ptr, index_block_stride, index_capacity,
    topk_ptr, topk_row_stride,
    Q_DIM: tl.constexpr, KV_DIM: tl.constexpr, ROPE_DIM: tl.constexpr,
    MLA_MODE: tl.constexpr, MLA_BLOCK_SIZE: tl.constexpr, MLA_TILE: tl.constexpr,
    MLA_LIMIT: tl.constexpr,
    INDEX_DIM: tl.constexpr, INDEX_ROPE_DIM: tl.constexpr, INDEX_INTERLEAVED: tl.constexpr,
    INDEX_BLOCK_SIZE: tl.constexpr, INDEX_UE8M0: tl.constexpr, INDEX_SHUFFLED: tl.constexpr,
    INDEX_LIMIT: tl.constexpr,
    TOPK: tl.constexpr,
    FNUZ: tl.constexpr, SOFT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A pointer that is None switches its part off at compile time."""
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    task = tl.program_id(1)
    every_task = tl.num_programs(1) == 1

    if every_task | (task == 0):
        norm_query(
            token, q_c_ptr, q_row_stride, q_weight_ptr, q_eps, q_out_ptr, q_out_row_stride, Q_DIM
        )

    if index_k_ptr is not None:
        if every_task | (task == 1):
            cos, sin = load_cos_sin(
                positions_ptr, token, index_table_ptr, index_table_row_stride, index_table_rows,
                INDEX_ROPE_DIM,
            )  # fmt: skip
            row = index_k_ptr + token * index_k_row_stride
            a, b, tail = norm_index_key(
                row, index_weight_ptr, index_bias_ptr, index_eps,
                INDEX_DIM, INDEX_ROPE_DIM, INDEX_INTERLEAVED,
            )  # fmt: skip
            a, b = rotate(a, b, cos, sin)
            if index_k_out_ptr is not None:
                dtype = index_k_out_ptr.dtype.element_ty
                out = index_k_out_ptr + token * index_k_out_row_stride
                store_pairs(
                    out, True, a.to(dtype), b.to(dtype), 1, INDEX_ROPE_DIM, INDEX_INTERLEAVED
                )
                store_tail(out, True, tail.to(dtype), INDEX_DIM, INDEX_ROPE_DIM)
            if index_cache_ptr is not None:
                slot, live = load_slot(
                    index_slot_mapping_ptr, num_index_slots, index_capacity, token
                )
                amax = tl.maximum(tl.max(finite_abs(a)), tl.max(finite_abs(b)))
                amax = tl.maximum(amax, tl.max(finite_abs(tail)))
                scale = row_scale(amax, INDEX_LIMIT)
                inverse = pow2_reciprocal(scale)
                block = as_bytes(index_cache_ptr) + slot // INDEX_BLOCK_SIZE * index_block_stride
                in_block = slot % INDEX_BLOCK_SIZE
                store_index_codes(
                    block, in_block, live,
                    e4m3_code(a * inverse, INDEX_LIMIT, FNUZ, SOFT),
                    e4m3_code(b * inverse, INDEX_LIMIT, FNUZ, SOFT),
                    e4m3_code(tail * inverse, INDEX_LIMIT, FNUZ, SOFT),
                    INDEX_DIM, INDEX_ROPE_DIM, INDEX_INTERLEAVED, INDEX_SHUFFLED,
                )  # fmt: skip
                store_index_scale(
                    block, in_block, live, scale, INDEX_BLOCK_SIZE, INDEX_DIM, INDEX_UE8M0
                )

    if (mla_cache_ptr is not None) or (kv_out_ptr is not None) or (k_pe_out_ptr is not None):
        if every_task | (task == 2):
            cos, sin = load_cos_sin(
                positions_ptr, token, table_ptr, table_row_stride, table_rows, ROPE_DIM
            )
            a, b = load_pairs(k_pe_ptr + token * k_pe_row_stride, True, 1, ROPE_DIM, True)
            a, b = rotate(a, b, cos, sin)
            kv = norm_kv(token, kv_c_ptr, kv_row_stride, kv_weight_ptr, kv_eps, KV_DIM, MLA_TILE)
            if mla_cache_ptr is not None:
                slot, live = load_slot(slot_mapping_ptr, num_slots, mla_capacity, token)
                entry = mla_cache_ptr + slot // MLA_BLOCK_SIZE * mla_block_stride
                entry += slot % MLA_BLOCK_SIZE * mla_entry_stride
                if MLA_MODE == "float":
                    store_float_entry(entry, live, kv, a, b, KV_DIM, ROPE_DIM)
                elif MLA_MODE == "fp8":
                    scale = 1.0
                    if mla_scale_ptr is not None:
                        scale = tl.load(mla_scale_ptr)
                    store_fp8_entry(
                        entry, live, kv, a, b, scale, KV_DIM, ROPE_DIM, MLA_LIMIT, FNUZ, SOFT
                    )
                elif MLA_MODE == "fp8_ds_mla":
                    store_fp8_ds_mla_entry(
                        entry, live, kv, a, b, KV_DIM, ROPE_DIM, MLA_LIMIT, FNUZ, SOFT
                    )
                else:
                    tl.static_assert(MLA_MODE == "nvfp4_ds_mla")
                    store_nvfp4_ds_mla_entry(entry, live, kv, a, b, KV_DIM, ROPE_DIM, SOFT)
            if kv_out_ptr is not None:
                dims = (
                    tl.arange(0, kv.shape[0])[:, None] * MLA_TILE + tl.arange(0, MLA_TILE)[None, :]
                )
                out = kv_out_ptr + token * kv_out_row_stride + dims
                tl.store(out, kv.to(kv_out_ptr.dtype.element_ty), mask=dims < KV_DIM)
            if k_pe_out_ptr is not None:
                dtype = k_pe_out_ptr.dtype.element_ty
                out = k_pe_out_ptr + token * k_pe_out_row_stride
                store_pairs(out, True, a.to(dtype), b.to(dtype), 1, ROPE_DIM, True)

    if topk_ptr is not None:
        if every_task | (task == 3):
            fill_topk_row(token, topk_ptr, topk_row_stride, TOPK)
    release_dependents(PDL)
