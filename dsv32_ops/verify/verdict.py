"""Collects how far results are from what they should be, and says what is too far."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from dsv32_ops import testing
from dsv32_ops.verify import entries, exact

# A different summation order moves one fp32 result in some thousand across a rounding boundary of
# a coarser format; a wrong rounding mode moves half of them.
MAX_DIFFERENT = 0.01


class Checker:
    """The largest differences so far, and a line for each that is too large."""

    def __init__(self, fp8_dtype: torch.dtype, allowed: Mapping[str, float]) -> None:
        self.fp8_dtype = fp8_dtype
        self.allowed_by_name = allowed
        self.failures: list[str] = []
        self.error = self.allowed = 0.0
        self.steps, self.equal = 0, 1.0

    def that(self, ok: bool, message: str) -> None:
        if not ok:
            self.failures.append(message)

    def floats(self, label: str, actual: Tensor, expected: Tensor, allowed: float) -> None:
        """Scaled error within ``allowed``; 16-bit results equal but for ``MAX_DIFFERENT``."""
        worst, equal = 0.0, 0
        for a, e in _row_chunks(actual, expected):
            worst = max(worst, float(exact.scaled_error(a, e).amax()))
            equal += int((a == e.to(a.dtype)).sum())
        if worst * self.allowed >= self.error * allowed:
            self.error, self.allowed = worst, allowed
        self.that(worst <= allowed, f"{label}: error {worst:.2e}, allowed {allowed:.2e}")
        if actual.element_size() == 2:
            self._share(label, equal, actual.numel())

    def codes(
        self, label: str, actual: Tensor, expected: Tensor, fp8_dtype: torch.dtype | None = None
    ) -> None:
        """fp8 codes: one step apart at most, equal but for ``MAX_DIFFERENT``."""
        report = testing.compare_codes(actual, expected, fp8_dtype or self.fp8_dtype)
        self._steps(label, report.max_step)
        self._share(label, round(report.equal * actual.numel()), actual.numel())

    def nibbles(self, label: str, actual: Tensor, expected: Tensor) -> None:
        """e2m1 codes 0 to 15, by the same rule."""
        places = [torch.where(n < 8, n.int(), 8 - n.int()) for n in (actual, expected)]
        self._steps(label, int((places[0] - places[1]).abs().amax()))
        self._share(label, int((actual == expected).sum()), actual.numel())

    def same(self, label: str, actual: Tensor, expected: Tensor) -> None:
        """Equal values."""
        different = int((actual != expected).sum())
        self.that(not different, f"{label}: {different} of {actual.numel()} differ")

    def outputs(
        self, label: str, actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], slack: float
    ) -> None:
        """Returned tensors by name: fp8 ones by code, others by error.

        ``slack`` is 1.5 where ``expected`` was rounded itself, with half the allowed error.
        """
        for name, wanted in expected.items():
            if actual[name].numel() == 0:
                continue
            if actual[name].element_size() == 1:
                self.codes(label + name, actual[name], wanted)
            else:
                allowed = slack * self.allowed_by_name[name]
                self.floats(label + name, actual[name], wanted, allowed)

    def cache_parts(
        self,
        label: str,
        actual: Mapping[str, entries.Part],
        expected: Mapping[str, Tensor],
        slack: float,
    ) -> None:
        """Parts of cache entries, each by its kind."""
        for name, part in actual.items():
            wanted = expected[name]
            if wanted.numel() == 0:
                continue
            if part.kind == entries.FLOAT:
                allowed = slack * self.allowed_by_name[name]
                self.floats(label + name, part.values, wanted, allowed)
            elif part.kind == entries.NIBBLE:
                self.nibbles(label + name, part.values, wanted)
            elif part.kind == entries.SCALE:
                self.same(label + name, part.values, wanted)
            else:
                e4m3fn = part.kind == entries.E4M3FN
                self.codes(
                    label + name, part.values, wanted, torch.float8_e4m3fn if e4m3fn else None
                )

    def _steps(self, label: str, steps: int) -> None:
        self.steps = max(self.steps, steps)
        self.that(steps <= 1, f"{label}: codes {steps} steps apart, allowed 1")

    def _share(self, label: str, equal: int, total: int) -> None:
        self.equal = min(self.equal, equal / total)
        allowed = max(1, int(MAX_DIFFERENT * total))
        self.that(total - equal <= allowed, f"{label}: {total - equal} of {total} differ")


def _row_chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    rows = max(1, (1 << 22) // max(1, tensors[0][:1].numel()))
    yield from zip(*(tensor.split(rows) for tensor in tensors), strict=True)
