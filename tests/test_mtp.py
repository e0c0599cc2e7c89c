"""The speculative-decoding and embedding norms against the float64 oracle, copies to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given, settings
from support import (
    BF16,
    FP16,
    FP32,
    PER_TOKEN,
    array,
    assert_like_fake,
    device_cases,
    generator,
    is_packed,
    model,
    name_of,
    on_devices,
    on_gpu,
    oracle_arguments,
    outputs_of,
    poisoned_memory,
    sample_rows,
    share_towards_zero,
    special_values,
)

import dsv32_ops
from dsv32_ops import testing
from dsv32_ops.testing import as_bytes, poison, same_bytes

OPS: dict[str, Any] = {
    "fused_eh_norm": (testing.eh_norm_inputs, oracle.eh_norm),
    "fused_embed_norm": (testing.embed_norm_inputs, oracle.embed_norm),
    "fused_embed_eh_norm": (testing.embed_eh_norm_inputs, oracle.embed_eh_norm),
}
OUTS = {
    "fused_eh_norm": ("out",),
    "fused_embed_norm": ("residual_out", "normed_out"),
    "fused_embed_eh_norm": ("out",),
}
EMBED_OPS = ("fused_embed_norm", "fused_embed_eh_norm")
HIDDEN_SIZES = (7168, 6144, 1, 7, 1000)
DTYPES = (BF16, FP16, FP32)
BITS = {BF16: torch.int16, FP16: torch.int16, FP32: torch.int32}


def arguments(
    op: str, hidden: int, num_tokens: int, device: str, dtype: torch.dtype = BF16, **options: Any
) -> dict[str, Any]:
    config = model(hidden_size=hidden, vocab_size=211)
    return OPS[op][0](config, num_tokens, device=device, dtype=dtype, **options)


def run(op: str, inputs: dict[str, Any], **outs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with poisoned_memory():
        return outputs_of(getattr(dsv32_ops, op)(**inputs, **outs))


def assert_outputs(
    outputs: tuple[torch.Tensor, ...], op: str, inputs: dict[str, Any], rows: Any = None
) -> None:
    expected = OPS[op][1](**oracle_arguments(inputs, rows))
    if op == "fused_embed_norm":
        residual, expected = expected
        assert np.array_equal(array(outputs[0]), residual, equal_nan=True)
    oracle.assert_float_near(array(outputs[-1]), expected, name_of(outputs[-1].dtype))


def check(op: str, inputs: dict[str, Any], **outs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    before = {name: t.clone() for name, t in inputs.items() if isinstance(t, torch.Tensor)}
    outputs = run(op, inputs, **outs)
    for name, t in before.items():
        assert same_bytes(inputs[name], t), f"{name} was written"
    assert_outputs(outputs, op, inputs)
    return outputs


def assert_same(actual: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert same_bytes(a, b)


# Against the oracle


@pytest.mark.parametrize("num_tokens", [1, 2, 37])
@device_cases(
    "case",
    [(op, hidden, dtype) for op in OPS for hidden in HIDDEN_SIZES for dtype in DTYPES],
    gpu=[(op, hidden, BF16) for op in OPS for hidden in HIDDEN_SIZES]
    + [(op, hidden, dtype) for op in OPS for hidden, dtype in ((7168, FP32), (7, FP16))],
)
def test_hidden_sizes_and_types(device, case, num_tokens):
    op, hidden, dtype = case
    outputs = check(op, arguments(op, hidden, num_tokens, device, dtype))
    width = hidden if op == "fused_embed_norm" else 2 * hidden
    for out in outputs:
        assert out.shape == (num_tokens, width) and out.dtype == dtype and is_packed(out)


@device_cases("case", [(op, dtype) for op in OPS for dtype in DTYPES],
              gpu=[(op, FP32) for op in OPS])  # fmt: skip
def test_weights_are_widened_not_narrowed(device, case):
    op, dtype = case
    check(op, arguments(op, 1000, 20, device, weight_dtype=dtype))


@device_cases("op", OPS)
def test_positions_and_ids_of_either_type(device, op):
    wide = run(op, arguments(op, 1000, 40, device, index_dtype=torch.int64))
    assert_same(run(op, arguments(op, 1000, 40, device, index_dtype=torch.int32)), wide)


# Position 0


@device_cases("op", ["fused_eh_norm", "fused_embed_eh_norm"])
def test_rows_at_position_0_have_a_zero_embedding(device, op):
    """Their embedding may be anything: it does not reach the output, not even as NaN."""
    inputs = arguments(op, 1000, 40, device)
    start = inputs["positions"] == 0
    assert 1 < int(start.sum()) < 40
    clean = run(op, inputs)
    if op == "fused_eh_norm":
        inputs["inputs_embeds"][start] = torch.nan
    else:
        inputs["embed_table"][5] = torch.inf
        inputs["input_ids"][inputs["input_ids"] == 5] = 6
        clean = run(op, inputs)
        inputs["input_ids"][start] = 5
    (out,) = run(op, inputs)
    assert (out[start, :1000] == 0).all() and (out[~start, :1000] != 0).any(1).all()
    assert_same((out,), clean)


@on_devices
def test_a_negative_position_is_no_start(device):
    inputs = arguments("fused_eh_norm", 7, 3, device)
    inputs["positions"][:] = torch.tensor([-1, 0, -(2**32)], device=device)
    (out,) = check("fused_eh_norm", inputs)
    assert (out[:, :7] == 0).all(1).tolist() == [False, True, False]


# Exact rows


def table_of_every_kind(hidden: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Random bit patterns: NaNs with payloads, both infinities, -0, subnormals."""
    info = torch.iinfo(BITS[dtype])
    bits = torch.randint(info.min, info.max + 1, (211, hidden), generator=generator(4))
    table = bits.to(BITS[dtype]).view(dtype)
    assert table.isnan().any() and ((table.abs() < torch.finfo(dtype).tiny) & (table != 0)).any()
    return table.to(device)


@device_cases("case", [(hidden, dtype) for hidden in (7168, 7, 1000) for dtype in DTYPES],
              gpu=[(7168, BF16), (7168, FP32), (7, FP16)])  # fmt: skip
def test_the_residual_is_the_tables_rows_to_the_bit(device, case):
    hidden, dtype = case
    inputs = arguments("fused_embed_norm", hidden, 300, device, dtype)
    inputs["embed_table"] = table_of_every_kind(hidden, dtype, device)
    residual, _ = run("fused_embed_norm", inputs)
    bits = inputs["embed_table"].view(BITS[dtype])[inputs["input_ids"]]
    assert torch.equal(residual.view(BITS[dtype]), bits)


@device_cases("case", [(hidden, dtype) for hidden in HIDDEN_SIZES for dtype in DTYPES],
              gpu=[(7168, BF16), (6144, BF16), (7168, FP32), (7, FP16)])  # fmt: skip
def test_the_normed_rows_are_gather_followed_by_the_norm_to_the_bit(device, case):
    hidden, dtype = case
    inputs = arguments("fused_embed_norm", hidden, 50, device, dtype)
    residual, normed = run("fused_embed_norm", inputs)
    weight, eps = inputs["norm_weight"], inputs["eps"]
    identity = torch.arange(50, device=device)
    assert_same(dsv32_ops.fused_embed_norm(identity, residual, weight, eps), (residual, normed))
    both = dsv32_ops.fused_eh_norm(identity + 1, residual, residual, weight, weight, eps)
    assert_same((both[:, :hidden], both[:, hidden:]), (normed, normed))


@device_cases("case", [(hidden, dtype) for hidden in HIDDEN_SIZES for dtype in DTYPES],
              gpu=[(7168, BF16), (6144, BF16), (7168, FP32), (7, FP16)])  # fmt: skip
def test_embed_eh_norm_is_gather_followed_by_eh_norm_to_the_bit(device, case):
    hidden, dtype = case
    inputs = arguments("fused_embed_eh_norm", hidden, 50, device, dtype)
    joined = run("fused_embed_eh_norm", inputs)
    gathered = inputs.pop("embed_table")[inputs.pop("input_ids")]
    assert_same(run("fused_eh_norm", {**inputs, "inputs_embeds": gathered}), joined)


@device_cases("op", OPS)
def test_a_non_finite_row_changes_no_other_row(device, op):
    inputs = arguments(op, 1000, 40, device)
    clean = run(op, inputs)
    if op == "fused_embed_norm":
        inputs["input_ids"][:] = torch.arange(40, device=device)
        clean = run(op, inputs)
    rows = inputs["embed_table" if op == "fused_embed_norm" else "previous_hidden"]
    for i, value in enumerate(special_values(rows)):
        rows[2 * i], rows[2 * i + 1, 3] = value, value
    outputs = check(op, inputs)
    for out, before in zip(outputs, clean, strict=True):
        assert same_bytes(out[2 * i + 2 :], before[2 * i + 2 :])


@device_cases("op", OPS)
def test_normed_rows_round_to_bf16_without_bias(device, op):
    inputs = arguments(op, 1000, 200, device)
    ideal = OPS[op][1](**oracle_arguments(inputs))
    ideal = ideal[1].value if op == "fused_embed_norm" else ideal.value
    # 2 * 10^5 roundings: 5 sigma are 0.6 %, the slope of the density adds less than 1 %.
    assert abs(share_towards_zero(array(run(op, inputs)[-1]), ideal) - 0.5) < 0.02


# Ids


@device_cases("op", EMBED_OPS)
def test_ids_may_be_batch_by_length(device, op):
    inputs = arguments(op, 1000, 48, device)
    flat, ids = run(op, inputs), inputs["input_ids"]
    wide = torch.full((6, 13), 2**20, device=device)
    wide[:, 2:10] = ids.view(6, 8)
    for batched in (ids.view(6, 8), ids.view(1, 48), ids.view(48, 1), wide[:, 2:10]):
        assert_same(run(op, {**inputs, "input_ids": batched}), flat)


@on_gpu
@pytest.mark.parametrize("op", EMBED_OPS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_outside_the_table_read_its_nearest_row_on_a_gpu(op, dtype):
    inputs = arguments(op, 1000, 6, "cuda", index_dtype=dtype)
    limits = torch.iinfo(dtype)
    wild, tame = [-1, 211, limits.min, limits.max, 210, 0], [0, 210, 0, 210, 210, 0]
    inputs["input_ids"] = torch.tensor(wild, dtype=dtype, device="cuda")
    outputs = check(op, inputs)
    inputs["input_ids"] = torch.tensor(tame, dtype=dtype, device="cuda")
    assert_same(outputs, run(op, inputs))


@pytest.mark.parametrize("bad", [-1, 211, 2**40])
@pytest.mark.parametrize("op", EMBED_OPS)
def test_ids_outside_the_table_are_an_error_on_a_cpu(op, bad):
    inputs = arguments(op, 7, 6, "cpu")
    inputs["input_ids"][4] = bad
    with pytest.raises(IndexError, match=f"input_ids.*211.* {bad} .*row 4"):
        getattr(dsv32_ops, op)(**inputs)
    width = 7 if op == "fused_embed_norm" else 14
    outs = {name: torch.full((6, width), 7.0, dtype=BF16) for name in OUTS[op]}
    with pytest.raises(IndexError, match="input_ids"):
        getattr(dsv32_ops, op)(**inputs, **outs)
    assert all((out == 7).all() for out in outs.values())


# Strides and outs


@device_cases("case", [(op, dtype) for op in OPS for dtype in DTYPES],
              gpu=[(op, BF16) for op in OPS])  # fmt: skip
def test_strided_equals_contiguous(device, case):
    op, dtype = case
    inputs = arguments(op, 1000, 30, device, dtype)
    expected = run(op, inputs)
    strided = {}
    for name in ("inputs_embeds", "previous_hidden", "embed_table"):
        if name in inputs:
            rows, width = inputs[name].shape
            wide = torch.full((rows, width + 9), torch.nan, dtype=dtype, device=device)
            strided[name] = wide[:, 4 : width + 4].copy_(inputs[name])
    assert_same(run(op, {**inputs, **strided}), expected)


@device_cases("case", [(op, hidden) for op in OPS for hidden in (1000, 7)])
def test_out_forms_write_the_callers_rows_and_nothing_else(device, case):
    op, hidden = case
    inputs = arguments(op, hidden, 30, device)
    expected = run(op, inputs)
    whole = [torch.full((32, t.shape[1] + 6), 7.0, dtype=BF16, device=device) for t in expected]
    views = [poison(t[1:31, 4 : t.shape[1] - 2]) for t in whole]
    outs = dict(zip(OUTS[op], views, strict=True))
    assert getattr(torch.ops.dsv32, f"{op}_out")(**outs, **inputs) is None
    assert_same(tuple(views), expected)
    for tensor, view in zip(whole, views, strict=True):
        view.fill_(7.0)
        assert (tensor == 7).all()
    returned = run(op, inputs, **outs)
    assert all(a is b for a, b in zip(returned, views, strict=True))
    assert_same(returned, expected)


@device_cases("op", OPS)
def test_any_subset_of_tokens_gives_the_same_bytes(device, op):
    inputs = arguments(op, 1000, 100, device)
    whole = run(op, inputs)
    order = torch.randperm(100, generator=generator(1)).to(device)
    for rows in (order[:1], order[1:3], order[3:20], order[20:], order.sort().values[1:]):
        tokens = {name: inputs[name][rows] for name in PER_TOKEN & inputs.keys()}
        part = run(op, {**inputs, **tokens})
        assert_same(part, tuple(out[rows] for out in whole))
    assert_same(run(op, inputs), whole)


@pytest.mark.parametrize("num_tokens", [0, 1, 6])
@device_cases("op", OPS)
def test_the_fake_kernel_gives_the_real_outputs(device, op, num_tokens):
    inputs = arguments(op, 1000, num_tokens, device)
    assert_like_fake(getattr(dsv32_ops, op), inputs)
    if op in EMBED_OPS and num_tokens == 6:
        inputs["input_ids"] = inputs["input_ids"].view(2, 3)
        assert_like_fake(getattr(dsv32_ops, op), inputs)


@device_cases("op", OPS)
def test_no_tokens(device, op):
    outputs = run(op, arguments(op, 1000, 0, device))
    width = 1000 if op == "fused_embed_norm" else 2000
    assert all(out.shape == (0, width) and out.dtype == BF16 for out in outputs)


def test_residual_and_normed_outs_come_together():
    inputs = arguments("fused_embed_norm", 7, 3, "cpu")
    with pytest.raises(ValueError, match="residual_out.*normed_out"):
        dsv32_ops.fused_embed_norm(**inputs, residual_out=torch.empty(3, 7, dtype=BF16))


# Token counts


@device_cases("case", [(op, n) for op in OPS for n in (65_535, 65_536, 65_537)])
def test_token_counts_around_2_to_the_16(device, case):
    op, num_tokens = case
    check(op, arguments(op, 7, num_tokens, device))


@pytest.mark.parametrize("op", OPS)
@settings(max_examples=6)
@given(num_tokens=testing.token_counts(max_value=131_072))
def test_any_token_count(op, num_tokens):
    check(op, arguments(op, 2, num_tokens, "cpu"))


@on_gpu
@pytest.mark.parametrize("num_tokens", [65_537, 150_000])
@pytest.mark.parametrize("op", OPS)
def test_row_offsets_past_2_to_the_31_bytes_and_elements(op, num_tokens):
    """A signed 32-bit offset wraps at 149,797 tokens of 7,168 elements (two halves: at half)."""
    inputs = arguments(op, 7168, num_tokens, "cuda")
    width = 7168 if op == "fused_embed_norm" else 14336
    outs = {name: poison(torch.empty(num_tokens, width, dtype=BF16, device="cuda"))
            for name in OUTS[op]}  # fmt: skip
    outputs = outputs_of(getattr(dsv32_ops, op)(**inputs, **outs))
    rows = torch.cat([sample_rows(num_tokens, "cuda", count=20),
                      torch.arange(num_tokens - 4, num_tokens, device="cuda")])  # fmt: skip
    assert_outputs(tuple(out[rows] for out in outputs), op, inputs, rows)
    half = slice(num_tokens // 2, None)
    tokens = {name: inputs[name][half] for name in PER_TOKEN & inputs.keys()}
    part = outputs_of(getattr(dsv32_ops, op)(**{**inputs, **tokens}))
    for out, whole in zip(part, outputs, strict=True):
        assert torch.equal(out.view(torch.int16), whole[half].view(torch.int16))


@on_gpu
def test_a_table_past_2_to_the_31_elements():
    """The row offset of an id is 64-bit as well: 300,000 rows of 7,168."""
    table = torch.empty(300_000, 7168, dtype=BF16, device="cuda")
    ids = torch.tensor([299_999, 299_593, 0, 150_000], device="cuda")
    rows = torch.randn(4, 7168, generator=generator(2)).to("cuda", BF16)
    table[ids] = rows
    weight = torch.ones(7168, device="cuda")
    residual, normed = dsv32_ops.fused_embed_norm(ids, table, weight, 1e-6)
    assert torch.equal(as_bytes(residual), as_bytes(rows))
    expected = dsv32_ops.fused_embed_norm(torch.arange(4, device="cuda"), rows, weight, 1e-6)
    assert_same((residual, normed), expected)
