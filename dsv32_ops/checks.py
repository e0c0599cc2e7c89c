"""Argument checks, shared by the GPU op, the CPU kernel and the fake kernel of each op.

They raise before anything is written and name the argument, what was expected and what came:
`TypeError` for dtypes, `ValueError` for everything else that shapes and strides show, `IndexError`
for what only the data show. Conditions on symbolic sizes go through `torch._check_value`, so that a
traced model fails with the same text and keeps one graph for every token count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import layouts, platform

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
INDEX_TYPES = (torch.int32, torch.int64)


_BYTES = (torch.uint8, *platform.FP8_DTYPES)
CACHE_DTYPES = {
    "auto": FLOATS,
    "bfloat16": (torch.bfloat16,),
    "float16": (torch.float16,),
    "fp8": _BYTES,
    "fp8_e4m3": _BYTES,
    "fp8_ds_mla": _BYTES,
    "nvfp4_ds_mla": (torch.uint8,),
}


def need(ok: Any, name: str, expected: str, got: Any) -> None:
    """Raise ValueError unless `ok`, which may be a symbolic condition."""
    if ok is True:
        return
    if ok is False:
        raise ValueError(_message(name, expected, got))
    torch._check_value(ok, lambda: _message(name, expected, got))


def _message(name: str, expected: str, got: Any) -> str:
    return f"{name}: expected {expected}, got {got}"


def need_dtype(t: Tensor, name: str, allowed: Sequence[torch.dtype]) -> None:
    if t.dtype not in allowed:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise TypeError(_message(name, f"dtype {names}", str(t.dtype).removeprefix("torch.")))


def need_tensor(
    t: Tensor | None, name: str, ndim: int, allowed: Sequence[torch.dtype], device: torch.device
) -> Tensor:
    """A tensor of this rank, type and device whose last dimension is contiguous."""
    if t is None:
        raise ValueError(_message(name, "a tensor", "None"))
    if t.dim() != ndim:
        raise ValueError(_message(name, f"{ndim} dimensions", f"shape {tuple(t.shape)}"))
    if t.dtype not in allowed:
        need_dtype(t, name, allowed)
    if t.device != device:
        raise ValueError(_message(name, f"a tensor on {device} like positions", t.device))
    need((t.stride(-1) == 1) | (t.shape[-1] == 1), name, "last stride 1", t.stride())
    return t


def need_index_map(t: Tensor | None, name: str, device: torch.device) -> None:
    need_tensor(t, name, 1, INDEX_TYPES, device)


def need_weight(t: Tensor | None, name: str, size: Any, device: torch.device) -> None:
    t = need_tensor(t, name, 1, FLOATS, device)
    need(t.shape[0] == size, name, f"{size} elements", tuple(t.shape))


def need_rows(t: Tensor, name: str, num_tokens: Any) -> None:
    need(t.shape[0] == num_tokens, name, f"{num_tokens} rows (num_tokens)", tuple(t.shape))


def need_table(t: Tensor | None, name: str, rope_dim: Any, device: torch.device) -> None:
    t = need_tensor(t, name, 2, FLOATS, device)
    need(t.shape[0] >= 1, name, "at least one row", tuple(t.shape))
    need(t.shape[1] == rope_dim, name, f"{rope_dim} columns (cos, then sin)", tuple(t.shape))


def need_out(t: Tensor, name: str, shape: Sequence[Any], device: torch.device) -> None:
    """A written tensor of this shape, none of whose elements share memory."""
    need_tensor(t, name, len(shape), FLOATS, device)
    need(tuple(t.shape) == tuple(shape), name, f"shape {tuple(shape)}", tuple(t.shape))
    need_distinct_rows(t, name)


def need_distinct_rows(t: Tensor, name: str) -> None:
    expected = "rows that do not share memory"
    need((t.shape[0] <= 1) | (t.stride(0) >= t.shape[-1]), name, expected, f"stride {t.stride()}")


def need_no_grad(*tensors: Tensor | None) -> None:
    """The ops have no derivative: say so at the call instead of returning detached results."""
    if torch.is_grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                raise RuntimeError(
                    "dsv32 ops have no derivative: call them under torch.no_grad() or "
                    "torch.inference_mode(), or detach() their inputs"
                )


def need_aligned(t: Tensor, name: str, alignment: int) -> None:
    """Base address and row strides of a 1-byte tensor are multiples of `alignment` bytes.

    A fake tensor has no address; its offset within the storage stands in, since allocators align
    storages further than any layout asks.
    """
    address = t.storage_offset() if _is_fake(t) else t.data_ptr()
    for what in (address, *t.stride()[:-1]):
        expected = f"address and strides that are multiples of {alignment} bytes"
        need(what % alignment == 0, name, expected, f"{what} (strides {t.stride()})")


def _is_fake(t: Tensor) -> bool:
    return type(t) is not Tensor and isinstance(t, torch._subclasses.FakeTensor)


def resolve_fp8_dtype(
    requested: torch.dtype | None, device: torch.device, **caches: Tensor | None
) -> torch.dtype:
    """The fp8 flavour of a call: the argument's, else a typed cache's, else the platform's."""
    if requested is not None and requested not in platform.FP8_DTYPES:
        names = "None, float8_e4m3fn or float8_e4m3fnuz"
        raise TypeError(_message("fp8_dtype", names, requested))
    flavour = requested
    for name, cache in caches.items():
        if cache is not None and cache.dtype in platform.FP8_DTYPES:
            if flavour is not None and cache.dtype is not flavour:
                raise TypeError(_message(name, f"dtype uint8 or {flavour}", cache.dtype))
            flavour = cache.dtype
    if flavour is None:
        return platform.fp8_dtype(device.type, device.index)
    return flavour


def need_mla_cache(
    cache: Tensor, mode: str, kv_dim: Any, rope_dim: Any, device: torch.device
) -> None:
    name = "mla_kv_cache"
    need_tensor(cache, name, 3, CACHE_DTYPES[mode], device)
    layout = layouts.mla_layout(mode, kv_dim=kv_dim, rope_dim=rope_dim, dtype=cache.dtype)
    blocks, block_size, width = cache.shape
    need(block_size >= 1, name, "block_size of at least 1", tuple(cache.shape))
    expected = f"entries of at least {layout.entry_width} elements for {mode!r}"
    need(width >= layout.entry_width, name, expected, tuple(cache.shape))
    block_stride, entry_stride = cache.stride()[:2]
    need(
        (block_size <= 1) | (entry_stride >= layout.entry_width), name,
        "entries that do not share memory", f"strides {cache.stride()}",
    )  # fmt: skip
    # Either blocks hold their entries or, as in a cache laid out entry-major, the reverse.
    need(
        (blocks <= 1)
        | (block_stride >= (block_size - 1) * entry_stride + layout.entry_width)
        | ((block_stride >= layout.entry_width)
           & (entry_stride >= (blocks - 1) * block_stride + layout.entry_width)), name,
        "blocks that do not share memory", f"strides {cache.stride()}",
    )  # fmt: skip
    if layout.alignment > cache.element_size():
        need_aligned(cache, name, layout.alignment)


def need_index_cache(cache: Tensor, head_dim: Any, shuffled: bool, device: torch.device) -> None:
    name = "indexer_k_cache"
    need_tensor(cache, name, 3, _BYTES, device)
    blocks, block_size, width = cache.shape
    need(block_size >= 1, name, "block_size of at least 1", tuple(cache.shape))
    need(width == head_dim + 4, name, f"entries of {head_dim + 4} bytes", tuple(cache.shape))
    packed = (block_size <= 1) | (cache.stride(1) == width)
    need(packed, name, "blocks without gaps between tokens", f"strides {cache.stride()}")
    apart = (blocks <= 1) | (cache.stride(0) >= block_size * width)
    need(apart, name, "blocks that do not share memory", f"strides {cache.stride()}")
    expected = "block_size * head_dim a multiple of 4, so that scales are aligned"
    need(block_size * head_dim % 4 == 0, name, expected, tuple(cache.shape))
    if shuffled:
        expected = "block_size and head_dim multiples of 16 for the shuffled layout"
        need((block_size % 16 == 0) & (head_dim % 16 == 0), name, expected, tuple(cache.shape))
    need_aligned(cache[:, 0], name, 4)


def need_apart(out: Tensor, source: Tensor, name: str, source_name: str) -> None:
    """`out` and `source`, both [N, D], share no element."""
    if out.untyped_storage()._cdata != source.untyped_storage()._cdata:
        return
    rows, width = source.shape
    gap = abs(out.storage_offset() * out.element_size()
              - source.storage_offset() * source.element_size())  # fmt: skip
    sizes = {out.element_size(), source.element_size()}
    strides = {out.stride(0) * out.element_size(), source.stride(0) * source.element_size()}
    span = max(strides) * (rows - 1) + width * max(sizes)
    apart: Any = (gap >= span) | (rows == 0)
    if len(strides) == 1:
        # Two column slices of one matrix interleave without touching.
        stride = max(strides)
        row_gap = gap % stride if stride else 0
        apart = apart | ((row_gap >= width * max(sizes)) & (stride - row_gap >= width * max(sizes)))
    need(apart, name, f"memory that does not overlap {source_name}", "overlapping tensors")


def norm_rope(
    positions: Tensor, q_c: Tensor, q_norm_weight: Tensor, q_norm_eps: float,
    kv_c: Tensor, kv_norm_weight: Tensor, kv_norm_eps: float, k_pe: Tensor, rope_cos_sin: Tensor,
    index_k: Tensor | None, index_k_norm_weight: Tensor | None, index_k_norm_bias: Tensor | None,
    index_k_norm_eps: float, index_rope_cos_sin: Tensor | None, topk_indices_buffer: Tensor,
    slot_mapping: Tensor | None = None, indexer_slot_mapping: Tensor | None = None,
    indexer_k_cache: Tensor | None = None, mla_kv_cache: Tensor | None = None,
    mla_kv_cache_dtype: str = "auto", mla_k_scale: Tensor | None = None,
    has_indexer: bool = True, index_rope_interleave: bool = False, fill_topk: bool = True,
    index_scale_format: str = "fp32", indexer_cache_shuffled: bool = False,
    kv_c_out: Tensor | None = None, k_pe_out: Tensor | None = None,
    index_k_out: Tensor | None = None, fp8_dtype: torch.dtype | None = None,
    *, q_c_out: Tensor | None = None,
) -> None:  # fmt: skip
    """Every rule on `fused_norm_rope`'s arguments that shapes, strides, types and devices show."""
    device = positions.device
    need_no_grad(q_c, q_norm_weight, kv_c, kv_norm_weight, k_pe, index_k, index_k_norm_weight,
                 index_k_norm_bias)  # fmt: skip
    need_index_map(positions, "positions", device)
    num_tokens = positions.shape[0]
    for name, t, weight in (("q_c", q_c, q_norm_weight), ("kv_c", kv_c, kv_norm_weight)):
        need_tensor(t, name, 2, FLOATS, device)
        need_rows(t, name, num_tokens)
        need(t.shape[1] >= 1, name, "at least one column", tuple(t.shape))
        need_weight(weight, name.replace("_c", "_norm_weight"), t.shape[1], device)
    need_tensor(k_pe, "k_pe", 2, FLOATS, device)
    need_rows(k_pe, "k_pe", num_tokens)
    kv_dim, rope_dim = kv_c.shape[1], k_pe.shape[1]
    need((rope_dim >= 2) & (rope_dim % 2 == 0), "k_pe", "an even number of columns", rope_dim)
    need_table(rope_cos_sin, "rope_cos_sin", rope_dim, device)

    if mla_kv_cache_dtype not in layouts.MLA_MODES:
        expected = f"one of {', '.join(layouts.MLA_MODES)}"
        raise ValueError(_message("mla_kv_cache_dtype", expected, repr(mla_kv_cache_dtype)))
    if mla_kv_cache is not None:
        need_mla_cache(mla_kv_cache, mla_kv_cache_dtype, kv_dim, rope_dim, device)
        need_index_map(slot_mapping, "slot_mapping", device)
        if mla_k_scale is not None and mla_kv_cache_dtype in layouts.FP8_MODES:
            need_scale(mla_k_scale, "mla_k_scale", device)
    elif slot_mapping is not None:
        need_index_map(slot_mapping, "slot_mapping", device)
    if kv_c_out is not None:
        need_out(kv_c_out, "kv_c_out", kv_c.shape, device)
    if k_pe_out is not None:
        need_out(k_pe_out, "k_pe_out", k_pe.shape, device)
    if q_c_out is not None:
        need_out(q_c_out, "q_c_out", q_c.shape, device)

    if has_indexer and fill_topk:
        need_tensor(topk_indices_buffer, "topk_indices_buffer", 2, (torch.int32,), device)
        rows = topk_indices_buffer.shape[0]
        need(rows >= num_tokens, "topk_indices_buffer", f"at least {num_tokens} rows", rows)
        need_distinct_rows(topk_indices_buffer, "topk_indices_buffer")
    else:
        need_dtype(topk_indices_buffer, "topk_indices_buffer", (torch.int32,))
    if index_scale_format not in layouts.INDEX_SCALE_FORMATS:
        expected = f"one of {', '.join(layouts.INDEX_SCALE_FORMATS)}"
        raise ValueError(_message("index_scale_format", expected, repr(index_scale_format)))
    resolve_fp8_dtype(fp8_dtype, device, mla_kv_cache=mla_kv_cache, indexer_k_cache=indexer_k_cache)
    if not has_indexer:
        need(index_k_out is None, "index_k_out", "None without an indexer", "a tensor")
        return
    index_k = need_tensor(index_k, "index_k", 2, FLOATS, device)
    need_rows(index_k, "index_k", num_tokens)
    head_dim = index_k.shape[1]
    need_weight(index_k_norm_weight, "index_k_norm_weight", head_dim, device)
    need_weight(index_k_norm_bias, "index_k_norm_bias", head_dim, device)
    need_index_table(index_rope_cos_sin, "index_rope_cos_sin", head_dim, device)
    if indexer_k_cache is not None:
        need_index_cache(indexer_k_cache, head_dim, indexer_cache_shuffled, device)
        if indexer_slot_mapping is None:
            need_index_map(slot_mapping, "slot_mapping", device)
        else:
            need_index_map(indexer_slot_mapping, "indexer_slot_mapping", device)
    if index_k_out is not None:
        need_out(index_k_out, "index_k_out", index_k.shape, device)
        need_apart(index_k_out, index_k, "index_k_out", "index_k")


def need_scale(t: Tensor, name: str, device: torch.device) -> None:
    need_dtype(t, name, (torch.float32,))
    need(t.numel() == 1, name, "one element", f"shape {tuple(t.shape)}")
    if t.device != device:
        raise ValueError(_message(name, f"a tensor on {device} like positions", t.device))


def need_index_table(t: Tensor | None, name: str, head_dim: Any, device: torch.device) -> None:
    t = need_tensor(t, name, 2, FLOATS, device)
    rope_dim = t.shape[1]
    need(t.shape[0] >= 1, name, "at least one row", tuple(t.shape))
    fits = (rope_dim >= 2) & (rope_dim % 2 == 0) & (rope_dim <= head_dim)
    need(fits, name, f"an even number of columns up to {head_dim}", tuple(t.shape))


def norm_rope_data(
    positions: Tensor, q_c: Tensor, q_norm_weight: Tensor, q_norm_eps: float,
    kv_c: Tensor, kv_norm_weight: Tensor, kv_norm_eps: float, k_pe: Tensor, rope_cos_sin: Tensor,
    index_k: Tensor | None, index_k_norm_weight: Tensor | None, index_k_norm_bias: Tensor | None,
    index_k_norm_eps: float, index_rope_cos_sin: Tensor | None, topk_indices_buffer: Tensor,
    slot_mapping: Tensor | None = None, indexer_slot_mapping: Tensor | None = None,
    indexer_k_cache: Tensor | None = None, mla_kv_cache: Tensor | None = None,
    mla_kv_cache_dtype: str = "auto", mla_k_scale: Tensor | None = None,
    has_indexer: bool = True, *_: Any,
) -> None:  # fmt: skip
    """What only the data show: slots past their cache, positions outside their table."""
    num_tokens = positions.shape[0]
    positions_in_range(positions, rope_cos_sin.shape[0], slot_mapping)
    if mla_kv_cache is not None and slot_mapping is not None:
        capacity = mla_kv_cache.shape[0] * mla_kv_cache.shape[1]
        slots_in_range(slot_mapping, "slot_mapping", capacity, num_tokens)
    if has_indexer and index_rope_cos_sin is not None:
        name, slots = "indexer_slot_mapping", indexer_slot_mapping
        if slots is None:
            name, slots = "slot_mapping", slot_mapping
        positions_in_range(positions, index_rope_cos_sin.shape[0], slots)
        if indexer_k_cache is not None and slots is not None:
            capacity = indexer_k_cache.shape[0] * indexer_k_cache.shape[1]
            slots_in_range(slots, name, capacity, num_tokens)


def query(
    positions: Tensor, q_pe: Tensor, q_pe_cos_sin: Tensor, index_q: Tensor | None,
    index_q_cos_sin: Tensor | None, ql_nope: Tensor, q_scale: Tensor,
    index_weights: Tensor | None, index_weights_softmax_scale: float,
    index_weights_head_scale: float, has_indexer: bool = True,
    index_rope_interleave: bool = False, quantize_mqa: bool = True,
    fp8_dtype: torch.dtype | None = None,
) -> None:  # fmt: skip
    """Every rule on `fused_q`'s arguments that shapes, strides, types and devices show."""
    device = positions.device
    need_no_grad(q_pe, ql_nope, index_q, index_weights)
    resolve_fp8_dtype(fp8_dtype, device)
    need_index_map(positions, "positions", device)
    num_tokens = positions.shape[0]
    need_tensor(q_pe, "q_pe", 3, FLOATS, device)
    need_rows(q_pe, "q_pe", num_tokens)
    heads, rope_dim = q_pe.shape[1:]
    need(heads >= 1, "q_pe", "at least one head", tuple(q_pe.shape))
    even = (rope_dim >= 2) & (rope_dim % 2 == 0)
    need(even, "q_pe", "an even number of rotary dims", tuple(q_pe.shape))
    need_table(q_pe_cos_sin, "q_pe_cos_sin", rope_dim, device)
    if quantize_mqa:
        need_tensor(ql_nope, "ql_nope", 3, FLOATS, device)
        expected = f"shape [{num_tokens}, {heads}, Dnope]"
        need_rows(ql_nope, "ql_nope", num_tokens)
        need(ql_nope.shape[1] == heads, "ql_nope", expected, tuple(ql_nope.shape))
        need(ql_nope.shape[2] >= 1, "ql_nope", expected, tuple(ql_nope.shape))
        need_scale(q_scale, "q_scale", device)
    if not has_indexer:
        return
    index_q = need_tensor(index_q, "index_q", 3, FLOATS, device)
    need_rows(index_q, "index_q", num_tokens)
    need(index_q.shape[1] >= 1, "index_q", "at least one head", tuple(index_q.shape))
    need_index_table(index_q_cos_sin, "index_q_cos_sin", index_q.shape[2], device)
    index_weights = need_tensor(index_weights, "index_weights", 2, FLOATS, device)
    need_rows(index_weights, "index_weights", num_tokens)
    same = index_weights.shape[1] == index_q.shape[1]
    need(same, "index_weights", f"{index_q.shape[1]} columns", tuple(index_weights.shape))


def query_data(
    positions: Tensor, q_pe: Tensor, q_pe_cos_sin: Tensor, index_q: Tensor | None,
    index_q_cos_sin: Tensor | None, *rest: Any,
) -> None:  # fmt: skip
    """What only the data show: positions outside their table."""
    positions_in_range(positions, q_pe_cos_sin.shape[0], None)
    if index_q is not None and index_q_cos_sin is not None:
        positions_in_range(positions, index_q_cos_sin.shape[0], None)


def eh_norm(
    positions: Tensor, inputs_embeds: Tensor, previous_hidden: Tensor, enorm_weight: Tensor,
    hnorm_weight: Tensor, eps: float, *, out: Tensor | None = None,
) -> None:  # fmt: skip
    """Every rule on `fused_eh_norm`'s arguments that shapes, strides, types and devices show."""
    need_tensor(inputs_embeds, "inputs_embeds", 2, FLOATS, positions.device)
    need_rows(inputs_embeds, "inputs_embeds", positions.shape[0])
    _eh_halves(
        positions, inputs_embeds, "inputs_embeds", previous_hidden, enorm_weight, hnorm_weight, out
    )


def embed_eh_norm(
    positions: Tensor, input_ids: Tensor, embed_table: Tensor, previous_hidden: Tensor,
    enorm_weight: Tensor, hnorm_weight: Tensor, eps: float, *, out: Tensor | None = None,
) -> None:  # fmt: skip
    """Every rule on `fused_embed_eh_norm`'s arguments that shapes, strides and types show."""
    device = positions.device
    need_ids(input_ids, device)
    num_tokens = positions.shape[0]
    need(input_ids.numel() == num_tokens, "input_ids", f"{num_tokens} ids (num_tokens)",
         tuple(input_ids.shape))  # fmt: skip
    need_tensor(embed_table, "embed_table", 2, FLOATS, device)
    need(embed_table.shape[0] >= 1, "embed_table", "at least one row", tuple(embed_table.shape))
    _eh_halves(
        positions, embed_table, "embed_table", previous_hidden, enorm_weight, hnorm_weight, out
    )


def _eh_halves(
    positions: Tensor, embeds: Tensor, embeds_name: str, previous_hidden: Tensor,
    enorm_weight: Tensor, hnorm_weight: Tensor, out: Tensor | None,
) -> None:  # fmt: skip
    device = positions.device
    need_no_grad(embeds, previous_hidden, enorm_weight, hnorm_weight)
    need_index_map(positions, "positions", device)
    num_tokens = positions.shape[0]
    need_tensor(previous_hidden, "previous_hidden", 2, FLOATS, device)
    need_rows(previous_hidden, "previous_hidden", num_tokens)
    hidden = previous_hidden.shape[1]
    need(hidden >= 1, "previous_hidden", "at least one column", tuple(previous_hidden.shape))
    same = embeds.shape[1] == hidden
    need(same, embeds_name, f"{hidden} columns like previous_hidden", tuple(embeds.shape))
    # One output holds both halves, so they have one type.
    need_dtype(embeds, embeds_name, (previous_hidden.dtype,))
    need_weight(enorm_weight, "enorm_weight", hidden, device)
    need_weight(hnorm_weight, "hnorm_weight", hidden, device)
    if out is not None:
        need_out(out, "out", (num_tokens, 2 * hidden), device)


def embed_norm(
    input_ids: Tensor, embed_table: Tensor, norm_weight: Tensor, eps: float,
    *, residual_out: Tensor | None = None, normed_out: Tensor | None = None,
) -> None:  # fmt: skip
    """Every rule on `fused_embed_norm`'s arguments that shapes, strides, types and devices show."""
    device = input_ids.device
    need_no_grad(embed_table, norm_weight)
    need_ids(input_ids, device)
    need_tensor(embed_table, "embed_table", 2, FLOATS, device)
    rows, hidden = embed_table.shape
    need((rows >= 1) & (hidden >= 1), "embed_table", "rows and columns", tuple(embed_table.shape))
    need_weight(norm_weight, "norm_weight", hidden, device)
    shape = (input_ids.numel(), hidden)
    if residual_out is not None:
        need_out(residual_out, "residual_out", shape, device)
        # An exact copy of the table's rows has their type.
        need_dtype(residual_out, "residual_out", (embed_table.dtype,))
    if normed_out is not None:
        need_out(normed_out, "normed_out", shape, device)


def need_ids(input_ids: Tensor, device: torch.device) -> None:
    """Token ids, flattened or [batch, length]."""
    expected = "1 or 2 dimensions"
    need(1 <= input_ids.dim() <= 2, "input_ids", expected, f"shape {tuple(input_ids.shape)}")
    need_dtype(input_ids, "input_ids", INDEX_TYPES)
    if input_ids.device != device:
        raise ValueError(_message("input_ids", f"a tensor on {device}", input_ids.device))


def slots_in_range(slots: Tensor, name: str, capacity: int, num_tokens: int) -> None:
    """Raise IndexError for a slot past its cache; a negative one is padding."""
    _raise_at(slots[:num_tokens] >= capacity, slots, name, f"a slot below {capacity}")


def positions_in_range(positions: Tensor, rows: int, slots: Tensor | None) -> None:
    """Raise IndexError for a position outside its table on a row that is not padding."""
    bad = (positions < 0) | (positions >= rows)
    if slots is not None:
        num_slots = min(slots.shape[0], positions.shape[0])
        bad[:num_slots] &= slots[:num_slots] >= 0
        bad[num_slots:] = False
    _raise_at(bad, positions, "positions", f"a row of a table of {rows}")


def ids_in_range(ids: Tensor, name: str, rows: int) -> None:
    """Raise IndexError for an id outside the table."""
    _raise_at((ids < 0) | (ids >= rows), ids, name, f"an id of a table of {rows} rows")


def _raise_at(bad: Tensor, values: Tensor, name: str, expected: str) -> None:
    if bool(bad.any()):
        row = int(bad.to(torch.int8).argmax())
        raise IndexError(f"{name}: expected {expected}, got {int(values[row])} in row {row}")
