"""The result file: one per GPU and version, written after every row."""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dsv32_ops.bench.cases import Case
from dsv32_ops.bench.compare import row_key

_PACKAGE = Path(__file__).resolve().parents[1]


def device_name(device: torch.device) -> str:
    """The GPU's name, or "CPU"."""
    return "CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)


def header(device: torch.device, copy_gb_s: float | None) -> dict[str, Any]:
    """What a result file says about its machine and versions; its rows are still empty."""
    import triton

    return {
        "gpu": device_name(device),
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit(),
        "copy_gb_s": copy_gb_s,
        "rows": [],
    }


def commit() -> str:
    """Commit of the measured code, "-dirty" when the tree differs; DSV32_OPS_COMMIT overrides."""
    if named := os.environ.get("DSV32_OPS_COMMIT"):
        return named
    head = _git("rev-parse", "--short=12", "HEAD")
    if head is None:
        return "unknown"
    # An installed package may lie inside somebody else's repository: ask for our own file.
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:
        return "unknown"
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return f"{head}-dirty" if changed else head


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ("git", "-C", str(_PACKAGE), *arguments), capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def file_name(results: dict[str, Any]) -> str:
    """``<gpu>-<torch>-<triton>``, without what file names should not hold."""
    parts = (results["gpu"], results["torch"].split("+")[0], results["triton"].split("+")[0])
    return "-".join(re.sub(r"[^A-Za-z0-9.]+", "-", part).strip("-") for part in parts)


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a result file. ``ValueError`` when it is none."""
    try:
        results = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not a JSON file ({error})") from error
    if not isinstance(results, dict) or not isinstance(results.get("rows"), list):
        raise ValueError(f"{path}: not a result file of this benchmark (no list of rows)")
    return results


def save(results: dict[str, Any], path: Path) -> None:
    """Write the file whole or not at all: a killed run leaves the rows measured until then."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    rows = ",\n    ".join(json.dumps(row) for row in results["rows"])
    head = json.dumps({k: v for k, v in results.items() if k != "rows"}, indent=2)[:-2]
    partial.write_text(f'{head},\n  "rows": [\n    {rows}\n  ]\n}}\n', encoding="utf-8")
    partial.replace(path)


def put(rows: list[dict[str, Any]], row: dict[str, Any]) -> None:
    """Add ``row``, or replace the one with the same key."""
    key = row_key(row)
    for i, other in enumerate(rows):
        if row_key(other) == key:
            rows[i] = row
            return
    rows.append(row)


def find(rows: Sequence[dict[str, Any]], case: Case, num_tokens: int) -> dict[str, Any] | None:
    """The row of ``case`` at ``num_tokens``, if there is one."""
    key = row_key({**case.fields(), "num_tokens": num_tokens})
    return next((row for row in rows if row_key(row) == key), None)
