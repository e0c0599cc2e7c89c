"""The short path from a repeated eager call to its compiled kernel, and when it stands aside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton

from dsv32_ops import launch, models, testing

CONFIG = models.PRESETS["deepseek-v3.2"]
gpu = pytest.mark.gpu


class Launcher:
    """Called as Triton 3.7's launcher is."""

    def __call__(
        self, gridX, gridY, gridZ, stream, function, kernel_metadata, launch_metadata,
        launch_enter_hook, launch_exit_hook, *args,
    ):  # fmt: skip
        pass


class Compiled:
    function, packed_metadata = 1, ()

    def __init__(self, run: Any) -> None:
        self.run = run


def test_an_unknown_launcher_is_left_alone() -> None:
    assert launch._known_launcher(Compiled(Launcher()))
    assert not launch._known_launcher(Compiled(lambda grid, stream, *args: None))
    assert not launch._known_launcher(Compiled(None))
    assert not launch._known_launcher(object())


def test_the_key_tells_apart_what_decides_a_launch() -> None:
    x = torch.empty(4, 6)
    keys = {
        launch.signature("op", (x, None, 1e-6)),
        launch.signature("op", (x[:, :5], None, 1e-6)),
        launch.signature("op", (x.t().contiguous().t(), None, 1e-6)),
        launch.signature("op", (x.half(), None, 1e-6)),
        launch.signature("op", (None, x, 1e-6)),
        launch.signature("op", (x, None, 1e-5)),
        launch.signature("op", (x.clone().requires_grad_(), None, 1e-6)),
        launch.signature("other", (x, None, 1e-6)),
    }
    assert len(keys) == 8
    assert launch.signature("op", (x.clone(), None, 1e-6)) in keys


@pytest.fixture
def shortcuts(monkeypatch):
    monkeypatch.setattr(launch, "_shortcuts", {})
    return launch._shortcuts


def norm_rope(seed: int) -> dict[str, Any]:
    return testing.norm_rope_inputs(CONFIG, 9, device="cuda", seed=seed, padding=0.3)


def results(inputs: dict[str, Any]) -> list[torch.Tensor]:
    names = ("mla_kv_cache", "indexer_k_cache", "topk_indices_buffer")
    return [torch.ops.dsv32.fused_norm_rope(**inputs), *(inputs[name] for name in names)]


@gpu
def test_the_second_call_takes_it_and_gives_the_same_bytes(shortcuts) -> None:
    torch.ops.dsv32.fused_norm_rope(**norm_rope(0))
    (shortcut,) = shortcuts.values()
    taken = results(norm_rope(1))
    shortcuts.clear()
    for short, long in zip(taken, results(norm_rope(1)), strict=True):
        assert testing.same_bytes(short, long)
    # With the launcher replaced by nothing, a call that takes the shortcut writes nothing.
    torch.ops.dsv32.fused_norm_rope(**norm_rope(0))
    (shortcut,) = shortcuts.values()
    shortcut.run = lambda *args: None
    inputs = norm_rope(2)
    before = inputs["mla_kv_cache"].clone()
    torch.ops.dsv32.fused_norm_rope(**inputs)
    assert testing.same_bytes(before, inputs["mla_kv_cache"])


@gpu
def test_query_outputs_are_the_same(shortcuts) -> None:
    first, second = (testing.q_inputs(CONFIG, 9, 16, device="cuda", seed=s) for s in (0, 1))
    torch.ops.dsv32.fused_q(**first)
    assert len(shortcuts) == 1
    short = torch.ops.dsv32.fused_q(**second)
    shortcuts.clear()
    for a, b in zip(short, torch.ops.dsv32.fused_q(**second), strict=True):
        assert testing.same_bytes(a, b) and a.stride() == b.stride() and a.shape == b.shape


@gpu
def test_one_tensor_in_two_roles_and_then_two(shortcuts) -> None:
    """A call remembered in place must not make the next one write its input."""
    inputs = norm_rope(0)
    q_c = inputs["q_c"].contiguous()
    torch.ops.dsv32.fused_norm_rope_out(q_c, **{**inputs, "q_c": q_c})
    q_c = norm_rope(3)["q_c"].contiguous()
    before, out = q_c.clone(), testing.poison(torch.empty_like(q_c))
    torch.ops.dsv32.fused_norm_rope_out(out, **{**inputs, "q_c": q_c})
    assert testing.same_bytes(q_c, before)
    shortcuts.clear()
    assert testing.same_bytes(out, torch.ops.dsv32.fused_norm_rope(**{**inputs, "q_c": q_c}))


@gpu
def test_an_unaligned_view_takes_the_long_way(shortcuts) -> None:
    inputs = norm_rope(0)
    torch.ops.dsv32.fused_norm_rope(**inputs)
    shifted = torch.empty(inputs["q_norm_weight"].numel() + 1, dtype=torch.bfloat16, device="cuda")
    weight = shifted[1:].copy_(inputs["q_norm_weight"])
    expected = torch.ops.dsv32.fused_norm_rope(**inputs)
    actual = torch.ops.dsv32.fused_norm_rope(**{**inputs, "q_norm_weight": weight})
    assert testing.same_bytes(actual, expected)


@gpu
def test_bad_calls_are_refused_after_good_ones(shortcuts) -> None:
    inputs = norm_rope(0)
    torch.ops.dsv32.fused_norm_rope(**inputs)
    with pytest.raises(ValueError, match="kv_c"):
        torch.ops.dsv32.fused_norm_rope(**{**inputs, "kv_c": inputs["kv_c"][:5]})
    with pytest.raises(RuntimeError, match="derivative"):
        weight = inputs["q_norm_weight"].clone().requires_grad_()
        torch.ops.dsv32.fused_norm_rope(**{**inputs, "q_norm_weight": weight})


@gpu
def test_profiler_hooks_are_called(shortcuts) -> None:
    inputs = norm_rope(0)
    torch.ops.dsv32.fused_norm_rope(**inputs)
    names = []

    def hook(metadata) -> None:
        names.append(metadata.get()["name"])

    runtime = triton.knobs.runtime
    if not hasattr(runtime.launch_enter_hook, "add"):
        pytest.skip("this Triton has no chain of launch hooks")
    runtime.launch_enter_hook.add(hook)
    try:
        torch.ops.dsv32.fused_norm_rope(**inputs)
    finally:
        runtime.launch_enter_hook.remove(hook)
    assert names == ["norm_rope_kernel"]
