"""Shared by the tests of the ops: devices, small models, exact conversions to and from NumPy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import oracle
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dsv32_ops import launch, platform
from dsv32_ops.models import PRESETS, ModelConfig

FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

on_gpu = pytest.mark.gpu
on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])


def device_cases(names: str, cases: Iterable[Any], gpu: Iterable[Any] | None = None) -> Any:
    """Parametrize (device, *names): every case on the CPU, those of `gpu` (else all) on a GPU.

    A GPU compiles a kernel per configuration, about a second each.
    """
    cases = list(cases)
    params = [pytest.param("cpu", case, id=f"cpu-{_label(case)}") for case in cases]
    for case in cases if gpu is None else gpu:
        params.append(pytest.param("cuda", case, id=f"cuda-{_label(case)}", marks=on_gpu))
    return pytest.mark.parametrize(f"device, {names}", params)


def _label(case: Any) -> str:
    if isinstance(case, tuple):
        return "-".join(_label(part) for part in case)
    if isinstance(case, dict):
        return "-".join(f"{key}={_label(value)}" for key, value in case.items())
    if isinstance(case, ModelConfig):
        return case.name
    return str(case).removeprefix("torch.")


def model(**sizes: Any) -> ModelConfig:
    """A model whose kernels compile fast; its MLA sizes fit every cache mode unless changed."""
    small: dict[str, Any] = dict(
        name="small",
        q_lora_rank=24,
        kv_lora_rank=512,
        rope_dim=64,
        index_heads=3,
        index_dim=80,
        index_topk=8,
        max_positions=97,
        rope_scaling=None,
        nope_dim=12,
    )
    return replace(PRESETS["deepseek-v3.2"], **{**small, **sizes})


SMALL = model()
TINY = model(
    name="tiny", q_lora_rank=1, kv_lora_rank=1, rope_dim=2, index_heads=1, index_dim=2, index_topk=3
)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def array(tensor: torch.Tensor) -> np.ndarray:
    """The exact values: float64, or the integers."""
    tensor = tensor.detach().cpu()
    return tensor.double().numpy() if tensor.is_floating_point() else tensor.numpy()


def byte_array(tensor: torch.Tensor) -> np.ndarray:
    """Codes as they lie in memory; wider elements become several bytes of the last dimension."""
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy()


def take(tensor: torch.Tensor, rows: Any) -> torch.Tensor:
    """tensor[rows]; codes are indexed as bytes, which every torch can do on every device."""
    if tensor.element_size() > 1:
        return tensor[rows]
    return tensor.view(torch.uint8)[rows].view(tensor.dtype)


SPECIAL_VALUES = (torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-40, 3e38)


def special_values(like: torch.Tensor) -> torch.Tensor:
    """In the type of `like`: where that ends, another infinity or zero."""
    return torch.tensor(SPECIAL_VALUES).to(like)


def to_device(inputs: dict[str, Any], device: str) -> dict[str, Any]:
    return {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in inputs.items()
    }


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def flavour(inputs: dict[str, Any]) -> torch.dtype:
    """The e4m3 flavour that a call shall choose."""
    caches = (inputs.get("mla_kv_cache"), inputs.get("indexer_k_cache"))
    typed = [c.dtype for c in caches if c is not None and c.dtype in (FN, FNUZ)]
    if inputs.get("fp8_dtype") is not None:
        return inputs["fp8_dtype"]
    device = inputs["positions"].device
    return typed[0] if typed else platform.fp8_dtype(device.type, device.index)


def fp8_values(inputs: dict[str, Any]) -> np.ndarray:
    return oracle.E4M3FN_VALUES if flavour(inputs) is FN else oracle.E4M3FNUZ_VALUES


def oracle_arguments(inputs: dict[str, Any], rows: Any = None) -> dict[str, Any]:
    """Arguments for the oracle; `rows` picks tokens from every tensor that has one row per token.

    Written tensors other than the top-k buffer are left out.
    """
    arguments: dict[str, Any] = {}
    for name, value in inputs.items():
        if name == "fp8_dtype" or name.endswith(("_cache", "_out", "slot_mapping")):
            continue
        if isinstance(value, torch.Tensor):
            if rows is not None and name in PER_TOKEN:
                value = value[rows]
            value = array(value)
        arguments[name] = value
    if rows is not None:
        arguments.pop("topk_indices_buffer", None)
    return arguments


PER_TOKEN = {
    "positions", "q_c", "kv_c", "k_pe", "index_k", "slot_mapping", "indexer_slot_mapping",
    "q_pe", "ql_nope", "index_q", "index_weights",
    "input_ids", "inputs_embeds", "previous_hidden",
}  # fmt: skip


def sample_rows(num_tokens: int, device: str, count: int = 40) -> torch.Tensor:
    """First and last rows, both sides of 2^16, and random ones."""
    picked = {0, 1, num_tokens - 2, num_tokens - 1, 65_534, 65_535, 65_536}
    picked |= set(torch.randint(num_tokens, (count,), generator=generator(num_tokens)).tolist())
    return torch.tensor(sorted(row for row in picked if 0 <= row < num_tokens), device=device)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """New tensors hold NaN: a block that the allocator gives back may hold yesterday's result."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        # The allocation of repeated calls on a GPU does not fill, torch.empty_strided does.
        with mock.patch.object(launch, "_empty_strided", None):
            yield
    finally:
        torch.use_deterministic_algorithms(before)


def outputs_of(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def is_packed(tensor: torch.Tensor) -> bool:
    """Row-major without gaps, in every stride, also where a size of 1 leaves strides open."""
    expected, size = [], 1
    for length in reversed(tensor.shape):
        expected.append(size)
        size *= max(length, 1)
    return tensor.stride() == tuple(reversed(expected)) and tensor.storage_offset() == 0


def assert_like_fake(call: Callable[..., Any], inputs: dict[str, Any]) -> None:
    """The fake kernel gives the shapes, strides, types and devices of the real outputs."""
    with FakeTensorMode() as mode:
        fakes = {
            name: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
            for name, value in inputs.items()
        }
        expected = outputs_of(call(**fakes))
    actual = outputs_of(call(**inputs))
    assert len(actual) == len(expected)
    for real, fake in zip(actual, expected, strict=True):
        assert is_packed(real)
        for of in ("shape", "dtype", "device"):
            assert getattr(real, of) == getattr(fake, of)
        assert real.stride() == fake.stride()


def share_towards_zero(actual: np.ndarray, ideal: np.ndarray) -> float:
    """Share of inexact values that were rounded towards zero: one half unless biased."""
    inexact = actual != ideal
    return float((np.abs(actual) < np.abs(ideal))[inexact].mean())
