"""Measures one row: the op, the floor with its traffic, host time and what it is compared with."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dsv32_ops.bench import cases, timing
from dsv32_ops.bench.against import Against
from dsv32_ops.bench.calls import call
from dsv32_ops.bench.stream import CONFIGS, StreamBuffers, StreamConfig
from dsv32_ops.bench.traffic import Traffic, traffic

# Host time does not depend on the token count; above this, waiting for the device costs more than
# the number is worth.
HOST_MAX_TOKENS = 4096

COMPILE = "torch.compile"
# Rows of this size leave too little for the next one's buffers unless their memory goes back.
LARGE_BYTES = 4 << 30

Row = dict[str, Any]


class Measurer:
    """Keeps what rows share: the floors measured so far, the device, the baselines."""

    def __init__(
        self,
        device: torch.device,
        against: Sequence[Against] = (),
        compile_tokens: Sequence[int] = (),
        scattered: bool = False,
    ) -> None:
        self.device = device
        self.scattered = scattered
        self.against = against
        self.compile_tokens = frozenset(compile_tokens)
        self._floors: dict[tuple[Traffic, int], float] = {}
        self._stream_configs: dict[tuple[str, int], StreamConfig] = {}

    def row(self, case: cases.Case, num_tokens: int) -> Row:
        """Measure ``case`` at ``num_tokens``."""
        op = getattr(torch.ops.dsv32, case.op)
        sets, moved = self._inputs(case, num_tokens)
        calls = [call(case.op, op, arguments) for arguments in sets]
        taken = timing.device_time(calls, num_tokens, self.device)
        row: Row = {
            **case.fields(),
            "num_tokens": num_tokens,
            "read_bytes": moved.read,
            "written_bytes": moved.written,
            "us": taken.us,
            "us_p20": taken.p20,
            "us_p80": taken.p80,
            "method": taken.method,
            "gb_s": moved.gb_s(taken.us),
        }
        if case.op == "fused_norm_rope":
            row["slots"] = "scattered" if self.scattered else "serving"
        if num_tokens <= HOST_MAX_TOKENS:
            (row["host_us"],) = timing.host_times(calls[:1], self.device)
        copies = len(sets)
        del sets, calls
        if moved.total > LARGE_BYTES:
            self.release()
        row["floor_us"] = self.floor(moved, num_tokens, copies)
        if row["floor_us"]:
            row["fraction_of_floor"] = row["floor_us"] / row["us"]
        return {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}

    def floor(self, moved: Traffic, num_tokens: int, copies: int) -> float | None:
        """Microseconds of the fastest streaming kernel for these bytes, timed like the op."""
        if self.device.type == "cpu":
            return None
        key = (moved, num_tokens)
        if key not in self._floors:
            self._floors[key] = self._stream(moved, num_tokens, copies)
            if moved.total > LARGE_BYTES:
                self.release()
        return self._floors[key]

    def release(self) -> None:
        """Captured graphs and outputs of the largest rows are tens of GB: give them back."""
        gc.collect()
        if self.device.type != "cpu":
            torch.cuda.empty_cache()

    def recovers(self) -> bool:
        """Whether the device still works after an error; memory is given back first."""
        try:
            self.release()
            if self.device.type != "cpu":
                torch.cuda.synchronize(self.device)
        except RuntimeError:
            return False
        return True

    def _stream(self, moved: Traffic, num_tokens: int, copies: int) -> float:
        buffers = StreamBuffers(moved.read, moved.written, copies, self.device)

        def us(config: StreamConfig) -> float:
            return timing.device_time(buffers.calls(config), num_tokens, self.device).us

        # All configurations are tried once per method and power of two of the bytes.
        method = "graph" if num_tokens <= timing.GRAPH_MAX else "flushed"
        size = (method, moved.total.bit_length())
        if size in self._stream_configs:
            return us(self._stream_configs[size])
        times = {config: us(config) for config in CONFIGS}
        self._stream_configs[size] = min(times, key=times.__getitem__)
        return min(times.values())

    def has_baseline(self, case: cases.Case, num_tokens: int) -> bool:
        """Whether ``baselines`` may find something to measure for a row."""
        return bool(self._functions(case, num_tokens))

    def baselines(self, case: cases.Case, num_tokens: int) -> Row:
        """Fields to add to a row: what the same takes by other means."""
        sets, _ = self._inputs(case, num_tokens)
        row: Row = {}
        for name, function in self._functions(case, num_tokens, sets[0]).items():
            taken = self._time(case, function, num_tokens, sets)
            row |= {"baseline": name, "baseline_us": round(taken.us, 4)}
            if name == COMPILE:
                row["compile_us"] = row["baseline_us"]
            elif num_tokens <= HOST_MAX_TOKENS:
                both = [
                    call(case.op, f, sets[0]) for f in (getattr(torch.ops.dsv32, case.op), function)
                ]
                ours, theirs = timing.host_times(both, self.device)
                row |= {"host_us": round(ours, 4), "baseline_host_us": round(theirs, 4)}
        return row

    def _functions(
        self, case: cases.Case, num_tokens: int, arguments: dict[str, Any] | None = None
    ) -> dict[str, Callable[..., Any]]:
        """Baselines by name, the one that a row shows last."""
        functions: dict[str, Callable[..., Any]] = {}
        if num_tokens in self.compile_tokens:
            from dsv32_ops.bench import plain

            compiled = plain.compiled(case)
            if compiled is not None:
                functions[COMPILE] = compiled
        for other in self.against:
            if other.op == case.op and not (arguments and other.missing(arguments)):
                functions[other.name] = other.function
        return functions

    def _inputs(self, case: cases.Case, num_tokens: int) -> tuple[list[dict[str, Any]], Traffic]:
        """As many sets of arguments as the method rotates over, and the traffic of one call."""
        sets = [cases.build(case, num_tokens, self.device, scattered=self.scattered)]
        outputs = call(case.op, getattr(torch.ops.dsv32, case.op), sets[0])()
        moved = traffic(sets[0], as_tuple(outputs))
        if self.device.type != "cpu":
            copies = timing.num_copies(num_tokens, moved.total)
            sets += [cases.clone(sets[0]) for _ in range(copies - 1)]
        return sets, moved

    def _time(
        self,
        case: cases.Case,
        function: Callable[..., Any],
        num_tokens: int,
        sets: Sequence[dict[str, Any]],
    ) -> timing.Timing:
        calls = [call(case.op, function, arguments) for arguments in sets]
        for one in calls:
            one()
        return timing.device_time(calls, num_tokens, self.device)


def as_tuple(outputs: Any) -> tuple[torch.Tensor, ...]:
    """An op's outputs as a tuple."""
    return (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)
