"""The benchmark without its numbers: bytes, selection, files, comparison, plots, the floor."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

import dsv32_ops  # noqa: F401  registers the ops
from dsv32_ops import launch, reference, testing
from dsv32_ops.__main__ import main
from dsv32_ops.bench import (
    against,
    calls,
    cases,
    compare,
    measure,
    plain,
    plots,
    report,
    results,
    timing,
)
from dsv32_ops.bench.stream import CONFIGS, stream_kernel
from dsv32_ops.bench.traffic import Traffic, traffic
from dsv32_ops.models import PRESETS

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
V32, GLM, KIMI = (PRESETS[name] for name in ("deepseek-v3.2", "glm-5", "kimi-k2"))
# One cos/sin row of 64 fp32, one position and one slot of int64.
ROW, INDEX = 256, 8


def moved(case: cases.Case, num_tokens: int) -> Traffic:
    """Traffic of a call that really happens, from the tensors that come and go."""
    arguments = cases.build(case, num_tokens, CPU)
    outputs = calls.call(case.op, getattr(torch.ops.dsv32, case.op), arguments)()
    return traffic(arguments, measure.as_tuple(outputs))


@pytest.mark.parametrize("num_tokens", [1, 37])
@pytest.mark.parametrize(
    ("mode", "entry"), [("auto", 1152), ("fp8", 576), ("fp8_ds_mla", 656), ("nvfp4_ds_mla", 352)]
)
def test_norm_rope_bytes(mode, entry, num_tokens) -> None:
    found = moved(
        cases.Case("fused_norm_rope", "deepseek-v3.2", mode=mode, fill_topk=True), num_tokens
    )
    assert found.read == num_tokens * (2 * (1536 + 512 + 64 + 128) + ROW + 2 * INDEX)
    assert found.written == num_tokens * (2 * 1536 + entry + 132 + 4 * 2048)
    if mode == "auto":
        assert found.read / num_tokens == pytest.approx(4.7e3, rel=0.02)
        assert found.written / num_tokens == pytest.approx(12.6e3, rel=0.01)


def test_what_is_not_written_is_not_counted() -> None:
    base = testing.norm_rope_inputs(GLM, 50, padding=0.5, shared_table=False)
    q_c = torch.empty(50, 2048, dtype=torch.bfloat16)
    live = int((base["slot_mapping"] >= 0).sum())
    assert 0 < live < 50
    full = traffic(base, [q_c])
    assert full.written == 50 * (4096 + 8192) + live * (1152 + 132)
    # Two tables: two rows per token.
    assert full.read == 50 * (2 * (2048 + 512 + 64 + 128) + 2 * ROW + 2 * INDEX)
    assert traffic(base | {"fill_topk": False}, [q_c]).written == full.written - 50 * 8192
    no_cache = base | {"mla_kv_cache": None, "indexer_k_cache": None}
    assert traffic(no_cache, [q_c]).written == 50 * (4096 + 8192)
    kimi = testing.norm_rope_inputs(KIMI, 50, outs=True)
    written = traffic(kimi, [q_c[:, :1536]]).written
    assert written == 50 * (2 * 1536 + 1152 + 2 * (512 + 64))


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("query", ["fp8", "bf16"])
def test_query_bytes(heads, query) -> None:
    found = moved(cases.Case("fused_q", "deepseek-v3.2", heads, query=query), 3)
    index = 64 * 128 * 2 + 64 * 2 + ROW + INDEX
    mqa_read, mqa_written = (1152, 576) if query == "fp8" else (128, 128)
    assert found.read == 3 * (heads * mqa_read + index)
    assert found.written == 3 * (heads * mqa_written + 64 * 128 + 64 * 4)
    per_token = found.total / 3 - heads * (mqa_read + mqa_written)
    assert per_token == pytest.approx(24.9e3, rel=0.02)


@pytest.mark.parametrize(
    ("op", "read", "written"),
    [
        ("fused_eh_norm", 2 * 2 * 6144 + INDEX, 2 * 2 * 6144),
        ("fused_embed_norm", 2 * 6144 + INDEX, 2 * 2 * 6144),
        ("fused_embed_eh_norm", 2 * 2 * 6144 + 2 * INDEX, 2 * 2 * 6144),
    ],
)
def test_embedding_bytes(op, read, written, monkeypatch) -> None:
    small = torch.randn(300, 6144).to(torch.bfloat16)
    monkeypatch.setattr(cases, "_embed_table", lambda config, device: small)
    assert moved(cases.Case(op, "glm-5"), 5) == (5 * read, 5 * written)


def test_the_matrix() -> None:
    chosen = cases.select()
    assert len(chosen) == len(set(chosen)) == 2 * 4 * 2 + 4 * 2 + 3 * 2
    assert len({case.label() for case in chosen}) == len(chosen)
    heads = {(case.config, case.heads) for case in chosen if case.op == "fused_q"}
    assert heads == {("deepseek-v3.2", 16), ("deepseek-v3.2", 128), ("glm-5", 8), ("glm-5", 64)}
    assert cases.TOKENS[0] == 1 and cases.TOKENS[-1] == 131072 and len(cases.TOKENS) == 18
    kimi = cases.select(ops=["fused_norm_rope"], presets=["kimi-k2"], modes=["auto"])
    assert kimi == [cases.Case("fused_norm_rope", "kimi-k2", mode="auto", fill_topk=True)]


@pytest.mark.parametrize(("num_tokens", "scattered"), [(512, False), (700, False), (700, True)])
def test_slots_are_those_of_decoding_and_of_a_prefill(num_tokens: int, scattered: bool) -> None:
    case = cases.Case("fused_norm_rope", "deepseek-v3.2", mode="auto", fill_topk=False)
    slots = cases.build(case, num_tokens, CPU, scattered=scattered)["slot_mapping"]
    assert slots.shape == slots.unique().shape == (num_tokens,)
    following = (slots.diff() == 1).float().mean().item()
    blocks = (slots[::64].diff() == 64).float().mean().item()
    assert blocks < 0.5
    assert following > 0.95 if num_tokens > 512 and not scattered else following < 0.05


def test_host_times_takes_turns() -> None:
    order: list[str] = []
    both = [lambda: order.append("a"), lambda: order.append("b")]
    times = timing.host_times(both, CPU, repeats=2, batches=3)
    assert len(times) == 2 and min(times) > 0
    assert "".join(order) == "ab" + 3 * "aabb"


def test_clone_keeps_strides_and_sharing_and_copies() -> None:
    first = cases.build(cases.Case("fused_norm_rope", "glm-5", mode="auto", fill_topk=True), 9, CPU)
    second = cases.clone(first)
    assert list(second) == list(first)
    for name, value in first.items():
        if isinstance(value, torch.Tensor):
            assert second[name].stride() == value.stride() and testing.same_bytes(
                second[name], value
            )
            shared = second[name].data_ptr() == value.data_ptr()
            assert shared == (name.endswith(("_weight", "_bias", "_cos_sin"))), name
    distance = first["kv_c"].data_ptr() - first["q_c"].data_ptr()
    assert second["kv_c"].data_ptr() - second["q_c"].data_ptr() == distance
    second["kv_c"].fill_(0)
    assert first["kv_c"].any()


def test_calls_are_made_as_a_model_makes_them() -> None:
    arguments = cases.build(
        cases.Case("fused_norm_rope", "glm-5", mode="fp8", fill_topk=False), 3, CPU
    )
    positional, keywords = calls.bind("fused_norm_rope", arguments)
    assert len(positional) == 15 and positional[14] is arguments["topk_indices_buffer"]
    assert set(keywords) == {
        "slot_mapping", "indexer_k_cache", "mla_kv_cache", "mla_kv_cache_dtype", "mla_k_scale",
        "index_rope_interleave", "fill_topk",
    }  # fmt: skip
    arguments = testing.embed_eh_norm_inputs(GLM, 3)
    positional, keywords = calls.bind("fused_embed_eh_norm", arguments)
    assert positional[1] is arguments["input_ids"] and not keywords


def test_against() -> None:
    other = against.parse("dsv32_ops.reference:fused_q")
    assert (other.op, other.name) == ("fused_q", "dsv32_ops.reference:fused_q")
    assert other.function is reference.fused_q
    assert against.parse("fused_eh_norm=dsv32_ops.reference:fused_q").op == "fused_eh_norm"
    arguments = testing.q_inputs(GLM, 2, 1, quantize_mqa=False)
    assert other.missing(arguments) == []

    def without_options(positions: Any, index_rope_interleave: bool = False) -> None: ...

    limited = against.Against("fused_q", "limited", without_options)
    assert limited.missing(arguments) == ["quantize_mqa"]
    for text in (
        "fused_q",
        "dsv32_ops.reference:nothing",
        "no_such_module:fused_q",
        "dsv32_ops:geometry",
    ):
        with pytest.raises(ValueError, match="--against"):
            against.parse(text)


@pytest.mark.parametrize("query", ["fp8", "bf16"])
@pytest.mark.parametrize("config", [V32, GLM], ids=lambda c: c.name)
def test_plain_query_is_the_same_function(config, query) -> None:
    arguments = testing.q_inputs(
        config, 11, 2, quantize_mqa=query == "fp8", index_dtype=torch.int64
    )
    found = calls.call("fused_q", _traced(plain.query), arguments)()
    for actual, expected in zip(found, reference.fused_q(**arguments), strict=True):
        assert_close(actual, expected)


@pytest.mark.parametrize("config", [V32, GLM], ids=lambda c: c.name)
def test_plain_norm_rope_is_the_same_function(config) -> None:
    arguments = testing.norm_rope_inputs(config, 70)
    twin = cases.clone(arguments)
    found = calls.call("fused_norm_rope", _traced(plain.norm_rope), arguments)()
    assert_close(found, reference.fused_norm_rope(**twin))
    assert torch.equal(arguments["topk_indices_buffer"], twin["topk_indices_buffer"])
    report = testing.compare_codes(arguments["indexer_k_cache"], twin["indexer_k_cache"])
    assert report.max_step <= 1 and report.equal > 0.99
    assert_close(arguments["mla_kv_cache"], twin["mla_kv_cache"])


@pytest.mark.parametrize("op", ["eh_norm", "embed_norm", "embed_eh_norm"])
def test_plain_embedding_ops_are_the_same_functions(op) -> None:
    arguments = getattr(testing, f"{op}_inputs")(GLM, 6)
    found = calls.call(f"fused_{op}", _traced(getattr(plain, op)), arguments)()
    expected = getattr(reference, f"fused_{op}")(**arguments)
    for actual, wanted in zip(measure.as_tuple(found), measure.as_tuple(expected), strict=True):
        assert_close(actual, wanted)


def _traced(function: Any) -> Any:
    """As the benchmark compiles it, but for the code generator: a graph break would fail."""
    return torch.compile(function, dynamic=True, fullgraph=True, backend="eager")


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Same type, and but for 1 % the same values: both round fp32 results once."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    if actual.dtype == torch.float32:
        torch.testing.assert_close(actual, expected)
        return
    a, e = actual.float(), expected.float()
    same = (a == e) | (a.isnan() & e.isnan())
    assert same.float().mean() > 0.99
    assert ((a - e).abs()[~same] <= e.abs()[~same] / 8 + 2.0**-9).all()


def row(
    num_tokens: int = 64, us: float = 100.0, spread: float = 0.0, **fields: Any
) -> dict[str, Any]:
    case = cases.Case("fused_q", "deepseek-v3.2", 16, query="fp8")
    return {
        **case.fields(),
        "num_tokens": num_tokens,
        "us": us,
        "us_p20": us * (1 - spread / 2),
        "us_p80": us * (1 + spread / 2),
        "gb_s": 1000.0,
        **fields,
    }


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        (row(), row(us=102.9), "same"),
        (row(), row(us=103.5), "slower"),
        (row(), row(us=96.0), "faster"),
        (row(spread=0.02), row(us=104.9, spread=0.01), "same"),
        (row(spread=0.02), row(us=106.5, spread=0.01), "slower"),
        # Launches of a microsecond: 5 % is the clock.
        (row(us=1.0), row(us=1.09), "same"),
        (row(us=1.0), row(us=1.2), "slower"),
        (row(floor_us=90.0), row(us=110.0, floor_us=99.0), "machine"),
        (row(floor_us=90.0), row(us=110.0, floor_us=91.0), "slower"),
        # A floor that became faster does not make the same time a regression.
        (row(floor_us=90.0), row(us=101.0, floor_us=70.0), "same"),
    ],
)
def test_regression_or_noise(old, new, verdict) -> None:
    (change,) = compare.compare([old], [new])
    assert change.verdict == verdict


def test_rows_are_matched_by_everything_but_the_numbers() -> None:
    old = [row(64), row(128), row(64, query="bf16")]
    new = [row(64, us=300.0), row(64, query="bf16", us=200.0), row(256)]
    changes = compare.compare(old, new)
    assert sorted(change.verdict for change in changes) == ["gone", "new", "slower", "slower"]
    assert [change.ratio for change in compare.regressions(changes)] == [3.0, 2.0]


def result_file(path: Path, rows: list[dict[str, Any]]) -> str:
    results.save(results.header(CPU, None) | {"rows": rows}, path)
    return str(path)


def test_compare_two_files(tmp_path, capsys) -> None:
    old = result_file(tmp_path / "old.json", [row(64), row(128)])
    new = result_file(tmp_path / "new.json", [row(64), row(128, us=120.0)])
    assert main(["bench", "--compare", old, new]) == 1
    out = capsys.readouterr().out
    assert "slower" in out and "+20.0%" in out and "1 same, 1 slower" in out
    assert main(["bench", "--compare", new, old]) == 0
    assert "1 faster, 1 same" in capsys.readouterr().out
    assert main(["bench", "--compare", old, new, old]) == 2


def bench(tmp_path: Path, *options: str) -> int:
    return main(["bench", "--device", "cpu", "--out", str(tmp_path), "--quick", *options])


def only_file(tmp_path: Path) -> dict[str, Any]:
    (path,) = tmp_path.glob("*.json")
    return results.load(path)


def test_result_file(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("DSV32_OPS_COMMIT", "abc123")
    options = ["--ops", "fused_norm_rope,fused_q", "--tokens", "1,3", "--json"]
    reference_q = "fused_q=dsv32_ops.reference:fused_q"
    assert bench(tmp_path, *options, "--against", reference_q) == 0
    found = only_file(tmp_path)
    assert found == json.loads(capsys.readouterr().out)
    assert set(found) == {"gpu", "date", "torch", "triton", "commit", "copy_gb_s", "rows"}
    assert (found["gpu"], found["commit"]) == ("CPU", "abc123")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found["date"])
    rows = [
        (r["op"], r["num_tokens"], r["mode"], r["query"], r["fill_topk"]) for r in found["rows"]
    ]
    assert rows == [("fused_norm_rope", n, "auto", None, True) for n in (1, 3)] + [
        ("fused_q", n, None, "fp8", None) for n in (1, 3)
    ]
    for r in found["rows"]:
        assert 0 < r["us_p20"] <= r["us"] <= r["us_p80"] and r["host_us"] > 0
        assert r["floor_us"] is None and "fraction_of_floor" not in r
        assert r["gb_s"] == pytest.approx(
            (r["read_bytes"] + r["written_bytes"]) / r["us"] / 1e3, abs=1e-3
        )
        assert ("baseline_us" in r) == (r["op"] == "fused_q")
    assert found["rows"][-1]["baseline"] == "dsv32_ops.reference:fused_q"


def test_a_failing_row_costs_no_other(tmp_path, capsys, monkeypatch) -> None:
    real = measure.Measurer.row

    def failing(self: Any, case: cases.Case, num_tokens: int) -> dict[str, Any]:
        if num_tokens == 2:
            raise RuntimeError("out of luck")
        return real(self, case, num_tokens)

    monkeypatch.setattr(measure.Measurer, "row", failing)
    assert bench(tmp_path, "--ops", "fused_q", "--tokens", "1,2,3") == 1
    assert [r["num_tokens"] for r in only_file(tmp_path)["rows"]] == [1, 3]
    assert "2 tokens: RuntimeError: out of luck" in capsys.readouterr().err


def test_a_killed_run_keeps_its_rows(tmp_path, monkeypatch, capsys) -> None:
    def killed(self: Any, case: cases.Case, num_tokens: int) -> dict[str, Any]:
        if num_tokens == 2:
            raise KeyboardInterrupt
        return row(num_tokens)

    monkeypatch.setattr(measure.Measurer, "row", killed)
    assert bench(tmp_path, "--ops", "fused_q", "--tokens", "1,2") == 130
    assert [r["num_tokens"] for r in only_file(tmp_path)["rows"]] == [1]
    # What was measured already is kept, once, when a later run of the same commit appends.
    monkeypatch.setenv("DSV32_OPS_COMMIT", only_file(tmp_path)["commit"])
    monkeypatch.setattr(measure.Measurer, "row", lambda self, case, n: row(n, us=7.0))
    assert bench(tmp_path, "--ops", "fused_q", "--tokens", "2,1,4", "--append") == 0
    assert [(r["num_tokens"], r["us"]) for r in only_file(tmp_path)["rows"]] == [
        (1, 7),
        (2, 7),
        (4, 7),
    ]
    monkeypatch.setenv("DSV32_OPS_COMMIT", "another")
    assert bench(tmp_path, "--ops", "fused_q", "--tokens", "8", "--append") == 0
    assert [r["num_tokens"] for r in only_file(tmp_path)["rows"]] == [8]


def test_a_row_with_a_baseline_is_replaced_whole(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("DSV32_OPS_COMMIT", "abc1234")
    options = ["--ops", "fused_q", "--against", "fused_q=dsv32_ops.reference:fused_q", "--append"]

    def run(us: float, end: BaseException | None = None) -> list[tuple[float, float | None]]:
        """(us, baseline_us) of all rows after a run whose second baseline is cut short."""

        def baselines(self: Any, case: cases.Case, num_tokens: int) -> dict[str, Any]:
            if end is not None and num_tokens == 2:
                raise end
            return {"baseline": "theirs", "baseline_us": 10 * us}

        monkeypatch.setattr(measure.Measurer, "row", lambda self, case, n: row(n, us=us))
        monkeypatch.setattr(measure.Measurer, "baselines", baselines)
        bench(tmp_path, *options, "--tokens", "1,2,4")
        return [(r["us"], r.get("baseline_us")) for r in only_file(tmp_path)["rows"]]

    assert run(5.0) == [(5, 50), (5, 50), (5, 50)]
    # A run that ends there leaves the earlier one's rows as they were.
    assert run(6.0, KeyboardInterrupt()) == [(6, 60), (5, 50), (5, 50)]
    # A baseline that fails, and says so, costs only itself.
    assert run(7.0, RuntimeError("out of luck")) == [(7, 70), (7, None), (7, 70)]
    assert run(8.0) == [(8, 80), (8, 80), (8, 80)]


def test_compare_measures_what_the_old_file_holds_and_repeats_what_seems_slower(
    tmp_path, monkeypatch, capsys
) -> None:
    old = result_file(tmp_path / "old.json", [row(3), row(5)])
    times = {3: [150.0, 101.0], 5: [150.0, 140.0]}
    measured = []

    def fake(self: Any, case: cases.Case, num_tokens: int) -> dict[str, Any]:
        measured.append((case.label(), num_tokens))
        return row(num_tokens, us=times[num_tokens].pop(0))

    monkeypatch.setattr(measure.Measurer, "row", fake)
    options = ["bench", "--device", "cpu", "--out", str(tmp_path / "new"), "--baseline", "none"]
    assert main([*options, "--compare", old]) == 1
    assert measured == [("fused_q deepseek-v3.2 H 16 fp8", n) for n in (3, 5, 3, 5)]
    out = capsys.readouterr().out
    assert "+40.0%" in out and "1 same, 1 slower" in out


def test_file_name_and_commit(monkeypatch) -> None:
    versions = {"gpu": "NVIDIA H200", "torch": "2.11.0+cu130", "triton": "3.6.0"}
    assert results.file_name(versions) == "NVIDIA-H200-2.11.0-3.6.0"
    monkeypatch.delenv("DSV32_OPS_COMMIT", raising=False)
    assert re.fullmatch(r"[0-9a-f]{12}(-dirty)?|unknown", results.commit())


def all_rows() -> list[dict[str, Any]]:
    rows = []
    for case in cases.select():
        for n in cases.TOKENS:
            floor = 1 + n / 250
            us = 1.5 + floor * 1.04
            beside = (
                {"baseline": "vllm.kernels:fused_q", "baseline_us": 15 * us} if case.heads else {}
            )
            rows.append(
                {**case.fields(), "num_tokens": n, "us": us, "floor_us": floor, "gb_s": 1.0}
                | {"fraction_of_floor": floor / us}
                | beside
            )
    return rows


def test_plots(tmp_path, capsys) -> None:
    path = result_file(tmp_path / "r.json", all_rows())
    assert main(["bench", "--plot", path]) == 0
    for name in ("r-fraction.png", "r-time.png"):
        data = (tmp_path / name).read_bytes()
        assert data.startswith(b"\x89PNG") and len(data) > 20_000
    panels = dict(plots.panels_of(all_rows()))
    assert len(panels) == 2 * 2 + 2 + 2 and all(3 <= len(lines) <= 4 for lines in panels.values())
    assert set(panels["fused_norm_rope, glm-5, no fill"]) == set(cases.MODES)
    assert set(panels["fused_q, bf16 query"]) == {
        "deepseek-v3.2, H 16", "deepseek-v3.2, H 128", "glm-5, H 8", "glm-5, H 64",
    }  # fmt: skip


def test_plots_of_rows_without_a_floor(tmp_path, capsys) -> None:
    path = result_file(tmp_path / "r.json", [row(1), row(64)])
    assert main(["bench", "--plot", path]) == 0
    assert [p.name for p in tmp_path.glob("*.png")] == ["r-time.png"]


def test_tables(capsys) -> None:
    head = results.header(CPU, 4250.0)
    report.print_results(head | {"rows": all_rows()})
    out = capsys.readouterr().out
    assert "copy 4,250 GB/s" in out and "131,072" in out
    assert sum(line.strip().startswith("fused_") for line in out.splitlines()) == len(
        cases.select()
    )
    report.print_results(head | {"rows": all_rows()[-3:]})
    out = capsys.readouterr().out
    assert out.count("fused_embed_eh_norm glm-5") == 3 and "32,768" in out


@pytest.mark.parametrize("config", CONFIGS)
def test_the_floor_moves_16_bytes_per_access(config) -> None:
    signature = {name: "constexpr" for name in ("PIECE", "PIECES", "HINT")}
    signature = {
        "src_ptr": "*i32", "dst_ptr": "*i32", "n_read": "i32", "n_written": "i32",
        "reads_per_program": "i64", **signature,
    }  # fmt: skip
    constants = {"PIECE": config.num_warps * 128, "PIECES": config.pieces, "HINT": config.hint}
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(4)}
    source = ASTSource(stream_kernel, signature, constants, aligned)
    options = {"num_warps": config.num_warps}
    ptx = compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    loads, stores = (re.findall(rf"\b{kind}\.global\S*", ptx) for kind in ("ld", "st"))
    assert len(loads) == config.pieces and all(".v4.b32" in load for load in loads)
    wide = [store for store in stores if ".v4.b32" in store]
    # The other stores keep the loads alive and never happen.
    assert len(wide) == config.pieces and len(stores) - len(wide) <= 4


INTERPRETED = """
import torch
from dsv32_ops.bench.stream import CONFIGS, StreamBuffers
for read, written in ((95_040, 251_120), (100, 0), (0, 200_000), (200_000, 64)):
    buffers = StreamBuffers(read, written, 2, "cpu")
    for config in CONFIGS:
        for copy in range(2):
            buffers.dst.fill_(-7)
            buffers.launch(copy, config)
            start = copy * buffers.n_written
            part = buffers.dst[start : start + buffers.n_written]
            assert torch.equal(part, torch.arange(len(part), dtype=torch.int32)), (read, config)
            assert int((buffers.dst != -7).sum()) == len(part), (read, config)
"""


def test_the_floor_writes_every_byte_once() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("op", cases.OPS)
def test_the_tuner_measures_what_is_in_use_too(op, monkeypatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    tune = importlib.import_module("tune")
    small = torch.randn(300, 7168).to(torch.bfloat16)
    monkeypatch.setattr(cases, "_embed_table", lambda config, device: small)
    groups: dict[cases.Case, dict[str, Any]] = {}
    for variant in tune.variants(op):
        labels = groups.setdefault(variant.case, {})
        assert variant.label not in labels
        labels[variant.label] = variant
    for case, labels in groups.items():
        inputs = cases.build(case, 2, CPU)
        for variant in labels.values():
            _, outputs = tune.call_of(variant, inputs)
            assert all(out.shape[0] == 2 for out in outputs)
        for num_tokens in tune.tokens_of(op):
            constants = {"TOPK": 2048 if case.fill_topk else 0}
            if op == "fused_norm_rope":
                parts = launch.norm_rope_grid(num_tokens, constants).tasks
                assert f"warps {launch.NORM_ROPE_WARPS}, tasks {parts}" in labels
            elif op == "fused_q":
                quantize = case.query == "fp8"
                tiles = launch.query_tiles(case.heads or 0, quantize, 64)
                warps = launch.query_warps({**tiles, "QUANTIZE": quantize})
                own = (f"{name} {tiles[name]}" for name in ("TILE", "INDEX_TILE", "FEW"))
                assert ", ".join((f"warps {warps}", *own)) in labels
            else:
                assert f"warps {launch.norm_warps(7168)}" in labels


@pytest.mark.gpu
def test_rows_on_a_gpu(tmp_path, capsys) -> None:
    options = ["bench", "--device", "cuda", "--out", str(tmp_path), "--baseline", "none"]
    selection = ["--presets", "deepseek-v3.2", "--heads", "16", "--tokens", "1,2048,32768"]
    assert main([*options, *selection]) == 0, capsys.readouterr()
    found = only_file(tmp_path)
    assert found["copy_gb_s"] > 100
    for r in found["rows"]:
        assert r["method"] == ("do_bench" if r["num_tokens"] > timing.GRAPH_MAX else "graph")
        assert 0 < r["floor_us"] and 0 < r["fraction_of_floor"] < 1.5
    assert len(list(tmp_path.glob("*.png"))) == 2


PUBLISHED = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


@pytest.mark.parametrize("path", PUBLISHED, ids=[path.name for path in PUBLISHED])
def test_published_files_say_where_they_are_from(path) -> None:
    found = results.load(path)
    assert all(found[name] for name in ("gpu", "date", "torch", "triton", "commit", "rows"))
    assert path.stem.removeprefix("tune-") == results.file_name(found)
    assert re.fullmatch(r"[0-9a-f]{7,}", found["commit"])
    if not path.stem.startswith("tune-"):
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        assert set(re.findall(r"commit (\w+)\)", readme)) == {found["commit"]}
