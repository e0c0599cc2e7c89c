"""The short path from a repeated eager call to its compiled kernel, and when it stands aside."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import triton

from dsv32_ops import launch, models, testing
from dsv32_ops.geometry import Grid
from dsv32_ops.ops import mtp as mtp_op
from dsv32_ops.ops import norm_rope as norm_rope_op
from dsv32_ops.ops import query as query_op

CONFIG = models.PRESETS["deepseek-v3.2"]
gpu = pytest.mark.gpu


class Launcher:
    """Called as Triton 3.7's launcher is."""

    def __call__(
        self, gridX, gridY, gridZ, stream, function, kernel_metadata, launch_metadata,
        launch_enter_hook, launch_exit_hook, *args,
    ):  # fmt: skip
        pass


class StreamFirst:
    def __call__(self, stream, gridX, gridY, gridZ, function, *args):
        pass


class Compiled:
    function, packed_metadata = 1, ()

    def __init__(self, run: Any) -> None:
        self.run = run


def test_an_unknown_launcher_is_left_alone() -> None:
    assert launch._known_launcher(Launcher)
    others: list[Any] = [StreamFirst, type(lambda grid, stream, *args: None), type(None), object]
    assert not any(map(launch._known_launcher, others))


class Bare(Launcher):
    """A launcher that hands everything to a function, in an order of its own."""

    global_scratch_size = profile_scratch_size = 0

    def __init__(self, order: Callable[..., tuple[Any, ...]]) -> None:
        self._order, self.entered = order, 0
        self.calls: list[tuple[Any, ...]] = []
        self.launch = lambda *args: self.calls.append(args)

    def __call__(
        self, gridX, gridY, gridZ, stream, function, kernel_metadata, launch_metadata,
        launch_enter_hook, launch_exit_hook, *args,
    ):  # fmt: skip
        self.entered += 1
        self.launch(*self._order((gridX, gridY, gridZ), stream, function, args))


ORDERS: dict[str, tuple[Callable[..., tuple[Any, ...]], bool]] = {
    "values at the end": (lambda grid, *rest: (*grid, *rest[:2], None, *rest[2]), True),
    "values as one": (lambda grid, *rest: (*grid, *rest[:2], None, rest[2]), True),
    "stream in front": (lambda grid, stream, *rest: (stream, *grid, rest[0], *rest[1]), True),
    "values reversed": (lambda grid, *rest: (*grid, *rest[:2], *rest[2][::-1]), False),
    "no stream": (lambda grid, stream, *rest: (*grid, rest[0], *rest[1]), False),
}


@pytest.mark.parametrize("order", ORDERS)
def test_the_function_behind_a_launcher_gets_what_the_launcher_hands_it(order) -> None:
    arranged, understood = ORDERS[order]
    run = Bare(arranged)
    start = launch.starter(Compiled(run), (9, 4, 1), 3)
    assert not run.calls
    for stream, values in ((7, (1, 2, 3)), (8, (4.0, None, "b"))):
        start(stream, values)
        assert run.calls.pop() == arranged((9, 4, 1), stream, Compiled.function, values)
    # The launcher works on a twin while it is recorded.
    assert run.entered == (0 if understood else 2)


def test_a_kernel_with_scratch_memory_goes_through_its_launcher() -> None:
    run = Bare(ORDERS["values as one"][0])
    run.profile_scratch_size = 64
    launch.starter(Compiled(run), (9, 4, 1), 1)(7, (1,))
    assert run.entered == 1


def test_the_launcher_of_this_triton_is_understood() -> None:
    """One that is not costs 1 to 2 us a call, and this test says so first."""
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    launcher: Any = driver.CudaLauncher
    run = launcher.__new__(launcher)
    vars(run).update(
        num_ctas=1, launch_cooperative_grid=False, launch_pdl=True, global_scratch_size=0,
        global_scratch_align=1, profile_scratch_size=0, profile_scratch_align=1,
        arg_annotations=["i32"], kernel_signature=b"i", launch=lambda *args: calls.append(args),
    )  # fmt: skip
    calls: list[tuple[Any, ...]] = []
    compiled = Compiled(run)
    assert launch._known_launcher(launcher)
    start = launch.starter(compiled, (9, 4, 1), 2)
    vars(run)["profile_scratch_size"] = None  # calling it would compare this with a number
    start(7, (5, 6))
    vars(run)["profile_scratch_size"] = 0
    run(9, 4, 1, 7, compiled.function, compiled.packed_metadata, None, None, None, 5, 6)
    assert len(calls) == 2 and calls[0] == calls[1]


@pytest.fixture
def shortcuts(monkeypatch):
    monkeypatch.setattr(launch, "_shortcuts", {})
    monkeypatch.setattr(launch, "_latest", {})
    return launch._shortcuts


def norm_rope(seed: int) -> dict[str, Any]:
    return testing.norm_rope_inputs(CONFIG, 9, device="cuda", seed=seed, padding=0.3)


def results(inputs: dict[str, Any]) -> list[torch.Tensor]:
    names = ("mla_kv_cache", "indexer_k_cache", "topk_indices_buffer")
    return [torch.ops.dsv32.fused_norm_rope(**inputs), *(inputs[name] for name in names)]


class Recorder:
    """The GPU path on CPU tensors: records what either way hands to the compiled kernel."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.warps: list[int] = []
        self.long: list[list[Any]] = []
        self.short: list[list[Any]] = []
        monkeypatch.setattr(launch, "launch", self._launch)
        monkeypatch.setattr(launch, "_empty_strided", self._empty_strided)
        monkeypatch.setattr(launch, "_current_device", lambda: None)
        monkeypatch.setattr(launch, "_raw_stream", lambda index: 77)

    @staticmethod
    def _empty_strided(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype)

    def _launch(self, kernel, grid, args, constants, device, num_warps):
        self.warps.append(num_warps)
        self.long.append([_address(arg) for arg in (*args, *constants.values())])
        return Compiled(Recording(self.short, grid.launch()))

    def same(self, function: Any, args: Sequence[Any]) -> None:
        """A call takes the shortcut, with the arguments that the long way has for its tensors."""
        before = len(self.long)
        outputs = function(*args)
        assert len(self.long) == before, "the long way"
        taken = self.short[-1]
        written = outputs if isinstance(outputs, tuple) else (outputs,)
        launch.forget_shortcuts()
        again = function(*args)
        again = again if isinstance(again, tuple) else (again,)
        expected = self.long.pop()
        for ours, theirs in zip(written, again, strict=True):
            assert (ours.shape, ours.stride(), ours.dtype) == (
                theirs.shape, theirs.stride(), theirs.dtype
            )  # fmt: skip
        renamed = dict(zip(map(_address, again), map(_address, written), strict=True))
        assert taken == [
            renamed.get(value, value) if isinstance(value, int) else value for value in expected
        ]


class Recording(Launcher):
    def __init__(self, calls: list[list[Any]], grid: tuple[int, ...]) -> None:
        self._calls, self._grid = calls, grid

    def __call__(
        self, gridX, gridY, gridZ, stream, function, kernel_metadata, launch_metadata,
        launch_enter_hook, launch_exit_hook, *args,
    ):  # fmt: skip
        assert (gridX, gridY, gridZ) == self._grid and stream == 77
        self._calls.append(list(args))


def _address(value: Any) -> Any:
    return value.data_ptr() if isinstance(value, torch.Tensor) else value


@pytest.fixture
def recorder(monkeypatch, shortcuts) -> Recorder:
    return Recorder(monkeypatch)


def positional(op: str, inputs: dict[str, Any]) -> list[Any]:
    arguments = getattr(torch.ops.dsv32, op).default._schema.arguments
    return [inputs.get(a.name, a.default_value) for a in arguments if a.name != "index_k_out"]


VARIANTS: dict[str, dict[str, Any]] = {
    "auto": {},
    "fp8": {"mode": "fp8"},
    "one table for both": {"shared_table": True},
    "no caches": {"caches": False},
    "outs": {"outs": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_both_ways_hand_the_same_arguments_to_the_kernel(variant, recorder) -> None:
    def args(seed: int) -> list[Any]:
        options = VARIANTS[variant]
        return positional(
            "fused_norm_rope", testing.norm_rope_inputs(CONFIG, 9, seed=seed, **options)
        )

    norm_rope_op._cuda(*args(0))
    assert len(launch._shortcuts) == 1
    recorder.same(norm_rope_op._cuda, args(1))


@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_both_ways_of_the_query(quantize, shared, recorder) -> None:
    first, second = (
        positional(
            "fused_q",
            testing.q_inputs(CONFIG, 9, 16, seed=s, quantize_mqa=quantize, shared_table=shared),
        )
        for s in (0, 1)
    )
    query_op._cuda(*first)
    assert recorder.warps == [launch.QUERY_WARPS]
    recorder.same(query_op._cuda, second)


def test_an_out_form_has_a_name_of_its_own(recorder) -> None:
    """Without their defaults both forms of a call may have as many arguments."""
    args = positional("fused_norm_rope", testing.norm_rope_inputs(CONFIG, 9))
    for _ in range(2):
        norm_rope_op._cuda(*args[:16])
    q_c_out = torch.empty(9, CONFIG.q_lora_rank, dtype=torch.bfloat16)
    assert norm_rope_op._cuda(*args[:15], q_c_out=q_c_out) is q_c_out


MTP: dict[str, tuple[Callable[..., dict[str, Any]], Callable[..., Any], tuple[str, ...]]] = {
    "fused_eh_norm": (testing.eh_norm_inputs, mtp_op._cuda_eh, ("out",)),
    "fused_embed_norm": (
        testing.embed_norm_inputs, mtp_op._cuda_embed, ("residual_out", "normed_out")
    ),
    "fused_embed_eh_norm": (testing.embed_eh_norm_inputs, mtp_op._cuda_embed_eh, ("out",)),
}  # fmt: skip


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("op", MTP)
def test_both_ways_of_the_other_norms(op, given, recorder) -> None:
    make, function, outs = MTP[op]
    width = CONFIG.hidden_size * (2 if outs == ("out",) else 1)

    def call(seed: int) -> tuple[Any, list[Any]]:
        written = {out: torch.empty(9, width, dtype=torch.bfloat16) for out in outs}
        inputs = positional(op, make(CONFIG, 9, seed=seed))
        return functools.partial(function, **written) if given else function, inputs

    first, args = call(0)
    first(*args)
    assert len(launch._shortcuts) == 1
    recorder.same(*call(1))


def test_ids_of_several_dimensions_go_the_long_way(recorder) -> None:
    """The kernel gets a flat view of them, whose address is no argument's."""
    inputs = testing.embed_norm_inputs(CONFIG, 8)
    inputs["input_ids"] = inputs["input_ids"].reshape(2, 4)
    for _ in range(2):
        residual, _ = mtp_op._cuda_embed(*positional("fused_embed_norm", inputs))
        assert residual.shape == (8, CONFIG.hidden_size)
    assert len(recorder.long) == 2 and not launch._shortcuts


def test_indices_need_not_be_aligned(recorder) -> None:
    """As the kernel is compiled for any address of them."""
    first, second = (
        positional("fused_norm_rope", testing.norm_rope_inputs(CONFIG, 9, seed=s)) for s in (0, 1)
    )
    norm_rope_op._cuda(*first)
    indices = [i for i, arg in enumerate(second) if _is_index(arg)]
    assert len(indices) >= 2
    for i in indices:
        second[i] = torch.cat((second[i][:1], second[i]))[1:]
    recorder.same(norm_rope_op._cuda, second)


def _is_index(arg: Any) -> bool:
    return isinstance(arg, torch.Tensor) and arg.dim() == 1 and not arg.is_floating_point()


def test_a_call_whose_checks_read_addresses_is_not_remembered(recorder) -> None:
    inputs = testing.norm_rope_inputs(CONFIG, 9, outs=True)
    assert inputs["index_k_out"] is not None
    arguments = torch.ops.dsv32.fused_norm_rope.default._schema.arguments
    args = [inputs.get(a.name, a.default_value) for a in arguments]
    for _ in range(2):
        norm_rope_op._cuda(*args)
    assert len(recorder.long) == 2 and not launch._shortcuts


def test_nan_is_not_remembered(recorder) -> None:
    """It equals no later one: every call would keep a shortcut that none takes."""
    inputs = testing.eh_norm_inputs(CONFIG, 9)
    for _ in range(2):
        mtp_op._cuda_eh(*positional("fused_eh_norm", {**inputs, "eps": float("nan")}))
    assert len(recorder.long) == 2 and not launch._shortcuts


def test_an_unused_tensor_need_not_be_aligned(recorder) -> None:
    inputs = testing.q_inputs(CONFIG, 9, 16, quantize_mqa=False)
    query_op._cuda(*positional("fused_q", inputs))
    nope = inputs["ql_nope"]
    inputs["ql_nope"] = torch.empty(nope.numel() + 1, dtype=nope.dtype)[1:].as_strided(
        nope.shape, nope.stride()
    )
    recorder.same(query_op._cuda, positional("fused_q", inputs))


def test_out_in_place_and_then_elsewhere(recorder) -> None:
    """A call remembered in place must not make the next one write its input."""
    first, second = (
        positional("fused_norm_rope", testing.norm_rope_inputs(CONFIG, 9, seed=s)) for s in (0, 1)
    )
    first[1], second[1] = first[1].contiguous(), second[1].contiguous()
    norm_rope_op._cuda(*first, q_c_out=first[1])
    out = torch.empty_like(second[1])
    norm_rope_op._cuda(*second, q_c_out=out)
    assert len(recorder.long) == 2 and not recorder.short
    recorder.same(functools.partial(norm_rope_op._cuda, q_c_out=out), second)
    assert {out.data_ptr(), second[1].data_ptr()} <= set(recorder.short[-1])


def test_an_unaligned_tensor_goes_the_long_way(recorder) -> None:
    args = positional("fused_norm_rope", testing.norm_rope_inputs(CONFIG, 9))
    norm_rope_op._cuda(*args)
    weight = args[2]
    args[2] = torch.cat((weight[:1], weight))[1:]
    norm_rope_op._cuda(*args)
    assert len(recorder.long) == 2 and not recorder.short


CHANGES = {
    "other sizes": lambda t: t[:, : t.shape[1] // 2],
    "other strides": lambda t: t.t().contiguous().t(),
    "other type": lambda t: t.half(),
    "needs a gradient": lambda t: t.clone().requires_grad_(),
    "a parameter": torch.nn.Parameter,
    "none": lambda t: None,
}


@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_what_decides_a_launch_is_compared(change, fallback, shortcuts, monkeypatch) -> None:
    if fallback:
        monkeypatch.setattr(launch, "guard", launch._PythonGuard)
    remembered = [torch.empty(9, 8), torch.empty(9, 6), 1e-6, None, "auto"]
    shortcut = launch.Shortcut(Compiled(Launcher()), Grid(9, 1), remembered, [], {}, [], 0)
    fresh = [torch.empty(9, 8), torch.empty(9, 6), 1e-6, None, "auto"]
    assert shortcut.matches(fresh)
    assert not shortcut.matches([*fresh[:2], 1e-5, None, "auto"])
    assert not shortcut.matches([*fresh[:3], fresh[0], "auto"])
    assert not shortcut.matches([*fresh[:4], "fp8"])
    with torch.no_grad() if change == "a parameter" else contextlib.nullcontext():
        assert not shortcut.matches([fresh[0], CHANGES[change](fresh[1]), *fresh[2:]])


@pytest.mark.parametrize("fallback", [False, True])
def test_arguments_that_were_one_tensor_stay_one(fallback, shortcuts, monkeypatch) -> None:
    if fallback:
        monkeypatch.setattr(launch, "guard", launch._PythonGuard)
    a, b, c = (torch.empty(9, 8) for _ in range(3))
    for remembered, like, unlike in (
        ([a, b, a], [c, b, c], [[a, b, c], [a, a, a], [a, a, b]]),
        ([a, b, c], [c, a, b], [[a, b, a], [a, a, b]]),
    ):
        shortcut = launch.Shortcut(Compiled(Launcher()), Grid(9, 1), remembered, [], {}, [], 0)
        assert shortcut.matches(remembered) and shortcut.matches(like)
        assert not any(map(shortcut.matches, unlike))


def test_coding_chosen_later_is_compared(shortcuts, monkeypatch) -> None:
    args = [torch.empty(9, 8), 1e-6]
    shortcut = launch.Shortcut(Compiled(Launcher()), Grid(9, 1), args, [], {}, [], 0)
    assert shortcut.matches(args)
    monkeypatch.setenv("DSV32_OPS_SOFT_FP8", "1")
    assert not shortcut.matches(args)


@pytest.mark.parametrize("name", ["_launch_hooks", "_current_device"])
def test_a_profiler_and_another_device_go_the_long_way(name, recorder, monkeypatch) -> None:
    args = positional("fused_q", testing.q_inputs(CONFIG, 9, 16))
    query_op._cuda(*args)
    with monkeypatch.context() as changed:
        changed.setattr(launch, name, lambda: 1)
        query_op._cuda(*args)
    assert len(recorder.long) == 2 and not recorder.short
    query_op._cuda(*args)
    assert len(recorder.long) == 2 and len(recorder.short) == 1


def test_calls_that_alternate_keep_their_shortcuts(recorder) -> None:
    """Fewer arguments, where the last ones have their defaults; other token counts; other flags."""
    names = [a.name for a in torch.ops.dsv32.fused_q.default._schema.arguments]
    first, second = (
        positional("fused_q", testing.q_inputs(CONFIG, n, 16, quantize_mqa=quantize))
        for n, quantize in ((9, True), (5, False))
    )
    calls = [first, second, first[: names.index("index_rope_interleave")]]
    for call in (*calls, *calls[::-1], *calls):
        query_op._cuda(*call)
    assert len(recorder.long) == 3 and len(recorder.short) == 6


def test_a_zero_factor_keeps_its_sign(recorder) -> None:
    """0.0 equals -0.0."""
    inputs = testing.q_inputs(CONFIG, 9, 16)
    factor = "index_weights_softmax_scale"
    query_op._cuda(*positional("fused_q", {**inputs, factor: 0.0}))
    recorder.same(query_op._cuda, positional("fused_q", {**inputs, factor: 0.0}))
    query_op._cuda(*positional("fused_q", {**inputs, factor: -0.0}))
    assert len(recorder.long) == 2


@pytest.mark.parametrize("fallback", [False, True])
def test_a_gradient_is_refused_after_calls_without(fallback, recorder, monkeypatch) -> None:
    if fallback:
        monkeypatch.setattr(launch, "guard", launch._PythonGuard)
    args = positional("fused_norm_rope", testing.norm_rope_inputs(CONFIG, 9))
    args[2] = torch.nn.Parameter(args[2])
    with torch.no_grad():
        norm_rope_op._cuda(*args)
        norm_rope_op._cuda(*args)
    assert recorder.short
    with pytest.raises(RuntimeError, match="q_norm_weight"):
        norm_rope_op._cuda(*args)


def test_a_torch_without_the_guards(recorder, monkeypatch) -> None:
    monkeypatch.setattr(launch, "_guards", object())
    args = [positional("fused_q", testing.q_inputs(CONFIG, 9, 16, seed=s)) for s in (0, 1)]
    query_op._cuda(*args[0])
    ((shortcut,),) = launch._shortcuts.values()
    assert isinstance(shortcut._guard, launch._PythonGuard)
    recorder.same(query_op._cuda, args[1])


def test_a_call_is_remembered_once(recorder, monkeypatch) -> None:
    """Also if it goes the long way each time, as with DSV32_OPS_CHECK=1."""
    args = positional("fused_norm_rope", testing.norm_rope_inputs(CONFIG, 9))
    monkeypatch.setenv("DSV32_OPS_CHECK", "1")
    for _ in range(3):
        norm_rope_op._cuda(*args)
    assert len(recorder.long) == 3
    assert [len(alike) for alike in launch._shortcuts.values()] == [1]


def test_no_tensor_is_kept(recorder) -> None:
    args = positional("fused_norm_rope", testing.norm_rope_inputs(CONFIG, 9))
    kept = [weakref.ref(arg) for arg in args if isinstance(arg, torch.Tensor)]
    norm_rope_op._cuda(*args)
    assert launch._shortcuts
    del args
    gc.collect()
    assert not any(ref() is not None for ref in kept)


def test_alike_calls_are_bounded(recorder, monkeypatch) -> None:
    monkeypatch.setattr(launch, "MAX_ALIKE", 3)
    for rows in range(10, 20):
        inputs = testing.norm_rope_inputs(CONFIG, 9, table_rows=rows)
        norm_rope_op._cuda(*positional("fused_norm_rope", inputs))
    (alike,) = launch._shortcuts.values()
    assert len(alike) == 3 and len(recorder.long) == 10


def misaligned(call: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    call[2] = torch.cat((call[2][:1], call[2]))[1:]


def passes_views(call: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As a kernel argument that is made for the launch would be: its address is no argument's."""
    prepare = norm_rope_op.prepare

    def with_views(*args: Any, **keywords: Any) -> Any:
        grid, kernel_args, constants = prepare(*args, **keywords)
        fresh = tuple(a.view(a.shape) if isinstance(a, torch.Tensor) else a for a in kernel_args)
        return grid, fresh, constants

    monkeypatch.setattr(norm_rope_op, "prepare", with_views)


def unknown_launcher(call: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_known_launcher", lambda kind: False)


def without(name: str) -> Callable[[list[Any], pytest.MonkeyPatch], None]:
    return lambda call, monkeypatch: monkeypatch.setattr(launch, name, None)


@pytest.mark.parametrize(
    "reason",
    [
        misaligned, passes_views, unknown_launcher,
        *map(without, ("_empty_strided", "_current_device", "_raw_stream")),
    ],
)  # fmt: skip
def test_a_call_that_is_not_understood_is_not_remembered(reason, recorder, monkeypatch) -> None:
    call = positional("fused_norm_rope", testing.norm_rope_inputs(CONFIG, 9))
    reason(call, monkeypatch)
    norm_rope_op._cuda(*call)
    assert len(recorder.long) == 1 and not launch._shortcuts


def test_shortcuts_are_bounded(recorder, monkeypatch) -> None:
    monkeypatch.setattr(launch, "MAX_SHORTCUTS", 3)
    for num_tokens in range(1, 9):
        inputs = testing.norm_rope_inputs(CONFIG, num_tokens)
        norm_rope_op._cuda(*positional("fused_norm_rope", inputs))
        assert len(launch._shortcuts) <= 3


@gpu
def test_the_second_call_takes_it_and_gives_the_same_bytes(shortcuts) -> None:
    torch.ops.dsv32.fused_norm_rope(**norm_rope(0))
    assert len(shortcuts) == 1
    taken = results(norm_rope(1))
    launch.forget_shortcuts()
    for short, long in zip(taken, results(norm_rope(1)), strict=True):
        assert testing.same_bytes(short, long)
    # With the launcher replaced by nothing, a call that takes the shortcut writes nothing.
    torch.ops.dsv32.fused_norm_rope(**norm_rope(0))
    ((shortcut,),) = shortcuts.values()
    shortcut.start = lambda stream, values: None
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
    launch.forget_shortcuts()
    for a, b in zip(short, torch.ops.dsv32.fused_q(**second), strict=True):
        assert testing.same_bytes(a, b) and a.stride() == b.stride() and a.shape == b.shape


@gpu
@pytest.mark.parametrize("op", MTP)
def test_the_other_norms_give_the_same_bytes(op, shortcuts) -> None:
    make, _, _ = MTP[op]
    function = getattr(torch.ops.dsv32, op)
    first, second = (make(CONFIG, 9, device="cuda", seed=s) for s in (0, 1))
    function(**first)
    ((shortcut,),) = shortcuts.values()
    start, taken = shortcut.start, []

    def recorded(stream: int, values: tuple[Any, ...]) -> None:
        taken.append(values)
        start(stream, values)

    shortcut.start = recorded
    short = function(**second)
    assert len(taken) == 1
    launch.forget_shortcuts()
    long = function(**second)
    for a, b in zip(*((x if isinstance(x, tuple) else (x,)) for x in (short, long)), strict=True):
        assert testing.same_bytes(a, b) and a.shape == b.shape and a.stride() == b.stride()


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
    launch.forget_shortcuts()
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
