"""Manual CUDA graphs: captured cold and warm, replayed with other values, in several pieces."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from layers import EMBED, HEADS, Layers, assert_same, make_batch, state
from support import SMALL, on_gpu, outputs_of

import dsv32_ops
from dsv32_ops import testing
from dsv32_ops.layouts import MLA_MODES

pytestmark = on_gpu

TOKENS = 40
WRITTEN = ("topk_indices_buffer", "mla_kv_cache", "indexer_k_cache")
SCALES = ("mla_k_scale", "q_scale")


def make_inputs(op: str, seed: int = 0, num_tokens: int = TOKENS, **options: Any) -> dict[str, Any]:
    """Arguments whose values, scales and dead slots included, all depend on the seed."""
    if op.startswith("fused_norm_rope"):
        options = {"padding": 0.3, **options}
        inputs = testing.norm_rope_inputs(SMALL, num_tokens, seed=seed, device="cuda", **options)
        if op.endswith("_out"):
            inputs["q_c_out"] = testing.poison(torch.empty_like(inputs["q_c"]))
    elif op == "fused_q":
        inputs = testing.q_inputs(SMALL, num_tokens, HEADS, seed=seed, device="cuda", **options)
    else:
        make = getattr(testing, op.removeprefix("fused_") + "_inputs")
        inputs = make(EMBED, num_tokens, seed=seed, device="cuda", **options)
    for name in SCALES:
        if inputs.get(name) is not None:
            inputs[name].fill_(0.37 + 0.11 * seed)
    return inputs


class Captured:
    """One call in a graph, with the tensors that it reads and writes."""

    def __init__(
        self,
        op: str,
        inputs: dict[str, Any],
        *,
        warm: bool = True,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self.op, self.inputs = getattr(torch.ops.dsv32, op), inputs
        if warm:
            self.op(**inputs)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            result = self.op(**inputs)
        self.outputs = (inputs["q_c_out"],) if result is None else outputs_of(result)

    def replay(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and name not in (*WRITTEN, "q_c_out"):
                self.inputs[name].copy_(value)
        for output in self.outputs:
            testing.poison(output)
        self.graph.replay()

    def check(self, values: dict[str, Any]) -> None:
        """A replay with new values does what an eager call does."""
        eager = {
            k: v.clone() if k in WRITTEN else v for k, v in {**values, **self.written()}.items()
        }
        self.replay(values)
        result = self.op(**eager)
        assert_same(self.outputs, (eager["q_c_out"],) if result is None else outputs_of(result))
        assert_same(self.written(), {name: eager[name] for name in self.written()})

    def written(self) -> dict[str, torch.Tensor]:
        return {name: self.inputs[name] for name in WRITTEN if name in self.inputs}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{mode: ("fused_norm_rope", {"mode": mode}) for mode in MLA_MODES},
    "out form": ("fused_norm_rope_out", {}),
    "fused_q fp8": ("fused_q", {}),
    "fused_q bf16": ("fused_q", {"quantize_mqa": False}),
    "fused_eh_norm": ("fused_eh_norm", {}),
    "fused_embed_norm": ("fused_embed_norm", {}),
    "fused_embed_eh_norm": ("fused_embed_eh_norm", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_replay_with_other_values(case: str) -> None:
    """Inputs, positions, slots, padding and scales change in place between replays."""
    op, options = CASES[case]
    captured = Captured(op, make_inputs(op, **options))
    for seed in (1, 2):
        captured.check(make_inputs(op, seed, **options))


def capture_cold() -> None:
    """In a process that compiled nothing: the kernels are built while their stream captures."""
    cache = Path(os.environ["TRITON_CACHE_DIR"])
    ops = ("fused_norm_rope", "fused_q", "fused_eh_norm", "fused_embed_norm")
    inputs = [make_inputs(op) for op in ops]
    torch.cuda.synchronize()
    assert not list(cache.rglob("*.ttir"))
    captured = [Captured(op, given, warm=False) for op, given in zip(ops, inputs, strict=True)]
    assert len(list(cache.rglob("*.ttir"))) == len(ops)
    for op, call in zip(ops, captured, strict=True):
        call.check(make_inputs(op, 1))


def test_cold_capture(tmp_path: Path) -> None:
    roots = [str(Path(__file__).parent), str(Path(dsv32_ops.__file__).parents[1])]
    path = os.pathsep.join([*roots, os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", "import test_cuda_graphs; test_cuda_graphs.capture_cold()"],
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": path},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("mode", ["auto", "fp8_ds_mla", "nvfp4_ds_mla"])
def test_padding_leaves_every_dead_row_alone(mode: str) -> None:
    """A batch of 40, then one of 5 in the same graph; the other 35 rows hold garbage."""
    captured = Captured("fused_norm_rope", make_inputs("fused_norm_rope", mode=mode))
    captured.replay(make_inputs("fused_norm_rope", 1, mode=mode, padding=0.0))
    expected = {name: tensor.clone() for name, tensor in captured.written().items()}
    live = make_inputs("fused_norm_rope", 2, 5, mode=mode, padding=0.0)
    padded = make_inputs("fused_norm_rope", 3, mode=mode)
    garbage = {name: testing.poison(padded[name]) for name in ("q_c", "kv_c", "k_pe", "index_k")}
    garbage |= {name: padded[name].fill_(-1) for name in ("positions", "slot_mapping")}
    for name, rows in garbage.items():
        rows[:5] = live[name]
    padded = {**live, **garbage}
    captured.replay(padded)
    torch.ops.dsv32.fused_norm_rope(**{**live, **expected})
    expected["topk_indices_buffer"][:TOKENS] = -1
    assert_same(captured.written(), expected)


def test_side_streams() -> None:
    """Captured on one stream, replayed on another."""
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    captured = [Captured(op, make_inputs(op), stream=side) for op in ("fused_norm_rope", "fused_q")]
    values = [make_inputs(op, 1) for op in ("fused_norm_rope", "fused_q")]
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        for call, given in zip(captured, values, strict=True):
            call.check(given)
    torch.cuda.current_stream().wait_stream(other)


def test_capture_with_checks_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """DSV32_OPS_CHECK=1 reads slots on the host, which a capture would not survive."""
    monkeypatch.setenv("DSV32_OPS_CHECK", "1")
    for op in ("fused_norm_rope", "fused_q", "fused_embed_norm"):
        Captured(op, make_inputs(op)).check(make_inputs(op, 1))


def test_layers_share_one_topk_buffer() -> None:
    """Each layer resets the buffer for its own indexer, within one graph."""
    layers = Layers(SMALL, device="cuda")
    batch = make_batch(layers, TOKENS)
    picks = torch.arange(layers.num_layers, dtype=torch.int32, device="cuda")

    def step() -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []
        for layer in range(layers.num_layers):
            seen.extend(layers.layer(layer, batch))
            seen.append(layers.topk.clone())
            # Stands for the layer's indexer, which fills in what it picks.
            layers.topk[:TOKENS] = picks[layer]
        return seen

    expected = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    written = state(layers)
    for tensor in (layers.topk, layers.mla_cache, layers.index_cache):
        testing.poison(tensor)
    graph.replay()
    assert_same(outputs, expected)
    assert_same(state(layers), written)
    for filled in (outputs[4], outputs[9]):
        assert torch.all(filled[:TOKENS] == -1)


def test_pieces() -> None:
    """Producer, op and consumer in graphs of their own, replayed back to back."""
    values = make_inputs("fused_norm_rope", padding=0.0)
    width = SMALL.q_lora_rank + SMALL.kv_lora_rank + SMALL.rope_dim
    hidden = torch.randn(TOKENS, 256, device="cuda").bfloat16()
    weight = torch.randn(256, width, device="cuda").bfloat16()
    latent = torch.empty(TOKENS, width, device="cuda", dtype=torch.bfloat16)
    sizes = (SMALL.q_lora_rank, SMALL.kv_lora_rank, SMALL.rope_dim)
    values["q_c"], values["kv_c"], values["k_pe"] = latent.split(sizes, 1)
    entries = values["mla_kv_cache"].flatten(0, 1)

    def consume() -> torch.Tensor:
        return entries[values["slot_mapping"]].float()

    pieces = [
        lambda: torch.mm(hidden, weight, out=latent),
        lambda: torch.ops.dsv32.fused_norm_rope(**values),
        consume,
    ]
    graphs, results = [], []
    for piece in pieces:
        piece()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            results.append(piece())
    hidden.copy_(torch.randn_like(hidden))
    values["slot_mapping"].copy_(values["slot_mapping"].flip(0))
    testing.poison(values["mla_kv_cache"])
    for graph in graphs * 2:
        graph.replay()
    actual = [results[1].clone(), results[2].clone()]
    torch.testing.assert_close(latent, hidden @ weight)
    testing.poison(values["mla_kv_cache"])
    assert_same(actual, [torch.ops.dsv32.fused_norm_rope(**values), consume()])
