"""`fused_q` against the float64 oracle, and on a GPU against the reference to the byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given, settings
from support import (
    BF16,
    FN,
    FNUZ,
    FP16,
    FP32,
    PER_TOKEN,
    SMALL,
    SPECIAL_VALUES,
    TINY,
    array,
    assert_like_fake,
    byte_array,
    device_cases,
    flavour,
    fp8_values,
    generator,
    is_packed,
    model,
    name_of,
    on_devices,
    on_gpu,
    oracle_arguments,
    poisoned_memory,
    sample_rows,
    share_towards_zero,
    special_values,
    take,
    to_device,
)

import dsv32_ops
from dsv32_ops import launch, reference, testing
from dsv32_ops.models import PRESETS, ModelConfig
from dsv32_ops.testing import same_bytes

V32, GLM, KIMI = PRESETS["deepseek-v3.2"], PRESETS["glm-5"], PRESETS["kimi-k2"]
ROWS = ("positions", "q_pe", "index_q", "ql_nope", "index_weights")

Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def run(inputs: dict[str, Any]) -> Outputs:
    with poisoned_memory():
        return dsv32_ops.fused_q(**inputs)


def expect(inputs: dict[str, Any], rows: Any = None) -> oracle.FusedQ:
    return oracle.fused_q(**oracle_arguments(inputs, rows), values=fp8_values(inputs))


def assert_outputs(outputs: Outputs, ideal: oracle.FusedQ, quantized: bool) -> None:
    index_q, weights, mqa_q = outputs
    if quantized:
        oracle.assert_codes_near(
            byte_array(mqa_q), ideal.mqa.value, ideal.values, abs_err=ideal.mqa.err, name="mqa_q"
        )
    else:
        oracle.assert_float_near(array(mqa_q), ideal.mqa, name_of(mqa_q.dtype), name="mqa_q")
    if weights.shape[1]:
        oracle.assert_index_q(byte_array(index_q), array(weights), ideal)


def assert_same(actual: Outputs, expected: Outputs) -> None:
    for name, a, b in zip(("index_q", "weights", "mqa_q"), actual, expected, strict=True):
        assert same_bytes(a, b), name


def check(inputs: dict[str, Any]) -> Outputs:
    """The call against the oracle; on a GPU also against the reference, bit for bit.

    Nothing is summed but the two products of a rotation, so there is one right result.
    """
    before = {name: t.clone() for name, t in inputs.items() if isinstance(t, torch.Tensor)}
    outputs = run(inputs)
    for name, t in before.items():
        assert same_bytes(inputs[name], t), f"{name} was written"
    index_q, weights, mqa_q = outputs
    quantized = inputs["quantize_mqa"]
    assert all(is_packed(out) for out in outputs)
    assert index_q.dtype == flavour(inputs) and weights.dtype == FP32
    assert mqa_q.dtype == (flavour(inputs) if quantized else inputs["q_pe"].dtype)
    if not inputs["has_indexer"]:
        assert index_q.shape[1] == weights.shape[1] == 0
    assert_outputs(outputs, expect(inputs), quantized)
    if index_q.is_cuda:
        assert_same(to_cpu(outputs), reference.fused_q(**to_device(inputs, "cpu")))
    return outputs


def to_cpu(outputs: tuple[torch.Tensor, ...]) -> Outputs:
    index_q, weights, mqa_q = (out.cpu() for out in outputs)
    return index_q, weights, mqa_q


def query(config: ModelConfig, num_tokens: int, heads: int, device: str, **options: Any) -> Any:
    return testing.q_inputs(config, num_tokens, heads, device=device, **options)


# Sizes and formats


@pytest.mark.parametrize("num_tokens", [1, 2, 37])
@device_cases(
    "case",
    [
        (V32, 16, BF16),
        (V32, 16, FP16),
        (V32, 16, FP32),
        (GLM, 8, BF16),
        (KIMI, 8, BF16),
        (KIMI, 8, FP32),
    ],
)
def test_a_layer_of_each_model_on_one_of_eight_ranks(device, case, num_tokens):
    config, heads, dtype = case
    check(query(config, num_tokens, heads, device, dtype=dtype))


@device_cases(
    "case",
    [(V32, 128), (GLM, 64), (KIMI, 64), (V32, 37)],
    gpu=[(V32, 128), (GLM, 64), (V32, 37)],
)
def test_all_heads_of_each_model(device, case):
    """And a number that does not fill the larger tiles of more than 32 heads."""
    config, heads = case
    check(query(config, 3, heads, device))


@pytest.mark.parametrize("num_tokens", [1, 7])
@device_cases(
    "case",
    [(V32, 16, BF16), (V32, 128, FP16), (GLM, 8, FP32), (KIMI, 64, BF16)],
    gpu=[(V32, 16, BF16), (V32, 128, FP16)],
)
def test_without_quantization_ql_nope_is_not_read(device, case, num_tokens):
    config, heads, dtype = case
    inputs = query(config, num_tokens, heads, device, dtype=dtype, quantize_mqa=False)
    assert inputs["ql_nope"].isnan().all()
    inputs["q_scale"] = torch.full((1,), torch.nan, device=device)
    check(inputs)
    inputs["ql_nope"], inputs["q_scale"] = torch.empty(0, device=device), inputs["ql_nope"]
    assert_same(run(inputs), check(inputs))


@device_cases("fp8", [(FN, 2), (FNUZ, 1), (FNUZ, 2)], gpu=[(FNUZ, 2)])
def test_each_fp8_flavour(device, fp8):
    fp8_dtype, seed = fp8
    inputs = query(SMALL, 40, 5, device, fp8_dtype=fp8_dtype, seed=seed)
    inputs["q_scale"] = torch.tensor([0.01], device=device)  # so that some codes saturate
    _, _, mqa_q = check(inputs)
    top = 0x7E if fp8_dtype is FN else 0x7F
    assert ((byte_array(mqa_q) & 0x7F) == top).any()


SIZES = [  # (heads, Dnope, R, indexer heads, Di)
    (1, 1, 2, 1, 2),
    (3, 20, 6, 1, 8),
    (5, 512, 64, 3, 66),
    (128, 1, 2, 2, 4),
    (1, 512, 6, 64, 6),
    (17, 20, 10, 5, 45),
    (3, 64, 64, 33, 64),
]


@pytest.mark.parametrize("num_tokens", [1, 19])
@device_cases(
    "case",
    [
        (sizes, interleave, dtype)
        for sizes in SIZES
        for interleave in (False, True)
        for dtype in (BF16, FP16, FP32)
    ],
    gpu=[(sizes, i % 2 == 0, (FP32, BF16, FP16)[i % 3]) for i, sizes in enumerate(SIZES)]
    + [(SIZES[1], True, BF16)],
)
def test_odd_sizes(device, case, num_tokens):
    (heads, nope_dim, rope_dim, index_heads, index_dim), interleave, dtype = case
    config = model(
        kv_lora_rank=nope_dim,
        rope_dim=rope_dim,
        index_heads=index_heads,
        index_dim=index_dim,
        index_rope_interleave=interleave,
    )
    check(query(config, num_tokens, heads, device, dtype=dtype))


@device_cases("dtype", [BF16, FP16, FP32], gpu=[FP32])
def test_weights_and_tables_have_types_of_their_own(device, dtype):
    inputs = query(SMALL, 20, 5, device, index_weights_dtype=dtype)
    for name in ("q_pe_cos_sin", "index_q_cos_sin"):
        inputs[name] = inputs[name].to(dtype)
    check(inputs)


@on_devices
def test_a_table_narrower_than_the_heads_leaves_the_rest_unrotated(device):
    inputs = query(SMALL, 20, 5, device)
    inputs["index_q_cos_sin"] = inputs["index_q_cos_sin"][:, 5:17]
    check(inputs)


@device_cases("dtype", [torch.int32, torch.int64])
def test_positions_of_either_type(device, dtype):
    check(query(SMALL, 20, 5, device, index_dtype=dtype))


@on_gpu
def test_positions_are_clamped_into_their_table_on_a_gpu():
    inputs = query(SMALL, 40, 5, "cuda")
    wild = torch.tensor([-1, 97, 2**40, -(2**63)], device="cuda")
    inputs["positions"][::10] = wild
    check(inputs)


@pytest.mark.parametrize("position", [-1, 97, 2**40])
def test_positions_outside_their_table_are_an_error_on_a_cpu(position):
    inputs = query(SMALL, 8, 5, "cpu")
    inputs["positions"][6] = position
    with pytest.raises(IndexError, match=f"positions.*97.* {position} .*row 6"):
        dsv32_ops.fused_q(**inputs)


# Arithmetic with one right answer


@on_devices
def test_q_scale_divides_truly(device):
    """x / scale and x * (1 / scale) differ in the last bit, and a midpoint makes that a code."""
    middles = (oracle.E4M3FN_VALUES[8:0x7E] + oracle.E4M3FN_VALUES[9:0x7F]) / 2
    for scale in np.array([0.37, 1 / 3, 1.7e-3, 77.7, 3e-20], np.float32):
        bits = (middles * scale).astype(np.float32).view(np.int32)
        x = np.stack([bits - 1, bits, bits + 1]).reshape(-1).view(np.float32)
        by_division = oracle.round_to_codes(x / scale, oracle.E4M3FN_VALUES)
        by_product = oracle.round_to_codes(x * (np.float32(1) / scale), oracle.E4M3FN_VALUES)
        assert (by_division != by_product).any()
        inputs = query(model(kv_lora_rank=x.size), 1, 1, device, dtype=FP32)
        inputs["ql_nope"].copy_(torch.from_numpy(x))
        inputs["q_scale"].fill_(float(scale))
        _, _, mqa_q = run(inputs)
        assert np.array_equal(byte_array(mqa_q)[0, 0, : x.size], by_division)


@on_devices
def test_index_weights_are_folded_in_the_order_of_the_contract(device):
    inputs = query(SMALL, 300, 1, device, index_weights_dtype=FP32)
    inputs.update(index_weights_softmax_scale=0.1, index_weights_head_scale=0.7)
    _, weights, _ = run(inputs)
    ideal = expect(inputs)
    assert np.array_equal(array(weights), ideal.index_weights)
    factors = [np.float32(f) for f in ideal.weight_factors[1:]]
    w, scale = ideal.weight_factors[0].astype(np.float32), ideal.index_scale.astype(np.float32)
    assert (w * scale * (factors[0] * factors[1]) != ideal.index_weights).any()


def boundary_inputs(
    device: str, fp8_dtype: torch.dtype, interleave: bool
) -> tuple[dict[str, Any], np.ndarray]:
    """Rows whose amax is limit * 2^k or one ulp to either side, for k from -40 to 110."""
    limit = 448.0 if fp8_dtype is FN else 224.0
    tops = np.ldexp(limit, np.arange(-40, 111)).astype(np.float32)
    ulps = [np.nextafter(tops, np.float32(0)), tops, np.nextafter(tops, np.float32(np.inf))]
    amax = np.stack(ulps, axis=1)
    rng = np.random.default_rng(5)
    rows = amax[..., None] * rng.uniform(-0.9, 0.9, (*amax.shape, 80)).astype(np.float32)
    place = rng.integers(0, 80, amax.shape)
    signed = amax * rng.choice(np.array([-1, 1], np.float32), amax.shape)
    np.put_along_axis(rows, place[..., None], signed[..., None], axis=2)
    config = model(index_heads=3, index_dim=80, index_rope_interleave=interleave, rope_dim=64)
    inputs = query(config, len(tops), 1, device, dtype=FP32, fp8_dtype=fp8_dtype)
    still = torch.cat([torch.ones(97, 32), torch.zeros(97, 32)], 1).to(device)
    inputs.update(
        index_q=torch.from_numpy(rows).to(device),
        index_q_cos_sin=still,
        index_weights=torch.ones(len(tops), 3, device=device),
        index_weights_softmax_scale=1.0,
        index_weights_head_scale=1.0,
    )
    return inputs, rows


@device_cases(
    "case",
    [(FN, False), (FN, True), (FNUZ, False), (FNUZ, True)],
    gpu=[(FN, False), (FNUZ, False)],
)
def test_a_row_of_448_times_a_power_of_two_has_that_power_as_its_scale(device, case):
    """And one ulp more the next: exact scale, exact codes. cos = 1 and sin = 0 keep the row."""
    fp8_dtype, interleave = case
    inputs, rows = boundary_inputs(device, fp8_dtype, interleave)
    index_q, weights, _ = run(inputs)
    exponents = np.arange(-40, 111)[:, None] + np.array([0, 0, 1])
    limit = 448.0 if fp8_dtype is FN else 224.0
    scale = np.ldexp(1.0, np.maximum(exponents, -22 if fp8_dtype is FN else -21))
    assert np.array_equal(array(weights), scale)
    values = fp8_values(inputs)
    codes = oracle.round_to_codes(rows / scale[..., None], values, limit)
    assert np.array_equal(byte_array(index_q), codes)


@device_cases("fp8_dtype", [FN, FNUZ], gpu=[FN])
def test_a_zero_row_has_the_scale_of_the_floor(device, fp8_dtype):
    inputs = query(SMALL, 8, 2, device, fp8_dtype=fp8_dtype)
    inputs["index_q"][::2] = 0
    inputs.update(index_weights=torch.ones(8, 3, device=device, dtype=BF16))
    inputs.update(index_weights_softmax_scale=1.0, index_weights_head_scale=1.0)
    index_q, weights, _ = check(inputs)
    assert (weights[::2] == (2.0**-22 if fp8_dtype is FN else 2.0**-21)).all()
    assert ((byte_array(index_q)[::2] & 0x7F) == 0).all()


def test_the_bytes_are_those_of_round_to_nearest_without_bias():
    inputs = query(SMALL, 200, 2, "cpu")
    index_q, _, mqa_q = run(inputs)
    ideal = expect(inputs)
    index_limit = oracle.format_limit(ideal.values, pow2_scaled=True)
    for got, ratio, limit in (
        (byte_array(mqa_q), ideal.mqa.value, None),
        (byte_array(index_q), ideal.index_ratio, index_limit),
    ):
        # 10^5 roundings: 5 sigma are 0.8 %, the slope of the density adds less than 1 %.
        assert abs(oracle.share_rounded_down(got, ratio, ideal.values, limit) - 0.5) < 0.02
        own = oracle.round_to_codes(ratio, ideal.values, limit)
        cut = own - (np.abs(ideal.values[own]) > np.abs(ratio))
        assert oracle.share_rounded_down(cut, ratio, ideal.values, limit) == 1.0


@on_gpu
def test_rounding_has_no_bias_on_a_gpu():
    inputs = query(V32, 500, 16, "cuda")
    outputs, ideal = run(inputs), expect(inputs, rows := torch.arange(40, device="cuda"))
    index_q, _, mqa_q = (byte_array(take(out, rows)) for out in outputs)
    values = ideal.values
    assert abs(oracle.share_rounded_down(mqa_q, ideal.mqa.value, values) - 0.5) < 0.02
    assert abs(oracle.share_rounded_down(index_q, ideal.index_ratio, values, 448.0) - 0.5) < 0.02


@on_devices
def test_rotated_q_pe_rounds_to_bf16_without_bias(device):
    inputs = query(SMALL, 500, 5, device, quantize_mqa=False)
    _, _, mqa_q = run(inputs)
    share = share_towards_zero(array(mqa_q), expect(inputs).mqa.value)
    assert abs(share - 0.5) < 0.02


# Values that are no numbers


def with_special_rows(inputs: dict[str, Any]) -> torch.Tensor:
    """Heads of rows that hold special values, alone and among numbers; the mask of clean rows."""
    clean = torch.ones(inputs["positions"].shape[0], dtype=torch.bool)
    for name in ("q_pe", "ql_nope", "index_q", "index_weights"):
        for i, value in enumerate(special_values(inputs[name])):
            inputs[name][3 * i, -1] = value
            if name != "index_weights":
                inputs[name][3 * i + 1, 0, ::5] = value
                inputs[name][3 * i + 2, :, -1] = value
    clean[: 3 * len(SPECIAL_VALUES)] = False
    return clean.to(inputs["positions"].device)


@device_cases("case", [(BF16, None), (FP32, None), (FP16, None), (FP32, FNUZ), (BF16, FNUZ)],
              gpu=[(BF16, None), (FP32, None), (BF16, FNUZ)])  # fmt: skip
@pytest.mark.parametrize("quantize", [True, False])
def test_non_finite_rows_follow_the_oracle_and_change_no_other_row(device, case, quantize):
    dtype, fp8_dtype = case
    inputs = query(SMALL, 40, 5, device, dtype=dtype, fp8_dtype=fp8_dtype, quantize_mqa=quantize)
    expected = run(inputs)
    clean = with_special_rows(inputs)
    outputs = run(inputs)
    assert_outputs(outputs, expect(inputs), quantize)
    for out, before in zip(outputs, expected, strict=True):
        assert same_bytes(take(out, clean), take(before, clean))


@device_cases("dtype", [BF16, FP32])
def test_the_scale_is_a_finite_power_of_two_whatever_the_row(device, dtype):
    inputs = query(SMALL, 40, 5, device, dtype=dtype)
    with_special_rows(inputs)
    inputs.update(index_weights=torch.ones(40, 3, device=device, dtype=dtype))
    inputs.update(index_weights_softmax_scale=1.0, index_weights_head_scale=1.0)
    _, weights, _ = run(inputs)
    scale = array(weights)
    assert np.isfinite(scale).all() and (np.frexp(scale)[0] == 0.5).all()
    ideal = expect(inputs)
    assert np.array_equal(scale, ideal.index_scale)


@on_devices
def test_nan_has_one_code_and_infinities_saturate(device):
    inputs = query(SMALL, 3, 1, device, dtype=FP32)
    negative_nan = torch.full((1,), -1, dtype=torch.int32).view(FP32)
    row = torch.cat([torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30, -0.0]), negative_nan])
    inputs["ql_nope"][0, 0, :6] = row.to(device)
    _, _, mqa_q = run(inputs)
    assert byte_array(mqa_q)[0, 0, :6].tolist() == [0x7F, 0x7E, 0xFE, 0x7E, 0x80, 0x7F]
    _, _, mqa_q = run({**inputs, "fp8_dtype": FNUZ})
    assert byte_array(mqa_q)[0, 0, :6].tolist() == [0x80, 0x7F, 0xFF, 0x7F, 0x00, 0x80]


# Properties


@device_cases("case", [(BF16, 5), (FP16, 16), (FP32, 3)], gpu=[(BF16, 5)])
@pytest.mark.parametrize("quantize", [True, False])
def test_any_subset_of_tokens_gives_the_same_bytes(device, case, quantize):
    dtype, heads = case
    inputs = query(SMALL, 300, heads, device, dtype=dtype, quantize_mqa=quantize)
    whole = run(inputs)
    order = torch.randperm(300, generator=generator(1)).to(device)
    for rows in (order[:1], order[1:3], order[3:20], order[20:], order.sort().values[1:]):
        tokens = {name: inputs[name][rows] for name in PER_TOKEN & inputs.keys()}
        part = run({**inputs, **tokens})
        for out, expected in zip(part, whole, strict=True):
            assert same_bytes(out, take(expected, rows))


@device_cases("dtype", [BF16, FP16, FP32], gpu=[BF16])
def test_strided_equals_contiguous(device, dtype):
    inputs = query(SMALL, 77, 5, device, dtype=dtype)
    expected = run(inputs)
    packed = {name: inputs[name].contiguous() for name in ROWS}
    assert not inputs["ql_nope"].is_contiguous() and not inputs["q_pe"].is_contiguous()
    assert_same(run({**inputs, **packed}), expected)
    gaps = {}
    for name in ("q_pe", "ql_nope", "index_q"):
        rows, heads, dim = inputs[name].shape
        wide = torch.full((rows, heads + 1, dim + 3), torch.nan, dtype=dtype, device=device)
        gaps[name] = wide[:, 1:, 1 : dim + 1].copy_(inputs[name])
    assert_same(run({**inputs, **gaps}), expected)
    swapped = {name: inputs[name].transpose(0, 1).contiguous().transpose(0, 1) for name in gaps}
    assert_same(run({**inputs, **swapped}), expected)


@on_devices
def test_two_runs_give_the_same_bytes(device):
    inputs = query(SMALL, 100, 5, device)
    assert_same(run(inputs), run(inputs))


@on_devices
def test_without_an_indexer_only_its_outputs_are_missing(device):
    inputs = query(SMALL, 30, 5, device)
    _, _, mqa_q = run(inputs)
    index = ("index_q", "index_q_cos_sin", "index_weights")
    for absent in ({}, dict.fromkeys(index)):
        index_q, weights, again = check({**inputs, **absent, "has_indexer": False})
        assert index_q.shape[:2] == (30, 0) and weights.shape == (30, 0)
        assert same_bytes(again, mqa_q)


@pytest.mark.parametrize("quantize", [True, False])
@device_cases("num_tokens", [0, 1, 5])
def test_the_fake_kernel_gives_the_real_outputs(device, num_tokens, quantize):
    for config in (SMALL, KIMI):
        inputs = query(config, num_tokens, 5, device, quantize_mqa=quantize)
        assert_like_fake(dsv32_ops.fused_q, inputs)


@on_devices
def test_no_tokens(device):
    index_q, weights, mqa_q = run(query(SMALL, 0, 5, device))
    assert index_q.shape == (0, 3, 80) and weights.shape == (0, 3) and mqa_q.shape == (0, 5, 576)


@on_devices
def test_trailing_arguments_may_be_left_out(device):
    inputs = query(SMALL, 9, 5, device)
    first = {name: inputs[name] for name in list(inputs)[:10]}
    assert_same(torch.ops.dsv32.fused_q(**first), run(inputs))
    assert_same(torch.ops.dsv32.fused_q(*first.values()), run(inputs))


# Token counts


def check_tiny(num_tokens: int, device: str) -> None:
    check(query(TINY, num_tokens, 1, device))


@device_cases("num_tokens", [65_535, 65_536, 65_537])
def test_token_counts_around_2_to_the_16(device, num_tokens):
    check_tiny(num_tokens, device)


@device_cases("beside", [-1, 0, 1])
def test_token_counts_around_the_change_of_order(device, beside):
    num_tokens = launch.QUERY_FEW_TOKENS + beside
    check_tiny(num_tokens, device)
    check(query(SMALL, num_tokens, 5, device))


@settings(max_examples=8)
@given(num_tokens=testing.token_counts(max_value=131_072))
def test_any_token_count(num_tokens):
    check_tiny(num_tokens, "cpu")


def check_rows(inputs: dict[str, Any], outputs: Outputs, rows: torch.Tensor) -> None:
    """Sampled rows against the oracle and, to the byte, against the reference."""
    index_q, weights, mqa_q = to_cpu(tuple(take(out, rows) for out in outputs))
    assert_outputs((index_q, weights, mqa_q), expect(inputs, rows), inputs["quantize_mqa"])
    tokens = {name: inputs[name][rows] for name in PER_TOKEN & inputs.keys()}
    on_cpu = to_device({**inputs, **tokens}, "cpu")
    assert_same((index_q, weights, mqa_q), reference.fused_q(**on_cpu))


@on_gpu
@pytest.mark.parametrize("num_tokens", [65_535, 65_536, 65_537])
def test_model_sizes_around_2_to_the_16(num_tokens):
    inputs = query(V32, num_tokens, 16, "cuda")
    outputs = run(inputs)
    check_rows(inputs, outputs, sample_rows(num_tokens, "cuda"))
    half = num_tokens // 2
    for rows in (slice(0, half), slice(half, None)):
        tokens = {name: inputs[name][rows] for name in PER_TOKEN & inputs.keys()}
        for out, expected in zip(run({**inputs, **tokens}), outputs, strict=True):
            assert same_bytes(out, take(expected, rows))


@on_gpu
def test_head_offsets_past_2_to_the_31_elements():
    """33,100 tokens of 128 heads: the last heads of ql_nope begin beyond 2^31."""
    inputs = query(V32, 33_100, 128, "cuda")
    assert 127 * inputs["ql_nope"].stride(1) > 2**31
    rows = sample_rows(33_100, "cuda", count=4)
    check_rows(inputs, run(inputs), rows)
