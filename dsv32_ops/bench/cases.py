"""What is measured: an op, the sizes of a model, and the settings that change its traffic."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from dsv32_ops import layouts, testing
from dsv32_ops.bench.traffic import PER_CALL
from dsv32_ops.models import PRESETS, ModelConfig
from dsv32_ops.rope import cos_sin_table

OPS = ("fused_norm_rope", "fused_q", "fused_eh_norm", "fused_embed_norm", "fused_embed_eh_norm")
# The models whose speed is a target, each with the local heads of one of eight ranks and of one.
HEADS = {"deepseek-v3.2": (16, 128), "glm-5": (8, 64)}
MODES = ("auto", "fp8", "fp8_ds_mla", "nvfp4_ds_mla")
ALL_MODES = layouts.MLA_MODES
QUERIES = ("fp8", "bf16")
TOKENS = tuple(2**k for k in range(18))
QUICK_TOKENS = (1, 64, 512, 4096, 65536)


@dataclass(frozen=True)
class Case:
    """One line over all token counts. What an op does not have is None."""

    op: str
    config: str
    heads: int | None = None
    mode: str | None = None
    query: str | None = None
    fill_topk: bool | None = None

    def label(self) -> str:
        """Short and unique, for tables and progress."""
        parts = [self.op, self.config]
        if self.heads:
            parts.append(f"H {self.heads}")
        parts += [part for part in (self.mode, self.query) if part]
        if self.fill_topk is False:
            parts.append("no fill")
        return " ".join(parts)

    def fields(self) -> dict[str, Any]:
        """The row fields that identify the case."""
        return asdict(self)


def select(
    ops: Sequence[str] = OPS,
    presets: Sequence[str] = tuple(HEADS),
    heads: Sequence[int] | None = None,
    modes: Sequence[str] = MODES,
    queries: Sequence[str] = QUERIES,
    fills: Sequence[bool] = (True, False),
) -> list[Case]:
    """All combinations that make sense, in the order in which they are measured."""
    cases = []
    for op in ops:
        for preset in presets:
            if op == "fused_norm_rope":
                settings = [(mode, fill) for mode in modes for fill in fills]
                if not PRESETS[preset].has_indexer:
                    settings = [(mode, True) for mode in modes]
                cases += [Case(op, preset, mode=mode, fill_topk=fill) for mode, fill in settings]
            elif op == "fused_q":
                local = heads or HEADS.get(preset) or (PRESETS[preset].num_heads // 8,)
                cases += [Case(op, preset, h, query=query) for h in local for query in queries]
            else:
                cases.append(Case(op, preset))
    return cases


# Up to here a batch is a decoding one: every token belongs to another sequence.
DECODE_TOKENS = 512


def build(
    case: Case,
    num_tokens: int,
    device: torch.device,
    seed: int = 0,
    scattered: bool = False,
) -> dict[str, Any]:
    """Keyword arguments of the op, with the strides and slots that a model's tensors have.

    Slots are in random order while decoding. Above ``DECODE_TOKENS`` they are a prefill's: blocks
    in random order, consecutive tokens inside each, unless ``scattered``.
    """
    config = PRESETS[case.config]
    options: dict[str, Any] = {"device": device, "seed": seed}
    # Two rows only, because the models' own tables replace them.
    tables: dict[str, Any] = {"table_rows": 2, "shared_table": True}
    if case.op == "fused_norm_rope":
        assert case.mode is not None
        arguments = testing.norm_rope_inputs(
            config, num_tokens, mode=case.mode, **tables, **options
        )
        arguments["fill_topk"] = case.fill_topk
        if num_tokens > DECODE_TOKENS and not scattered:
            arguments["slot_mapping"] = _prefill_slots(arguments["mla_kv_cache"], num_tokens)
        return _with_tables(config, arguments, device)
    if case.op == "fused_q":
        quantize = case.query == "fp8"
        arguments = testing.q_inputs(
            config, num_tokens, case.heads, quantize_mqa=quantize, **tables, **options
        )
        return _with_tables(config, arguments, device)
    if case.op == "fused_eh_norm":
        return testing.eh_norm_inputs(config, num_tokens, **options)
    if case.op == "fused_embed_norm":
        arguments = testing.embed_norm_inputs(config, num_tokens, vocab_rows=2, **options)
    else:
        arguments = testing.embed_eh_norm_inputs(config, num_tokens, vocab_rows=2, **options)
    # The whole vocabulary: a few thousand rows would stay in L2.
    table = _embed_table(config, device)
    ids = torch.randint(0, table.shape[0], arguments["input_ids"].shape, device=device)
    return arguments | {"embed_table": table, "input_ids": ids}


def _prefill_slots(cache: Tensor, num_tokens: int) -> Tensor:
    blocks, block_size = cache.shape[:2]
    first = torch.randperm(blocks, device=cache.device)[:, None] * block_size
    return (first + torch.arange(block_size, device=cache.device)).flatten()[:num_tokens]


def _with_tables(
    config: ModelConfig, arguments: dict[str, Any], device: torch.device
) -> dict[str, Any]:
    table = _rope_table(config, device)
    for name in ("rope_cos_sin", "index_rope_cos_sin", "q_pe_cos_sin", "index_q_cos_sin"):
        if arguments.get(name) is not None:
            arguments[name] = table
    positions = torch.randint(0, table.shape[0], arguments["positions"].shape, device=device)
    return arguments | {"positions": positions}


@functools.lru_cache(maxsize=2)
def _rope_table(config: ModelConfig, device: torch.device) -> Tensor:
    return cos_sin_table(
        config.max_positions,
        config.rope_dim,
        theta=config.rope_theta,
        scaling=config.rope_scaling,
        device=device,
    )


@functools.lru_cache(maxsize=1)
def _embed_table(config: ModelConfig, device: torch.device) -> Tensor:
    shape = (config.vocab_size, config.hidden_size)
    return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()


def clone(arguments: dict[str, Any]) -> dict[str, Any]:
    """Copies of all tensors that grow with the tokens: same strides, same sharing of memory."""
    storages: dict[int, torch.UntypedStorage] = {}
    copies = dict(arguments)
    for name, value in arguments.items():
        if not isinstance(value, Tensor) or name in PER_CALL:
            continue
        storage = value.untyped_storage()
        twin = storages.setdefault(storage.data_ptr(), storage.clone())
        copy = torch.empty(0, dtype=value.dtype, device=value.device)
        copies[name] = copy.set_(twin, value.storage_offset(), value.shape, value.stride())
    return copies
