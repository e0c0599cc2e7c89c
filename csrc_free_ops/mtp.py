"""Kernels of the speculative-decoding and embedding norms.

    eh_norm    = [RMSNorm(embedding, zero at position 0) | RMSNorm(previous_hidden)]
    embed_norm = (table[id], RMSNorm(table[id]))

Tokens are on grid axis x, the two halves of eh_norm on y.
"""

import triton
import triton.language as tl

from .numerics import inverse_rms, square
from .rows import release_dependents, wait_for_inputs


@triton.jit
def table_row(ids_ptr, token, table_rows):
    """Row of a token's id; an id outside the table is clamped into it, never read out of bounds."""
    row = tl.load(ids_ptr + token).to(tl.int64)
    return tl.minimum(tl.maximum(row, 0), table_rows - 1)


@triton.jit
def load_row(row_ptr, DIM: tl.constexpr):
    BLOCK: tl.constexpr = triton.next_power_of_2(DIM)
    dims = tl.arange(0, BLOCK)
    return tl.load(row_ptr + dims, mask=dims < DIM, other=0.0)


@triton.jit
def store_normed_row(out_ptr, x, weight_ptr, eps, DIM: tl.constexpr):
    dims = tl.arange(0, x.shape[0])
    x = x.to(tl.float32)
    weight = load_row(weight_ptr, DIM).to(tl.float32)
    normed = x * inverse_rms(tl.sum(square(x), axis=0), eps, DIM) * weight
    tl.store(out_ptr + dims, normed.to(out_ptr.dtype.element_ty), mask=dims < DIM)


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "ids_ptr"])
def eh_norm_kernel(
    positions_ptr, ids_ptr,
    embeds_ptr, embeds_row_stride, embeds_rows,
    hidden_ptr, hidden_row_stride,
    embed_weight_ptr, hidden_weight_ptr, eps,
    out_ptr, out_row_stride,
    DIM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Without ids the embedding of a token is its own row of `embeds`."""
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    out = out_ptr + token * out_row_stride
    if tl.program_id(1) == 0:
        row = token
        if ids_ptr is not None:
            row = table_row(ids_ptr, token, embeds_rows)
        embed = load_row(embeds_ptr + row * embeds_row_stride, DIM).to(tl.float32)
        embed = tl.where(tl.load(positions_ptr + token) == 0, 0.0, embed)
        store_normed_row(out, embed, embed_weight_ptr, eps, DIM)
    else:
        hidden = load_row(hidden_ptr + token * hidden_row_stride, DIM)
        store_normed_row(out + DIM, hidden, hidden_weight_ptr, eps, DIM)
    release_dependents(PDL)


@triton.jit(do_not_specialize_on_alignment=["ids_ptr"])
def embed_norm_kernel(
    ids_ptr, table_ptr, table_row_stride, table_rows, weight_ptr, eps,
    residual_ptr, residual_row_stride, normed_ptr, normed_row_stride,
    DIM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    x = load_row(table_ptr + table_row(ids_ptr, token, table_rows) * table_row_stride, DIM)
    dims = tl.arange(0, x.shape[0])
    tl.store(residual_ptr + token * residual_row_stride + dims, x, mask=dims < DIM)
    store_normed_row(normed_ptr + token * normed_row_stride, x, weight_ptr, eps, DIM)
    release_dependents(PDL)
