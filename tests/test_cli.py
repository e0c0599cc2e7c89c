"""The command line and its main job: verdicts that can fail, exit codes, output."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dsv32_ops
from dsv32_ops import layouts, overhead, testing
from dsv32_ops.__main__ import main
from dsv32_ops.models import PRESETS
from dsv32_ops.verify import TOKENS, Job, Result, command, entries, exact, run
from dsv32_ops.verify.verdict import Checker

FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
V32 = PRESETS["deepseek-v3.2"]
# More than the sample holds, so that a row can lie outside of it.
NUM_TOKENS = 600


def verify(*options: str) -> int:
    return main(["verify", "--device", "cpu", "--tokens", str(NUM_TOKENS), *options])


def live_slot(arguments: dict[str, Any], row: int) -> tuple[int, int]:
    """Block and offset of the slot of a row, or of the nearest row before it with a live slot."""
    slots = arguments["slot_mapping"].tolist()
    while slots[row] < 0:
        row -= 1
    return divmod(slots[row], 64)


def scale_q_c(a: dict[str, Any], q_c: torch.Tensor) -> None:
    q_c *= 1.02


def truncate_q_c(a: dict[str, Any], q_c: torch.Tensor) -> None:
    """Round down: no element is more than a code off, but many are off."""
    exact_rows = exact.norm_rope_rows(a, torch.arange(q_c.shape[0]))["q_c"]
    q_c -= torch.where(q_c > exact_rows, q_c.abs() * 2.0**-8, 0).to(q_c.dtype)


def nan_in_last_row(a: dict[str, Any], q_c: torch.Tensor) -> None:
    q_c[-1, 7] = float("nan")


def wrong_kv_in_last_row(a: dict[str, Any], q_c: torch.Tensor) -> None:
    a["mla_kv_cache"][live_slot(a, NUM_TOKENS - 1)][3] += 1


def swap_rotation(a: dict[str, Any], q_c: torch.Tensor) -> None:
    rotated = a["mla_kv_cache"][..., 512:]
    rotated.copy_(rotated.roll(1, -1))


def double_indexer_scale(a: dict[str, Any], q_c: torch.Tensor) -> None:
    block, offset = live_slot(a, 0)
    flat = a["indexer_k_cache"][block].flatten()
    # The exponent's lowest bit, bit 23 of the scale, is in its third byte.
    flat[64 * 128 + 4 * offset + 2] ^= 0x80


def skip_a_slot(a: dict[str, Any], q_c: torch.Tensor) -> None:
    testing.poison(a["mla_kv_cache"][live_slot(a, 300)].view(torch.uint8))


def skip_an_indexer_slot(a: dict[str, Any], q_c: torch.Tensor) -> None:
    layout = layouts.IndexerCache()
    block, offset = live_slot(a, 300)
    codes, scales = layout._views(a["indexer_k_cache"])
    testing.poison(codes[block, offset])
    testing.poison(scales[block, offset])


def write_a_dead_slot(a: dict[str, Any], q_c: torch.Tensor) -> None:
    used = set(a["slot_mapping"].tolist())
    capacity = a["mla_kv_cache"].shape[0] * 64
    dead = next(slot for slot in range(capacity) if slot not in used)
    a["mla_kv_cache"][dead // 64, dead % 64, 5] = 1.0


def write_a_gap(a: dict[str, Any], q_c: torch.Tensor) -> None:
    cache = a["mla_kv_cache"]
    torch.as_strided(cache, (1,), (1,), cache.storage_offset() + 64 * 576).fill_(1.0)


def leave_a_row_unfilled(a: dict[str, Any], q_c: torch.Tensor) -> None:
    a["topk_indices_buffer"][NUM_TOKENS - 1, -1] = 0


def fill_a_row_too_many(a: dict[str, Any], q_c: torch.Tensor) -> None:
    a["topk_indices_buffer"][NUM_TOKENS] = -1


NORM_ROPE_FAULTS: list[tuple[Callable[[dict[str, Any], torch.Tensor], None], str]] = [
    (scale_q_c, "sample q_c: error"),
    (truncate_q_c, "sample q_c: "),
    (nan_in_last_row, "sample q_c: error inf"),
    (wrong_kv_in_last_row, "sample mla_kv_cache kv: error"),
    (swap_rotation, "sample mla_kv_cache k_pe: error"),
    (double_indexer_scale, "sample indexer_k_cache index_k_scale: 1 of"),
    (skip_a_slot, "mla_kv_cache: 1 live slots were not written"),
    (skip_an_indexer_slot, "indexer_k_cache: 1 live slots were not written"),
    (write_a_dead_slot, "mla_kv_cache: 2 bytes outside"),
    (write_a_gap, "mla_kv_cache: 2 bytes outside"),
    (leave_a_row_unfilled, "topk_indices_buffer: rows that are not -1"),
    (fill_a_row_too_many, "topk_indices_buffer: extra rows written"),
]


@pytest.mark.parametrize(
    ("fault", "message"), NORM_ROPE_FAULTS, ids=lambda v: getattr(v, "__name__", "")
)
def test_a_fault_in_norm_rope_is_found(fault, message, monkeypatch, capsys) -> None:
    real = dsv32_ops.fused_norm_rope

    def faulty(**arguments: Any) -> torch.Tensor:
        q_c = real(**arguments)
        fault(arguments, q_c)
        return q_c

    monkeypatch.setattr(dsv32_ops, "fused_norm_rope", faulty)
    monkeypatch.setattr(run, "_check_q", lambda job, n: ok_result())
    assert verify() == 1
    out = capsys.readouterr().out
    assert f"FAILED fused_norm_rope, {NUM_TOKENS} tokens: {message}" in out


def ok_result() -> Result:
    return Result("fused_q", NUM_TOKENS, "cpu", "ok", 0.0, 0.0, 0, 1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("output", "change", "message"),
    [
        (0, lambda t: t.view(torch.uint8)[-1, 5].add_(2), "sample index_q_fp8: codes"),
        (1, lambda t: t[0].mul_(2), "sample index_weights_out: error"),
        (2, lambda t: t.view(torch.uint8)[:, 1].add_(1), "sample mqa_q: "),
        (2, lambda t: t.view(torch.uint8)[-1, -1, -64:].fill_(0x7F), "sample mqa_q: codes"),
    ],
    ids=["two-steps", "weights", "biased", "nan"],
)
def test_a_fault_in_q_is_found(output, change, message, monkeypatch, capsys) -> None:
    real = dsv32_ops.fused_q

    def faulty(**arguments: Any) -> tuple[torch.Tensor, ...]:
        outputs = real(**arguments)
        change(outputs[output])
        return outputs

    monkeypatch.setattr(dsv32_ops, "fused_q", faulty)
    assert verify("--heads", "2") == 1
    assert f"FAILED fused_q, {NUM_TOKENS} tokens: {message}" in capsys.readouterr().out


def test_the_reference_comparison_sees_what_the_sample_misses() -> None:
    job = Job(V32, 2, torch.device("cpu"))
    rows = set(job.sample(NUM_TOKENS).tolist())
    inputs, buffers = job.norm_rope_inputs(NUM_TOKENS)
    slots = inputs["slot_mapping"].tolist()
    outside = next(row for row in range(NUM_TOKENS) if row not in rows and slots[row] >= 0)
    q_c = dsv32_ops.fused_norm_rope(**inputs)

    def failures() -> list[str]:
        checker = Checker(job.fp8_dtype, job.allowed)
        run._reference_norm_rope(checker, job, inputs, buffers, q_c)
        return checker.failures

    assert failures() == []
    q_c[outside, 0] += 1
    inputs["mla_kv_cache"][live_slot(inputs, outside)][570] += 1
    assert [text.partition(":")[0] for text in failures()] == ["q_c", "mla_kv_cache k_pe"]


@pytest.mark.parametrize("mode", ["auto", "float16", "fp8", "fp8_ds_mla", "nvfp4_ds_mla"])
@pytest.mark.parametrize("preset", ["glm-5", "kimi-k2"])
def test_every_mode_and_model_passes(mode, preset, capsys) -> None:
    options = ["--preset", preset, "--mode", mode, "--query", "bf16", "--heads", "3"]
    assert main([*options, "--tokens", "65", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "fused_norm_rope" in out and "fused_q" in out and "FAILED" not in out


def test_no_command_is_the_main_job_at_the_boundary(monkeypatch, capsys) -> None:
    seen: list[tuple[Job, list[int]]] = []

    def fake(job: Job, tokens: list[int], progress: Any) -> list[Result]:
        seen.append((job, list(tokens)))
        return [ok_result()]

    monkeypatch.setattr(command, "verify", fake)
    assert main([]) == 0
    (job, tokens) = seen[0]
    assert tokens == [1, 512, 65_535, 65_536, 65_537] == list(TOKENS)
    assert (job.config, job.num_heads, job.mode, job.quantize_mqa) == (V32, 16, "auto", True)
    assert main(["--heads", "128", "--tokens", "3,4"]) == 0
    assert seen[1][0].num_heads == 128 and seen[1][1] == [3, 4]
    capsys.readouterr()


def test_json_and_config(tmp_path, capsys) -> None:
    config = {
        "model_type": "tiny", "hidden_size": 64, "q_lora_rank": 24, "kv_lora_rank": 32,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "num_attention_heads": 4,
        "index_n_heads": 3, "index_head_dim": 16, "index_topk": 8, "rope_theta": 10000.0,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "vocab_size": 100,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = ["--config", str(tmp_path / "config.json"), "--tokens", "1,130", "--heads", "2"]
    assert main([*options, "--device", "cpu", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["config"], report["device"], report["heads"]) == ("tiny", "CPU", 2)
    lines = [(r["op"], r["num_tokens"], r["verdict"], r["grid"]) for r in report["results"]]
    assert lines == [
        (op, n, "ok", "cpu") for n in (1, 130) for op in ("fused_norm_rope", "fused_q")
    ]
    assert all(0 < r["largest_error"] <= r["allowed_error"] for r in report["results"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "tpu"], "--device"),
        (["--device", "cuda:99"], "cuda:99"),
        (["--config", "/nowhere/config.json"], "/nowhere/config.json"),
        (["--mode", "int3"], "fp8_ds_mla"),
        (["layout", "int3"], "nvfp4_ds_mla"),
        (["bench", "--ops", "fused_k"], "fused_q"),
        (["bench", "--against", "nonsense"], "[op=]module:function"),
        (["bench", "--plot", "/nowhere.json"], "/nowhere.json"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(options, message, capsys) -> None:
    assert main(options) == 2
    err = capsys.readouterr().err.strip().splitlines()
    assert message in err[-1] and not any("Traceback" in line for line in err)


@pytest.mark.parametrize("options", [["--tokens", "0"], ["--preset", "gpt-2"], ["--heads", "x"]])
def test_argument_errors_are_exit_code_2(options, capsys) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(options)
    assert exit_info.value.code == 2
    assert options[0] in capsys.readouterr().err


def test_layout_prints_byte_maps(capsys) -> None:
    assert main(["layout"]) == 0
    out = capsys.readouterr().out
    assert "656 bytes" in out and "352 bytes" in out and "8448 bytes" in out
    assert main(["layout", "fp8_ds_mla"]) == 0
    assert "512..527" in capsys.readouterr().out


@pytest.mark.parametrize("name", [None, "verify", "bench", "layout"])
def test_help(name, capsys) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main([name, "--help"] if name else ["--help"])
    assert exit_info.value.code == 0
    out = capsys.readouterr().out
    assert "usage: dsv32-ops" in out
    if name in (None, "bench"):
        assert "examples:" in out


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_overhead_takes_calls_apart(device, monkeypatch, capsys) -> None:
    def once(calls: list[Callable[[], Any]], device: torch.device) -> list[float]:
        for call in calls:
            call()
        return [1.0] * len(calls)

    monkeypatch.setattr(overhead, "host_times", once)
    assert main(["overhead", "--device", device, "--tokens", "3", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["us"]
    assert rows.keys() == {"fused_norm_rope", "fused_q", "fused_eh_norm"}
    for parts in rows.values():
        assert parts.keys() == rows["fused_q"].keys() and "whole call, keywords" in parts
        assert any(name.startswith("least") for name in parts) == (device == "cuda")


def test_overhead_leaves_no_dead_ops() -> None:
    """With one, torch 2.11 could not import Inductor any more."""
    overhead._op_like(torch.ops.dsv32.fused_q, (), lambda *args: None)
    gc.collect()
    alive = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    packets = [
        packet
        for packet in vars(torch.ops.dsv32_overhead).values()
        if isinstance(packet, torch._ops.OpOverloadPacket)
    ]
    assert packets and {packet._qualified_op_name for packet in packets} <= alive


def test_core_dependencies_are_enough() -> None:
    """Without the extras the main job prints a plain table and says how to get a better one."""
    code = (
        "import sys\n"
        "for name in ('rich', 'matplotlib', 'hypothesis', 'pytest', 'packaging'):\n"
        "    sys.modules[name] = None\n"
        "from dsv32_ops.__main__ import main\n"
        "sys.exit(main(['--tokens', '5', '--heads', '1', '--device', 'cpu']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "fused_norm_rope" in done.stdout and "verdict" in done.stdout
    assert "pip install 'dsv32_ops[bench]'" in done.stderr


def test_codes_by_hand() -> None:
    values = [0.0, -0.0, 1.0, 1.0625, 1.1875, -448.0, 463.0, 1e9, 2.0**-9, 2.0**-10, 3 * 2.0**-10]
    wanted = [0, 0x80, 0x38, 0x38, 0x3A, 0xFE, 0x7E, 0x7E, 1, 0, 2]
    assert exact.codes(torch.tensor(values, dtype=torch.float64), FN).tolist() == wanted
    values = [0.0, -0.0, -(2.0**-12), 1.0, 240.0, 250.0, float("nan"), float("-inf")]
    wanted = [0, 0, 0, 0x40, 0x7F, 0x7F, 0x80, 0xFF]
    assert exact.codes(torch.tensor(values, dtype=torch.float64), FNUZ).tolist() == wanted
    # e2m1 holds 0, 0.5, 1, 1.5, 2, 3, 4, 6; a block whose amax is 6 has scale 1.
    block = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -5.1, -0.0] + [0.1] * 6)
    quantized = exact.quantize_fp4(block.double().view(1, 16))
    assert quantized.scale.tolist() == [[0x38]]
    assert quantized.codes[0, :10].tolist() == [7, 0, 2, 2, 4, 4, 6, 6, 15, 8]


def test_scales_by_hand() -> None:
    rows = torch.tensor([[0.0, 0.0], [448.0, 1.0], [448.0 * (1 + 2.0**-20), 1.0]]).double()
    assert exact.quantize_row(rows, FN).scale.flatten().tolist() == [2.0**-22, 1.0, 2.0]
    assert exact.quantize_row(rows, FNUZ).scale.flatten().tolist() == [2.0**-21, 2.0, 4.0]
    tiles = torch.zeros(1, 256, dtype=torch.float64)
    tiles[0, 130] = -1.0
    assert exact.quantize_tiles(tiles, FN).scale.tolist() == [[2.0**-13, 2.0**-8]]


def test_entry_bytes_are_found_without_the_layouts() -> None:
    """Against the layouts' own decoders, in caches with gaps."""
    torch.manual_seed(0)
    slots = torch.randperm(128)[:9]
    cache, buffer = testing.canary_cache(layouts.IndexerCache(), 2, 64, block_gap=64)
    rows = torch.randn(9, 128)
    layouts.IndexerCache().encode(cache, slots, rows)
    start = cache.data_ptr() - buffer.data_ptr()
    parts = entries.indexer_parts(buffer[start + entries.offsets("indexer_k_cache", cache, slots)])
    found = parts["index_k"].values.view(FN).float() * parts["index_k_scale"].values
    assert torch.equal(found, layouts.IndexerCache().decode(cache, slots))
    layout = layouts.Fp8DsMla()
    cache, buffer = testing.canary_cache(layout, 2, 64, block_gap=64, entry_gap=16)
    kv, k_pe = torch.randn(9, 512), torch.randn(9, 64)
    layout.encode(cache, slots, kv, k_pe)
    start = cache.data_ptr() - buffer.data_ptr()
    raw = buffer[start + entries.offsets("mla_kv_cache", cache, slots)]
    found_parts = entries.mla_parts("fp8_ds_mla", raw, 512, torch.uint8)
    decoded_kv, decoded_k_pe = layout.decode(cache, slots)
    codes = found_parts["kv"].values.view(FN).float().view(9, 4, 128)
    scaled = codes * found_parts["kv_scales"].values.unsqueeze(-1)
    assert torch.equal(scaled.flatten(1), decoded_kv)
    assert torch.equal(found_parts["k_pe"].values.float(), decoded_k_pe)


@pytest.mark.gpu
def test_main_job_on_a_gpu(capsys) -> None:
    assert main(["--device", "cuda", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {r["num_tokens"] for r in report["results"]} == set(TOKENS)
    assert all(r["grid"].startswith(f"{r['num_tokens']:,} x ") for r in report["results"])


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["fp8", "fp8_ds_mla", "nvfp4_ds_mla"])
def test_modes_on_a_gpu(mode, capsys) -> None:
    options = ["--device", "cuda", "--mode", mode, "--query", "bf16", "--tokens", "1,700,65537"]
    assert main(options) == 0, capsys.readouterr().out


@pytest.mark.gpu
def test_a_fault_on_a_gpu_is_found_in_any_row(monkeypatch, capsys) -> None:
    real = dsv32_ops.fused_norm_rope

    def faulty(**arguments: Any) -> torch.Tensor:
        q_c = real(**arguments)
        q_c[4321, 0] += 1
        return q_c

    monkeypatch.setattr(dsv32_ops, "fused_norm_rope", faulty)
    assert main(["--device", "cuda", "--tokens", "5000"]) == 1
    assert "FAILED fused_norm_rope, 5,000 tokens: q_c: error" in capsys.readouterr().out
