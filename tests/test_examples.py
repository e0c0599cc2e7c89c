"""The examples run, and their own checks can fail."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support import on_gpu

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
FEW = ("--prefill 40 --requests 6 --prompt 30 --new-tokens 5 --max-batch 4 --device cpu").split()


def run(example: str, *arguments: str) -> str:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / example, *arguments],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def load(example: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(example, ROOT / "examples" / f"{example}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[example] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("example", EXAMPLES)
def test_help(example: str) -> None:
    assert "usage:" in run(example, "--help")


def assert_decoded(printed: str) -> None:
    """Every prompt and every further token went through, and rates were printed."""
    for name in ("prefill", "decode"):
        found = re.search(rf"^{name} +([\d,]+) tokens +([\d,]+) steps +([\d,]+) tokens/s$",
                          printed, re.MULTILINE)  # fmt: skip
        assert found is not None, printed
        assert all(int(number.replace(",", "")) > 0 for number in found.groups())
    assert re.search(r"caches agreed with the reference after each of \d+ steps", printed)


@pytest.mark.parametrize("options", ["", "--mode auto --layers 1", "--model glm-5 --mode fp8"])
def test_decode_loop(options: str) -> None:
    assert_decoded(run("decode_loop.py", *FEW, *options.split()))


@on_gpu
@pytest.mark.parametrize("mode", ["fp8_ds_mla", "auto"])
def test_decode_loop_on_a_gpu(mode: str) -> None:
    """Chunks of 65,536 tokens, and graphs of 1 to 64 rows."""
    printed = run("decode_loop.py", "--mode", mode, "--requests", "90", "--layers", "1")
    assert_decoded(printed)
    assert "graphs of 1, 2, 4, 8, 16, 32, 64" in printed


@pytest.mark.parametrize("fault", ["shifted slots", "dead row", "top-k"])
def test_decode_loop_notices(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = load("decode_loop")
    op = loop.fused_norm_rope

    def faulty(**arguments: Any) -> torch.Tensor:
        if fault == "shifted slots":
            slots = arguments["slot_mapping"]
            arguments["slot_mapping"] = torch.where(slots > 0, slots - 1, slots)
        result = op(**arguments)
        if fault == "dead row":
            slots = arguments["slot_mapping"]
            # A cache of its own for row 0 at a slot that is not among this step's.
            arguments["slot_mapping"] = torch.where(slots >= 0, (slots + 64 * 7) % 640, slots)[:1]
            op(**arguments)
        if fault == "top-k":
            arguments["topk_indices_buffer"][0, -1] = 3
        return result

    monkeypatch.setattr(loop, "fused_norm_rope", faulty)
    with pytest.raises(SystemExit, match="top-k" if fault == "top-k" else "cache"):
        loop.main(FEW)
