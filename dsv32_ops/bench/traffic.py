"""Bytes that an op must move: each input read once, each output written once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

# One or two rows shared by all tokens: they stay in L2 whatever the token count.
_SHARED = frozenset(
    (
        "q_norm_weight",
        "kv_norm_weight",
        "index_k_norm_weight",
        "index_k_norm_bias",
        "enorm_weight",
        "hnorm_weight",
        "norm_weight",
        "mla_k_scale",
        "q_scale",
    )
)
# A token reads one row of each; two arguments may name the same table.
_TABLES = frozenset(
    ("rope_cos_sin", "index_rope_cos_sin", "q_pe_cos_sin", "index_q_cos_sin", "embed_table")
)
# What a second set of the per-token tensors can share with the first.
PER_CALL = _SHARED | _TABLES
_CACHES = {"mla_kv_cache": "slot_mapping", "indexer_k_cache": "indexer_slot_mapping"}
_OUTS = frozenset(
    ("kv_c_out", "k_pe_out", "index_k_out", "q_c_out", "out", "residual_out", "normed_out")
)


class Traffic(NamedTuple):
    """Bytes read and bytes written by one call."""

    read: int
    written: int

    @property
    def total(self) -> int:
        return self.read + self.written

    def gb_s(self, us: float) -> float:
        """GB/s (10^9) of a call that takes ``us`` microseconds."""
        return self.total / us * 1e-3


def traffic(arguments: Mapping[str, Any], outputs: Sequence[torch.Tensor]) -> Traffic:
    """Bytes of one call, from its keyword arguments and the tensors that it returned.

    Counted: activations, positions, ids and slots once, the table rows of each token once, caches
    by the entries of live slots, the top-k fill, outs and returned tensors. Weights and scales are
    left out: they are a few KB for any number of tokens. What an argument switches off
    (``fill_topk``, ``has_indexer``, ``quantize_mqa``) is not counted.
    """
    skipped = _not_read(arguments)
    num_tokens = _num_tokens(arguments)
    read = written = 0
    seen: set[int] = set()
    for name, value in arguments.items():
        if not isinstance(value, torch.Tensor) or name in skipped or name in _SHARED:
            continue
        if name in _CACHES:
            written += _entry_bytes(value) * _live_slots(arguments, name)
        elif name == "topk_indices_buffer":
            written += num_tokens * value.shape[1] * value.element_size()
        elif name in _OUTS:
            written += _nbytes(value)
        elif id(value) not in seen:
            seen.add(id(value))
            rows = num_tokens if name in _TABLES else None
            read += _nbytes(value) if rows is None else rows * _nbytes(value[:1])
    return Traffic(read, written + sum(_nbytes(out) for out in outputs))


def _not_read(arguments: Mapping[str, Any]) -> set[str]:
    names: set[str] = set()
    if not arguments.get("has_indexer", True):
        names |= {"topk_indices_buffer", "indexer_k_cache", "indexer_slot_mapping", "index_k"}
        names |= {"index_q", "index_weights", "index_rope_cos_sin", "index_q_cos_sin"}
    if not arguments.get("fill_topk", True):
        names.add("topk_indices_buffer")
    if not arguments.get("quantize_mqa", True):
        names.add("ql_nope")
    return names


def _num_tokens(arguments: Mapping[str, Any]) -> int:
    tensor = arguments.get("positions")
    return (arguments["input_ids"] if tensor is None else tensor).numel()


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _entry_bytes(cache: torch.Tensor) -> int:
    return cache.shape[2] * cache.element_size()


def _live_slots(arguments: Mapping[str, Any], cache_name: str) -> int:
    slots = arguments.get(_CACHES[cache_name])
    if slots is None:
        slots = arguments.get("slot_mapping")
    if slots is None:
        return 0
    if slots.is_meta:
        return slots.numel()
    cache = arguments[cache_name]
    slots = slots[: _num_tokens(arguments)]
    return int(((slots >= 0) & (slots < cache.shape[0] * cache.shape[1])).sum())
