"""What this machine and these versions can do, asked by capability. Nothing else asks."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


def backend(device: torch.device) -> str:
    """Launch backend of a device: torch calls AMD GPUs "cuda" too."""
    return "hip" if torch.version.hip is not None and device.type == "cuda" else "cuda"


@functools.cache
def fp8_dtype(device_type: str, device_index: int | None) -> torch.dtype:
    """e4m3fnuz on gfx94x, whose matrix units know no other; e4m3fn everywhere else."""
    if device_type == "cuda" and torch.version.hip is not None:
        arch = torch.cuda.get_device_properties(device_index or 0).gcnArchName
        if arch.startswith("gfx94"):
            return torch.float8_e4m3fnuz
    return torch.float8_e4m3fn


@functools.cache
def capability(device_index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device_index)


def _switch(name: str) -> Callable[[], bool]:
    """Whether an environment variable is 1, now.

    os.environ.get codes the name and decodes the value, 1 to 2 us, and an eager call asks twice.
    """
    try:
        data: Any = os.environ._data  # type: ignore[attr-defined]
        key, one = os.environ.encodekey(name), os.environ.encodevalue("1")
    except AttributeError:
        return lambda: os.environ.get(name) == "1"
    return lambda: bool(data.get(key) == one)


soft_fp8_chosen = _switch("DSV32_OPS_SOFT_FP8")
_check_chosen = _switch("DSV32_OPS_CHECK")


def soft_fp8(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether e4m3 is coded in integer arithmetic; DSV32_OPS_SOFT_FP8=1 chooses it anywhere.

    Only NVIDIA's conversion (sm_89 and later) saturates by definition.
    """
    if dtype is torch.float8_e4m3fnuz or soft_fp8_chosen():
        return True
    if device.type != "cuda":
        return False
    return backend(device) == "hip" or capability(device.index) < (8, 9)


def check_device_data() -> bool:
    """DSV32_OPS_CHECK=1: read positions, ids and slots before every launch and refuse bad ones."""
    return _check_chosen() and not (
        torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    )
