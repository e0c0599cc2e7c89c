"""The Triton kernels on a CPU: addresses, masks, 64-bit offsets and integer-coded bytes.

The reference and the kernels do the same fp32 operations in the same order, sums apart. Where the
sums are exact every byte must be the same.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import interpret
import pytest
import torch
from support import BF16, FN, FNUZ, FP16, FP32, PER_TOKEN, SMALL, TINY, generator, model

from dsv32_ops import launch, reference, testing
from dsv32_ops.layouts import MLA_MODES, IndexerCache, mla_layout
from dsv32_ops.testing import POISON_BYTE, as_bytes, canary_cache, changed_canaries, poison

INTERLEAVED = model(index_rope_interleave=True)
WIDTH_24 = model(hidden_size=24)
ODD = model(q_lora_rank=37, kv_lora_rank=40, rope_dim=6, index_dim=10, index_topk=5)
CACHES = ("mla_kv_cache", "indexer_k_cache")
OUTS = ("kv_c_out", "k_pe_out", "index_k_out")
WRITTEN = (*CACHES, *OUTS, "topk_indices_buffer")
# The token on either side of 2^15 and 2^16, and the ends.
FAR = [0, 1, 32_767, 32_768, 65_534, 65_535, 65_536]


@pytest.fixture(scope="module")
def interpreter():
    with interpret.Interpreter() as started:
        yield started


def exact_sums(inputs: dict[str, Any]) -> dict[str, Any]:
    """Make norms independent of the order of their sums, in place.

    Rows are small integers times a power of two. Those of index_k come as +-v around an integer
    mean, so that the centered values and their squares are integers too.
    """
    make = generator(7)
    for name in ("q_c", "kv_c", "index_k", "inputs_embeds", "previous_hidden", "embed_table"):
        rows = inputs.get(name)
        if rows is None:
            continue
        integers = torch.randint(-15, 16, rows.shape, generator=make).float()
        if name == "index_k":
            half = rows.shape[1] // 2
            integers[:, half : 2 * half] = -integers[:, :half]
            integers[:, 2 * half :] = 0.0
            integers += torch.randint(-3, 4, (rows.shape[0], 1), generator=make)
        exponents = torch.randint(-4, 5, (rows.shape[0], 1), generator=make)
        rows.copy_(torch.ldexp(integers, exponents))
    return inputs


def compare(interpreter, name, inputs, check, *buffers, call=interpret.op):
    """Run the kernel and the reference on the same inputs, then check(tensor name, got, wanted).

    Returns the inputs and the buffers as the kernel left them.
    """
    expected = copy.deepcopy(inputs)
    wanted = getattr(reference, name)(**expected)
    got, (_, actual, *after) = interpreter(call, name, inputs, *buffers)
    for i, pair in enumerate(zip(as_tuple(got), as_tuple(wanted), strict=True)):
        check(f"result {i}", *pair)
    for key in WRITTEN:
        if isinstance(inputs.get(key), torch.Tensor):
            check(key, actual[key], expected[key])
    return actual, after


def as_tuple(result):
    return result if isinstance(result, tuple) else (result,)


def same(name, got, wanted):
    assert got.shape == wanted.shape and got.dtype == wanted.dtype, name
    different = (as_bytes(got) != as_bytes(wanted)).nonzero().flatten()
    assert different.numel() == 0, f"{name}: bytes {different[:20].tolist()} of {got.shape} differ"


NORM_ROPE = {
    **{mode: dict(mode=mode) for mode in MLA_MODES},
    "auto fp16": dict(dtype=FP16),
    "auto fp32": dict(dtype=FP32, weight_dtype=FP32),
    "fp8 fnuz": dict(mode="fp8", fp8_dtype=FNUZ),
    "fp8_ds_mla fnuz": dict(mode="fp8_ds_mla", fp8_dtype=FNUZ),
    "interleaved": dict(config=INTERLEAVED),
    "shuffled": dict(indexer_cache_shuffled=True, block_size=48),
    "shuffled interleaved": dict(config=INTERLEAVED, indexer_cache_shuffled=True, block_size=32),
    "ue8m0x4": dict(index_scale_format="ue8m0x4", index_dtype=torch.int32),
    "odd sizes": dict(config=ODD, mode="fp8"),
    "smallest sizes": dict(config=TINY, mode="fp8"),
    "no indexer": dict(config=model(has_indexer=False)),
    "no caches": dict(caches=False),
}


def norm_rope_inputs(num_tokens, config=SMALL, **options):
    options = {"table_rows": 61, "block_size": 4, **options}
    return exact_sums(testing.norm_rope_inputs(config, num_tokens, **options))


@pytest.mark.parametrize("case", NORM_ROPE)
def test_norm_rope_to_the_byte(interpreter, case):
    inputs = norm_rope_inputs(5, **NORM_ROPE[case], outs=True, padding=0.2, seed=11)
    compare(interpreter, "fused_norm_rope", inputs, same)


@pytest.mark.parametrize("fill_topk", [True, False])
@pytest.mark.parametrize("case", NORM_ROPE)
def test_one_program_for_all_tasks_to_the_byte(interpreter, case, fill_topk):
    inputs = norm_rope_inputs(3, **NORM_ROPE[case], outs=True, padding=0.2, seed=12)
    inputs["fill_topk"] = fill_topk
    compare(interpreter, "fused_norm_rope", inputs, same, call=interpret.whole_op)


@pytest.mark.parametrize("fill_topk", [True, False])
def test_one_program_runs_one_copy_of_the_tasks(interpreter, fill_topk):
    """Written in place, a second run would norm what the first has normed."""
    inputs = norm_rope_inputs(3, mode="fp8_ds_mla", seed=13)
    inputs.update(fill_topk=fill_topk, kv_c_out=inputs["kv_c"], k_pe_out=inputs["k_pe"])
    compare(interpreter, "fused_norm_rope", inputs, same, call=interpret.whole_op)


@pytest.mark.parametrize("mode", ["auto", "fp8", "fp8_ds_mla", "nvfp4_ds_mla"])
def test_random_rows_are_within_one_code(interpreter, mode):
    inputs = testing.norm_rope_inputs(SMALL, 6, mode=mode, block_size=4, outs=True)

    def check(name, got, wanted):
        if name not in CACHES:
            if got.is_floating_point():
                # One rounding to bf16 apart, where the sums differ in their last bit.
                assert testing.compare_floats(got, wanted).max_step <= 1
            else:
                same(name, got, wanted)
            return
        got, wanted = as_bytes(got), as_bytes(wanted)
        assert (got == wanted).float().mean() > 0.99
        # Neighbouring codes and scales differ by one in their last byte; -0 is the code of no
        # other value here. Two nibbles share a byte in nvfp4.
        steps = (got.int() - wanted.int()).abs()
        nibbles = (steps & 15) + (steps >> 4)
        assert (nibbles if mode == "nvfp4_ds_mla" else steps).max() <= 1

    compare(interpreter, "fused_norm_rope", inputs, check)


def slot_maps(kind: str, num_tokens: int, capacity: int) -> torch.Tensor:
    slots = 1 + torch.randperm(capacity - 2, generator=generator(3))[:num_tokens]
    slots[[1, 4]] = {
        "negative": torch.tensor([-1, -(2**63)]),
        "past the cache": torch.tensor([capacity, 2**40]),
        "ends": torch.tensor([0, capacity - 1]),
        "map shorter than the tokens": torch.tensor([-1, -1]),
    }[kind]
    return slots[:4] if kind.startswith("map") else slots


SLOT_KINDS = ("negative", "past the cache", "ends", "map shorter than the tokens")


@pytest.mark.parametrize(
    "mode, kind",
    [(mode, kind) for mode in ("auto", "fp8_ds_mla") for kind in SLOT_KINDS]
    + [("fp8", "negative"), ("nvfp4_ds_mla", "past the cache")],
)
def test_every_byte_without_a_live_slot_keeps_its_canary(interpreter, mode, kind):
    """Also between the entries, between the blocks and around the caches.

    The indexer's slots, block size and dead rows are not those of the MLA cache.
    """
    inputs = norm_rope_inputs(6, mode=mode)
    mla = canary_cache(mla_layout(mode), 4, 2, guard=256, block_gap=32, entry_gap=16)
    index = canary_cache(IndexerCache(SMALL.index_dim), 3, 4, guard=256, block_gap=64)
    inputs["mla_kv_cache"], inputs["indexer_k_cache"] = mla[0], index[0]
    inputs["slot_mapping"] = slot_maps(kind, 6, 8)
    inputs["indexer_slot_mapping"] = slot_maps("negative", 6, 12).roll(1)
    # Memory can be sent as one type only.
    buffer = mla[1].view(mla[0].dtype)
    actual, buffers = compare(interpreter, "fused_norm_rope", inputs, same, buffer, index[1])
    live = {"negative": 4, "past the cache": 4, "ends": 6, "map shorter than the tokens": 3}[kind]
    for name, buffer, entries in zip(CACHES, buffers, (live, 4), strict=True):
        cache = actual[name]
        assert changed_canaries(cache, buffer.view(torch.uint8)).numel() == 0
        written = (cache.view(torch.uint8) != POISON_BYTE).sum() / as_bytes(cache[0, 0]).numel()
        assert entries - 0.5 < written <= entries


def test_a_canary_that_changes_is_seen(interpreter):
    cache, buffer = canary_cache(mla_layout("fp8"), 2, 2, guard=64, block_gap=16)
    for offset in (0, 64 + 2 * cache.shape[-1], buffer.numel() - 1):
        buffer[offset] += 1
        assert changed_canaries(cache, buffer).tolist() == [offset]
        buffer[offset] -= 1


def test_positions_and_ids_are_clamped_into_their_tables(interpreter):
    inputs = norm_rope_inputs(4, mode="fp8", outs=True)
    inputs["positions"] = torch.tensor([-1, 61, 2**40, -(2**63)])
    compare(interpreter, "fused_norm_rope", inputs, same)
    inputs = embed_inputs(4)
    inputs["input_ids"] = torch.tensor([-1, 23, 2**40, -(2**63)])
    compare(interpreter, "fused_embed_norm", inputs, same)


@pytest.mark.parametrize("fp8_dtype", [FN, FNUZ])
@pytest.mark.parametrize("mode", ["fp8", "fp8_ds_mla", "nvfp4_ds_mla"])
def test_non_finite_rows_to_the_byte(interpreter, mode, fp8_dtype):
    if (mode, fp8_dtype) == ("nvfp4_ds_mla", FNUZ):
        fp8_dtype = None
    inputs = norm_rope_inputs(6, mode=mode, fp8_dtype=fp8_dtype)
    special = [float("nan"), float("inf"), float("-inf"), 3e38, 1e-40]
    for row, value in enumerate(special):
        for name in ("kv_c", "k_pe", "index_k"):
            inputs[name][row, row : 64 : 3 + row] = value

    def check(name, got, wanted):
        if name in CACHES:
            same(name, got, wanted)

    compare(interpreter, "fused_norm_rope", inputs, check)


QUERY = {
    "fp8": dict(),
    "fp8 fnuz": dict(fp8_dtype=FNUZ),
    "bf16": dict(quantize_mqa=False),
    "interleaved fp32": dict(config=INTERLEAVED, dtype=FP32),
    "no indexer": dict(config=model(has_indexer=False)),
    "odd sizes": dict(config=ODD, index_weights_dtype=FP32),
    "smallest sizes": dict(config=TINY),
    "tiles that heads do not fill": dict(config=model(index_heads=37), num_heads=19),
    "large tiles that heads do not fill": dict(num_heads=launch.QUERY_FEW_HEADS + 3),
    "bf16, tiles": dict(config=model(kv_lora_rank=8), num_heads=70, quantize_mqa=False),
}


@pytest.mark.parametrize("case", QUERY)
def test_query_to_the_byte(interpreter, case):
    options = {"config": SMALL, "num_heads": 3, "table_rows": 61, **QUERY[case]}
    inputs = testing.q_inputs(options.pop("config"), 3, **options)
    compare(interpreter, "fused_q", inputs, same)


@pytest.mark.parametrize(
    "scale",
    [1e-30, 0.37, 3.0, 2.0**127, 3.4e38, 0.0, -0.0, 1e-45]
    + [float(special) for special in ("inf", "-inf", "nan")],
)
def test_division_by_the_query_scale_to_the_byte(interpreter, scale):
    inputs = testing.q_inputs(SMALL, 2, 3, dtype=FP32, table_rows=61)
    values = torch.randn(inputs["ql_nope"].shape, generator=generator(5)) * 100
    values *= scale if 0 < scale < math.inf else 1
    inputs["ql_nope"] = values.nan_to_num(posinf=3e38, neginf=-3e38)
    inputs["q_scale"] = torch.tensor([scale])
    compare(interpreter, "fused_q", inputs, same)


def test_non_finite_queries_to_the_byte(interpreter):
    inputs = testing.q_inputs(SMALL, 5, 3, table_rows=61)
    for row, value in enumerate([float("nan"), float("inf"), float("-inf"), 3e38, 1e-40]):
        for name in ("q_pe", "ql_nope", "index_q"):
            inputs[name][row, 1, row : 64 : 3 + row] = value
    compare(interpreter, "fused_q", inputs, same)


def eh_inputs(num_tokens, config=WIDTH_24, **options):
    return exact_sums(testing.eh_norm_inputs(config, num_tokens, **options))


def embed_inputs(num_tokens, config=WIDTH_24, **options):
    return exact_sums(testing.embed_norm_inputs(config, num_tokens, vocab_rows=23, **options))


def embed_eh_inputs(num_tokens, config=WIDTH_24, **options):
    return exact_sums(testing.embed_eh_norm_inputs(config, num_tokens, vocab_rows=23, **options))


MTP = {
    "fused_eh_norm": eh_inputs,
    "fused_embed_norm": embed_inputs,
    "fused_embed_eh_norm": embed_eh_inputs,
}


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("hidden", [1, 24, 520])
@pytest.mark.parametrize("name", MTP)
def test_embedding_norms_to_the_byte(interpreter, name, hidden, dtype):
    inputs = MTP[name](5, config=model(hidden_size=hidden), dtype=dtype)
    if name == "fused_eh_norm":
        # Position 0 hides its row, NaN included.
        inputs["inputs_embeds"][inputs["positions"] == 0] = float("nan")
    compare(interpreter, name, inputs, same)


@pytest.mark.parametrize("num_tokens, tasks, few", [(1, 3, 4), (4, 3, 4), (5, 3, 4), (9, 1, 4)])
def test_programs_are_in_the_order_of_tasks_or_of_tokens(interpreter, num_tokens, tasks, few):
    order, _ = interpreter(interpret.order_of_programs, num_tokens, tasks, few)
    in_order = order.T if num_tokens <= few else order
    assert in_order.flatten().tolist() == list(range(num_tokens * tasks))
    for token in range(num_tokens):
        for task in range(tasks):
            x, y = interpret.program_of(token, task, num_tokens, tasks, few)
            assert order[token, task] == y * num_tokens + x


def compare_far(interpreter, name, inputs):
    expected = copy.deepcopy(inputs)
    wanted = getattr(reference, name)(**expected)
    got, (_, actual, _) = interpreter(interpret.far_op, name, inputs, FAR)
    for i, pair in enumerate(zip(as_tuple(got), as_tuple(wanted), strict=True)):
        same(f"result {i}", *pair)
    for key in WRITTEN:
        if isinstance(inputs.get(key), torch.Tensor):
            tokens = slice(None) if key in CACHES else slice(len(FAR))
            same(key, actual[key][tokens], expected[key][tokens])


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("mode", ["auto", "fp8_ds_mla"])
def test_norm_rope_past_65535_tokens_and_2_31_elements(interpreter, mode, index_dtype):
    """Offsets of rows, tables, outputs and caches need 64 bits, in the launch of 65,537 tokens."""
    inputs = norm_rope_inputs(
        len(FAR), mode=mode, outs=True, extra_blocks=2, index_dtype=index_dtype
    )
    # One live slot in the first block and in the last, whose base is past 2^31.
    capacity = inputs["mla_kv_cache"].shape[0] * 4
    inputs["slot_mapping"][[0, 1, 5, 6]] = torch.tensor(
        [0, capacity - 4, capacity - 2, capacity - 1], dtype=index_dtype
    )
    inputs["slot_mapping"][2:5] = -1
    compare_far(interpreter, "fused_norm_rope", inputs)


@pytest.mark.parametrize("quantize_mqa", [True, False])
def test_query_past_65535_tokens_and_2_31_elements(interpreter, quantize_mqa):
    """Head strides grow with the tokens, and the outputs have more than 2^31 elements."""
    config = model(index_heads=64, index_dim=512)
    inputs = testing.q_inputs(config, len(FAR), 72, quantize_mqa=quantize_mqa, table_rows=61)
    compare_far(interpreter, "fused_q", inputs)


@pytest.mark.parametrize("name", MTP)
def test_embedding_norms_past_65535_tokens_and_2_31_elements(interpreter, name):
    compare_far(interpreter, name, MTP[name](len(FAR)))


def test_a_32_bit_offset_is_seen_past_2_31_elements(interpreter):
    values = torch.arange(1.0, 1 + len(FAR))
    wide, _ = interpreter(interpret.far_copy, "wide_kernel", values, FAR)
    narrow, _ = interpreter(interpret.far_copy, "narrow_kernel", values, FAR)
    assert torch.equal(wide, values)
    assert torch.equal(narrow[:4], values[:4]) and not narrow[4:].any()


def test_rows_do_not_depend_on_each_other_or_on_strides(interpreter):
    """Packed copies of the inputs, and a subset of the tokens, give the same bytes."""
    inputs = testing.norm_rope_inputs(SMALL, 7, mode="fp8_ds_mla", block_size=4, outs=True)
    _, (_, whole) = interpreter(interpret.op, "fused_norm_rope", inputs)
    rows = torch.tensor([5, 0, 3])
    packed = {
        key: value[rows].contiguous() if key in PER_TOKEN and value is not None else value
        for key, value in copy.deepcopy(inputs).items()
    }
    for key in OUTS:
        packed[key] = poison(packed[key][:3])
    _, (_, subset) = interpreter(interpret.op, "fused_norm_rope", packed)
    for key in OUTS:
        same(key, subset[key], whole[key][rows])
    slots = inputs["slot_mapping"][rows]
    block, offset = slots // 4, slots % 4
    mla = "mla_kv_cache"
    same(mla, subset[mla][block, offset], whole[mla][block, offset])
    decode = IndexerCache(SMALL.index_dim).decode
    index = "indexer_k_cache"
    same(index, decode(subset[index], slots), decode(whole[index], slots))
