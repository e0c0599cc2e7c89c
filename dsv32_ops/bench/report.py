"""Rows and comparisons as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dsv32_ops.bench.cases import Case
from dsv32_ops.bench.compare import KEY, Change, regressions
from dsv32_ops.bench.console import microseconds, print_table

Row = dict[str, Any]

# More rows than this are shown as one line per case.
FULL_TABLE_ROWS = 60
SUMMARY_TOKENS = (1, 64, 512, 4096, 16384, 65536, 131072)
CASE_FIELDS = tuple(name for name in KEY if name != "num_tokens")


def case_of(row: Row) -> Case:
    """The case that a row of a result file measured."""
    settings: dict[str, Any] = {name: row.get(name) for name in CASE_FIELDS}
    return Case(**settings)


def by_case(rows: Sequence[Row]) -> dict[Case, list[Row]]:
    """Rows of each case, by token count."""
    groups: dict[Case, list[Row]] = {}
    for row in rows:
        groups.setdefault(case_of(row), []).append(row)
    return {case: sorted(group, key=lambda r: r["num_tokens"]) for case, group in groups.items()}


def print_results(results: dict[str, Any]) -> None:
    """All rows when there are few, else microseconds and fraction of floor for some counts."""
    rows = results["rows"]
    title = f"{results['gpu']}, torch {results['torch']}, triton {results['triton']}"
    if results.get("copy_gb_s"):
        title += f", copy {results['copy_gb_s']:,.0f} GB/s"
    if len(rows) <= FULL_TABLE_ROWS:
        _print_full(title, rows)
    else:
        _print_summary(title, rows)


def _print_full(title: str, rows: Sequence[Row]) -> None:
    columns = "case,tokens,time,floor,of floor,GB/s,host,baseline,speed-up".split(",")
    lines = []
    for case, group in by_case(rows).items():
        for row in group:
            baseline = row.get("baseline_us")
            lines.append(
                [
                    case.label(),
                    f"{row['num_tokens']:,}",
                    microseconds(row["us"]),
                    microseconds(row.get("floor_us")),
                    percent(row.get("fraction_of_floor")),
                    f"{row['gb_s']:,.0f}" if row["gb_s"] >= 10 else f"{row['gb_s']:.2g}",
                    microseconds(row.get("host_us")),
                    microseconds(baseline),
                    f"{baseline / row['us']:.2f} x" if baseline else "-",
                ]
            )
    print_table(title, columns, lines)


def _print_summary(title: str, rows: Sequence[Row]) -> None:
    measured = {row["num_tokens"] for row in rows}
    tokens = [n for n in SUMMARY_TOKENS if n in measured] or sorted(measured)[-7:]
    lines = []
    for case, group in by_case(rows).items():
        found = {row["num_tokens"]: row for row in group}
        lines.append([case.label(), *(_cell(found.get(n)) for n in tokens)])
    columns = ["us (of floor) at tokens:", *(f"{n:,}" for n in tokens)]
    print_table(title, columns, lines)


def _cell(row: Row | None) -> str:
    if row is None:
        return "-"
    us = f"{row['us']:,.0f}" if row["us"] >= 100 else f"{row['us']:.3g}"
    # Below, the floor is launch latency and data that stays in L2.
    if row["num_tokens"] < 1024:
        return us
    return f"{us} ({percent(row.get('fraction_of_floor'))})"


def percent(fraction: float | None) -> str:
    """``0.957`` as ``95.7%``."""
    return "-" if fraction is None else f"{100 * fraction:.1f}%"


def print_changes(changes: Sequence[Change]) -> None:
    """What differs, the regressions first, and a line that counts the rest."""
    counts: dict[str, int] = {}
    for change in changes:
        counts[change.verdict] = counts.get(change.verdict, 0) + 1
    shown = regressions(changes)
    shown += [c for verdict in ("machine", "faster") for c in changes if c.verdict == verdict]
    if shown:
        columns = ["case", "tokens", "old", "new", "change", "noise", "verdict"]
        styles = ["bold red" if change.verdict == "slower" else None for change in shown]
        print_table("Changes", columns, [_change_row(change) for change in shown], styles)
    summary = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    print(f"Compared {len(changes)} rows: {summary or 'nothing in common'}.")
    if counts.get("machine"):
        print("machine: the floor became as much slower, which is no code of ours.")


def _change_row(change: Change) -> list[str]:
    *fields, num_tokens = change.key
    ratio = change.ratio or 1.0
    return [
        Case(*fields).label(),
        f"{num_tokens:,}",
        microseconds(change.old_us),
        microseconds(change.new_us),
        f"{100 * (ratio - 1):+.1f}%",
        f"{100 * change.allowed:.1f}%",
        change.verdict,
    ]
