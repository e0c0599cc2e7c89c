"""Loads and stores shared by every kernel: RoPE pairs, cos/sin rows, launch-dependency marks.

Row pointers come as [ROWS, 1] tensors with a [ROWS, 1] mask, so that one helper serves a single
token and a tile of heads. Global accesses stay contiguous in both RoPE styles: interleaved pairs
are split and joined in registers, half-split ones are two contiguous pieces.
"""

import triton
import triton.language as tl


@triton.jit
def as_bytes(ptr):
    """Codes are stored as bytes whatever 1-byte type the tensor has."""
    return ptr.to(tl.pointer_type(tl.uint8))


@triton.jit
def load_pairs(
    rows, row_mask, ROWS: tl.constexpr, ROPE_DIM: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """fp32 members (a, b) of the ROPE_DIM / 2 pairs of each row, [ROWS, HALF]."""
    HALF: tl.constexpr = triton.next_power_of_2(ROPE_DIM // 2)
    if INTERLEAVED:
        dims = tl.arange(0, 2 * HALF)[None, :]
        x = tl.load(rows + dims, mask=row_mask & (dims < ROPE_DIM), other=0.0)
        a, b = tl.split(tl.reshape(x, (ROWS, HALF, 2)))
    else:
        dims = tl.arange(0, HALF)[None, :]
        mask = row_mask & (dims < ROPE_DIM // 2)
        a = tl.load(rows + dims, mask=mask, other=0.0)
        b = tl.load(rows + ROPE_DIM // 2 + dims, mask=mask, other=0.0)
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def store_pairs(
    rows, row_mask, a, b, ROWS: tl.constexpr, ROPE_DIM: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Write pairs back to where `load_pairs` finds them; a and b have the stored type."""
    HALF: tl.constexpr = triton.next_power_of_2(ROPE_DIM // 2)
    if INTERLEAVED:
        dims = tl.arange(0, 2 * HALF)[None, :]
        x = tl.reshape(tl.join(a, b), (ROWS, 2 * HALF))
        tl.store(rows + dims, x, mask=row_mask & (dims < ROPE_DIM))
    else:
        dims = tl.arange(0, HALF)[None, :]
        mask = row_mask & (dims < ROPE_DIM // 2)
        tl.store(rows + dims, a, mask=mask)
        tl.store(rows + ROPE_DIM // 2 + dims, b, mask=mask)


@triton.jit
def load_tail(rows, row_mask, DIM: tl.constexpr, ROPE_DIM: tl.constexpr):
    """fp32 dims ROPE_DIM..DIM-1 of each row, which rotation leaves alone; one masked lane if none."""
    TAIL: tl.constexpr = triton.next_power_of_2(DIM - ROPE_DIM if DIM > ROPE_DIM else 1)
    dims = tl.arange(0, TAIL)[None, :]
    mask = row_mask & (dims < DIM - ROPE_DIM)
    return tl.load(rows + ROPE_DIM + dims, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_tail(rows, row_mask, tail, DIM: tl.constexpr, ROPE_DIM: tl.constexpr):
    dims = tl.arange(0, tail.shape[1])[None, :]
    tl.store(rows + ROPE_DIM + dims, tail, mask=row_mask & (dims < DIM - ROPE_DIM))


@triton.jit
def load_cos_sin(
    positions_ptr, token, table_ptr, table_row_stride, table_rows, ROPE_DIM: tl.constexpr
):
    """fp32 (cos, sin) of a token, [1, HALF]; a position outside the table is clamped into it."""
    HALF: tl.constexpr = triton.next_power_of_2(ROPE_DIM // 2)
    position = tl.load(positions_ptr + token).to(tl.int64)
    position = tl.minimum(tl.maximum(position, 0), table_rows - 1)
    dims = tl.arange(0, HALF)[None, :]
    mask = dims < ROPE_DIM // 2
    row = table_ptr + position * table_row_stride
    cos = tl.load(row + dims, mask=mask, other=0.0)
    sin = tl.load(row + ROPE_DIM // 2 + dims, mask=mask, other=0.0)
    return cos.to(tl.float32), sin.to(tl.float32)


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Programmatic dependent launch: start early, wait before the first load."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def release_dependents(PDL: tl.constexpr):
    """Let the next kernel start; safe since one launched with the attribute waits itself."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
