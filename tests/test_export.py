"""torch.export and AOTInductor: round trips, traced forms, packages without Python's part."""

from __future__ import annotations

import copy
import inspect
import io
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
from layers import DISTINCT, EMBED, HEADS, Layers, assert_same, make_batch, state
from support import SMALL, on_gpu, outputs_of, to_device
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram, export
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

import dsv32_ops
from dsv32_ops import platform, testing
from dsv32_ops.layouts import MLA_MODES
from dsv32_ops.ops import mtp, norm_rope, query

PER_TOKEN = (
    "positions", "slot_mapping", "q_c", "kv_c", "k_pe", "index_k", "q_pe", "ql_nope", "index_q",
    "index_weights", "input_ids", "inputs_embeds", "previous_hidden",
)  # fmt: skip
WRITTEN = {"topk_indices_buffer", "mla_kv_cache", "indexer_k_cache"}


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield


@pytest.mark.parametrize("strict", [True, False])
def test_round_trip(strict: bool) -> None:
    """Exported, saved, loaded and decomposed programs compute and write what the module does."""
    layers = Layers(DISTINCT, max_tokens=64)
    batch = make_batch(layers, 20)
    tokens = Dim("num_tokens", min=2, max=64)
    shapes = {name: {1 if name == "nope" else 0: tokens} for name in batch}
    program = export(layers, (batch,), dynamic_shapes=(shapes,), strict=strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    functional = program.run_decompositions({})
    assert set(functional.graph_signature.buffers_to_mutate.values()) == set(state(layers))
    for candidate in (program, torch.export.load(file), functional):
        module, eager = candidate.module(), copy.deepcopy(layers)
        for num_tokens in (20, 2, 33, 64):
            batch = make_batch(layers, num_tokens, seed=num_tokens)
            assert_same(module(batch), eager(batch))
        assert_same(state(module), state(eager))


class Call(torch.nn.Module):
    """One op as a module: tensors are arguments, everything else is fixed."""

    def __init__(self, op: str, inputs: dict[str, Any]) -> None:
        super().__init__()
        self.op = getattr(torch.ops.dsv32, op)
        self.fixed = {k: v for k, v in inputs.items() if not isinstance(v, torch.Tensor)}

    def forward(self, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return outputs_of(self.op(**tensors, **self.fixed))


def tensors_of(inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}


def export_call(op: str, inputs: dict[str, Any], other: Any = Dim.STATIC) -> ExportedProgram:
    """Token counts are dynamic, other sizes `other`."""
    tensors = tensors_of(inputs)
    shapes = token_shapes(tensors, other)
    return export(Call(op, inputs), (tensors,), dynamic_shapes=(shapes,), strict=False)


def token_shapes(tensors: dict[str, torch.Tensor], other: Any = Dim.STATIC) -> dict[str, Any]:
    return {
        name: {d: Dim.DYNAMIC if d == 0 and name in PER_TOKEN else other for d in range(t.dim())}
        for name, t in tensors.items()
    }


OPS = ("fused_norm_rope", "fused_q", "fused_eh_norm", "fused_embed_norm", "fused_embed_eh_norm")


def op_inputs(op: str, num_tokens: int = 20, blocks: int = 2, **options: Any) -> dict[str, Any]:
    """Arguments of an op; those that are fixed in an exported program do not depend on N."""
    if op == "fused_norm_rope":
        extra = blocks - -(-num_tokens // 64)
        inputs = testing.norm_rope_inputs(SMALL, num_tokens, extra_blocks=extra, **options)
        buffer = inputs["topk_indices_buffer"].new_empty(64 * blocks, SMALL.index_topk)
        return {**inputs, "topk_indices_buffer": testing.poison(buffer)}
    if op == "fused_q":
        return testing.q_inputs(SMALL, num_tokens, HEADS, **options)
    return getattr(testing, op.removeprefix("fused_") + "_inputs")(EMBED, num_tokens, **options)


@pytest.mark.parametrize("op", OPS)
def test_single_ops(op: str) -> None:
    module = export_call(op, op_inputs(op)).module()
    for num_tokens in (2, 21):
        actual, expected = op_inputs(op, num_tokens), op_inputs(op, num_tokens)
        assert_same(module(tensors_of(actual)), Call(op, expected)(tensors_of(expected)))
        assert_same(tensors_of(actual), tensors_of(expected))


class StubDriver:
    """What Triton asks of a GPU's driver while a kernel is traced: for what to compile it."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., dict[str, Any]]]:
    """Moves arguments to the GPU, or makes them fake tensors of one if there is none."""
    if torch.cuda.is_available():
        yield lambda inputs: to_device(inputs, "cuda")
        return
    monkeypatch.setattr(platform, "capability", lambda index: (9, 0))
    monkeypatch.setattr(driver, "_active", StubDriver())
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)

    def fake(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        with mode:
            return torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device="cuda:0"
            )

    yield lambda inputs: {name: fake(value) for name, value in inputs.items()}


@pytest.mark.parametrize("other", [Dim.STATIC, Dim.AUTO], ids=["static sizes", "dynamic sizes"])
@pytest.mark.parametrize("op", OPS)
def test_traced_forms(op: str, other: Any, as_on_gpu: Callable[..., dict[str, Any]]) -> None:
    """A trace holds one kernel, for every token count, and writes what the schema says."""
    program = export_call(op + "_triton", as_on_gpu(op_inputs(op)), other)
    program = program.run_decompositions({}, decompose_custom_triton_ops=True)
    targets = set(program.graph_signature.user_inputs_to_mutate.values())
    assert {target.removeprefix("tensors_") for target in targets} == (
        WRITTEN if op == "fused_norm_rope" else set()
    )
    (kernel,) = [n for n in program.graph.nodes if "triton_kernel_wrapper" in str(n.target)]
    (grid,) = kernel.kwargs["grid"]
    assert isinstance(grid[0], torch.fx.Node)
    constants = {k: v for k, v in kernel.kwargs["kwargs"].items() if k.isupper()}
    assert constants
    assert not any(isinstance(value, torch.fx.Node) for value in constants.values())
    assert constants["PDL"] is False


@pytest.mark.parametrize("module", [norm_rope, query, mtp])
def test_kernels_are_wrapped_by_their_names(module: ModuleType) -> None:
    """Only so torch's cache of compiled graphs finds a kernel's source and notices an edit."""
    source = inspect.getsource(module)
    names = re.findall(r"(?<![.\w])wrap_triton\((\w+)\)\[", source)
    assert len(names) == source.count("wrap_triton(") > 0
    assert all(isinstance(getattr(module, name), triton.JITFunction) for name in names)


SAME_BYTES: dict[str, tuple[str, dict[str, Any]]] = {
    **{mode: ("fused_norm_rope", {"mode": mode}) for mode in MLA_MODES},
    "outs": ("fused_norm_rope", {"outs": True}),
    "no caches": ("fused_norm_rope", {"caches": False}),
    "fused_q fp8": ("fused_q", {}),
    "fused_q bf16": ("fused_q", {"quantize_mqa": False}),
    **{op: (op, {}) for op in OPS[2:]},
}


@on_gpu
@pytest.mark.parametrize("case", SAME_BYTES)
def test_traced_forms_give_the_same_bytes(case: str) -> None:
    """Eagerly, and as Inductor compiles them, with sizes that it takes for dynamic."""
    op, options = SAME_BYTES[case]
    expected = op_inputs(op, device="cuda", **options)
    outputs = Call(op, expected)(tensors_of(expected))
    forms: list[Callable[..., Any]] = [Call(op + "_triton", expected)]
    if case in ("auto", "fp8_ds_mla", *OPS[1:]) or op == "fused_q":
        forms.append(torch.compile(forms[0], fullgraph=True, dynamic=True))
    for form in forms:
        actual = op_inputs(op, device="cuda", **options)
        assert_same(form(tensors_of(actual)), outputs)
        assert_same(tensors_of(actual), tensors_of(expected))


class Step(torch.nn.Module):
    """Several ops as one module."""

    def __init__(self, *calls: Call) -> None:
        super().__init__()
        self.calls = torch.nn.ModuleList(calls)

    def forward(self, inputs: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
        calls = zip(self.calls, inputs, strict=True)
        return [output for call, tensors in calls for output in call(tensors)]


LOADER = """
import sys, torch
package, given, results = sys.argv[1:]
step = torch._inductor.aoti_load_package(package)
batches = torch.load(given)
outputs = [[out.view(torch.uint8) for out in step(batch)] for batch in batches]
torch.save((outputs, batches), results)
print(sorted({"dsv32_ops", "csrc_free_ops"} & set(sys.modules)))
"""


def package(calls: list[Call], inputs: list[dict[str, Any]], path: Path) -> None:
    tensors = [tensors_of(given) for given in inputs]
    shapes = [token_shapes(given) for given in tensors]
    program = export(Step(*calls), (tensors,), dynamic_shapes=(shapes,), strict=False)
    torch._inductor.aoti_compile_and_package(
        program,
        package_path=str(path),
        inductor_configs={"aot_inductor.compile_wrapper_opt_level": "O0"},
    )


def load_elsewhere(path: Path, batches: Any, preamble: str = "") -> tuple[Any, Any]:
    """Outputs and written inputs of a package, run in a process of its own."""
    given, results = path.with_suffix(".in"), path.with_suffix(".out")
    torch.save(batches, given)
    script = path.with_suffix(".py")
    script.write_text(preamble + LOADER)
    done = subprocess.run(
        [sys.executable, script, path, given, results], cwd=path.parent,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr)
    assert done.stdout.splitlines()[-1] == ("['csrc_free_ops', 'dsv32_ops']" if preamble else "[]")
    return torch.load(results)


@on_gpu
def test_a_package_runs_without_this_one(tmp_path: Path) -> None:
    """AOTInductor compiles the traced forms' kernels into the package."""
    ops = ("fused_norm_rope", "fused_q", "fused_embed_eh_norm")

    def make(num_tokens: int, seed: int) -> list[dict[str, Any]]:
        return [op_inputs(op, num_tokens, 1026, seed=seed, device="cuda") for op in ops]

    inputs = make(20, 0)
    calls = [Call(op + "_triton", given) for op, given in zip(ops, inputs, strict=True)]
    package(calls, inputs, tmp_path / "step.pt2")
    batches = [[tensors_of(given) for given in make(n, n)] for n in (2, 33, 65_537)]
    outputs, written = load_elsewhere(tmp_path / "step.pt2", batches)
    opaque = Step(*(Call(op, given) for op, given in zip(ops, inputs, strict=True)))
    for batch, actual, after in zip(batches, outputs, written, strict=True):
        assert_same(actual, [output.view(torch.uint8) for output in opaque(batch)])
        for name in WRITTEN:
            assert testing.same_bytes(after[0][name], batch[0][name]), name


@on_gpu
def test_a_package_of_opaque_ops_needs_this_one(tmp_path: Path) -> None:
    """It calls the ops by name: they are there only where this package was imported."""
    inputs = op_inputs("fused_eh_norm", device="cuda")
    package([Call("fused_eh_norm", inputs)], [inputs], tmp_path / "step.pt2")
    batch = [tensors_of(op_inputs("fused_eh_norm", 33, seed=1, device="cuda"))]
    with pytest.raises(RuntimeError, match="dsv32::fused_eh_norm"):
        load_elsewhere(tmp_path / "step.pt2", [batch])
    root = Path(dsv32_ops.__file__).parents[1]
    preamble = f"import sys; sys.path.insert(0, {str(root)!r}); import dsv32_ops"
    (outputs,), _ = load_elsewhere(tmp_path / "step.pt2", [batch], preamble)
    expected = torch.ops.dsv32.fused_eh_norm(**batch[0], eps=inputs["eps"])
    assert_same(outputs, [expected.view(torch.uint8)])
