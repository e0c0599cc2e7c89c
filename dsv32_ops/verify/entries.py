"""Cache entries of single tokens: found, taken apart, and what float64 says they should be.

Shares no code with ``layouts.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv32_ops.verify import exact

# How a part is compared: floats by error, codes (the platform's, or always e4m3fn) and nibbles by
# steps, scales bit for bit.
FLOAT, CODE, E4M3FN, NIBBLE, SCALE = "float", "code", "e4m3fn", "nibble", "scale"


class Part(NamedTuple):
    """A field of n entries, [n, elements of the field]."""

    kind: str
    values: Tensor


def offsets(name: str, cache: Tensor, slots: Tensor) -> Tensor:
    """Byte offsets [n, entry bytes] of the entries at ``slots``, counted from the cache's start."""
    return (_indexer_offsets if name == "indexer_k_cache" else _mla_offsets)(cache, slots)


def live_slots(name: str, arguments: Mapping[str, Any]) -> Tensor:
    """The slots [int64] that a call may write in the cache ``name``."""
    cache, slots = arguments[name], arguments["slot_mapping"]
    if name == "indexer_k_cache" and arguments["indexer_slot_mapping"] is not None:
        slots = arguments["indexer_slot_mapping"]
    capacity = cache.shape[0] * cache.shape[1]
    return slots[(slots >= 0) & (slots < capacity)].long()


def mla_parts(mode: str, entries: Tensor, kv_dim: int, dtype: torch.dtype) -> dict[str, Part]:
    """Take raw MLA entries [n, bytes] apart; ``dtype`` is the element type of a float cache."""
    if mode in ("fp8", "fp8_e4m3"):
        return {"kv": Part(CODE, entries[:, :kv_dim]), "k_pe": Part(CODE, entries[:, kv_dim:])}
    if mode == "fp8_ds_mla":
        return {
            "kv": Part(CODE, entries[:, :512]),
            "kv_scales": Part(SCALE, _as(entries[:, 512:528], torch.float32)),
            "k_pe": Part(FLOAT, _as(entries[:, 528:], torch.bfloat16)),
        }
    if mode == "nvfp4_ds_mla":
        pairs = entries[:, :256]
        block = torch.arange(32, device=entries.device)
        return {
            "kv": Part(NIBBLE, torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)),
            "kv_scales": Part(E4M3FN, entries[:, 320 + 8 * (block & 3) + (block >> 2)]),
            "k_pe": Part(E4M3FN, entries[:, 256:320]),
        }
    floats = _as(entries, dtype)
    return {"kv": Part(FLOAT, floats[:, :kv_dim]), "k_pe": Part(FLOAT, floats[:, kv_dim:])}


def indexer_parts(entries: Tensor) -> dict[str, Part]:
    """Take raw indexer entries [n, Di + 4] apart."""
    scales = Part(SCALE, _as(entries[:, -4:], torch.float32))
    return {"index_k": Part(CODE, entries[:, :-4]), "index_k_scale": scales}


def exact_mla_parts(
    mode: str,
    rows: Mapping[str, Tensor],
    arguments: Mapping[str, Any],
    fp8_dtype: torch.dtype,
) -> dict[str, Tensor]:
    """What ``mla_parts`` should find, from the rows of ``exact.norm_rope_rows``."""
    kv, k_pe = rows["kv"], rows["k_pe"]
    if mode in ("fp8", "fp8_e4m3"):
        scale = arguments["mla_k_scale"]
        divisor = 1.0 if scale is None else scale.double()
        return {
            "kv": exact.codes(kv / divisor, fp8_dtype),
            "k_pe": exact.codes(k_pe / divisor, fp8_dtype),
        }
    if mode == "fp8_ds_mla":
        tiles = exact.quantize_tiles(kv, fp8_dtype)
        return {"kv": tiles.codes, "kv_scales": tiles.scale, "k_pe": k_pe}
    if mode == "nvfp4_ds_mla":
        blocks = exact.quantize_fp4(kv)
        e4m3 = exact.codes(k_pe, torch.float8_e4m3fn)
        return {"kv": blocks.codes, "kv_scales": blocks.scale, "k_pe": e4m3}
    return {"kv": kv, "k_pe": k_pe}


def exact_indexer_parts(rows: Mapping[str, Tensor], fp8_dtype: torch.dtype) -> dict[str, Tensor]:
    """What ``indexer_parts`` should find."""
    quantized = exact.quantize_row(rows["index_k"], fp8_dtype)
    return {"index_k": quantized.codes, "index_k_scale": quantized.scale}


def _as(entries: Tensor, dtype: torch.dtype) -> Tensor:
    return entries.contiguous().view(dtype)


def _mla_offsets(cache: Tensor, slots: Tensor) -> Tensor:
    size = cache.element_size()
    block, offset = slots // cache.shape[1], slots % cache.shape[1]
    start = (block * cache.stride(0) + offset * cache.stride(1)) * size
    return start[:, None] + torch.arange(cache.shape[2] * size, device=slots.device)


def _indexer_offsets(cache: Tensor, slots: Tensor) -> Tensor:
    block_size, dim = cache.shape[1], cache.shape[2] - 4
    base, offset = slots // block_size * cache.stride(0), slots % block_size
    code = (base + offset * dim)[:, None] + torch.arange(dim, device=slots.device)
    scale = (base + block_size * dim + 4 * offset)[:, None]
    return torch.cat((code, scale + torch.arange(4, device=slots.device)), -1)
