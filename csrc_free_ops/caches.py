"""Slot to address, and one store helper per cache layout.

Byte layouts are described in `dsv32_ops.layouts`, whose constants reach the kernels as
compile-time arguments. Offsets are 64-bit from the first multiplication.
"""

import triton
import triton.language as tl

from .numerics import (
    divide,
    divide_by,
    e2m1_code,
    e4m3_code,
    e4m3_value,
    pow2_exponent,
    pow2_reciprocal,
    reciprocal,
    row_amax,
    row_scale,
    tile_scale,
)
from .rows import amax_pieces, as_bytes, store_pairs


@triton.jit
def live_slot(slot, capacity):
    """(slot, live): a negative slot and one past the cache are dead.

    Callers load the slot in the kernel's own body: torch's mutation analysis follows the address of
    a store back through calls to every pointer they got, and stops at a load only where it sees it.
    """
    slot = slot.to(tl.int64)
    live = (slot >= 0) & (slot < capacity)
    return tl.where(live, slot, 0), live


@triton.jit
def store_float_entry(entry, live, kv, a, b, KV_DIM: tl.constexpr, ROPE_DIM: tl.constexpr):
    """[normed kv | rotated k_pe] in the cache's float dtype; kv is [1, BLOCK]."""
    dtype = entry.dtype.element_ty
    dims = tl.arange(0, kv.shape[1])[None, :]
    tl.store(entry + dims, kv.to(dtype), mask=live & (dims < KV_DIM))
    store_pairs(entry + KV_DIM, live, a.to(dtype), b.to(dtype), 1, ROPE_DIM, True)


@triton.jit
def store_fp8_entry(
    entry, live, kv, a, b, power, high, low,
    KV_DIM: tl.constexpr, ROPE_DIM: tl.constexpr,
    LIMIT: tl.constexpr, FNUZ: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    """[kv / scale | k_pe / scale] as e4m3 codes; kv is [1, BLOCK]."""
    entry = as_bytes(entry)
    dims = tl.arange(0, kv.shape[1])[None, :]
    codes = e4m3_code(divide(kv, power, high, low), LIMIT, FNUZ, SOFT)
    tl.store(entry + dims, codes, mask=live & (dims < KV_DIM))
    a = e4m3_code(divide(a, power, high, low), LIMIT, FNUZ, SOFT)
    b = e4m3_code(divide(b, power, high, low), LIMIT, FNUZ, SOFT)
    store_pairs(entry + KV_DIM, live, a, b, 1, ROPE_DIM, True)


@triton.jit
def store_fp8_ds_mla_entry(
    entry, live, kv, a, b,
    KV_DIM: tl.constexpr, ROPE_DIM: tl.constexpr,
    LIMIT: tl.constexpr, FNUZ: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    """e4m3 codes, an fp32 power-of-two scale per tile, bf16 k_pe; kv is [TILES, TILE]."""
    TILES: tl.constexpr = kv.shape[0]
    TILE: tl.constexpr = kv.shape[1]
    entry = as_bytes(entry)
    tiles = tl.arange(0, TILES)
    scale = tile_scale(row_amax(kv), LIMIT)
    codes = e4m3_code(kv * pow2_reciprocal(scale)[:, None], LIMIT, FNUZ, SOFT)
    tl.store(entry + tiles[:, None] * TILE + tl.arange(0, TILE)[None, :], codes, mask=live)
    scales = (entry + KV_DIM).to(tl.pointer_type(tl.float32))
    tl.store(scales + tiles, scale, mask=live)
    rope = (entry + KV_DIM + 4 * TILES).to(tl.pointer_type(tl.bfloat16))
    store_pairs(rope, live, a.to(tl.bfloat16), b.to(tl.bfloat16), 1, ROPE_DIM, True)


@triton.jit
def store_nvfp4_ds_mla_entry(
    entry, live, kv, a, b,
    KV_DIM: tl.constexpr, ROPE_DIM: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    """e2m1 pairs (even element low), e4m3 k_pe, permuted e4m3 block scales; kv is [BLOCKS, 16]."""
    BLOCKS: tl.constexpr = kv.shape[0]
    entry = as_bytes(entry)
    blocks = tl.arange(0, BLOCKS)
    ratio = tl.maximum(divide_by(row_amax(kv), 6), 0.001953125)
    scale_code = e4m3_code(ratio, 448.0, False, SOFT)
    inverse = reciprocal(e4m3_value(scale_code))
    codes = e2m1_code(kv * inverse[:, None], SOFT)
    low, high = tl.split(tl.reshape(codes, (BLOCKS, 8, 2)))
    payload = entry + blocks[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(payload, (low + (high << 4)).to(tl.uint8), mask=live)
    rope = entry + KV_DIM // 2
    a = e4m3_code(a, 448.0, False, SOFT)
    b = e4m3_code(b, 448.0, False, SOFT)
    store_pairs(rope, live, a, b, 1, ROPE_DIM, True)
    tl.store(rope + ROPE_DIM + 8 * (blocks & 3) + (blocks >> 2), scale_code, mask=live)


@triton.jit
def store_entry(
    entry, live, kv, a, b,
    KV_DIM: tl.constexpr, ROPE_DIM: tl.constexpr, MODE: tl.constexpr,
    LIMIT: tl.constexpr, FNUZ: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    """An entry of a cache that brings no scale of its own."""
    if MODE == "float":
        store_float_entry(entry, live, kv, a, b, KV_DIM, ROPE_DIM)
    elif MODE == "fp8_ds_mla":
        store_fp8_ds_mla_entry(entry, live, kv, a, b, KV_DIM, ROPE_DIM, LIMIT, FNUZ, SOFT)
    else:
        tl.static_assert(MODE == "nvfp4_ds_mla")
        store_nvfp4_ds_mla_entry(entry, live, kv, a, b, KV_DIM, ROPE_DIM, SOFT)


@triton.jit
def index_code_offset(in_block, dims, HEAD_DIM: tl.constexpr, SHUFFLED: tl.constexpr):
    """Byte of code `dims` of token `in_block`, from the start of its block."""
    if SHUFFLED:
        offset = (in_block // 16) * (16 * HEAD_DIM) + (in_block % 16) * 16
        offset += (dims // 16) * 256 + dims % 16
    else:
        offset = in_block * HEAD_DIM + dims
    return offset


@triton.jit
def store_index_codes(
    block, in_block, live, a, b, c, d,
    HEAD_DIM: tl.constexpr, ROPE_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr, SHUFFLED: tl.constexpr,
):  # fmt: skip
    """Codes of the four pieces of a row (see `load_pairs` and `load_tail`) at their addresses."""
    HALF: tl.constexpr = a.shape[1]
    if INTERLEAVED:
        dims = tl.arange(0, 2 * HALF)[None, :]
        address = block + index_code_offset(in_block, dims, HEAD_DIM, SHUFFLED)
        pairs = tl.reshape(tl.join(a, b), (1, 2 * HALF))
        tl.store(address, pairs, mask=live & (dims < ROPE_DIM))
    else:
        dims = tl.arange(0, HALF)[None, :]
        mask = live & (dims < ROPE_DIM // 2)
        tl.store(block + index_code_offset(in_block, dims, HEAD_DIM, SHUFFLED), a, mask=mask)
        dims += ROPE_DIM // 2
        tl.store(block + index_code_offset(in_block, dims, HEAD_DIM, SHUFFLED), b, mask=mask)
    FIRST: tl.constexpr = HEAD_DIM - ROPE_DIM - (HEAD_DIM - ROPE_DIM) // 2
    lanes = tl.arange(0, c.shape[1])[None, :]
    dims = ROPE_DIM + lanes
    address = block + index_code_offset(in_block, dims, HEAD_DIM, SHUFFLED)
    tl.store(address, c, mask=live & (lanes < FIRST))
    dims += FIRST
    address = block + index_code_offset(in_block, dims, HEAD_DIM, SHUFFLED)
    tl.store(address, d, mask=live & (dims < HEAD_DIM))


@triton.jit
def store_index_scale(
    block, in_block, live, scale,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, UE8M0: tl.constexpr,
):  # fmt: skip
    """The token's 4 scale bytes, behind the codes of its block: fp32, or four exponent bytes."""
    # scale is [1, 1]
    address = block + BLOCK_SIZE * HEAD_DIM + in_block * 4 + tl.arange(0, 1)[:, None]
    bits = scale.to(tl.int32, bitcast=True)
    if UE8M0:
        bits = pow2_exponent(scale).to(tl.int32) * 0x01010101
    tl.store(address.to(tl.pointer_type(tl.int32)), bits, mask=live)


@triton.jit
def store_index_key(
    block, in_block, live, a, b, c, d,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, ROPE_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr, SHUFFLED: tl.constexpr, UE8M0: tl.constexpr,
    LIMIT: tl.constexpr, FNUZ: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    """e4m3 codes and the scale of a key in fp32 pieces."""
    scale = row_scale(amax_pieces(a, b, c, d), LIMIT)[:, None]
    inverse = pow2_reciprocal(scale)
    store_index_codes(
        block, in_block, live,
        e4m3_code(a * inverse, LIMIT, FNUZ, SOFT),
        e4m3_code(b * inverse, LIMIT, FNUZ, SOFT),
        e4m3_code(c * inverse, LIMIT, FNUZ, SOFT),
        e4m3_code(d * inverse, LIMIT, FNUZ, SOFT),
        HEAD_DIM, ROPE_DIM, INTERLEAVED, SHUFFLED,
    )  # fmt: skip
    store_index_scale(block, in_block, live, scale, BLOCK_SIZE, HEAD_DIM, UE8M0)
