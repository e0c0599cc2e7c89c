"""Several ranks: heads split by tensor parallelism, slots split by decode context parallelism."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import distributed_worker as worker
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import dsv32_ops
from dsv32_ops import testing


@dataclass
class Ranks:
    device: str
    found: dict[Any, Any] = field(repr=False)
    """What `worker.main` saves: of each output a list with one tensor per rank."""


@pytest.fixture(scope="module", params=["gloo", pytest.param("nccl", marks=pytest.mark.gpu)])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Two processes, one run for all tests. NCCL gives each a GPU of its own."""
    backend = request.param
    if not dist.is_available() or not dist.is_backend_available(backend):
        pytest.skip(f"this torch has no {backend}")
    if backend == "nccl" and torch.cuda.device_count() < worker.WORLD:
        pytest.skip(f"needs two GPUs, found {torch.cuda.device_count()}")
    folder: Path = tmp_path_factory.mktemp(backend)
    results = folder / "results"
    arguments = (backend, str(folder / "rendezvous"), str(results))
    mp.spawn(worker.main, arguments, nprocs=worker.WORLD)
    device = "cuda:0" if backend == "nccl" else "cpu"
    return Ranks(device, torch.load(results, map_location=device))


@pytest.mark.parametrize("quantize_mqa", [True, False])
def test_heads_of_all_ranks_are_those_of_one(ranks: Ranks, quantize_mqa: bool) -> None:
    expected = dsv32_ops.fused_q(**worker.query_inputs(ranks.device, quantize_mqa))
    index_q, index_weights, mqa_q = ranks.found["heads", quantize_mqa]
    assert testing.same_bytes(_joined(mqa_q, dim=1), expected[2])
    for each, one in ((index_q, expected[0]), (index_weights, expected[1])):
        assert len(each) == worker.WORLD
        assert all(testing.same_bytes(replica, one) for replica in each)


@pytest.mark.parametrize("split", [tuple(worker.CACHES), ("mla_kv_cache",)], ids="+".join)
@pytest.mark.parametrize("mode", worker.MODES)
def test_slots_of_all_ranks_are_those_of_one(
    ranks: Ranks, mode: str, split: tuple[str, ...]
) -> None:
    inputs = worker.norm_rope_inputs(ranks.device, mode)
    assert 0 < int((inputs["slot_mapping"] < 0).sum()) < worker.NUM_TOKENS
    normed = dsv32_ops.fused_norm_rope(**inputs)
    found = ranks.found["slots", mode, split]
    for name in worker.CACHES:
        expected = _entries(name, inputs[name])
        parts = [_entries(name, cache) for cache in found[name]]
        if name in split:
            assert all(_written(part) for part in parts)
            parts = [torch.stack(parts, 1).flatten(0, 1)]
        assert all(testing.same_bytes(part, expected) for part in parts)
    # Whichever rank holds a row's slot, all of them need its query and its top-k row.
    assert all(testing.same_bytes(each, normed) for each in found["normed"])
    for name in worker.EVERY_ROW:
        assert all(testing.same_bytes(each, inputs[name]) for each in found[name])


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    """torch.cat of codes too."""
    views = [part.view(torch.uint8) for part in parts]
    return torch.cat(views, dim).view(parts[0].dtype)


def _entries(name: str, cache: Tensor) -> Tensor:
    """[slots, bytes]. An indexer block holds all its codes, then all its scales."""
    blocks, block_size, width = cache.shape
    if name == "mla_kv_cache":
        return cache.view(blocks * block_size, width).view(torch.uint8)
    codes, scales = cache.view(blocks, -1).split((block_size * (width - 4), block_size * 4), 1)
    slots = blocks * block_size
    return torch.cat((codes.reshape(slots, -1), scales.reshape(slots, -1)), 1)


def _written(entries: Tensor) -> bool:
    """Some slots, and not all."""
    written = (entries != testing.POISON_BYTE).any(1)
    return bool(written.any()) and not bool(written.all())


def _calls(device: torch.device) -> list[Tensor]:
    """What every op writes, on one device."""
    keys = testing.norm_rope_inputs(
        worker.CONFIG, worker.NUM_TOKENS, device=device, mode="fp8_ds_mla", outs=True
    )
    normed = dsv32_ops.fused_norm_rope(**keys)
    sizes: dict[str, Any] = {"device": device, "num_tokens": worker.NUM_TOKENS}
    return [
        normed,
        *(keys[name] for name in (*worker.CACHES, *worker.EVERY_ROW)),
        *dsv32_ops.fused_q(**testing.q_inputs(worker.CONFIG, num_heads=worker.HEADS, **sizes)),
        dsv32_ops.fused_eh_norm(**testing.eh_norm_inputs(worker.CONFIG, **sizes)),
        *dsv32_ops.fused_embed_norm(**testing.embed_norm_inputs(worker.CONFIG, **sizes)),
        dsv32_ops.fused_embed_eh_norm(**testing.embed_eh_norm_inputs(worker.CONFIG, **sizes)),
    ]


@pytest.mark.gpu
def test_runs_on_its_tensors_device_while_another_is_current(
    gpus2: tuple[torch.device, torch.device],
) -> None:
    first, second = gpus2
    with torch.cuda.device(first):
        expected = _calls(first)
    for tensors, current in ((second, first), (first, second)):
        with torch.cuda.device(current):
            actual = _calls(tensors)
            assert torch.cuda.current_device() == current.index
        for mine, one in zip(actual, expected, strict=True):
            assert mine.device == tensors
            assert testing.same_bytes(mine.to(first), one)
