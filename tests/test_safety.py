"""Bad slots, positions and ids never corrupt memory, and sizes past 2^31 do not wrap.

Bytes are compared with an address computed here, from the formulas of the layouts; the bytes of an
entry come from a call with packed caches and one slot per token, whose values other files check.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import SMALL, device_cases, on_devices, on_gpu, sample_rows
from torch import Tensor

import dsv32_ops
from dsv32_ops import checks, reference, testing
from dsv32_ops.layouts import MLA_MODES, IndexerCache, mla_layout
from dsv32_ops.models import PRESETS
from dsv32_ops.testing import POISON_BYTE, poison, same_bytes

GUARD = 4096
V32 = PRESETS["deepseek-v3.2"]
INT32_MAX, INT32_MIN = 2**31 - 1, -(2**31)
INDEX_FORMATS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "ue8m0x4": {"index_scale_format": "ue8m0x4"},
    "shuffled": {"indexer_cache_shuffled": True},
}

Inputs = dict[str, Any]


# Every byte of a cache


def mla_layout_of(inputs: Inputs) -> Any:
    return mla_layout(
        inputs["mla_kv_cache_dtype"],
        kv_dim=inputs["kv_c"].shape[1],
        rope_dim=inputs["k_pe"].shape[1],
        dtype=inputs["q_c"].dtype,
    )


def index_layout_of(inputs: Inputs) -> IndexerCache:
    shuffled = inputs["indexer_cache_shuffled"]
    return IndexerCache(inputs["index_k"].shape[1], inputs["index_scale_format"], shuffled)


def entries_of(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """The bytes that each token writes when its slot is live: MLA entry, index codes and scale."""
    num_tokens, device = inputs["positions"].shape[0], inputs["positions"].device
    rows = -(-num_tokens // 16) * 16
    mla = mla_layout_of(inputs).empty(1, rows, device)
    index_dim = inputs["index_k"].shape[1]
    index = IndexerCache(index_dim).empty(1, rows, device)
    slots = torch.arange(num_tokens, device=device)
    packed = dict(
        slot_mapping=slots, indexer_slot_mapping=slots, mla_kv_cache=mla, indexer_k_cache=index,
        indexer_cache_shuffled=False,
    )  # fmt: skip
    dsv32_ops.fused_norm_rope(**{**inputs, **packed})
    flat = index.flatten()
    codes = flat[: rows * index_dim].view(rows, index_dim)
    scales = flat[rows * index_dim :].view(rows, 4)
    return (
        mla[0].contiguous().view(torch.uint8)[:num_tokens],
        codes[:num_tokens],
        scales[:num_tokens],
    )


def live_rows(slots: Tensor, cache: Tensor, num_tokens: int) -> list[tuple[int, int, int]]:
    """(row, block, offset in the block) of the rows that write."""
    blocks, block_size, _ = cache.shape
    numbers = enumerate(slots.tolist()[:num_tokens])
    return [(row, *divmod(s, block_size)) for row, s in numbers if 0 <= s < blocks * block_size]


def expected_mla(inputs: Inputs, buffer: Tensor, entries: Tensor) -> Tensor:
    cache, expected = inputs["mla_kv_cache"], torch.full_like(buffer, POISON_BYTE)
    block_bytes, entry_bytes = (n * cache.element_size() for n in cache.stride()[:2])
    for row, block, offset in live_rows(inputs["slot_mapping"], cache, len(entries)):
        start = GUARD + block * block_bytes + offset * entry_bytes
        expected[start : start + entries.shape[1]] = entries[row]
    return expected


def expected_index(inputs: Inputs, buffer: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    cache, expected = inputs["indexer_k_cache"], torch.full_like(buffer, POISON_BYTE)
    block_size, dim = cache.shape[1], codes.shape[1]
    d = torch.arange(dim, device=buffer.device)
    for row, block, o in live_rows(inputs["indexer_slot_mapping"], cache, len(codes)):
        base = GUARD + block * cache.stride(0)
        where = o * dim + d
        if inputs["indexer_cache_shuffled"]:
            where = o // 16 * 16 * dim + d // 16 * 256 + o % 16 * 16 + d % 16
        expected[base + where] = codes[row]
        scale = base + block_size * dim + 4 * o
        expected[scale : scale + 4] = scales[row]
    return expected


def canaried(mode: str, index_format: str, num_tokens: int, device: str, **more: Any) -> Inputs:
    """Inputs whose caches lie between guard bytes, with gaps and different block sizes."""
    formats = INDEX_FORMATS[index_format]
    inputs = testing.norm_rope_inputs(
        SMALL, num_tokens, mode=mode, caches=False, device=device, outs=True, **formats, **more
    )
    inputs.update(mla_kv_cache_dtype=mode)
    inputs["mla_kv_cache"], inputs["mla buffer"] = testing.canary_cache(
        mla_layout_of(inputs), 3, 5, guard=GUARD, block_gap=64, entry_gap=16, device=device
    )
    inputs["indexer_k_cache"], inputs["index buffer"] = testing.canary_cache(
        index_layout_of(inputs), 2, 32, guard=GUARD, block_gap=48, device=device
    )
    return inputs


def run(inputs: Inputs) -> Tensor:
    return dsv32_ops.fused_norm_rope(**arguments(inputs))


def arguments(inputs: Inputs) -> Inputs:
    return {name: value for name, value in inputs.items() if " " not in name}


# Dead slots: negative, and past a cache of 15 slots or of 64.
NEGATIVE = {torch.int32: (-1, -16, INT32_MIN), torch.int64: (-1, -(2**40), -(2**63))}
PAST = {torch.int32: (2**30, INT32_MAX), torch.int64: (2**40, 2**63 - 1)}


def slot_maps(dtype: torch.dtype, device: str, tokens: int = 19) -> tuple[Tensor, Tensor]:
    """Rows live in both caches, in one, in none; first and last slots; every kind of dead slot.

    The first map is shorter than the tokens, the second longer. A slot past its cache is an error
    on a CPU, so that it gets a negative one there.
    """
    a, b, c = NEGATIVE[dtype]
    (y, z), past_mla, past_index = PAST[dtype], 15, 64
    if device == "cpu":
        y = z = past_mla = past_index = a
    mla = [14, 0, a, 7, b, 3, c, 9, y, z, past_mla, past_mla, 12, 1]
    index = [63, a, 5, y, c, 49, 0, b, 31, z, past_index, 8, 16, 2, 3, 4, 6, 7, 9, 10, 11]
    assert len(mla) < tokens < len(index)
    maps = (torch.tensor(slots, dtype=dtype, device=device) for slots in (mla, index))
    return next(maps), next(maps)


DTYPES = (torch.int32, torch.int64)
FORMATS = list(itertools.product(MLA_MODES, INDEX_FORMATS, DTYPES))
# A GPU compiles a kernel for each: there, every mode once and each of the others with some.
PAIRED = [(mode, [*INDEX_FORMATS][i % 3], DTYPES[i % 2]) for i, mode in enumerate(MLA_MODES)]


@device_cases("case", FORMATS, gpu=PAIRED)
def test_every_byte_that_no_rule_names_keeps_its_canary(device, case):
    mode, index_format, dtype = case
    inputs = canaried(mode, index_format, 19, device, index_dtype=dtype)
    inputs["slot_mapping"], inputs["indexer_slot_mapping"] = slot_maps(dtype, device)
    run(inputs)
    entries, codes, scales = entries_of(arguments(inputs))
    mla = expected_mla(inputs, inputs["mla buffer"], entries)
    index = expected_index(inputs, inputs["index buffer"], codes, scales)
    assert torch.equal(inputs["mla buffer"], mla)
    assert torch.equal(inputs["index buffer"], index)
    filled = inputs["topk_indices_buffer"]
    assert (filled[:19] == -1).all() and same_bytes(filled[19:], poison(filled[19:].clone()))


# What only the data show


BAD: dict[str, tuple[str, int, int, str, Inputs]] = {
    # argument: name in the text, row, value, what was expected
    "slot past the cache": ("slot_mapping", 2, 15, "a slot below 15", {}),
    "slot of 2^40": ("slot_mapping", 0, 2**40, "a slot below 15", {}),
    "indexer slot past its cache": ("indexer_slot_mapping", 4, 64, "a slot below 64", {}),
    "slot past the indexer cache": (
        "slot_mapping", 3, 64, "a slot below 64",
        {"mla_kv_cache": None, "indexer_slot_mapping": None},
    ),
    "position past the tables": ("positions", 4, 97, "a row of a table of 97", {}),
    "position of 2^40": ("positions", 4, 2**40, "a row of a table of 97", {}),
    "negative position": ("positions", 4, -1, "a row of a table of 97", {}),
    "position without slots": (
        "positions", 1, 97, "a row of a table of 97",
        {"slot_mapping": None, "indexer_slot_mapping": None, "mla_kv_cache": None,
         "indexer_k_cache": None},
    ),
}  # fmt: skip


def checked(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cuda":
        monkeypatch.setenv("DSV32_OPS_CHECK", "1")


def small_call(device: str) -> Inputs:
    """Five tokens: row 1 is padding in both maps, row 3 in the first."""
    inputs = canaried("auto", "fp32", 5, device)
    inputs["slot_mapping"] = torch.tensor([3, -1, 4, -5, 0], device=device)
    inputs["indexer_slot_mapping"] = torch.tensor([3, -1, 4, 9, 0], device=device)
    inputs["q_c_out"] = poison(torch.empty_like(inputs["q_c"]))
    return inputs


def written(inputs: Inputs) -> dict[str, Tensor]:
    """Copies of all that the op writes, with the guard bytes around the caches."""
    names = ["mla buffer", "index buffer", "topk_indices_buffer", "q_c_out"]
    names += ["kv_c_out", "k_pe_out", "index_k_out"]
    return {name: inputs[name].clone() for name in names}


@pytest.mark.parametrize("case", BAD)
@on_devices
def test_bad_data_is_named_before_anything_is_written(device, case, monkeypatch):
    checked(device, monkeypatch)
    name, row, value, expected, changes = BAD[case]
    inputs = small_call(device)
    inputs.update(changes)
    inputs[name][row] = value
    before = written(inputs)
    text = f"{name}: expected {expected}, got {value} in row {row}"
    with pytest.raises(IndexError, match=f"^{re.escape(text)}$"):
        run(inputs)
    assert all(same_bytes(inputs[key], memory) for key, memory in before.items())


@on_devices
def test_the_indexers_own_table_bounds_its_rows(device, monkeypatch):
    checked(device, monkeypatch)
    inputs = small_call(device)
    inputs["index_rope_cos_sin"] = inputs["index_rope_cos_sin"][:50]
    inputs["positions"].fill_(49)
    inputs["positions"][1] = 50  # padding
    run(inputs)
    inputs["positions"][3] = 50  # padding for the MLA cache alone
    with pytest.raises(
        IndexError, match="positions: expected a row of a table of 50, got 50 in row 3"
    ):
        run(inputs)


@on_devices
def test_padding_is_never_an_error(device, monkeypatch):
    """Negative slots of any size, rows past the map and their positions, slots past the tokens."""
    checked(device, monkeypatch)
    inputs = small_call(device)
    inputs["slot_mapping"] = inputs["slot_mapping"][:4]
    inputs["indexer_slot_mapping"] = torch.tensor([3, -(2**63), 4, 9, -1, 64, 2**40], device=device)
    inputs["positions"][1], inputs["positions"][4] = 2**40, -7
    run(inputs)
    assert (inputs["topk_indices_buffer"][:5] == -1).all()


@pytest.mark.parametrize("op", ["fused_embed_norm", "fused_embed_eh_norm"])
@pytest.mark.parametrize("value", [31, -1, 2**40])
@on_devices
def test_ids_outside_the_table_are_named(device, value, op, monkeypatch):
    checked(device, monkeypatch)
    inputs, outs = ids_call(op, device)
    inputs["input_ids"][3] = value
    text = f"input_ids: expected an id of a table of 31 rows, got {value} in row 3"
    with pytest.raises(IndexError, match=f"^{re.escape(text)}$"):
        getattr(dsv32_ops, op)(**inputs, **outs)
    assert all(same_bytes(out, poison(out.clone())) for out in outs.values())


def ids_call(op: str, device: str) -> tuple[Inputs, Inputs]:
    config = replace(SMALL, hidden_size=40)
    if op == "fused_embed_norm":
        inputs = testing.embed_norm_inputs(config, 6, vocab_rows=31, device=device)
        widths = {"residual_out": 40, "normed_out": 40}
    else:
        inputs = testing.embed_eh_norm_inputs(config, 6, vocab_rows=31, device=device)
        widths = {"out": 80}
    outs = {name: torch.empty(6, width, dtype=torch.bfloat16) for name, width in widths.items()}
    return inputs, {name: poison(out.to(device)) for name, out in outs.items()}


@pytest.mark.parametrize("table", ["q_pe_cos_sin", "index_q_cos_sin"])
@on_devices
def test_query_positions_outside_a_table_are_named(device, table, monkeypatch):
    checked(device, monkeypatch)
    inputs = testing.q_inputs(SMALL, 5, 2, device=device)
    inputs[table] = inputs[table][:50]
    inputs["positions"].fill_(49)
    dsv32_ops.fused_q(**inputs)
    inputs["positions"][2] = 50
    with pytest.raises(
        IndexError, match="positions: expected a row of a table of 50, got 50 in row 2"
    ):
        dsv32_ops.fused_q(**inputs)


def test_an_int32_map_of_a_cache_beyond_2_to_the_31_slots():
    """torch compares int32 with a wrapped number: 5 >= 2**31 would be true."""
    slots = torch.tensor([5, INT32_MAX, -1], dtype=torch.int32)
    checks.slots_in_range(slots, "slot_mapping", 2**31, 3)
    checks.positions_in_range(slots[:2], 2**31, None)
    checks.ids_in_range(slots[:2], "input_ids", 2**32)
    with pytest.raises(IndexError, match="got 2147483647 in row 1"):
        checks.slots_in_range(slots, "slot_mapping", INT32_MAX, 3)


@on_gpu
def test_unchecked_bad_data_is_clamped_or_skipped():
    """Without DSV32_OPS_CHECK: the bytes of the same call with data made good by hand."""
    positions = torch.tensor([2**40, 96, -(2**40), 97, -1], device="cuda")
    bad, good = small_call("cuda"), small_call("cuda")
    bad["positions"], good["positions"] = positions, positions.clamp(0, 96)
    bad["slot_mapping"] = torch.tensor([15, 2**40, 4, 3, 2**63 - 1], device="cuda")
    good["slot_mapping"] = torch.tensor([-1, -1, 4, 3, -1], device="cuda")
    for inputs in (bad, good):
        run(inputs)
    assert all(same_bytes(bad[key], memory) for key, memory in written(good).items())
    query = testing.q_inputs(SMALL, 5, 2, device="cuda")
    bad_query, good_query = (
        dsv32_ops.fused_q(**{**query, "positions": p}) for p in (positions, positions.clamp(0, 96))
    )
    assert all(map(same_bytes, bad_query, good_query))


@on_gpu
@pytest.mark.parametrize("op", ["fused_embed_norm", "fused_embed_eh_norm"])
def test_unchecked_ids_are_clamped(op):
    inputs, outs = ids_call(op, "cuda")
    inputs["input_ids"] = torch.tensor([2**40, 30, 31, -1, -(2**63), 0], device="cuda")
    getattr(dsv32_ops, op)(**inputs, **outs)
    clamped = {**inputs, "input_ids": inputs["input_ids"].clamp(0, 30)}
    expected = getattr(dsv32_ops, op)(**clamped)
    for out, right in zip(outs.values(), expected if len(outs) == 2 else (expected,), strict=True):
        assert same_bytes(out, right)


@on_gpu
def test_the_check_stands_aside_under_capture(monkeypatch):
    """Reading the data would synchronize, which a capture forbids."""
    inputs = small_call("cuda")
    run(inputs)
    expected = written(inputs)
    for name in expected:
        poison(inputs[name])
    monkeypatch.setenv("DSV32_OPS_CHECK", "1")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(inputs)
    assert (inputs["mla buffer"] == POISON_BYTE).all()
    graph.replay()
    assert all(same_bytes(inputs[key], memory) for key, memory in expected.items())


# Past 2^31


def need_gigabytes(count: int) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < count << 30:
        pytest.skip(f"needs {count} GB of free GPU memory, found {free >> 30}")


def differs_anywhere(buffer: Tensor) -> bool:
    """Whether any byte is no canary; in pieces, since a comparison is as large as its operands."""
    return any(bool((piece != POISON_BYTE).any()) for piece in buffer.split(1 << 28))


BIG_CACHES = {
    "bf16, 2^31 elements": ("mla_kv_cache", "auto", False),
    "656-byte entries, 2^32 bytes": ("mla_kv_cache", "fp8_ds_mla", False),
    "352-byte entries, 2^32 bytes": ("mla_kv_cache", "nvfp4_ds_mla", False),
    "fp8, entry-major": ("mla_kv_cache", "fp8", True),
    "indexer, 2^32 bytes": ("indexer_k_cache", "auto", False),
}


@on_gpu
@pytest.mark.parametrize("case", BIG_CACHES)
def test_int32_slots_reach_the_end_of_a_cache_beyond_2_to_the_31_elements(case):
    """Rows at the first, a middle and the last slot; not one other byte of 4.3 GB changes."""
    need_gigabytes(12)
    name, mode, entry_major = BIG_CACHES[case]
    inputs = testing.norm_rope_inputs(SMALL, 3, mode=mode, caches=False, device="cuda")
    layout = mla_layout_of(inputs) if name == "mla_kv_cache" else index_layout_of(inputs)
    block_size = 64
    blocks = 2**32 // (block_size * layout.entry_bytes) + 2
    shape = (block_size, blocks) if entry_major else (blocks, block_size)
    cache, buffer = testing.canary_cache(layout, *shape, guard=GUARD, device="cuda")
    cache = cache.transpose(0, 1) if entry_major else cache
    assert cache.numel() > 2**31 and buffer.numel() > 2**32
    last = blocks * block_size - 1
    slots = torch.tensor([last, 0, last // 2], dtype=torch.int32, device="cuda")
    small = layout.empty(1, 64, "cuda")
    first = torch.arange(3, device="cuda")
    map_name = "slot_mapping" if name == "mla_kv_cache" else "indexer_slot_mapping"
    dsv32_ops.fused_norm_rope(**{**inputs, name: small, map_name: first})
    dsv32_ops.fused_norm_rope(**{**inputs, name: cache, map_name: slots})
    for row, slot in enumerate(slots.tolist()):
        block, o = cache[slot // block_size], slot % block_size
        parts = [(block[o], small[0, row])]
        if name == "indexer_k_cache":
            # A token's codes and its scale lie apart, behind each other's in the block.
            dim, flat, packed = layout.head_dim, block.flatten(), small.flatten()
            scale, scale_of_row = 64 * dim + 4 * o, 64 * dim + 4 * row
            parts = [
                (flat[o * dim : (o + 1) * dim], packed[row * dim : (row + 1) * dim]),
                (flat[scale : scale + 4], packed[scale_of_row : scale_of_row + 4]),
            ]
        for part, expected in parts:
            assert same_bytes(part, expected)
            part.view(torch.uint8).fill_(POISON_BYTE)
    assert not differs_anywhere(buffer)


@on_gpu
def test_a_ql_nope_of_4_gigabytes():
    """Heads of a transposed product are N * 512 apart: past 2^31 elements for the last heads."""
    need_gigabytes(24)
    num_tokens, heads = 33_100, 128
    inputs = testing.q_inputs(V32, num_tokens, heads, device="cuda")
    assert inputs["ql_nope"].stride() == (512, num_tokens * 512, 1)
    assert (heads - 1) * num_tokens * 512 > 2**31
    outputs = dsv32_ops.fused_q(**inputs)
    rows = sample_rows(num_tokens, "cuda")
    per_token = ("positions", "q_pe", "ql_nope", "index_q", "index_weights")
    sampled = {name: inputs[name][rows] if name in per_token else inputs[name] for name in inputs}
    sampled = {n: v.cpu() if isinstance(v, Tensor) else v for n, v in sampled.items()}
    index_q, weights, mqa_q = (out[rows].cpu() for out in outputs)
    expected = reference.fused_q(**sampled)
    # Division is exact in both; a rotation of the reference rounds twice in 2^29 cases.
    assert same_bytes(mqa_q[..., :512].contiguous(), expected[2][..., :512].contiguous())
    assert same_bytes(weights, expected[1])
    for actual, right in ((mqa_q, expected[2]), (index_q, expected[0])):
        step, equal = testing.compare_codes(actual, right)
        assert step <= 1 and equal > 0.99999


@on_gpu
def test_150_000_tokens_of_a_row_stride_that_wraps():
    """Rows 16,384 elements apart pass 2^31 elements at row 131,072, in inputs and outputs."""
    need_gigabytes(32)
    num_tokens, stride = 150_000, 16_384
    inputs = testing.norm_rope_inputs(V32, num_tokens, mode="fp8_ds_mla", device="cuda", outs=True)
    result = dsv32_ops.fused_norm_rope(**inputs)
    names = ("kv_c_out", "k_pe_out", "index_k_out", "mla_kv_cache", "indexer_k_cache")
    expected = {name: inputs[name].clone() for name in names}
    wide = torch.empty(num_tokens, stride, dtype=torch.bfloat16, device="cuda")
    poison(wide)
    apart = dict(inputs)
    start = 0
    # The outs of kv_c and k_pe are the inputs themselves; index_k's lies beside it.
    for name in ("q_c", "kv_c", "k_pe", "index_k"):
        width = inputs[name].shape[1]
        apart[name] = wide[:, start : start + width].copy_(inputs[name])
        start += width
    apart.update(kv_c_out=apart["kv_c"], k_pe_out=apart["k_pe"])
    apart["index_k_out"] = wide[:, start : start + 128]
    topk = poison(torch.empty(num_tokens + 1, stride, dtype=torch.int32, device="cuda"))
    apart["topk_indices_buffer"] = topk[:, :2048]
    for name in ("mla_kv_cache", "indexer_k_cache"):
        apart[name] = poison(torch.empty_like(inputs[name]))
    assert same_bytes(dsv32_ops.fused_norm_rope(**apart), result)
    for name, right in expected.items():
        assert same_bytes(apart[name], right), name
    assert wide[:, start + 128 :].isnan().all()
    assert (topk[:num_tokens, :2048] == -1).all()
    untouched = int(topk[num_tokens, 0])
    assert (topk[:, 2048:] == untouched).all() and (topk[num_tokens] == untouched).all()


# Devices


def every_op(device: torch.device) -> list[Any]:
    small = replace(SMALL, hidden_size=40)
    caches = canaried("fp8_ds_mla", "fp32", 19, str(device))
    caches["slot_mapping"], caches["indexer_slot_mapping"] = (
        m.to(device) for m in slot_maps(torch.int64, "cpu")
    )
    results = [run(caches), caches["mla buffer"], caches["index buffer"]]
    results += dsv32_ops.fused_q(**testing.q_inputs(small, 7, 3, device=device))
    results.append(dsv32_ops.fused_eh_norm(**testing.eh_norm_inputs(small, 7, device=device)))
    results += dsv32_ops.fused_embed_norm(**testing.embed_norm_inputs(small, 7, device=device))
    inputs = testing.embed_eh_norm_inputs(small, 7, device=device)
    return [*results, dsv32_ops.fused_embed_eh_norm(**inputs)]


@on_gpu
def test_tensors_on_a_device_that_is_not_current(gpus2):
    current, other = gpus2
    with torch.cuda.device(other):
        expected = every_op(other)
    with torch.cuda.device(current):
        results = every_op(other)
        assert torch.cuda.current_device() == current.index
    assert all(result.device == other for result in results)
    assert all(map(same_bytes, results, expected))


# compute-sanitizer


@on_gpu
@pytest.mark.parametrize(
    "tool, clean",
    [
        ("memcheck", "ERROR SUMMARY: 0 errors"),
        ("racecheck", "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"),
    ],
)
def test_sanitizer(tool, clean):
    """Every op in every mode, in one process without torch's caching allocator.

    Its blocks hold many tensors, so that an access past the end of one would go unseen.
    """
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not on PATH")
    script = Path(__file__).with_name("sanitizer_cases.py")
    # A failed look-up of an optional driver function is no error of a kernel.
    command = [sanitizer, "--tool", tool, "--report-api-errors", "no", sys.executable, str(script)]
    paths = [str(Path(dsv32_ops.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    settings = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        command,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=900,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-4000:]
    assert clean in output, output[-4000:]
    assert re.search(r"^\d{2,} calls$", done.stdout, re.MULTILINE), output[-4000:]
