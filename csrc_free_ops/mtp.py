"""Kernels of the speculative-decoding and embedding norms.

    eh_norm    = [RMSNorm(embedding, zero at position 0) | RMSNorm(previous_hidden)]
    embed_norm = (table[id], RMSNorm(table[id]))

Tokens are on grid axis x, the two halves of eh_norm on y.
"""

import triton
import triton.language as tl

from .rows import address, begin, load_row, row_at, store_normed_row, store_row


@triton.jit
def table_row(ids_ptr, token, table_rows):
    """Row of a token's id; an id outside the table is clamped into it, never read out of bounds."""
    row = tl.load(ids_ptr + token).to(tl.int64)
    return tl.maximum(tl.minimum(row, table_rows - 1), 0)


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
    token = tl.program_id(0).to(tl.int64)
    begin(address(positions_ptr) | address(out_ptr), PDL)
    out = row_at(out_ptr, token, out_row_stride)
    if tl.program_id(1) == 0:
        row = token
        if ids_ptr is not None:
            row = table_row(ids_ptr, token, embeds_rows)
        not_first = tl.load(positions_ptr + token) != 0
        head, tail = load_row(row_at(embeds_ptr, row, embeds_row_stride), not_first, DIM)
        store_normed_row(out, head, tail, embed_weight_ptr, eps, DIM)
    else:
        head, tail = load_row(row_at(hidden_ptr, token, hidden_row_stride), True, DIM)
        store_normed_row(out + DIM, head, tail, hidden_weight_ptr, eps, DIM)


@triton.jit(do_not_specialize_on_alignment=["ids_ptr"])
def embed_norm_kernel(
    ids_ptr, table_ptr, table_row_stride, table_rows, weight_ptr, eps,
    residual_ptr, residual_row_stride, normed_ptr, normed_row_stride,
    DIM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    begin(address(ids_ptr) | address(normed_ptr), PDL)
    row = row_at(table_ptr, table_row(ids_ptr, token, table_rows), table_row_stride)
    head, tail = load_row(row, True, DIM)
    store_row(row_at(residual_ptr, token, residual_row_stride), head, tail, DIM)
    normed = row_at(normed_ptr, token, normed_row_stride)
    store_normed_row(normed, head, tail, weight_ptr, eps, DIM)
