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
from support import on_devices, on_gpu

ROOT = Path(__file__).parents[1]
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


def test_help() -> None:
    printed = run("decode_loop.py", "--help")
    assert all(f"--{option}" in printed for option in ("mode", "prefill", "steps", "max-batch"))


def assert_decoded(printed: str) -> None:
    """Every prompt and every further token went through, and rates were printed."""
    for name in ("prefill", "decode"):
        found = re.search(rf"^{name} +([\d,]+) tokens +([\d,]+) steps +([\d,]+) tokens/s$",
                          printed, re.MULTILINE)  # fmt: skip
        assert found is not None, printed
        assert all(int(number.replace(",", "")) > 0 for number in found.groups())
    assert re.search(r"caches agreed with the reference after each of \d+ steps", printed)


@pytest.mark.parametrize("options", ["", "--model glm-5 --mode auto --layers 1"])
def test_decode_loop(options: str) -> None:
    assert_decoded(run("decode_loop.py", *FEW, *options.split()))


@on_gpu
@pytest.mark.parametrize("mode", ["fp8_ds_mla", "auto"])
def test_decode_loop_on_a_gpu(mode: str) -> None:
    """Chunks of 65,536 tokens, and graphs of 1 to 64 rows."""
    printed = run("decode_loop.py", "--mode", mode, "--requests", "90", "--layers", "1")
    assert_decoded(printed)
    assert "graphs of 1, 2, 4, 8, 16, 32, 64" in printed


@pytest.mark.parametrize("fault", ["wrong slots", "dead row", "top-k"])
def test_decode_loop_notices(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = load("decode_loop")
    op, before = loop.fused_norm_rope, loop.Checker.before

    def faulty(**arguments: Any) -> torch.Tensor:
        slots = arguments["slot_mapping"]
        if fault == "wrong slots":
            arguments["slot_mapping"] = torch.where(slots > 0, slots - 1, slots)
        result = op(**arguments)
        if fault == "top-k":
            arguments["topk_indices_buffer"][0, -1] = 3
        return result

    def spoil(checker: Any) -> None:
        before(checker)
        if fault == "dead row":
            checker.layers[-1].index_cache[-1] ^= 1

    monkeypatch.setattr(loop, "fused_norm_rope", faulty)
    monkeypatch.setattr(loop.Checker, "before", spoil)
    with pytest.raises(SystemExit, match="top-k" if fault == "top-k" else "cache"):
        loop.main(FEW)


def pages() -> list[tuple[str, str]]:
    """Texts with code that runs: the page on compilation, and that section of the README."""
    texts = [("compile.md", (ROOT / "docs" / "compile.md").read_text(encoding="utf-8"))]
    readme = ROOT / "README.md"
    if readme.exists():
        sections = re.split(r"^## ", readme.read_text(encoding="utf-8"), flags=re.MULTILINE)
        texts += [
            ("README.md", text) for text in sections if text.startswith("Compile and capture")
        ]
    return texts


@on_devices
@pytest.mark.parametrize("page", [pytest.param(text, id=name) for name, text in pages()])
def test_code_in_documents(page: str, device: str) -> None:
    """Blocks run in their order and in one namespace; those fenced "python gpu" on a GPU only."""
    blocks = re.findall(r"^```python( gpu)?\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert blocks
    names: dict[str, Any] = {"__name__": "page"}
    for needs_gpu, code in blocks:
        if device == "cuda" or not needs_gpu:
            exec(code, names)
