"""Where the host time of an eager call goes: dispatcher, allocation, checks, launch."""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Callable
from typing import Any

import torch

from . import checks, launch, models, testing
from .bench.timing import Call, host_times
from .ops import mtp, norm_rope, query


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=64, help="tokens of the call (default 64)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(options: argparse.Namespace) -> int:
    # With an index, as the tensors of a call have it: use_pdl asks for it.
    device = torch.empty(0, device=options.device).device
    config = models.PRESETS["deepseek-v3.2"]
    rows = {
        "fused_norm_rope": _breakdown(
            torch.ops.dsv32.fused_norm_rope,
            testing.norm_rope_inputs(config, options.tokens, device=device),
            device,
            check=checks.norm_rope,
            allocate=lambda values: norm_rope._empty_output(values[1]),
            prepare=lambda values, out, pdl: norm_rope.prepare(*values, q_c_out=out, pdl=pdl),
            kernel=norm_rope.norm_rope_kernel,
            warps=lambda constants: launch.NORM_ROPE_WARPS,
        ),
        "fused_q": _breakdown(
            torch.ops.dsv32.fused_q,
            testing.q_inputs(config, options.tokens, 16, device=device),
            device,
            check=checks.query,
            allocate=lambda values: query._outputs(*values),
            prepare=lambda values, outputs, pdl: query.prepare(*values, outputs=outputs, pdl=pdl),
            kernel=query.query_kernel,
            warps=launch.query_warps,
        ),
        "fused_eh_norm": _breakdown(
            torch.ops.dsv32.fused_eh_norm,
            testing.eh_norm_inputs(config, options.tokens, device=device),
            device,
            check=checks.eh_norm,
            allocate=lambda values: mtp._eh_output(values[2]),
            prepare=lambda values, out, pdl: mtp.prepare_eh(
                *mtp._per_token(values), out=out, pdl=pdl
            ),
            kernel=mtp.eh_norm_kernel,
            warps=lambda constants: launch.norm_warps(constants["DIM"]),
        ),
    }
    if options.json:
        print(json.dumps({"device": str(device), "us": rows}, indent=1))
        return 0
    names = list(dict.fromkeys(name for us in rows.values() for name in us))
    print(f"{'host time, us':44}" + "".join(f"{op:>18}" for op in rows))
    for name in names:
        print(f"{name:44}" + "".join(f"{us.get(name, math.nan):18.1f}" for us in rows.values()))
    return 0


def _breakdown(
    op: Any, inputs: dict[str, Any], device: torch.device, *,
    check: Callable[..., Any], allocate: Callable[..., Any], prepare: Callable[..., Any],
    kernel: Any, warps: Callable[..., int],
) -> dict[str, float]:  # fmt: skip
    """Each part on its own, and whole calls. On a CPU a whole call is mostly the computation."""
    values = _positional(op, inputs)
    outputs, pdl = allocate(values), launch.use_pdl(device)
    grid, args, constants, *_ = prepare(values, outputs, pdl)
    name = op.default._schema.name.removeprefix("dsv32::")
    passed = _without_defaults(op, values)
    parts: dict[str, Call] = {
        "dispatcher (a kernel that does nothing)": _op_like(op, values, lambda *args: outputs),
        "allocation of the outputs": lambda: allocate(values),
        "search for the shortcut": lambda: launch.find_shortcut(name, passed),
        "first call of its kind: checks": lambda: check(*values),
        "first call of its kind: preparation": lambda: prepare(values, outputs, pdl),
    }
    if device.type == "cuda":
        parts["first call of its kind: Triton's launch"] = lambda: launch.launch(
            kernel, grid, args, constants, device, warps(constants)
        )
        op(*values)
        parts.update(_short_path(op, values, launch.find_shortcut(name, passed), passed))
    parts["whole call, keywords"] = lambda: op(**inputs)
    parts["whole call, positional"] = lambda: op(*values)
    return dict(zip(parts, host_times(list(parts.values()), device), strict=True))


def _short_path(
    op: Any, values: tuple[Any, ...], shortcut: Any, passed: tuple[Any, ...]
) -> dict[str, Call]:  # fmt: skip
    """Parts of a call that is like one before, and the least that an op in Python can do."""
    if shortcut is None:
        return {}
    start, recorded = shortcut.start, []
    shortcut.start = lambda stream, values: recorded.append((stream, values))
    written = shortcut(passed)
    shortcut.start = start
    if written is None:
        return {}
    ((stream, kernel_values),) = recorded

    def allocate() -> Any:
        new = [launch._empty_strided(*like) for like in shortcut.outputs]
        return new[0] if len(new) == 1 else tuple(new)

    def least(*args: Any, keep: Any = written) -> Any:
        start(stream, kernel_values)
        return allocate()

    return {
        "short path: allocation": allocate,
        "short path: start": lambda: start(stream, kernel_values),
        "least: dispatcher, allocation, start": _op_like(op, values, least),
    }


def _positional(op: Any, inputs: dict[str, Any]) -> tuple[Any, ...]:
    arguments = op.default._schema.arguments
    return tuple(inputs.get(a.name, a.default_value) for a in arguments)


def _without_defaults(op: Any, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """As the dispatcher passes them: arguments at the end that have their defaults are left out."""
    arguments = op.default._schema.arguments
    while arguments[len(values) - 1].has_default_value():
        default = arguments[len(values) - 1].default_value
        if isinstance(values[-1], torch.Tensor) or values[-1] != default:
            break
        values = values[:-1]
    return values


# Alive as long as the process: torch 2.11 cannot list the ops of a library that is gone, and then
# not import Inductor.
_scratch = torch.library.Library("dsv32_overhead", "FRAGMENT")
_numbers = itertools.count()


def _op_like(op: Any, values: tuple[Any, ...], kernel: Callable[..., Any]) -> Callable[[], Any]:
    """A call of an op with the same schema and another kernel."""
    schema = op.default._schema
    name = f"{schema.name.split('::')[1]}_{next(_numbers)}"
    _scratch.define(f"{name}{str(schema).removeprefix(schema.name)}")
    for key in ("CPU", "CUDA"):
        _scratch.impl(name, kernel, key)
    call = getattr(torch.ops.dsv32_overhead, name)
    return lambda: call(*values)
