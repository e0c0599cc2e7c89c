"""What each rank of test_distributed.py runs, and the inputs that both sides build.

A module of its own, so that a spawned process does not import pytest.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import dsv32_ops
from dsv32_ops import testing
from dsv32_ops.models import PRESETS

WORLD = 2
NUM_TOKENS = 70
BLOCK_SIZE = 16
HEADS = 6
CONFIG = PRESETS["deepseek-v3.2"]
MODES = ("auto", "fp8", "fp8_ds_mla", "nvfp4_ds_mla")
# Each with the slot mapping that gates it.
CACHES = {"mla_kv_cache": "slot_mapping", "indexer_k_cache": "indexer_slot_mapping"}
EVERY_ROW = ("topk_indices_buffer", "kv_c_out", "k_pe_out", "index_k_out")


def query_inputs(device: str, quantize_mqa: bool) -> dict[str, Any]:
    return testing.q_inputs(
        CONFIG, NUM_TOKENS, HEADS, device=device, quantize_mqa=quantize_mqa, table_rows=200
    )


def own_heads(inputs: dict[str, Any], rank: int) -> dict[str, Any]:
    """The inputs of a rank that makes only its own heads, with the strides of so few heads."""
    own = slice(rank * HEADS // WORLD, (rank + 1) * HEADS // WORLD)
    query = torch.nn.functional.pad(inputs["q_pe"][:, own], (CONFIG.nope_dim, 0))
    product = inputs["ql_nope"].transpose(0, 1)[own].clone()
    return {**inputs, "q_pe": query[..., CONFIG.nope_dim :], "ql_nope": product.transpose(0, 1)}


def norm_rope_inputs(device: str, mode: str) -> dict[str, Any]:
    """One rank's call, some rows of it padding, every out given."""
    inputs = testing.norm_rope_inputs(
        CONFIG, NUM_TOKENS, device=device, mode=mode, block_size=WORLD * BLOCK_SIZE, padding=0.2,
        outs=True, table_rows=200,
    )  # fmt: skip
    inputs["indexer_slot_mapping"] = inputs["slot_mapping"].clone()
    return inputs


def own_slots(inputs: dict[str, Any], rank: int, split: tuple[str, ...]) -> dict[str, Any]:
    """Decode context parallelism: of the caches in `split` a rank holds every second slot.

    Slot s is slot s // 2 of rank s % 2, and -1 on the other. Local blocks are half as long.
    """
    mine = dict(inputs)
    for name in split:
        num_blocks, _, width = inputs[name].shape
        mine[name] = inputs[name].new_empty(num_blocks, BLOCK_SIZE, width)
        mine[name].view(torch.uint8).fill_(testing.POISON_BYTE)
        slots = inputs[CACHES[name]]
        owned = (slots >= 0) & (slots % WORLD == rank)
        mine[CACHES[name]] = torch.where(owned, slots // WORLD, -1)
    return mine


def gathered(tensor: Tensor) -> list[Tensor]:
    """The tensor of every rank. As bytes: not every backend knows fp8."""
    mine = tensor.contiguous().view(torch.uint8)
    parts = [torch.empty_like(mine) for _ in range(WORLD)]
    dist.all_gather(parts, mine)
    return [part.view(tensor.dtype) for part in parts]


def main(rank: int, backend: str, rendezvous: str, results: str) -> None:
    device = "cpu"
    if backend == "nccl":
        device = f"cuda:{rank}"
        torch.cuda.set_device(rank)
    torch.set_num_threads(1)
    dist.init_process_group(
        backend, init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD,
        timeout=timedelta(seconds=90),
    )  # fmt: skip
    found: dict[Any, Any] = {}
    for quantize in (True, False):
        mine = own_heads(query_inputs(device, quantize), rank)
        found["heads", quantize] = [gathered(output) for output in dsv32_ops.fused_q(**mine)]
    for mode in MODES:
        for split in (tuple(CACHES), ("mla_kv_cache",)):
            mine = own_slots(norm_rope_inputs(device, mode), rank, split)
            outputs = {"normed": gathered(dsv32_ops.fused_norm_rope(**mine))}
            for name in (*CACHES, *EVERY_ROW):
                outputs[name] = gathered(mine[name])
            found["slots", mode, split] = outputs
    if rank == 0:
        torch.save(found, results)
    dist.destroy_process_group()
