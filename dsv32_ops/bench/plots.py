"""Two pictures of a result file: fraction of the floor, and time, over the token count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from dsv32_ops.bench.cases import Case
from dsv32_ops.bench.report import by_case

Row = dict[str, Any]
Panel = tuple[str, dict[str, list[Row]]]
# Below, a floor is launch latency, and the data stays in L2.
FRACTION_MIN_TOKENS = 512
TARGET = 0.95
COLUMNS = 4


def draw(results: dict[str, Any], path: Path) -> list[Path]:
    """Write ``<file>-fraction.png`` and ``<file>-time.png`` beside the result file."""
    panels = panels_of(results["rows"])
    head = f"{results['gpu']}, torch {results['torch']}, triton {results['triton']}"
    written = []
    for name, title, plot in (
        ("fraction", f"Fraction of the streaming floor: {head}", _fraction),
        ("time", f"Time per call: {head}", _time),
    ):
        shown = [panel for panel in panels if name == "time" or _has_fraction(panel)]
        if shown:
            written.append(_figure(shown, title, plot, path.with_name(f"{path.stem}-{name}.png")))
    return written


def panels_of(rows: Sequence[Row]) -> list[Panel]:
    """A panel per op and setting, a line per mode, model or op within it."""
    panels: dict[str, dict[str, list[Row]]] = {}
    for case, group in by_case(rows).items():
        title, line = _place(case)
        panels.setdefault(title, {})[line] = group
    return list(panels.items())


def _place(case: Case) -> tuple[str, str]:
    if case.op == "fused_norm_rope":
        fill = "" if case.fill_topk else ", no fill"
        return f"fused_norm_rope, {case.config}{fill}", str(case.mode)
    if case.op == "fused_q":
        return f"fused_q, {case.query} query", f"{case.config}, H {case.heads}"
    return f"MTP and embedding, {case.config}", case.op


def _has_fraction(panel: Panel) -> bool:
    return any(_fraction_points(rows) for rows in panel[1].values())


def _fraction_points(rows: Sequence[Row]) -> list[tuple[int, float]]:
    return [
        (row["num_tokens"], row["fraction_of_floor"])
        for row in rows
        if row.get("fraction_of_floor") and row["num_tokens"] >= FRACTION_MIN_TOKENS
    ]


def _figure(
    panels: Sequence[Panel],
    title: str,
    plot: Callable[[Axes, dict[str, list[Row]]], None],
    path: Path,
) -> Path:
    columns = min(COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(4.6 * columns, 3.7 * lines + 0.5), squeeze=False
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (name, cases) in zip(axes.flat, panels, strict=False):
        axis.set_title(name, fontsize=10)
        axis.grid(True, which="major", color="0.9", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        plot(axis, cases)
        axis.set_xlabel("tokens")
        axis.legend(fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=12)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _fraction(axis: Axes, cases: dict[str, list[Row]]) -> None:
    top = 1.05
    tokens: list[int] = []
    for i, (name, rows) in enumerate(cases.items()):
        points = _fraction_points(rows)
        if not points:
            continue
        counts, fractions = zip(*points, strict=True)
        axis.plot(counts, fractions, marker="o", markersize=3, color=f"C{i}", label=name)
        top, tokens = max(top, *fractions), [*tokens, *counts]
    axis.axhline(1.0, color="0.4", linewidth=0.8)
    axis.axhline(TARGET, color="0.4", linewidth=0.8, linestyle=":", label=f"target {TARGET:.2f}")
    axis.set_ylim(0, top * 1.03)
    axis.set_ylabel("floor time / time")
    _token_axis(axis, tokens)


def _time(axis: Axes, cases: dict[str, list[Row]]) -> None:
    rows_of_all = [row for rows in cases.values() for row in rows]
    for i, (name, rows) in enumerate(cases.items()):
        color = f"C{i}"
        axis.plot(*_points(rows, "us"), marker="o", markersize=3, color=color, label=name)
        axis.plot(*_points(rows, "floor_us"), linestyle=":", linewidth=1.2, color=color)
        axis.plot(*_points(rows, "baseline_us"), linestyle="none", marker="x", color=color)
    # The legend explains the two other styles once, in grey.
    if _points(rows_of_all, "floor_us")[0]:
        axis.plot([], [], linestyle=":", color="0.4", label="streaming floor")
    names = sorted({_short(row["baseline"]) for row in rows_of_all if row.get("baseline")})
    if names:
        label = ", ".join(names)
        axis.plot([], [], linestyle="none", marker="x", color="0.4", label=label)
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(FuncFormatter(lambda us, _: f"{us:,g}"))
    axis.set_ylabel("time (us)")
    _token_axis(axis, [row["num_tokens"] for row in rows_of_all])


def _points(rows: Sequence[Row], key: str) -> tuple[list[int], list[float]]:
    found = [row for row in rows if row.get(key)]
    return [row["num_tokens"] for row in found], [row[key] for row in found]


def _short(baseline: str) -> str:
    """torch.compile as it is, ``package.module:function`` as its package."""
    return baseline.partition(".")[0] if ":" in baseline else baseline


def _token_axis(axis: Axes, tokens: Sequence[int]) -> None:
    axis.set_xscale("log", base=2)
    low, high = min(tokens), max(tokens)
    ticks = [4**k for k in range(10) if low / 2 < 4**k <= high] or [low]
    axis.xaxis.set_major_locator(FixedLocator(ticks))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(
        FuncFormatter(lambda n, _: f"{n / 1024:g}k" if n >= 1024 else f"{n:g}")
    )
    if low == high:
        axis.set_xlim(low / 2, high * 2)
