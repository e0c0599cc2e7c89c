"""``python -m dsv32_ops bench``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dsv32_ops.bench import against, cases, compare, console, report, results, timing
from dsv32_ops.bench.measure import Measurer
from dsv32_ops.bench.options import add_options
from dsv32_ops.models import PRESETS
from dsv32_ops.verify.command import pick_device

__all__ = ["add_options", "run"]

Plan = list[tuple[cases.Case, int]]
COMPILE_TOKENS = (64, 4096, 65536)
# A CPU takes seconds for what the largest counts need.
CPU_TOKENS = (1, 64, 512)


def run(options: argparse.Namespace) -> int:
    """Measure, redraw or compare; 1 when something became slower or could not be measured."""
    if options.plot:
        return _plot(Path(options.plot))
    if options.compare and len(options.compare) > 2:
        raise ValueError(f"--compare: expected OLD or OLD NEW, got {len(options.compare)} files")
    old = results.load(options.compare[0]) if options.compare else None
    if old is not None and len(options.compare) == 2:
        return int(_report_changes(old, results.load(options.compare[1])))
    device = pick_device(options.device)
    plan = plan_of(options, device, old)
    compiles = options.baseline == "compile" and not options.quick and device.type != "cpu"
    others = [against.parse(text) for text in options.against]
    scattered = options.slots == "scattered"
    measurer = Measurer(device, others, COMPILE_TOKENS if compiles else (), scattered)
    measured, path, failures = _measure(measurer, plan, options, device)
    if old is not None:
        _repeat_slower(measurer, old, measured)
        results.save(measured, path)
    if options.json:
        print(json.dumps(measured, indent=2))
    else:
        report.print_results(measured)
    print(f"Wrote {path}", file=sys.stderr)
    _plot(path)
    for failure in failures:
        print(f"not measured: {failure}", file=sys.stderr)
    slower = old is not None and _report_changes(old, measured, quiet=options.json)
    return 1 if failures or slower else 0


def plan_of(options: argparse.Namespace, device: torch.device, old: dict[str, Any] | None) -> Plan:
    """The rows to measure: those chosen, or those of ``old`` when nothing was."""
    selection = ("ops", "presets", "heads", "modes", "query", "fill", "tokens")
    if old is not None and not options.quick and not any(map(vars(options).get, selection)):
        return [(report.case_of(row), row["num_tokens"]) for row in old["rows"]]
    quick = options.quick
    chosen = cases.select(
        ops=_known("--ops", options.ops, cases.OPS) or cases.OPS,
        presets=_known("--presets", options.presets, tuple(PRESETS))
        or (("deepseek-v3.2",) if quick else tuple(cases.HEADS)),
        heads=options.heads or ((16,) if quick else None),
        modes=_known("--modes", options.modes, cases.ALL_MODES)
        or (("auto",) if quick else cases.MODES),
        queries=(options.query,) if options.query else (("fp8",) if quick else cases.QUERIES),
        fills=_fills(options.fill, quick),
    )
    tokens = options.tokens or (cases.QUICK_TOKENS if quick else cases.TOKENS)
    if device.type == "cpu" and not options.tokens:
        tokens = CPU_TOKENS
    return [(case, num_tokens) for case in chosen for num_tokens in tokens]


def _fills(choice: str | None, quick: bool) -> tuple[bool, ...]:
    if choice is None:
        return (True,) if quick else (True, False)
    return (choice == "on",)


def _known(option: str, names: Sequence[str] | None, known: Sequence[str]) -> Sequence[str] | None:
    for name in names or ():
        if name not in known:
            raise ValueError(f"{option}: expected some of {', '.join(known)}, got {name!r}")
    return names


def _measure(
    measurer: Measurer, plan: Plan, options: argparse.Namespace, device: torch.device
) -> tuple[dict[str, Any], Path, list[str]]:
    copy_gb_s = None if device.type == "cpu" else timing.copy_bandwidth(device)
    measured = results.header(device, copy_gb_s)
    path = Path(options.out) / f"{results.file_name(measured)}.json"
    if options.append and path.exists():
        existing = results.load(path)
        if existing.get("commit") == measured["commit"]:
            measured["rows"] = existing["rows"]
    # Last, and the largest at the very end: a baseline that corrupts memory costs no row of ours.
    beside = [(case, n) for case, n in plan if measurer.has_baseline(case, n)]
    beside.sort(key=lambda item: item[1] * (item[0].heads or 1))
    fresh: dict[tuple[cases.Case, int], dict[str, Any]] = {}
    failures = []
    with console.progress(len(plan) + len(beside)) as steps:
        for step, (case, num_tokens) in enumerate(plan + beside):
            label = f"{case.label()}, {num_tokens:,} tokens"
            if step >= len(plan):
                label += " (baseline)"
            steps(label)
            key = case, num_tokens
            try:
                if step < len(plan):
                    fresh[key] = measurer.row(case, num_tokens)
                    known = results.find(measured["rows"], case, num_tokens)
                    # An earlier run's row and its baseline stay until both are measured again.
                    if known is None or "baseline" not in known or key not in beside:
                        results.put(measured["rows"], fresh[key])
                elif key in fresh:
                    results.put(measured["rows"], fresh[key])
                    fresh[key] |= measurer.baselines(case, num_tokens)
            except Exception as error:  # one row that fails must not cost the others
                first_line = str(error).strip().partition("\n")[0]
                failures.append(f"{label}: {type(error).__name__}: {first_line}")
                if not measurer.recovers():
                    failures.append("everything after it: the device does not answer any more")
                    break
            results.save(measured, path)
    return measured, path, failures


def _repeat_slower(measurer: Measurer, old: dict[str, Any], measured: dict[str, Any]) -> None:
    """Measure again what seems slower and keep the better time: noise does not repeat itself."""
    suspects = compare.regressions(compare.compare(old["rows"], measured["rows"]))
    keys = {change.key for change in suspects}
    for row in [row for row in measured["rows"] if compare.row_key(row) in keys]:
        again = measurer.row(report.case_of(row), row["num_tokens"])
        if again["us"] < row["us"]:
            row.update(again)


def _report_changes(old: dict[str, Any], new: dict[str, Any], quiet: bool = False) -> bool:
    """Print what changed; True when something is slower."""
    changes = compare.compare(old["rows"], new["rows"])
    if not quiet:
        if old.get("gpu") != new.get("gpu"):
            print(f"Different devices: {old.get('gpu')} and {new.get('gpu')}.")
        orders = [{row.get("slots") for row in side["rows"]} - {None} for side in (old, new)]
        if orders[0] != orders[1]:
            print("Different orders of slots: fused_norm_rope is not comparable.")
        report.print_changes(changes)
    return bool(compare.regressions(changes))


def _plot(path: Path) -> int:
    measured = results.load(path)
    try:
        from dsv32_ops.bench import plots
    except ImportError:
        print("no plots without matplotlib: pip install 'dsv32_ops[bench]'", file=sys.stderr)
        return 0
    for written in plots.draw(measured, path):
        print(f"Wrote {written}", file=sys.stderr)
    return 0
