"""One binary per configuration: token counts and the alignment of index tensors select none.

Triton counts: its hook before a compile sees every new specialization key. Without a GPU the launch
stops there, with a stand-in for the driver; on a GPU the ops themselves run.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton
from support import model
from triton.runtime import jit

import dsv32_ops
from csrc_free_ops.mtp import eh_norm_kernel, embed_norm_kernel
from csrc_free_ops.norm_rope import norm_rope_kernel
from csrc_free_ops.query import query_kernel
from dsv32_ops import launch, platform, targets, testing
from dsv32_ops.ops import mtp, norm_rope, query
from dsv32_ops.testing import poison

KERNELS = (norm_rope_kernel, query_kernel, eh_norm_kernel, embed_norm_kernel)
TOKENS = (1, 2, 3, 15, 16, 17, 1000, 65_536)
# Small, so that 65,536 tokens fit anywhere, with model-like alignment.
SIZES = model(q_lora_rank=32, index_dim=80, index_topk=16, hidden_size=64)
INDEX_TENSORS = (
    "positions", "slot_mapping", "indexer_slot_mapping", "input_ids", "mla_k_scale", "q_scale"
)  # fmt: skip
GPU_PATHS: dict[str, Callable[..., Any]] = {
    "fused_norm_rope": norm_rope._cuda,
    "fused_q": query._cuda,
    "fused_eh_norm": mtp._cuda_eh,
    "fused_embed_norm": mtp._cuda_embed,
    "fused_embed_eh_norm": mtp._cuda_embed_eh,
}


def norm_rope_inputs(num_tokens: int, **options: Any) -> dict[str, Any]:
    # One cache for every token count, as a server has it.
    blocks = 1 + (TOKENS[-1] - num_tokens) // 64
    inputs = testing.norm_rope_inputs(SIZES, num_tokens, extra_blocks=blocks, **options)
    inputs["indexer_slot_mapping"] = inputs["slot_mapping"].clone()
    return inputs


def q_inputs(num_tokens: int, **options: Any) -> dict[str, Any]:
    # The head stride of ql_nope is N * 8 elements: one 16-byte step for a single token.
    config = model(kv_lora_rank=8, index_heads=2, index_dim=80, nope_dim=12)
    return testing.q_inputs(config, num_tokens, 2, **options)


def mtp_inputs(make: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    return lambda num_tokens, **options: make(SIZES, num_tokens, **options)


OPS: dict[str, tuple[str, Callable[..., dict[str, Any]], dict[str, Any]]] = {
    "norm_rope auto": ("fused_norm_rope", norm_rope_inputs, {}),
    "norm_rope fp8": ("fused_norm_rope", norm_rope_inputs, {"mode": "fp8"}),
    "norm_rope fp8_ds_mla": ("fused_norm_rope", norm_rope_inputs, {"mode": "fp8_ds_mla"}),
    "norm_rope int32": ("fused_norm_rope", norm_rope_inputs, {"index_dtype": torch.int32}),
    "norm_rope outs": ("fused_norm_rope", norm_rope_inputs, {"outs": True}),
    "q fp8": ("fused_q", q_inputs, {}),
    "q bf16": ("fused_q", q_inputs, {"quantize_mqa": False}),
    "eh_norm": ("fused_eh_norm", mtp_inputs(testing.eh_norm_inputs), {}),
    "embed_norm": ("fused_embed_norm", mtp_inputs(testing.embed_norm_inputs), {"vocab_rows": 96}),
    "embed_eh_norm": (
        "fused_embed_eh_norm",
        mtp_inputs(testing.embed_eh_norm_inputs),
        {"vocab_rows": 96},
    ),
}


class Compilations(list[str]):
    """Names of the kernels for which Triton started a compile."""

    def hook(self, *, key: Any, fn: Any, **_: Any) -> None:
        self.append(fn.name)


@pytest.fixture
def compilations(monkeypatch) -> Iterator[Compilations]:
    """Counts from empty caches; what was compiled before is kept for the other tests."""
    counted = Compilations()
    monkeypatch.setattr(launch, "_shortcuts", {})
    kept = [(kernel, dict(kernel.device_caches)) for kernel in KERNELS]
    for kernel, _ in kept:
        kernel.device_caches.clear()
    before = triton.knobs.runtime.jit_cache_hook
    triton.knobs.runtime.jit_cache_hook = counted.hook
    yield counted
    triton.knobs.runtime.jit_cache_hook = before
    for kernel, caches in kept:
        kernel.device_caches.clear()
        kernel.device_caches.update(caches)


@pytest.fixture(params=["sm_90", "gfx942"])
def no_gpu(request, monkeypatch, compilations) -> Compilations:
    """Launches up to the compile: the driver names a target, nothing is compiled or started."""
    target = targets.TARGETS[request.param]
    driver = types.SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
    monkeypatch.setattr(jit, "driver", types.SimpleNamespace(active=driver))
    seen = set()

    def stop(*, key: Any, fn: Any, **_: Any) -> bool:
        if (fn.name, str(key)) not in seen:
            seen.add((fn.name, str(key)))
            compilations.append(fn.name)
        return True

    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", stop)
    monkeypatch.setattr(platform, "soft_fp8", lambda device, dtype: request.param != "sm_90")
    monkeypatch.setattr(launch, "use_pdl", lambda device: request.param == "sm_90")
    return compilations


def call_gpu_path(name: str, inputs: dict[str, Any]) -> None:
    schema = getattr(torch.ops.dsv32, name).default._schema
    GPU_PATHS[name](*(inputs.get(a.name, a.default_value) for a in schema.arguments))


def call_op(name: str, inputs: dict[str, Any]) -> None:
    getattr(dsv32_ops, name)(**inputs)


def offset_views(inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The inputs with one index tensor at a time moved by 1, 2 and 3 elements."""
    for name in INDEX_TENSORS:
        value = inputs.get(name)
        if value is None:
            continue
        for offset in (1, 2, 3):
            moved = torch.empty(value.numel() + offset, dtype=value.dtype, device=value.device)
            moved[offset:] = value
            yield {**inputs, name: moved[offset:]}


def run_all(op: str, call: Callable[..., None], device: str) -> None:
    name, make, options = OPS[op]
    for num_tokens in TOKENS:
        call(name, make(num_tokens, device=device, **options))
    for inputs in offset_views(make(7, device=device, **options)):
        call(name, inputs)


@pytest.mark.parametrize("op", OPS)
def test_one_specialization_per_configuration(op, no_gpu):
    run_all(op, call_gpu_path, "cpu")
    assert len(no_gpu) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_one_compilation_per_configuration(op, compilations):
    run_all(op, call_op, "cuda")
    torch.cuda.synchronize()
    assert len(compilations) == 1


@pytest.mark.parametrize(
    "change",
    [{"mode": "fp8"}, {"index_dtype": torch.int32}, {"dtype": torch.float16}, {"block_size": 32}],
)
def test_another_configuration_is_another_specialization(change, no_gpu):
    for options in ({}, change):
        call_gpu_path("fused_norm_rope", norm_rope_inputs(3, **options))
    assert len(no_gpu) == 2


def test_the_count_sees_a_specialization_on_alignment(no_gpu):
    """A row stride, which the model fixes, makes another binary when it is no multiple of 16."""
    inputs = norm_rope_inputs(3)
    call_gpu_path("fused_norm_rope", inputs)
    wider = poison(torch.empty(3, 33, dtype=torch.bfloat16))
    call_gpu_path("fused_norm_rope", {**inputs, "q_c": wider[:, :32]})
    assert len(no_gpu) == 2
