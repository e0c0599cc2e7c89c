"""From the dispatcher to the device: measured configurations, launches, and calls seen before."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import math
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from . import platform
from .geometry import Grid

# Measured on an H200 over 1 to 65,536 tokens by benchmarks/tune.py and variants of the kernels
# (benchmarks/NOTES.md); other architectures run the same until somebody measures them there.
#
# (most tokens, programs of a token) of `fused_norm_rope`, with and without the fill; above, one.
# More programs shorten the critical path until a multiprocessor, which starts 6 of them per us, is
# busy with that; without a fill the fourth has nothing to do. Above 1,024 tokens (1,280 without a
# fill) two again: there the programs of a launch fill 30 to 80 % of the places on the
# multiprocessors, and those of the next one, which dependent launch lets in, take the rest
# unevenly. All grids run one binary.
NORM_ROPE_PARTS = {
    True: ((256, 4), (512, 2), (768, 4), (1024, 1), (2304, 2)),
    False: ((192, 4), (608, 2), (1280, 1), (1792, 2)),
}
# Four warps take 5 % longer at 16,384 tokens with the fill, 54 % without.
NORM_ROPE_WARPS = 1
# Heads of a `fused_q` program. With more than 32 heads, fewer and larger programs: 17 % faster at
# 128 tokens of 128 heads; with 16 heads they are 28 % slower.
QUERY_HEAD_TILE = 4
QUERY_FEW_HEADS = 32
QUERY_LARGE_HEAD_TILE = 8
# Rope parts alone: a share of the heads beside a tile of the indexer's, this many at most.
QUERY_LARGE_ROPE_TILE = 32
# For the large tiles of either kind twice as many.
QUERY_WARPS = 2
QUERY_INDEX_TILE = 16
# Up to here the tasks of a batch are done one after the other, for all tokens.
QUERY_FEW_TOKENS = 512
# A warp of a norm kernel holds this many elements of a row: eight warps a row of 7,168. Four take 4
# to 13 % longer from 128 to 512 tokens, eight take 1.5 % longer from 16,384 on.
NORM_ELEMENTS_PER_WARP = 1024


def norm_rope_grid(num_tokens: int, constants: Mapping[str, Any]) -> Grid:
    # Written without a comparison: a traced launch keeps one graph for every token count.
    parts = above = 1
    for limit, count in reversed(NORM_ROPE_PARTS[constants["TOPK"] > 0]):
        up_to = torch.sym_min(1, limit // torch.sym_max(num_tokens, 1))
        parts = parts + (count - above) * up_to
        above = count
    return Grid(num_tokens, parts)


def query_tiles(heads: int, quantize: bool, index_heads: int) -> dict[str, int]:
    """Heads per program: enough bytes that every thread moves 16 at a time."""
    index_tile = min(QUERY_INDEX_TILE, _next_power_of_2(max(index_heads, 1)))
    if quantize:
        tile = QUERY_HEAD_TILE if heads <= QUERY_FEW_HEADS else QUERY_LARGE_HEAD_TILE
    else:
        share = -(-heads // max(-(-index_heads // index_tile), 1))
        tile = min(QUERY_LARGE_ROPE_TILE, _next_power_of_2(share))
    return {
        "FEW": QUERY_FEW_TOKENS,
        "TILE": min(tile, _next_power_of_2(heads)),
        "INDEX_TILE": index_tile,
    }


def query_warps(constants: Mapping[str, Any]) -> int:
    large = QUERY_LARGE_HEAD_TILE if constants["QUANTIZE"] else QUERY_LARGE_ROPE_TILE
    return QUERY_WARPS * (2 if constants["TILE"] == large else 1)


def query_grid(num_tokens: int, constants: Mapping[str, Any]) -> Grid:
    head_tiles = -(-constants["HEADS"] // constants["TILE"])
    index_tiles = -(-constants["INDEX_HEADS"] // constants["INDEX_TILE"])
    both = head_tiles + index_tiles if constants["QUANTIZE"] else max(head_tiles, index_tiles)
    return Grid(num_tokens, both)


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def norm_warps(dim: int) -> int:
    """Warps of a program that norms one row of `dim` elements."""
    return min(max(_next_power_of_2(dim) // NORM_ELEMENTS_PER_WARP, 1), 16)


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


def cached(function: Callable[..., Any]) -> Callable[..., Any]:
    """functools.cache of a function of model sizes; symbolic ones, as in a trace, become fixed."""
    call = functools.cache(function)

    @functools.wraps(function)
    def fixed(*args: Any) -> Any:
        if any(isinstance(arg, torch.SymInt) for arg in args):
            args = tuple(int(arg) if isinstance(arg, torch.SymInt) else arg for arg in args)
        return call(*args)

    return fixed


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
) -> Any:
    """Start `kernel` on the current stream of `device`, whatever device is current.

    Returns the compiled kernel, or None if there was nothing to start.
    """
    if grid.empty:
        return None
    shape = grid.launch(platform.backend(device), threads=num_warps * 64)
    options: dict[str, Any] = {"num_warps": num_warps}
    if constants["PDL"]:
        options["launch_pdl"] = True
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    with torch.cuda.device(device) if elsewhere else contextlib.nullcontext():
        return kernel[shape](*args, **constants, **options)


class Call(NamedTuple):
    """A checked call, ready to be launched."""

    kernel: Any
    grid: Grid
    args: tuple[Any, ...]
    constants: Mapping[str, Any]
    num_warps: int
    device: torch.device
    # What the call allocated.
    outputs: tuple[Tensor, ...]
    # Whether the next one like it needs no check.
    repeatable: bool = True


Prepare = Callable[[tuple[Any, ...], tuple[Tensor, ...]], Call]


def run(
    name: str, args: tuple[Any, ...], outs: tuple[Tensor, ...], prepare: Prepare
) -> Sequence[Tensor]:
    """Do an op's call as the dispatcher makes it, and return the outputs: `outs` if there are any.

    `prepare` checks and prepares a call whose like has not been seen. An op and its `_out` form may
    share a name if they never have as many arguments.
    """
    given = (*outs, *args) if outs else args
    shortcut = find_shortcut(name, given)
    if shortcut is not None and (new := shortcut(given)) is not None:
        return outs or new
    call = prepare(args, outs)
    compiled = launch(
        call.kernel, call.grid, call.args, call.constants, call.device, call.num_warps
    )
    if call.repeatable and compiled is not None:
        remember(name, given, call, compiled)
    return outs or call.outputs


class Shortcut:
    """The launch of a call whose like was checked, prepared and compiled before.

    Triton's own path from arguments to the compiled kernel takes 40 to 70 us of host time for
    `fused_norm_rope` on the H200's host, the checks and the preparation another 30. A call with
    the same shapes, strides, types and flags needs none of that: only its addresses are new.
    """

    def __init__(
        self, compiled: Any, grid: Grid, args: Sequence[Any], outputs: Sequence[Tensor],
        sources: Mapping[int, tuple[int, int]], values: Sequence[Any], device_index: int,
    ) -> None:  # fmt: skip
        """`values` are the kernel's arguments. By the place of each pointer, `sources` has
        (index, address bits that must be zero).

        The index counts the outputs first, then `args`: with one output, 0 is that and 3 `args[2]`.
        """
        tensors = [i for i, arg in enumerate(args) if isinstance(arg, Tensor)]
        first = {id(args[i]): i for i in reversed(tensors)}
        # A model's two rotations share a table, and outs may be the inputs themselves: tensors that
        # are one here must be one again, all others apart, which the guard sees to.
        self._twins = [(i, first[id(args[i])]) for i in tensors if first[id(args[i])] != i]
        self._tensors = _picker(sorted(first.values()))
        self._guard = guard(self._tensors(args))
        self._plain = _picker([i for i in range(len(args)) if i not in tensors])
        self._plain_values = self._plain(args)
        # -0.0 equals 0.0, and is another factor.
        self._zeros = [
            (i, math.copysign(1.0, arg))
            for i, arg in enumerate(args)
            if isinstance(arg, float) and arg == 0.0
        ]

        # The guard compares requires_grad, not whether it matters. Where it does the checks refuse.
        self._without_grad = any(args[i].requires_grad for i in tensors)
        self._soft = platform.soft_fp8_chosen()
        self.device_index = device_index
        self.start = starter(compiled, grid.launch(), len(values))
        self.outputs = [(tuple(t.shape), t.stride(), t.dtype) for t in outputs]
        # New outputs are aligned.
        given: dict[int, int] = {}
        for index, mask in sources.values():
            if (i := index - len(outputs)) >= 0:
                given[i] = given.get(i, 0) | mask
        self._pointers = _picker(list(given))
        self._must_align = _picker([n for n, mask in enumerate(given.values()) if mask])
        # One pick from all addresses and the other values puts the kernel's arguments in order.
        place = [*range(len(outputs)), *(len(outputs) + i for i in given)]
        self._values = tuple(values)
        self._order = _picker(
            [
                place.index(sources[slot][0]) if slot in sources else len(place) + slot
                for slot in range(len(values))
            ]
        )

    def matches(self, args: Sequence[Any]) -> bool:
        """Whether a call of the same op with as many arguments is like the remembered one."""
        if self._plain(args) != self._plain_values or not self._guard(*self._tensors(args)):
            return False
        for i, twin in self._twins:
            if args[i] is not args[twin]:
                return False
        for i, sign in self._zeros:
            if math.copysign(1.0, args[i]) != sign:
                return False
        if self._without_grad and torch.is_grad_enabled():
            return False
        return platform.soft_fp8_chosen() is self._soft

    def __call__(self, args: Sequence[Any]) -> list[Tensor] | None:
        """Launch and return the new outputs; None if the compiled kernel is not for these tensors.

        A profiler that listens to launches wants Triton's own path.
        """
        if _current_device() != self.device_index or _launch_hooks():
            return None
        addresses = [*map(_data_ptr, self._pointers(args))]
        for address in self._must_align(addresses):
            if address & 15:
                return None
        outputs = [_empty_strided(*like) for like in self.outputs]
        values = self._order((*map(_data_ptr, outputs), *addresses, *self._values))
        self.start(_raw_stream(self.device_index), values)
        return outputs


def _picker(indices: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """operator.itemgetter that returns a tuple for any number of indices."""
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    if indices:
        (only,) = indices
        return lambda values: (values[only],)
    return lambda values: ()


def guard(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A check that tensors have the types, sizes, strides and devices of these.

    torch.compile's own guard takes 2 us for 13 tensors, the same in Python 10. It refuses two that
    are one and the same.
    """
    try:
        guards = _guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        check: Callable[..., bool] = guards.check
        check(*tensors)
    except (AttributeError, TypeError, RuntimeError):
        return _PythonGuard(tensors)
    return check


class _PythonGuard:
    """What `guard` needs of a torch without those guards."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._expected = self._describe(tensors)

    def __call__(self, *tensors: Any) -> bool:
        return self._describe(tensors) == self._expected

    @staticmethod
    def _describe(tensors: Sequence[Any]) -> Any:
        if not all(isinstance(t, Tensor) for t in tensors):
            return None
        distinct = len(set(map(id, tensors))) == len(tensors)
        return distinct, [
            (type(t), t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in tensors
        ]


_guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
# What torch.compile's generated code allocates with: 2 us less than torch.empty. It and the next
# two may be missing from a torch without CUDA: `remember` asks.
_empty_strided: Any = getattr(_guards, "_empty_strided_cuda", None)
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_data_ptr = torch.Tensor.data_ptr
_runtime = triton.knobs.runtime
_shortcuts: dict[Any, list[Shortcut]] = {}
_latest: dict[Any, Shortcut] = {}
# Every token count has an entry of its own.
MAX_SHORTCUTS = 4096
# Calls of one token count with other flags or strides, caches of other sizes, longer slot maps.
MAX_ALIKE = 64


def find_shortcut(name: str, args: Sequence[Any]) -> Shortcut | None:
    """The shortcut of a call as the dispatcher makes it, whose first argument has the tokens.

    The dispatcher has given each argument the type that the schema says, so that plain values that
    are equal are the same, but for the sign of a zero.
    """
    if platform.check_device_data():
        return None
    # The layers of a model call an op alike, one after the other.
    op = (name, len(args))
    latest = _latest.get(op)
    if latest is not None and latest.matches(args):
        return latest
    for shortcut in _shortcuts.get((op, args[0].shape), ()):
        if shortcut.matches(args):
            _latest[op] = shortcut
            return shortcut
    return None


def forget_shortcuts() -> None:
    _shortcuts.clear()
    _latest.clear()


def remember(name: str, args: Sequence[Any], call: Call, compiled: Any) -> None:
    """Keep a shortcut for calls like the one just launched, if everything about it is known.

    A tensor that goes to the kernel, from the outputs or `args`, must be the very object: a view
    made for the launch has an address of its own.
    """
    needed = (_empty_strided, _current_device, _raw_stream)
    if torch.version.hip is not None or None in needed:
        return
    key = ((name, len(args)), args[0].shape)
    alike = _shortcuts.get(key, [])
    if any(known.matches(args) for known in alike):
        return
    # A NaN equals no later one.
    if any(isinstance(arg, float) and arg != arg for arg in args):
        return
    candidates = [*call.outputs, *args]
    sources = {}
    for slot, arg in enumerate(call.args):
        if isinstance(arg, Tensor):
            mask = 0 if call.kernel.params[slot].do_not_specialize_on_alignment else 15
            index = next((i for i, candidate in enumerate(candidates) if candidate is arg), None)
            if index is None or arg.data_ptr() & mask:
                return
            sources[slot] = index, mask
    if not all(hasattr(compiled, part) for part in ("run", "function", "packed_metadata")):
        return
    launcher: Any = type(compiled.run)
    if not _known_launcher(launcher):
        return
    values = [None if isinstance(arg, Tensor) else arg for arg in call.args]
    shortcut = Shortcut(
        compiled, call.grid, args, call.outputs, sources,
        [*values, *call.constants.values()], call.device.index,
    )  # fmt: skip
    if not shortcut.matches(args):
        return
    if len(_shortcuts) >= MAX_SHORTCUTS:
        forget_shortcuts()
    _shortcuts[key] = [shortcut, *alike][:MAX_ALIKE]


@functools.cache
def _known_launcher(kind: type) -> bool:
    """Whether a compiled kernel's launcher is called as `Shortcut` does; Triton 3.6's and 3.7's
    are. Reading a signature takes 60 us."""
    try:
        names = list(inspect.signature(kind.__call__).parameters)
    except (AttributeError, TypeError, ValueError):
        return False
    leading = ["self", "gridX", "gridY", "gridZ", "stream", "function"]
    hooked = ["kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook"]
    return names in ([*leading, "args"], [*leading, *hooked, "args"])


Start = Callable[[int, tuple[Any, ...]], None]


def starter(compiled: Any, grid: Sequence[int], num_values: int) -> Start:
    """start(stream, values) of a compiled kernel whose launcher is a known one.

    The launcher is Python in front of a C function, 1 to 2 us of a call. What it hands to that
    function is recorded once, with stand-ins for the stream and the values; a record that is not
    understood leaves the launcher in front.
    """
    run, leading = compiled.run, (compiled.function, compiled.packed_metadata, None, None, None)

    def through_launcher(stream: int, values: tuple[Any, ...]) -> None:
        run(*grid, stream, *leading, *values)

    # A kernel that needs scratch memory needs new memory at each launch.
    if any(getattr(run, f"{kind}_scratch_size", None) != 0 for kind in ("global", "profile")):
        return through_launcher
    stream, values = object(), tuple(object() for _ in range(num_values))
    records: list[tuple[Any, ...]] = []
    try:
        function, twin = run.launch, copy.copy(run)
        twin.launch = lambda *args: records.append(args)
        twin(*grid, stream, *leading, *values)
        (record,) = records
        at = record.index(stream)
    except (AttributeError, TypeError, ValueError):
        return through_launcher
    before, behind = record[:at], record[at + 1 :]
    if behind[-1:] == (values,):
        fixed = behind[:-1]
        return lambda stream, values: function(*before, stream, *fixed, values)
    fixed = behind[: len(behind) - num_values]
    if (*fixed, *values) == behind:
        return lambda stream, values: function(*before, stream, *fixed, *values)
    return through_launcher


def _launch_hooks() -> bool:
    enter, leave = _runtime.launch_enter_hook, _runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter)) or bool(getattr(leave, "calls", leave))
