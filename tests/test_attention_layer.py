"""The example of a whole attention layer: its verdict, and that a wrong byte turns it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support import on_devices

from dsv32_ops.layouts import MLA_MODES, Fp8DsMla, locate

FILE = Path(__file__).parents[1] / "examples" / "attention_layer.py"
SIZES = ["--tokens", "40", "--decode", "3", "--chunk", "17", "--topk", "16"]


@pytest.fixture
def example() -> Iterator[ModuleType]:
    """A module of its own for each test, which may replace what it imported."""
    spec = importlib.util.spec_from_file_location("attention_layer", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    threads = torch.get_num_threads()
    yield module
    # The example sets it.
    torch.set_num_threads(threads)


def verdict(
    example: ModuleType, capsys: pytest.CaptureFixture[str], mode: str, device: str = "cpu"
) -> tuple[int, dict[str, str]]:
    """Exit code, and what the table says at the end of each row."""
    code = example.main([*SIZES, "--mode", mode, "--device", device])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"verdict: {'FAILED' if code else 'passed'}"
    rows = [line for line in lines if line.startswith(mode)]
    return code, {line[14:30].strip(): line[96:].strip() for line in rows}


@on_devices
@pytest.mark.parametrize("mode", ["fp8_ds_mla", "nvfp4_ds_mla"])
def test_agrees_with_dense_fp32(
    example: ModuleType, capsys: pytest.CaptureFixture[str], device: str, mode: str
) -> None:
    expected = {"all keys": "ok", "top 16": "ok"}
    assert verdict(example, capsys, mode, device) == (0, expected)


def test_needs_no_more_keys_than_topk(
    example: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    code = example.main(["--tokens", "9", "--chunk", "4", "--device", "cpu", "--mode", "auto"])
    output = capsys.readouterr().out
    assert code == 0 and "top 32: skipped, it covers all 13 keys" in output


def _flip(cache: torch.Tensor, slots: torch.Tensor, byte: int, bit: int) -> None:
    block, offset = locate(cache, slots)
    cache.view(torch.uint8)[block, offset, byte] ^= bit


def _tile_scale(call: dict[str, Any]) -> None:
    """Bit 23 of the first tile's scale: twice as large or half."""
    _flip(call["mla_kv_cache"], call["slot_mapping"], Fp8DsMla.SCALE_OFFSET + 2, 0x80)


def _sign_of_one_code(call: dict[str, Any]) -> None:
    _flip(call["mla_kv_cache"], call["slot_mapping"], 7, 0x80)


def _sign_of_one_rotated_dim(call: dict[str, Any]) -> None:
    _flip(call["mla_kv_cache"], call["slot_mapping"], Fp8DsMla.ROPE_OFFSET + 7, 0x80)


def _signs_of_indexer_keys(call: dict[str, Any]) -> None:
    """Of the first 16 codes of a row."""
    cache = call["indexer_k_cache"]
    block, offset = locate(cache, call["slot_mapping"][:, None])
    dim = cache.shape[2] - 4
    cache.view(len(cache), -1)[block, offset * dim + torch.arange(16)] ^= 0x80


@pytest.mark.parametrize(
    "corrupt, failing",
    [
        (_tile_scale, {"all keys", "top 16"}),
        (_sign_of_one_code, {"all keys", "top 16"}),
        (_sign_of_one_rotated_dim, {"all keys", "top 16"}),
        (_signs_of_indexer_keys, {"top 16"}),
    ],
    ids=["tile-scale", "one-code", "one-rotated-dim", "indexer-keys"],
)
def test_a_wrong_cache_fails(
    example: ModuleType,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    corrupt: Callable[[dict[str, Any]], None],
    failing: set[str],
) -> None:
    real = example.fused_norm_rope

    def corrupted(*args: Any, **keywords: Any) -> torch.Tensor:
        normed = real(*args, **keywords)
        corrupt(keywords)
        return normed

    monkeypatch.setattr(example, "fused_norm_rope", corrupted)
    code, verdicts = verdict(example, capsys, "fp8_ds_mla")
    assert code == 1
    assert {name for name, end in verdicts.items() if end == "FAIL"} == failing


def test_an_unfilled_topk_buffer_fails(
    example: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = example.fused_norm_rope
    monkeypatch.setattr(example, "fused_norm_rope", lambda *a, **k: real(*a, **k, fill_topk=False))
    code, verdicts = verdict(example, capsys, "fp8_ds_mla")
    assert code == 1 and verdicts["all keys"] == "FAIL: not its keys"


def test_a_query_at_a_wrong_position_fails(
    example: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = example.fused_q
    shifted = lambda positions, *a, **k: real((positions - 1).clamp(min=0), *a, **k)  # noqa: E731
    monkeypatch.setattr(example, "fused_q", shifted)
    assert verdict(example, capsys, "nvfp4_ds_mla") == (1, {"all keys": "FAIL", "top 16": "FAIL"})


def test_help_names_every_mode(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        example.main(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert all(mode in text for mode in (*MLA_MODES, "all", "--transformers"))
