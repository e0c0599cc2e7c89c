"""Loads and stores shared by every kernel: rows, RoPE pairs, cos/sin, launch-dependency marks.

For pairs, row pointers come as [ROWS, 1] tensors with a [ROWS, 1] mask, so that one helper serves a
single token and a tile of heads. Global accesses stay contiguous in both RoPE styles: interleaved
pairs are split and joined in registers, half-split ones are two contiguous pieces.
"""

import triton
import triton.language as tl

from .numerics import inverse_rms, row_amax, square_sum, widen


@triton.jit
def as_bytes(ptr):
    """Codes are stored as bytes whatever 1-byte type the tensor has."""
    return ptr.to(tl.pointer_type(tl.uint8))


@triton.jit
def row_at(ptr, row, stride):
    """Pointer to a 64-bit row.

    A tensor's strides are not negative: told so, the compiler multiplies in one instruction instead
    of four (24 instructions less in `norm_rope_kernel`, 10 to 17 of them ahead of its loads).
    """
    tl.assume(stride >= 0)
    return ptr + row * stride


@triton.jit
def load_row(ptr, enabled, DIM: tl.constexpr):
    """A row in two pieces, so that 1536 takes 1024 + 512 registers' worth of lanes, not 2048."""
    HEAD: tl.constexpr = triton.next_power_of_2(DIM) // 2 if DIM > 4 else 2
    TAIL: tl.constexpr = triton.next_power_of_2(DIM - HEAD if DIM > HEAD + 1 else 2)
    head_dims = tl.arange(0, HEAD)
    tail_dims = HEAD + tl.arange(0, TAIL)
    head = tl.load(ptr + head_dims, mask=enabled & (head_dims < DIM), other=0.0)
    tail = tl.load(ptr + tail_dims, mask=enabled & (tail_dims < DIM), other=0.0)
    return head, tail


@triton.jit
def store_row(ptr, head, tail, DIM: tl.constexpr):
    head_dims = tl.arange(0, head.shape[0])
    tail_dims = head.shape[0] + tl.arange(0, tail.shape[0])
    dtype = ptr.dtype.element_ty
    tl.store(ptr + head_dims, head.to(dtype), mask=head_dims < DIM)
    tl.store(ptr + tail_dims, tail.to(dtype), mask=tail_dims < DIM)


@triton.jit
def pair_squares(x):
    """Square sums of the neighbours in a row: [SIZE] to [SIZE / 2], within each thread."""
    a, b = tl.split(tl.reshape(x, (x.shape[0] // 2, 2)))
    return square_sum(a, b)


@triton.jit
def store_normed_row(out_ptr, head, tail, weight_ptr, eps, DIM: tl.constexpr):
    """RMSNorm of a row that `load_row` read."""
    weight_head, weight_tail = load_row(weight_ptr, True, DIM)
    head = widen(head)
    tail = widen(tail)
    # Folded onto the tail, the head shares its reduction: five dependent shuffles less.
    FOLDS: tl.constexpr = head.shape[0] // tail.shape[0]
    squares = tl.sum(tl.reshape(pair_squares(head), (FOLDS, tail.shape[0] // 2)), axis=0)
    scale = inverse_rms(tl.sum(squares + pair_squares(tail), axis=0), eps, DIM, BRANCH=False)
    head = head * scale * widen(weight_head)
    store_row(out_ptr, head, tail * scale * widen(weight_tail), DIM)


@triton.jit
def load_pairs(
    rows, row_mask, ROWS: tl.constexpr, ROPE_DIM: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Members (a, b) of the ROPE_DIM / 2 pairs of each row, [ROWS, HALF], as they are stored."""
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
    return a, b


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
    """Dims ROPE_DIM..DIM-1 of each row, which rotation leaves alone, in two halves.

    At the models' sizes (128, of which 64 rotate) all four pieces of a row then have one shape, one
    register layout and one reduction.
    """
    SECOND: tl.constexpr = (DIM - ROPE_DIM) // 2
    FIRST: tl.constexpr = DIM - ROPE_DIM - SECOND
    dims = tl.arange(0, triton.next_power_of_2(FIRST if FIRST > 0 else 1))[None, :]
    tail = rows + ROPE_DIM + dims
    c = tl.load(tail, mask=row_mask & (dims < FIRST), other=0.0)
    d = tl.load(tail + FIRST, mask=row_mask & (dims < SECOND), other=0.0)
    return c, d


@triton.jit
def store_tail(rows, row_mask, c, d, DIM: tl.constexpr, ROPE_DIM: tl.constexpr):
    """Write back what `load_tail` read."""
    SECOND: tl.constexpr = (DIM - ROPE_DIM) // 2
    FIRST: tl.constexpr = DIM - ROPE_DIM - SECOND
    dims = tl.arange(0, c.shape[1])[None, :]
    tail = rows + ROPE_DIM + dims
    tl.store(tail, c, mask=row_mask & (dims < FIRST))
    tl.store(tail + FIRST, d, mask=row_mask & (dims < SECOND))


@triton.jit
def load_pieces(
    rows, row_mask,
    ROWS: tl.constexpr, DIM: tl.constexpr, ROPE_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Rows in four pieces: the members of their pairs, the halves of their tails."""
    a, b = load_pairs(rows, row_mask, ROWS, ROPE_DIM, INTERLEAVED)
    c, d = load_tail(rows, row_mask, DIM, ROPE_DIM)
    return a, b, c, d


@triton.jit
def sum_pieces(ab, cd):
    """Row sums [ROWS] over both tensors, in one reduction where their shapes agree.

    A reduction within a warp is five dependent shuffles.
    """
    if ab.shape[1] == cd.shape[1]:
        total = tl.sum(ab + cd, axis=1)
    else:
        total = tl.sum(ab, axis=1) + tl.sum(cd, axis=1)
    return total


@triton.jit
def amax_pieces(a, b, c, d):
    """Row amax [ROWS] over four pieces; see `row_amax`."""
    ab = tl.maximum(tl.abs(a), tl.abs(b))
    cd = tl.maximum(tl.abs(c), tl.abs(d))
    if ab.shape[1] == cd.shape[1]:
        amax = row_amax(tl.maximum(ab, cd))
    else:
        amax = tl.maximum(row_amax(ab), row_amax(cd))
    return amax


@triton.jit
def token_and_task(TASKS: tl.constexpr, FEW: tl.constexpr):
    """(token, task) of this program of a grid (tokens, TASKS), 64-bit token.

    Blocks start in the order of x, then y: the first task of all tokens, then the second. Up to FEW
    tokens are up to 12 % faster that way. In a larger batch, which does not fit the L2 cache, the
    rows of a token, adjacent in memory, would be written far apart in time: there all tasks of a
    token come before the next token's.
    """
    num_tokens = tl.num_programs(0)
    token = tl.program_id(0).to(tl.int64)
    task = tl.program_id(1)
    few = num_tokens <= FEW
    program = task.to(tl.int64) * num_tokens + token
    token = tl.where(few, token, program // TASKS)
    return token, tl.where(few, task, (program % TASKS).to(tl.int32))


@triton.jit
def load_position(positions_ptr, token, enabled):
    return tl.load(positions_ptr + token, mask=enabled, other=0).to(tl.int64)


@triton.jit
def load_cos_sin(position, table_ptr, table_row_stride, table_rows, ROPE_DIM: tl.constexpr):
    """(cos, sin) of a position, [1, HALF]; one outside the table is clamped into it.

    The clamp ends at 0, which shows the compiler that the row is not negative.

    ptxas hoists these loads, and with them the wait for the position, in front of loads that need
    no position. It moves none across the barrier: what is loaded before is in flight meanwhile.
    """
    HALF: tl.constexpr = triton.next_power_of_2(ROPE_DIM // 2)
    position = tl.maximum(tl.minimum(position, table_rows - 1), 0)
    dims = tl.arange(0, HALF)[None, :]
    mask = dims < ROPE_DIM // 2
    row = row_at(table_ptr, position, table_row_stride)
    tl.debug_barrier()
    cos = tl.load(row + dims, mask=mask, other=0.0)
    sin = tl.load(row + ROPE_DIM // 2 + dims, mask=mask, other=0.0)
    return cos, sin


@triton.jit
def address(ptr):
    """The address in a kernel argument; 0 of one that is None."""
    if ptr is None:
        result = tl.full((), 0, tl.int64)
    else:
        result = ptr.to(tl.int64)
    return result


@triton.jit
def begin(arguments, PDL: tl.constexpr):
    """Programmatic dependent launch: wait for the kernels before, then let the next one start.

    Nothing, weights included, may be loaded before the wait; what a program computes from its
    number and arguments is done by then. The next kernel may start this early since it waits
    itself, for this kernel's end. Not before the wait: the next one, and those behind it, would
    then start while kernels before this one still run, which a foreign one may not expect.

    `arguments` joins bits of addresses, and with one that is not 0 it is not 1: the assembly does
    nothing but make what they are computed from go ahead of the wait. They need one of the kernel's
    arguments in each 64 bytes, whose first read misses the constant cache (11 to 15 % of the cycles
    of a warp at 64 tokens), and may be addresses of rows.
    """
    if PDL:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.eq.u64 p, $1, 1; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
            "=r,l", [arguments], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
