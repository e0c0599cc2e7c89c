"""From validated arguments to the device: measured configurations and the launch itself."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from . import platform
from .geometry import Grid

# Below this many tokens `fused_norm_rope` spreads its tasks over programs, which shortens the
# critical path; above it one program does all tasks of a token.
NORM_ROPE_SPLIT_TOKENS = 1024
NORM_ROPE_TASKS = 4
NORM_ROPE_WARPS = 1
QUERY_WARPS = 4
QUERY_HEAD_TILE = 8
QUERY_ROPE_ONLY_HEAD_TILE = 16
QUERY_INDEX_TILE = 32
QUERY_GROUP = 64


def norm_rope_grid(num_tokens: int) -> Grid:
    # Written without a comparison: a traced launch keeps one graph for every token count.
    split = torch.sym_min(1, NORM_ROPE_SPLIT_TOKENS // torch.sym_max(num_tokens, 1))
    return Grid(num_tokens, 1 + (NORM_ROPE_TASKS - 1) * split)


def query_tiles(heads: int, nope_dim: int, index_heads: int) -> dict[str, int]:
    """Heads per program: enough bytes that every thread moves 16 at a time."""
    tile = QUERY_HEAD_TILE if nope_dim else QUERY_ROPE_ONLY_HEAD_TILE
    return {
        "GROUP": QUERY_GROUP,
        "TILE": min(tile, _next_power_of_2(heads)),
        "INDEX_TILE": min(QUERY_INDEX_TILE, _next_power_of_2(max(index_heads, 1))),
    }


def query_grid(num_tokens: int, heads: int, index_heads: int, tiles: Mapping[str, int]) -> Grid:
    head_tiles = -(-heads // tiles["TILE"])
    return Grid(num_tokens, head_tiles + -(-index_heads // tiles["INDEX_TILE"]))


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def norm_warps(dim: int) -> int:
    """Warps of a program that norms one row of `dim` elements."""
    return min(max(_next_power_of_2(dim) // 1024, 1), 16)


@functools.cache
def _pdl(device_index: int) -> bool:
    if os.environ.get("DSV32_OPS_PDL") == "0" or torch.version.hip is not None:
        return False
    return platform.capability(device_index) >= (9, 0)


def use_pdl(device: torch.device) -> bool:
    """Programmatic dependent launch: Hopper and later, unless DSV32_OPS_PDL=0."""
    return device.type == "cuda" and device.index is not None and _pdl(device.index)


def largest_step(itemsize: int, stride: int, dim: int) -> int:
    """Compile-time divisor of a head stride that keeps 16-byte accesses provable.

    It may depend on the head's size but not on the token count, so it is the full 16 bytes or 1.
    """
    step = 16 // itemsize
    return step if dim % step == 0 and stride % step == 0 else 1


def as_codes(t: Tensor, soft: bool) -> Tensor:
    """Triton refuses an fp8e4nv pointer where the GPU has no such type: there, pass the bytes."""
    return t.view(torch.uint8) if soft and t.dtype in platform.FP8_DTYPES else t


def launch(
    kernel: Any,
    grid: Grid,
    args: tuple[Any, ...],
    constants: Mapping[str, Any],
    device: torch.device,
    num_warps: int,
) -> None:
    """Start `kernel` on the current stream of `device`, whatever device is current."""
    if grid.empty:
        return
    shape = grid.launch(platform.backend(device), threads=num_warps * 64)
    options: dict[str, Any] = {"num_warps": num_warps}
    if constants["PDL"]:
        options["launch_pdl"] = True
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    with torch.cuda.device(device) if elsewhere else contextlib.nullcontext():
        kernel[shape](*args, **constants, **options)
