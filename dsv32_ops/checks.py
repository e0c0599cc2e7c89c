"""Argument checks, shared by the GPU op, the CPU kernel and the fake kernel of each op.

They raise before anything is written and name the argument, what was expected and what came:
`TypeError` for dtypes, `ValueError` for everything else that shapes and strides show, `IndexError`
for what only the data show. Conditions on symbolic sizes go through `torch._check_value`, so that a
traced model fails with the same text and keeps one graph for every token count.

They run at every call, so a text is made only where its condition is not plainly True: making all
of them took nine tenths of the time. Conditions are joined with `|` and `&`, which take bools and
symbolic conditions alike; `or` and `and` would put a guard on the left one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from . import layouts, platform

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
INDEX_TYPES = (torch.int32, torch.int64)
FILL_TYPES = (torch.int32,)
SCALE_TYPES = (torch.float32,)
CODE_TYPES = (torch.uint8, *platform.FP8_DTYPES)
CACHE_TYPES = {
    "auto": FLOATS,
    "bfloat16": (torch.bfloat16,),
    "float16": (torch.float16,),
    "fp8": CODE_TYPES,
    "fp8_e4m3": CODE_TYPES,
    "fp8_ds_mla": CODE_TYPES,
    "nvfp4_ds_mla": (torch.uint8,),
}
FIXED_LAYOUTS: dict[str, type[layouts.Fp8DsMla] | type[layouts.Nvfp4DsMla]] = {
    "fp8_ds_mla": layouts.Fp8DsMla,
    "nvfp4_ds_mla": layouts.Nvfp4DsMla,
}


def refuse(error: type[Exception], name: str, got: Any, expected: str, *sizes: Any) -> NoReturn:
    raise error(_message(name, got, expected, *sizes))


def need(ok: Any, name: str, got: Any, expected: str, *sizes: Any) -> None:
    """Raise ValueError unless `ok`, a bool or a symbolic condition. `sizes` fill `expected`."""
    if ok is False:
        refuse(ValueError, name, got, expected, *sizes)
    torch._check_value(ok, lambda: _message(name, got, expected, *sizes))


def _message(name: str, got: Any, expected: str, *sizes: Any) -> str:
    return f"{name}: expected {expected.format(*map(_plain, sizes))}, got {_plain(got)}"


def _plain(value: Any) -> Any:
    """A symbolic size as the number that it stands for, so that a traced call has the same text."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if isinstance(value, torch.SymInt):
        try:
            return int(value)
        except RuntimeError:  # It stands for none: it is unbacked.
            return value
    return value


def need_dtype(t: Tensor, name: str, allowed: Sequence[torch.dtype]) -> None:
    if t.dtype not in allowed:
        names = ", ".join(map(_dtype_name, allowed))
        refuse(TypeError, name, _dtype_name(t.dtype), f"dtype {names}")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def need_device(t: Tensor, name: str, device: torch.device, like: str = "positions") -> None:
    if t.device != device:
        refuse(ValueError, name, t.device, f"device {device} like {like}")


def need_tensor(
    t: Tensor | None,
    name: str,
    ndim: int,
    allowed: Sequence[torch.dtype],
    device: torch.device,
    like: str = "positions",
) -> Sequence[Any]:
    """The shape of a tensor of this rank, type and device whose last dimension is contiguous."""
    if t is None:
        refuse(ValueError, name, None, "a tensor")
    shape = t.shape
    if len(shape) != ndim:
        refuse(ValueError, name, f"shape {tuple(map(_plain, shape))}", f"{ndim} dimensions")
    if t.dtype not in allowed:
        need_dtype(t, name, allowed)
    if t.device != device:
        need_device(t, name, device, like)
    if (packed := t.stride()[-1] == 1) is not True:
        need(packed | (shape[-1] <= 1), name, t.stride(), "strides that end in 1")
    return shape


def need_rows(
    t: Tensor | None, name: str, ndim: int, num_tokens: Any, device: torch.device
) -> Sequence[Any]:
    """The shape of a float tensor with one row per token, which is not empty."""
    shape = need_tensor(t, name, ndim, FLOATS, device)
    if (ok := shape[0] == num_tokens) is not True:
        need(ok, name, shape, "{} rows like positions", num_tokens)
    if (ok := (shape[1] >= 1) & (shape[-1] >= 1)) is not True:
        need(ok, name, shape, "rows that are not empty")
    return shape


def need_map(t: Tensor | None, name: str, device: torch.device) -> Any:
    """The length of positions or of a slot map."""
    return need_tensor(t, name, 1, INDEX_TYPES, device)[0]


def need_ids(ids: Tensor) -> Any:
    """The number of token ids, [N] or [batch, length]."""
    shape, strides, name = ids.shape, ids.stride(), "input_ids"
    if not 1 <= len(shape) <= 2:
        refuse(ValueError, name, f"shape {tuple(map(_plain, shape))}", "1 or 2 dimensions")
    need_dtype(ids, name, INDEX_TYPES)
    # Flattening copies ids that are far apart, but for a column, which stays a strided view.
    if (packed := strides[-1] == 1) is not True:
        need(packed | (shape[-1] <= 1), name, strides, "strides that end in 1")
    if len(shape) == 2 and (packed := strides[0] == shape[1]) is not True:
        need(packed | (shape[0] <= 1) | (shape[1] != 1), name, strides, "contiguous ids")
    return ids.numel()


def need_weight(
    t: Tensor | None, name: str, size: Any, of: str, device: torch.device, like: str = "positions"
) -> None:
    """One element per column of the argument `of`."""
    shape = need_tensor(t, name, 1, FLOATS, device, like)
    if (ok := shape[0] == size) is not True:
        need(ok, name, shape, f"{{}} elements like the columns of {of}", size)


def need_scale(t: Tensor, name: str, device: torch.device) -> None:
    need_dtype(t, name, SCALE_TYPES)
    if (ok := t.numel() == 1) is not True:
        need(ok, name, t.shape, "one element")
    need_device(t, name, device)


def need_table(t: Tensor, name: str, rope_dim: Any, of: str, device: torch.device) -> None:
    """cos/sin rows that rotate all `rope_dim` columns of the argument `of`."""
    shape = need_tensor(t, name, 2, FLOATS, device)
    if (ok := shape[0] >= 1) is not True:
        need(ok, name, shape, "at least one row")
    if (ok := shape[1] == rope_dim) is not True:
        need(ok, name, shape, f"{{}} columns (cos, then sin) like {of}", rope_dim)


def need_index_table(
    t: Tensor | None, name: str, head_dim: Any, of: str, device: torch.device
) -> None:
    """cos/sin rows that rotate the first of `head_dim` columns of the argument `of`."""
    shape = need_tensor(t, name, 2, FLOATS, device)
    rope_dim = shape[1]
    if (ok := shape[0] >= 1) is not True:
        need(ok, name, shape, "at least one row")
    if (ok := (rope_dim >= 2) & (rope_dim % 2 == 0) & (rope_dim <= head_dim)) is not True:
        need(ok, name, shape, f"an even number of columns from 2 to the {{}} of {of}", head_dim)


def need_pairs(rope_dim: Any, name: str, shape: Sequence[Any]) -> None:
    if (ok := (rope_dim >= 2) & (rope_dim % 2 == 0)) is not True:
        need(ok, name, shape, "an even number of rotary dims")


def need_out(
    t: Tensor, name: str, rows: Any, columns: Any, device: torch.device, like: str = "positions"
) -> None:
    """A written matrix of this shape, none of whose elements share memory."""
    shape = need_tensor(t, name, 2, FLOATS, device, like)
    if (ok := (shape[0] == rows) & (shape[1] == columns)) is not True:
        need(ok, name, shape, "shape ({}, {})", rows, columns)
    need_distinct_rows(t, name)


def need_distinct_rows(t: Tensor, name: str) -> None:
    if (ok := t.stride()[0] >= t.shape[1]) is not True:
        need(ok | (t.shape[0] <= 1), name, t.stride(), "strides of rows that do not overlap")


def need_no_grad(**tensors: Tensor | None) -> None:
    """The ops have no derivative: say so at the call instead of returning detached results."""
    for name, t in tensors.items():
        if t is not None and t.requires_grad:
            raise RuntimeError(
                f"{name}: expected a tensor that needs no gradient, got requires_grad=True. dsv32 "
                "ops have no derivative: call them under torch.no_grad() or "
                "torch.inference_mode(), or detach() their inputs"
            )


def need_aligned(t: Tensor, name: str, *strides: Any) -> None:
    """Address and strides of a 1-byte tensor are multiples of 4: it holds 32-bit words."""
    # A tensor that is being traced has no address; its offset within the storage stands in, since
    # allocators align storages further than that.
    plain = type(t) is Tensor or type(t) is torch.nn.Parameter
    offset: Any = t.data_ptr() if plain else t.storage_offset()
    for what in (offset, *strides):
        if (ok := what % 4 == 0) is not True:
            got = f"address % 4 = {_plain(offset % 4)}, strides {_plain(t.stride())}"
            need(ok, name, got, "address and strides that are multiples of 4 bytes")


def resolve_fp8_dtype(
    requested: torch.dtype | None, device: torch.device, **caches: Tensor | None
) -> torch.dtype:
    """The fp8 flavour of a call: the argument's, else a typed cache's, else the platform's."""
    flavour = requested
    if requested is not None and requested not in platform.FP8_DTYPES:
        got = _dtype_name(requested)
        refuse(TypeError, "fp8_dtype", got, "None, float8_e4m3fn or float8_e4m3fnuz")
    for name, cache in caches.items():
        if cache is not None and cache.dtype in platform.FP8_DTYPES:
            if flavour is not None:
                need_dtype(cache, name, (torch.uint8, flavour))
            flavour = cache.dtype
    if flavour is None:
        return platform.fp8_dtype(device.type, device.index)
    return flavour


def need_mla_cache(
    cache: Tensor, mode: str, kv_dim: Any, rope_dim: Any, device: torch.device
) -> None:
    name = "mla_kv_cache"
    shape = need_tensor(cache, name, 3, CACHE_TYPES[mode], device)
    blocks, block_size, width = shape
    block_stride, entry_stride, _ = strides = cache.stride()
    entry = kv_dim + rope_dim
    if (layout := FIXED_LAYOUTS.get(mode)) is not None:
        for part, size, fixed in (
            ("kv_c", kv_dim, layout.KV_DIM), ("k_pe", rope_dim, layout.ROPE_DIM)
        ):  # fmt: skip
            if (ok := size == fixed) is not True:
                need(ok, part, size, f"{fixed} columns for {mode}")
        entry = layout.ENTRY_BYTES
        if layout.alignment > 1:
            need_aligned(cache, name, block_stride, entry_stride)
    if (ok := block_size >= 1) is not True:
        need(ok, name, shape, "a block_size of at least 1")
    if (ok := width >= entry) is not True:
        need(ok, name, shape, f"entries of at least {{}} elements for {mode}", entry)
    if (ok := entry_stride >= entry) is not True:
        need(ok | (block_size <= 1), name, strides, "strides of entries that do not overlap")
    if (ok := block_stride >= (block_size - 1) * entry_stride + entry) is not True:
        # Or, in a cache laid out entry-major, each offset holds the entries of all blocks.
        spread = entry_stride >= (blocks - 1) * block_stride + entry
        ok = ok | (blocks <= 1) | ((block_stride >= entry) & spread)
        need(ok, name, strides, "strides of blocks that do not overlap")


def need_index_cache(cache: Tensor, head_dim: Any, shuffled: bool, device: torch.device) -> None:
    name = "indexer_k_cache"
    shape = need_tensor(cache, name, 3, CODE_TYPES, device)
    blocks, block_size, width = shape
    block_stride, entry_stride, _ = strides = cache.stride()
    if (ok := block_size >= 1) is not True:
        need(ok, name, shape, "a block_size of at least 1")
    if (ok := width == head_dim + 4) is not True:
        need(ok, name, shape, "entries of {} bytes", head_dim + 4)
    if (ok := entry_stride == width) is not True:
        need(ok | (block_size <= 1), name, strides, "strides without gaps between tokens")
    if (ok := block_stride >= block_size * width) is not True:
        need(ok | (blocks <= 1), name, strides, "strides of blocks that do not overlap")
    if (ok := block_size * head_dim % 4 == 0) is not True:
        need(ok, name, shape, "block_size * {} a multiple of 4, for aligned scales", head_dim)
    if shuffled and (ok := (block_size % 16 == 0) & (head_dim % 16 == 0)) is not True:
        need(ok, name, shape, "a block_size and {} columns that are multiples of 16 when shuffled",
             head_dim)  # fmt: skip
    need_aligned(cache, name, block_stride)


def need_apart(out: Tensor, source: Tensor, name: str, source_name: str) -> None:
    """`out` and `source`, both [N, D], share no byte."""
    if out.untyped_storage()._cdata != source.untyped_storage()._cdata:
        return
    rows, columns = source.shape
    size, source_size = out.element_size(), source.element_size()
    step, source_step = out.stride()[0] * size, source.stride()[0] * source_size
    start, source_start = out.storage_offset() * size, source.storage_offset() * source_size
    end = start + (rows - 1) * step + columns * size
    source_end = source_start + (rows - 1) * source_step + columns * source_size
    # Two column slices of one matrix interleave without touching.
    gap = (start - source_start) % torch.sym_max(step, 1)
    interleaved = (gap >= columns * source_size) & (step - gap >= columns * size)
    apart = (end <= source_start) | (source_end <= start) | (rows == 0)
    ok = apart | ((step == source_step) & interleaved)
    need(ok, name, "overlapping tensors", f"memory that {source_name} does not overlap")


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
    if torch.is_grad_enabled():
        need_no_grad(
            q_c=q_c, q_norm_weight=q_norm_weight, kv_c=kv_c, kv_norm_weight=kv_norm_weight,
            k_pe=k_pe, rope_cos_sin=rope_cos_sin, index_k=index_k,
            index_k_norm_weight=index_k_norm_weight, index_k_norm_bias=index_k_norm_bias,
            index_rope_cos_sin=index_rope_cos_sin, mla_kv_cache=mla_kv_cache,
            mla_k_scale=mla_k_scale, kv_c_out=kv_c_out, k_pe_out=k_pe_out, index_k_out=index_k_out,
            q_c_out=q_c_out,
        )  # fmt: skip
    if mla_kv_cache_dtype not in CACHE_TYPES:
        _refuse_choice("mla_kv_cache_dtype", mla_kv_cache_dtype, layouts.MLA_MODES)
    if index_scale_format not in layouts.INDEX_SCALE_FORMATS:
        _refuse_choice("index_scale_format", index_scale_format, layouts.INDEX_SCALE_FORMATS)
    resolve_fp8_dtype(fp8_dtype, device, mla_kv_cache=mla_kv_cache, indexer_k_cache=indexer_k_cache)
    num_tokens = need_map(positions, "positions", device)
    _, q_dim = need_rows(q_c, "q_c", 2, num_tokens, device)
    need_weight(q_norm_weight, "q_norm_weight", q_dim, "q_c", device)
    _, kv_dim = need_rows(kv_c, "kv_c", 2, num_tokens, device)
    need_weight(kv_norm_weight, "kv_norm_weight", kv_dim, "kv_c", device)
    _, rope_dim = need_rows(k_pe, "k_pe", 2, num_tokens, device)
    need_pairs(rope_dim, "k_pe", k_pe.shape)
    need_table(rope_cos_sin, "rope_cos_sin", rope_dim, "k_pe", device)
    if mla_kv_cache is not None:
        need_mla_cache(mla_kv_cache, mla_kv_cache_dtype, kv_dim, rope_dim, device)
        if mla_k_scale is not None and mla_kv_cache_dtype in layouts.FP8_MODES:
            need_scale(mla_k_scale, "mla_k_scale", device)
    if mla_kv_cache is not None or slot_mapping is not None:
        need_map(slot_mapping, "slot_mapping", device)
    if q_c_out is not None:
        need_out(q_c_out, "q_c_out", num_tokens, q_dim, device)
    if kv_c_out is not None:
        need_out(kv_c_out, "kv_c_out", num_tokens, kv_dim, device)
    if k_pe_out is not None:
        need_out(k_pe_out, "k_pe_out", num_tokens, rope_dim, device)
    need_fill(topk_indices_buffer, num_tokens, has_indexer and fill_topk, device)
    if not has_indexer:
        if index_k_out is not None:
            refuse(ValueError, "index_k_out", "a tensor", "None without an indexer")
        return
    _, head_dim = need_rows(index_k, "index_k", 2, num_tokens, device)
    need_weight(index_k_norm_weight, "index_k_norm_weight", head_dim, "index_k", device)
    need_weight(index_k_norm_bias, "index_k_norm_bias", head_dim, "index_k", device)
    need_index_table(index_rope_cos_sin, "index_rope_cos_sin", head_dim, "index_k", device)
    if indexer_slot_mapping is not None:
        need_map(indexer_slot_mapping, "indexer_slot_mapping", device)
    if indexer_k_cache is not None:
        need_index_cache(indexer_k_cache, head_dim, indexer_cache_shuffled, device)
        if indexer_slot_mapping is None:
            need_map(slot_mapping, "slot_mapping", device)
    if index_k_out is not None and index_k is not None:
        need_out(index_k_out, "index_k_out", num_tokens, head_dim, device)
        need_apart(index_k_out, index_k, "index_k_out", "index_k")


def _refuse_choice(name: str, got: str, choices: Sequence[str]) -> NoReturn:
    refuse(ValueError, name, repr(got), f"one of {', '.join(choices)}")


def need_fill(buffer: Tensor, num_tokens: Any, filled: bool, device: torch.device) -> None:
    """topk_indices_buffer: a matrix where it is filled, any int32 tensor where it is left alone."""
    name = "topk_indices_buffer"
    if not filled:
        need_dtype(buffer, name, FILL_TYPES)
        return
    shape = need_tensor(buffer, name, 2, FILL_TYPES, device)
    if (ok := shape[0] >= num_tokens) is not True:
        need(ok, name, shape, "at least {} rows like positions", num_tokens)
    need_distinct_rows(buffer, name)


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
    if torch.is_grad_enabled():
        need_no_grad(
            q_pe=q_pe, q_pe_cos_sin=q_pe_cos_sin, index_q=index_q, index_q_cos_sin=index_q_cos_sin,
            ql_nope=ql_nope, q_scale=q_scale, index_weights=index_weights,
        )  # fmt: skip
    resolve_fp8_dtype(fp8_dtype, device)
    num_tokens = need_map(positions, "positions", device)
    _, heads, rope_dim = need_rows(q_pe, "q_pe", 3, num_tokens, device)
    need_pairs(rope_dim, "q_pe", q_pe.shape)
    need_table(q_pe_cos_sin, "q_pe_cos_sin", rope_dim, "q_pe", device)
    if quantize_mqa:
        _, nope_heads, _ = need_rows(ql_nope, "ql_nope", 3, num_tokens, device)
        if (ok := nope_heads == heads) is not True:
            need(ok, "ql_nope", ql_nope.shape, "{} heads like q_pe", heads)
        need_scale(q_scale, "q_scale", device)
    if not has_indexer:
        return
    _, index_heads, head_dim = need_rows(index_q, "index_q", 3, num_tokens, device)
    need_index_table(index_q_cos_sin, "index_q_cos_sin", head_dim, "index_q", device)
    _, columns = need_rows(index_weights, "index_weights", 2, num_tokens, device)
    if (ok := columns == index_heads) is not True:
        need(ok, "index_weights", columns, "{} columns like index_q's heads", index_heads)


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
    if torch.is_grad_enabled():
        need_no_grad(
            inputs_embeds=inputs_embeds, previous_hidden=previous_hidden,
            enorm_weight=enorm_weight, hnorm_weight=hnorm_weight, out=out,
        )  # fmt: skip
    num_tokens = need_map(positions, "positions", positions.device)
    _, hidden = need_rows(inputs_embeds, "inputs_embeds", 2, num_tokens, positions.device)
    _need_halves(
        num_tokens, positions.device, inputs_embeds, "inputs_embeds", hidden, previous_hidden,
        enorm_weight, hnorm_weight, out,
    )  # fmt: skip


def embed_eh_norm(
    positions: Tensor, input_ids: Tensor, embed_table: Tensor, previous_hidden: Tensor,
    enorm_weight: Tensor, hnorm_weight: Tensor, eps: float, *, out: Tensor | None = None,
) -> None:  # fmt: skip
    """Every rule on `fused_embed_eh_norm`'s arguments that shapes, strides and types show."""
    device = positions.device
    if torch.is_grad_enabled():
        need_no_grad(
            embed_table=embed_table, previous_hidden=previous_hidden,
            enorm_weight=enorm_weight, hnorm_weight=hnorm_weight, out=out,
        )  # fmt: skip
    num_tokens = need_map(positions, "positions", device)
    if (ok := need_ids(input_ids) == num_tokens) is not True:
        need(ok, "input_ids", input_ids.shape, "{} ids like positions", num_tokens)
    need_device(input_ids, "input_ids", device)
    hidden = _need_vocabulary(embed_table, device, "positions")
    _need_halves(
        num_tokens, device, embed_table, "embed_table", hidden, previous_hidden,
        enorm_weight, hnorm_weight, out,
    )  # fmt: skip


def _need_halves(
    num_tokens: Any, device: torch.device, embeds: Tensor, embeds_name: str, hidden: Any,
    previous_hidden: Tensor, enorm_weight: Tensor, hnorm_weight: Tensor, out: Tensor | None,
) -> None:  # fmt: skip
    _, columns = need_rows(previous_hidden, "previous_hidden", 2, num_tokens, device)
    if (ok := columns == hidden) is not True:
        need(ok, "previous_hidden", columns, f"{{}} columns like {embeds_name}", hidden)
    # One output holds both halves, so they have one type.
    need_dtype(previous_hidden, "previous_hidden", (embeds.dtype,))
    need_weight(enorm_weight, "enorm_weight", hidden, embeds_name, device)
    need_weight(hnorm_weight, "hnorm_weight", hidden, embeds_name, device)
    if out is not None:
        need_out(out, "out", num_tokens, 2 * hidden, device)


def embed_norm(
    input_ids: Tensor, embed_table: Tensor, norm_weight: Tensor, eps: float,
    *, residual_out: Tensor | None = None, normed_out: Tensor | None = None,
) -> None:  # fmt: skip
    """Every rule on `fused_embed_norm`'s arguments that shapes, strides, types and devices show."""
    device, like = input_ids.device, "input_ids"
    if torch.is_grad_enabled():
        need_no_grad(
            embed_table=embed_table, norm_weight=norm_weight,
            residual_out=residual_out, normed_out=normed_out,
        )  # fmt: skip
    num_tokens = need_ids(input_ids)
    hidden = _need_vocabulary(embed_table, device, like)
    need_weight(norm_weight, "norm_weight", hidden, "embed_table", device, like)
    if residual_out is not None:
        need_out(residual_out, "residual_out", num_tokens, hidden, device, like)
        # An exact copy of the table's rows has their type.
        need_dtype(residual_out, "residual_out", (embed_table.dtype,))
    if normed_out is not None:
        need_out(normed_out, "normed_out", num_tokens, hidden, device, like)


def _need_vocabulary(embed_table: Tensor, device: torch.device, like: str) -> Any:
    """The columns of an embedding table, which has at least one row and column."""
    rows, hidden = shape = need_tensor(embed_table, "embed_table", 2, FLOATS, device, like)
    if (ok := (rows >= 1) & (hidden >= 1)) is not True:
        need(ok, "embed_table", shape, "at least one row and one column")
    return hidden


def slots_in_range(slots: Tensor, name: str, capacity: int, num_tokens: int) -> None:
    """Raise IndexError for a slot past its cache; a negative one is padding."""
    # Widened first: an int32 tensor wraps the number that it is compared with.
    _raise_at(slots[:num_tokens].long() >= capacity, slots, name, f"a slot below {capacity}")


def positions_in_range(positions: Tensor, rows: int, slots: Tensor | None) -> None:
    """Raise IndexError for a position outside its table on a row that is not padding."""
    bad = (positions < 0) | (positions.long() >= rows)
    if slots is not None:
        num_slots = min(slots.shape[0], positions.shape[0])
        bad[:num_slots] &= slots[:num_slots] >= 0
        bad[num_slots:] = False
    _raise_at(bad, positions, "positions", f"a row of a table of {rows}")


def ids_in_range(ids: Tensor, name: str, rows: int) -> None:
    """Raise IndexError for an id outside the table."""
    _raise_at((ids < 0) | (ids.long() >= rows), ids, name, f"an id of a table of {rows} rows")


def _raise_at(bad: Tensor, values: Tensor, name: str, expected: str) -> None:
    if bool(bad.any()):
        row = int(bad.to(torch.int8).argmax())
        raise IndexError(f"{name}: expected {expected}, got {int(values[row])} in row {row}")
