"""Tell regressions from noise between two result files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

KEY = ("op", "config", "heads", "mode", "query", "fill_topk", "num_tokens")

# Run-to-run differences of one binary on one machine stay below this share of the time, and, for
# launches of about a microsecond, below this many microseconds.
MIN_RELATIVE = 0.03
MIN_US = 0.1


@dataclass(frozen=True)
class Change:
    """One row in two files. ``verdict``: same, faster, slower, machine, new or gone."""

    key: tuple[Any, ...]
    old_us: float | None
    new_us: float | None
    allowed: float
    verdict: str

    @property
    def ratio(self) -> float | None:
        """New time over old time."""
        return self.new_us / self.old_us if self.new_us and self.old_us else None


def row_key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What identifies a measurement across files."""
    return tuple(row.get(name) for name in KEY)


def compare(old: Iterable[Mapping[str, Any]], new: Iterable[Mapping[str, Any]]) -> list[Change]:
    """Compare rows that both files hold; list those that only one of them holds.

    A row is *slower* when its time grew by more than ``MIN_RELATIVE`` plus the spread (20th to 80th
    percentile) of both measurements, and by more than ``MIN_US``. When the floor, which is no code
    of ours, grew as much, the verdict is *machine*: another GPU, clock or driver.
    """
    old_rows = {row_key(row): row for row in old}
    new_rows = {row_key(row): row for row in new}
    changes = [_change(key, old_rows[key], new_rows[key]) for key in new_rows if key in old_rows]
    for key in new_rows.keys() - old_rows.keys():
        changes.append(Change(key, None, new_rows[key]["us"], 0.0, "new"))
    for key in old_rows.keys() - new_rows.keys():
        changes.append(Change(key, old_rows[key]["us"], None, 0.0, "gone"))
    return changes


def regressions(changes: Iterable[Change]) -> list[Change]:
    """The changes that count as regressions, the worst first."""
    slower = [change for change in changes if change.verdict == "slower"]
    return sorted(slower, key=lambda change: -(change.ratio or 0.0))


def _change(key: tuple[Any, ...], old: Mapping[str, Any], new: Mapping[str, Any]) -> Change:
    allowed = MIN_RELATIVE + _spread(old) + _spread(new)
    ratio, difference = new["us"] / old["us"], new["us"] - old["us"]
    verdict = "same"
    if abs(difference) > MIN_US and ratio < 1 / (1 + allowed):
        verdict = "faster"
    elif difference > MIN_US and ratio > 1 + allowed:
        drift = _floor_ratio(old, new)
        verdict = "slower" if ratio / drift > 1 + allowed else "machine"
    return Change(key, old["us"], new["us"], allowed, verdict)


def _spread(row: Mapping[str, Any]) -> float:
    if row.get("us_p20") is None or row.get("us_p80") is None:
        return 0.0
    return (row["us_p80"] - row["us_p20"]) / row["us"]


def _floor_ratio(old: Mapping[str, Any], new: Mapping[str, Any]) -> float:
    """How much slower the machine was; never below 1, so that a fast floor accuses nobody."""
    if not old.get("floor_us") or not new.get("floor_us"):
        return 1.0
    return max(1.0, new["floor_us"] / old["floor_us"])
