"""torch.compile: one graph for every token count, the bytes of eager mode, no copy of a cache."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from layers import DISTINCT, EMBED, HEADS, Layers, assert_same, make_batch, state
from support import SMALL, device_cases, on_devices, on_gpu, outputs_of
from torch._dynamo.utils import ReinplaceCounters, counters
from torch._inductor.utils import run_and_get_code

import dsv32_ops
from dsv32_ops import testing
from dsv32_ops.layouts import MLA_MODES
from dsv32_ops.models import PRESETS

V32 = PRESETS["deepseek-v3.2"]
COUNTS = (2, 3, 16, 65_535, 65_536, 65_537, 131_072)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Each test compiles anew; a result from a disk cache would skip what is looked at."""
    torch._dynamo.reset()
    counters.clear()
    with torch._inductor.config.patch(force_disable_caches=True), torch.no_grad():
        yield
    torch._dynamo.reset()


def compile_whole(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, dynamic=True, **options)


@contextmanager
def reinplacing() -> Iterator[list[int]]:
    """Numbers of tensors that Inductor cloned although an op could have written them in place.

    One number for each functionalized op of the graph.
    """
    missed: list[int] = []
    with mock.patch.object(
        ReinplaceCounters, "add_missed_opportunities", lambda _, count: missed.append(count)
    ):
        yield missed


def body(source: str) -> str:
    """The statements of a generated wrapper that run at each call."""
    found = re.search(r"^( *)def call\(.*?^\1    return [^\n]*", source, re.DOTALL | re.MULTILINE)
    assert found is not None, source
    return found[0]


def copies(source: str) -> list[str]:
    """Lines of generated code that allocate, clone or copy."""
    pattern = re.compile(r"= empty_strided|copy_\(|clone|cpp_fused|triton_\w+\.run")
    return [line.strip() for line in body(source).splitlines() if pattern.search(line)]


def assert_one_graph() -> None:
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@on_devices
def test_one_graph_for_every_token_count(device: str) -> None:
    layers = Layers(DISTINCT, num_layers=1, max_tokens=COUNTS[-1], device=device)
    eager = copy.deepcopy(layers)
    compiled = compile_whole(layers)
    assert_same(compiled(make_batch(layers, 5)), eager(make_batch(layers, 5)))
    with torch.compiler.set_stance("fail_on_recompile"):
        for seed, num_tokens in enumerate(COUNTS):
            batch = make_batch(layers, num_tokens, seed=seed)
            assert_same(compiled(batch), eager(batch))
            assert_same(state(layers), state(eager))
    assert_one_graph()


@device_cases(
    "mode", [*MLA_MODES, "typed fp8"], ["auto", "fp8_ds_mla", "nvfp4_ds_mla", "typed fp8"]
)
def test_caches_are_written_in_place(device: str, mode: str) -> None:
    """A layer's cache is a view of a buffer, in its stored type: nothing is allocated or copied."""
    cache_dtype = torch.float8_e4m3fn if mode == "typed fp8" else None
    mode = mode.removeprefix("typed ")
    layers = Layers(SMALL, mode=mode, cache_dtype=cache_dtype, device=device)
    eager = copy.deepcopy(layers)
    with reinplacing() as missed:
        outputs, (source,) = run_and_get_code(compile_whole(layers), make_batch(layers, 20))
    assert_same(outputs, eager(make_batch(layers, 20)))
    assert_same(state(layers), state(eager))
    assert missed == [0] * layers.num_layers
    assert copies(source) == []
    assert source.count("torch.ops.dsv32.fused_norm_rope.default(") == layers.num_layers


def test_the_detectors_see_a_copied_cache() -> None:
    """A control of the test above: a clone of a cache shows in the counters and in the code."""
    inputs = testing.norm_rope_inputs(DISTINCT, 20)
    cache = inputs.pop("mla_kv_cache")

    def cloning(cache: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        torch.ops.dsv32.fused_norm_rope(mla_kv_cache=cache, **inputs)
        after = cache.clone()
        torch.ops.dsv32.fused_norm_rope(mla_kv_cache=after, **inputs)
        return after

    with reinplacing() as missed:
        _, (source,) = run_and_get_code(compile_whole(cloning), cache, inputs)
    assert missed == [0, 1]
    assert any("empty_strided" in line for line in copies(source))


@on_devices
def test_between_compiled_ops(device: str) -> None:
    """Inputs are slices of what Inductor computes, outputs are read by what it compiles."""
    layers = Layers(DISTINCT, device=device)

    def around(module: Layers, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        # Powers of two: exact, so that fused and separate rounding agree.
        batch = {**batch, "latent": batch["latent"] * 2, "nope": batch["nope"] * 0.5}
        return [out.float() * 4 for out in module(batch)]

    batch = make_batch(layers, 20)
    expected = around(copy.deepcopy(layers), batch)
    assert_same(compile_whole(around)(layers, batch), expected)


# What a caller may leave out, each by a name.
SLOTS, INDEX_SLOTS = "slot_mapping", "indexer_slot_mapping"
MLA, INDEX = "mla_kv_cache", "indexer_k_cache"
OUTS = ("kv_c_out", "k_pe_out", "index_k_out")
INPUTS = ("kv_c", "k_pe", "index_k")
CASES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "no caches": ((), {}),
    "MLA cache alone": ((SLOTS, MLA), {}),
    "indexer cache alone": ((INDEX_SLOTS, INDEX), {}),
    "indexer cache, shared slots": ((SLOTS, INDEX), {}),
    "both slot maps": ((SLOTS, INDEX_SLOTS, MLA, INDEX), {}),
    "outs alone": (OUTS, {}),
    "k_pe_out alone": (OUTS[1:2], {}),
    "index_k_out with its cache": ((SLOTS, INDEX, OUTS[2]), {}),
    "everything": ((SLOTS, INDEX_SLOTS, MLA, INDEX, *OUTS), {}),
    "no fill": ((SLOTS, MLA, INDEX), {"fill_topk": False}),
    "no fill, no caches": ((), {"fill_topk": False}),
    "interleaved ue8m0x4": (
        (SLOTS, INDEX), {"index_scale_format": "ue8m0x4", "index_rope_interleave": True}
    ),
    "shuffled": ((SLOTS, INDEX), {"indexer_cache_shuffled": True}),
    "fnuz": ((SLOTS, INDEX), {"fp8_dtype": torch.float8_e4m3fnuz}),
    "no indexer": ((SLOTS, MLA), {"has_indexer": False}),
    "no indexer, no caches": ((), {"has_indexer": False}),
}  # fmt: skip


def norm_rope_case(case: str, device: str) -> dict[str, Any]:
    """Keyword arguments of `fused_norm_rope` with only those optional ones that the case names."""
    given, changes = CASES[case]
    inputs = testing.norm_rope_inputs(SMALL, 20, outs=True, device=device)
    inputs[INDEX_SLOTS] = inputs[SLOTS].flip(0)
    for name in (SLOTS, INDEX_SLOTS, MLA, INDEX, *OUTS):
        if name not in given:
            del inputs[name]
    for name in ("mla_k_scale", "fp8_dtype", "index_scale_format", "has_indexer"):
        del inputs[name]
    return {**inputs, **changes}


@device_cases("case", CASES, ["everything", "no indexer, no caches"])
def test_left_out_keywords(device: str, case: str) -> None:
    inputs = norm_rope_case(case, device)
    compare_to_eager(torch.ops.dsv32.fused_norm_rope, inputs)


@device_cases("case", ["no caches", "everything"], ["everything"])
def test_out_form(device: str, case: str) -> None:
    inputs = norm_rope_case(case, device)
    out = testing.poison(torch.empty(20, SMALL.q_lora_rank, dtype=torch.bfloat16, device=device))
    compare_to_eager(torch.ops.dsv32.fused_norm_rope_out, {**inputs, "q_c_out": out})


QUERIES: dict[str, dict[str, Any]] = {
    "fp8": {},
    "bf16": {"quantize_mqa": False},
    "interleaved": {"index_rope_interleave": True},
    "no indexer": {"has_indexer": False, "index_q": None, "index_weights": None},
}


@device_cases("case", QUERIES, ["bf16", "no indexer"])
def test_fused_q(device: str, case: str) -> None:
    inputs = testing.q_inputs(SMALL, 20, HEADS, device=device)
    compare_to_eager(torch.ops.dsv32.fused_q, {**inputs, **QUERIES[case]})


@device_cases("name", ["fused_eh_norm", "fused_embed_norm", "fused_embed_eh_norm"])
def test_embedding_ops(device: str, name: str) -> None:
    make = getattr(testing, name.removeprefix("fused_") + "_inputs")
    compare_to_eager(getattr(torch.ops.dsv32, name), make(EMBED, 20, device=device))


def compare_to_eager(op: Callable[..., Any], inputs: dict[str, Any]) -> None:
    """One graph, and every tensor that the op returns, writes or leaves alone as in eager mode."""
    copied = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    with reinplacing() as missed:
        actual = compile_whole(lambda inputs: op(**inputs))(inputs)
    if actual is not None:
        assert_same(outputs_of(actual), outputs_of(op(**copied)))
    else:
        op(**copied)
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor):
            assert testing.same_bytes(value, copied[name]), name
    assert sum(missed) == 0
    assert_one_graph()


def test_public_functions() -> None:
    inputs = testing.norm_rope_inputs(DISTINCT, 20)
    expected = dsv32_ops.fused_norm_rope(**inputs)
    actual = compile_whole(lambda inputs: dsv32_ops.fused_norm_rope(**inputs))(inputs)
    assert testing.same_bytes(actual, expected)
    out = testing.poison(torch.empty_like(expected))
    compile_whole(lambda out: dsv32_ops.fused_norm_rope(**inputs, q_c_out=out))(out)
    assert testing.same_bytes(out, expected)


def test_one_graph_for_one_token_too() -> None:
    """Marked unbacked, a token count is not specialized even where it is 1."""
    layers = Layers(DISTINCT)
    eager = copy.deepcopy(layers)
    compiled = torch.compile(layers, fullgraph=True, dynamic=False)
    for num_tokens in (5, 1, 2, 33):
        batch = make_batch(layers, num_tokens)
        for name, tensor in batch.items():
            torch._dynamo.decorators.mark_unbacked(tensor, 1 if name == "nope" else 0)
        assert_same(compiled(batch), eager(batch))
    assert_same(state(layers), state(eager))
    assert_one_graph()


def test_bad_shapes_fail_while_tracing() -> None:
    """With the text of eager mode, and nothing is written."""
    inputs = testing.norm_rope_inputs(DISTINCT, 20)
    inputs["topk_indices_buffer"] = inputs["topk_indices_buffer"][:19]
    before = inputs["mla_kv_cache"].clone()
    with pytest.raises(Exception, match="topk_indices_buffer: expected at least .* rows"):
        compile_whole(lambda inputs: torch.ops.dsv32.fused_norm_rope(**inputs))(inputs)
    assert testing.same_bytes(inputs["mla_kv_cache"], before)


def test_gradients_are_refused_while_tracing() -> None:
    inputs = testing.norm_rope_inputs(DISTINCT, 20)
    inputs["q_norm_weight"].requires_grad_()
    step = compile_whole(lambda inputs: torch.ops.dsv32.fused_norm_rope(**inputs))
    with torch.enable_grad(), pytest.raises(Exception, match="have no derivative"):
        step(inputs)
    with torch.inference_mode():
        assert testing.same_bytes(step(inputs), torch.ops.dsv32.fused_norm_rope(**inputs))


def test_arguments_that_torch_reserves() -> None:
    """Inductor calls a mutating op through a wrapper that has an argument `mode` itself."""
    names = [name for name in dir(torch.ops.dsv32) if name.startswith("fused_")]
    assert len(names) == 14
    for name in names:
        schema = getattr(torch.ops.dsv32, name).default._schema
        assert not {"mode", "self"} & {argument.name for argument in schema.arguments}


@pytest.mark.parametrize("out, source", [("q_c_out", "q_c"), *zip(OUTS, INPUTS, strict=True)])
def test_clone_of_an_input_as_output(out: str, source: str) -> None:
    """Inductor may drop the clone and pass the input for both: legal, or not done."""
    op = getattr(torch.ops.dsv32, "fused_norm_rope" + ("_out" if out == "q_c_out" else ""))
    inputs = testing.norm_rope_inputs(DISTINCT, 20)

    def step(inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        written = inputs[source].clone()
        op(**inputs, **{out: written})
        return written, inputs[source] + 0

    original = inputs[source].clone()
    expected = step(inputs)
    assert_same(compile_whole(step)(inputs), expected)
    assert testing.same_bytes(inputs[source], original)


def gpu_events(run: Callable[[], Any]) -> list[str]:
    """Names of all that the profiler sees on the host and on the GPU."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    return [event.name for event in profile.events()]


def device_work(names: list[str]) -> dict[str, int]:
    """Kernels, copies and fills by name."""
    return Counter(
        name for name in names if re.match(r"Mem(cpy|set)|triton_|\w*kernel|void ", name)
    )


@on_gpu
def test_one_kernel_per_op_and_no_copy() -> None:
    layers = Layers(V32, num_blocks=4096, block_size=64, max_tokens=256, device="cuda")
    batch = make_batch(layers, 64)
    compiled = compile_whole(layers)
    smallest = state(layers)["index_cache"][0].nbytes
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outputs = [compiled(batch)]
    assert torch.cuda.max_memory_allocated() - before < smallest / 4
    work = device_work(gpu_events(lambda: outputs.append(compiled(batch))))
    assert work == {"norm_rope_kernel": layers.num_layers, "query_kernel": layers.num_layers}
    assert_same(outputs[1], outputs[0])


def assert_captured(
    step: Callable[..., list[torch.Tensor]],
    eager: Callable[..., list[torch.Tensor]],
    batches: Iterable[Any],
) -> None:
    """Under CUDA graphs `step` returns what `eager` does, and graphs are what runs."""
    compiled = compile_whole(step, mode="reduce-overhead")

    def once(batch: Any) -> list[torch.Tensor]:
        torch.compiler.cudagraph_mark_step_begin()
        return [output.clone() for output in compiled(batch)]

    for batch in batches:
        assert_same(once(batch), eager(batch))
    assert "cudaGraphLaunch" in gpu_events(lambda: once(batch))
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert_one_graph()


# The first call with a size warms up, the second records, later ones replay.
SIZES = (20, 20, 20, 33, 33, 33, 20)


def as_attribute(layers: Layers, name: str) -> None:
    """Make a buffer a plain attribute, whose sizes are fixed all the same."""
    cache = getattr(layers, name)
    delattr(layers, name)
    torch._dynamo.mark_static(cache)
    setattr(layers, name, cache)


def test_caches_of_fixed_size_are_written_where_they_are() -> None:
    """Inductor (2.11, 2.13) loses the offset of `cache[layer]` if the cache's size is dynamic.

    Buffers are of fixed size by themselves, attributes when they are marked.
    """
    layers = Layers(SMALL)
    eager = copy.deepcopy(layers)
    for name in state(layers):
        as_attribute(layers, name)
    batch = make_batch(layers, 20)
    with torch.inference_mode():
        torch.compile(layers, fullgraph=True, dynamic=True)(batch)
        eager(batch)
    assert_same(state(layers), state(eager))


@on_gpu
@pytest.mark.parametrize("kind", ["buffers", "attributes"])
def test_reduce_overhead_captures(kind: str) -> None:
    layers = Layers(SMALL, device="cuda")
    eager = copy.deepcopy(layers)
    if kind == "attributes":
        for name in state(layers):
            as_attribute(layers, name)
    batches = [make_batch(layers, size, seed=seed) for seed, size in enumerate(SIZES)]
    assert_captured(layers, eager, batches)
    eager(batches[-1])
    assert_same(state(layers), state(eager))


@on_gpu
def test_reduce_overhead_captures_marked_arguments() -> None:
    """Inductor leaves mutated arguments out of graphs, unless their addresses are static."""
    batches = [testing.norm_rope_inputs(SMALL, n, device="cuda") for n in SIZES]
    written = {name: batches[3][name] for name in ("topk_indices_buffer", MLA, INDEX)}
    expected = {name: tensor.clone() for name, tensor in written.items()}
    for tensor in written.values():
        torch._dynamo.mark_static_address(tensor)

    def step(batch: dict[str, Any]) -> list[torch.Tensor]:
        return [torch.ops.dsv32.fused_norm_rope(**batch)]

    def eager(batch: dict[str, Any]) -> list[torch.Tensor]:
        return step({**batch, **expected})

    assert_captured(step, eager, [{**batch, **written} for batch in batches])
    assert_same(written, expected)
