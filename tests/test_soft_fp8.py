"""e4m3, e2m1 and power-of-two scales in integer arithmetic, for every fp32 that matters.

On a CPU the kernels' helpers run under the interpreter over all upper halves of fp32 with lower
halves around the ties, and around all midpoints; on a GPU over all 2^32 values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import interpret
import numpy as np
import oracle
import pytest
import torch
from support import FN, FNUZ, SMALL, generator, model

import dsv32_ops
from dsv32_ops import codecs, testing
from dsv32_ops.testing import same_bytes

LOWER_HALVES = (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
E4M3 = [(FN, 448.0), (FNUZ, 240.0), (FNUZ, 224.0)]
NAN_CODES = {FN: 0x7F, FNUZ: 0x80}
on_gpu = pytest.mark.gpu
# The oracle widens signalling NaNs.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in cast")


@pytest.fixture(scope="module")
def interpreter():
    with interpret.Interpreter() as started:
        yield started


def floats(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.astype(np.uint32).view(np.float32).copy())


def patterns() -> torch.Tensor:
    """Every sign, exponent and upper mantissa, NaN and denormals too, with six lower halves."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    return floats(np.concatenate([upper | np.uint32(lower) for lower in LOWER_HALVES]))


def around_midpoints(values: np.ndarray) -> torch.Tensor:
    """Codes, midpoints between neighbours and the numbers one ulp to either side of both."""
    size = np.unique(np.abs(values[np.isfinite(values)]))
    points = np.concatenate([size, (size[1:] + size[:-1]) / 2, [size[-1] * 17 / 16]])
    points = points.astype(np.float32)
    ulps = [np.nextafter(points, np.float32(end)) for end in (-np.inf, np.inf)]
    near = np.concatenate([points, *ulps])
    return torch.from_numpy(np.concatenate([near, -near]))


def values_of(fp8_dtype: torch.dtype) -> np.ndarray:
    return oracle.E4M3FN_VALUES if fp8_dtype is FN else oracle.E4M3FNUZ_VALUES


def assert_codes(got: torch.Tensor, wanted: Any, x: torch.Tensor) -> None:
    wrong = (got != torch.as_tensor(wanted, device=got.device)).nonzero().flatten()[:10]
    assert wrong.numel() == 0, [(float(x[i]).hex(), int(got[i])) for i in wrong]


@pytest.mark.parametrize(("fp8_dtype", "limit"), E4M3)
def test_soft_e4m3_is_nearest_even(interpreter, fp8_dtype, limit):
    x = torch.cat([patterns(), around_midpoints(values_of(fp8_dtype))])
    got, _ = interpreter(interpret.soft_codes, "e4m3_code", x, limit, fp8_dtype is FNUZ)
    assert_codes(got, oracle.round_to_codes(x.numpy(), values_of(fp8_dtype), limit), x)
    assert_codes(got, codecs.encode_fp8(x, fp8_dtype, limit), x)
    assert set(got[x.isnan()].tolist()) == {NAN_CODES[fp8_dtype]}


def test_soft_e2m1_is_nearest_even(interpreter):
    x = torch.cat([patterns(), around_midpoints(oracle.E2M1_VALUES)])
    got, _ = interpreter(interpret.soft_codes, "e2m1_code", x)
    assert_codes(got, oracle.round_to_codes(x.numpy(), oracle.E2M1_VALUES), x)
    assert_codes(got, codecs.encode_e2m1(x), x)


def test_every_code_is_hit():
    """The inputs above reach each finite code, so that none is right by absence."""
    for values in (oracle.E4M3FN_VALUES, oracle.E4M3FNUZ_VALUES, oracle.E2M1_VALUES):
        codes = oracle.round_to_codes(around_midpoints(values).numpy(), values)
        assert set(codes.tolist()) == set(np.flatnonzero(~np.isnan(values)).tolist())


@pytest.mark.parametrize("mistake", ["truncates", "rounds ties up", "wraps above the range"])
def test_the_comparison_sees_a_wrong_code(mistake):
    x = torch.cat([patterns(), around_midpoints(oracle.E4M3FN_VALUES)])
    right = oracle.round_to_codes(x.numpy(), oracle.E4M3FN_VALUES)
    bits = x.view(torch.int32) & 0x7FFFFFFF
    carry = {"truncates": 0, "rounds ties up": 0x80000, "wraps above the range": 0x7FFFF}[mistake]
    odd = (bits >> 20) & 1 if carry == 0x7FFFF else 0
    normal = (((bits + carry + odd) >> 20) - (120 << 3)) & 0x7F
    wrong = torch.where(x.view(torch.int32) < 0, normal | 0x80, normal).to(torch.uint8)
    with pytest.raises(AssertionError):
        assert_codes(wrong, right, x)


@pytest.mark.parametrize("limit", [448.0, 224.0])
def test_scales_are_the_smallest_powers_of_two_that_suffice(interpreter, limit):
    """An infinite amax counts as the largest number, NaN (a row of it) as 0."""
    x = patterns()
    edges = limit * torch.tensor(2.0).pow(torch.arange(-120, 116))
    edges = torch.cat([edges, (1.0 - 2.0**-24) * edges, (1.0 + 2.0**-23) * edges])
    x = torch.cat([x[(x >= 0) | x.isnan()], edges])
    for function in ("row_scale", "tile_scale"):
        got, _ = interpreter(interpret.soft_codes, function, x, limit)
        amax = oracle.finite_amax(x.numpy()[:, None])
        expected = getattr(oracle, function)(amax, limit).astype(np.float32)
        assert np.array_equal(got.numpy(), expected), function


def test_powers_of_two_have_exact_reciprocals_and_exponent_bytes(interpreter):
    exponents = torch.arange(-126, 127)
    powers = torch.tensor(2.0).pow(exponents)
    got, _ = interpreter(interpret.soft_codes, "pow2_reciprocal", powers)
    assert torch.equal(got, torch.tensor(2.0).pow(-exponents))
    got, _ = interpreter(interpret.soft_codes, "pow2_exponent", powers)
    assert torch.equal(got.int(), (exponents + 127).int())


def test_e4m3_value_decodes_every_positive_code(interpreter):
    codes = torch.arange(127, dtype=torch.uint8)
    got, _ = interpreter(interpret.soft_codes, "e4m3_value", codes)
    assert np.array_equal(got.numpy(), oracle.E4M3FN_VALUES[:127])


@on_gpu
def test_e4m3_value_decodes_every_positive_code_on_a_gpu():
    codes = torch.arange(127, dtype=torch.uint8, device="cuda")
    assert np.array_equal(interpret.codes("e4m3_value", codes).cpu(), oracle.E4M3FN_VALUES[:127])


def every_float(chunk: int = 1 << 28) -> Iterator[torch.Tensor]:
    """All 2^32 bit patterns."""
    for start in range(-(1 << 31), 1 << 31, chunk):
        yield torch.arange(start, start + chunk, dtype=torch.int32, device="cuda").view(
            torch.float32
        )


@on_gpu
def test_soft_e4m3_equals_the_instruction_for_all_floats():
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no e4m3 instruction below sm_89")
    for x in every_float():
        soft = interpret.codes("e4m3_code", x)
        assert torch.equal(soft, interpret.codes("e4m3_code", x, soft=False))


@on_gpu
@pytest.mark.parametrize(("fp8_dtype", "limit"), E4M3)
def test_soft_e4m3_equals_the_cast_of_clamped_floats(fp8_dtype, limit):
    """torch casts what is in range to the nearest, NaN with its sign."""
    for x in every_float():
        soft = interpret.codes("e4m3_code", x, limit=limit, fnuz=fp8_dtype is FNUZ)
        cast = x.clamp(-limit, limit).to(fp8_dtype).view(torch.uint8)
        cast.masked_fill_(x.isnan(), NAN_CODES[fp8_dtype])
        assert torch.equal(soft, cast)


@on_gpu
def test_e2m1_equals_the_encoder_for_all_floats():
    for x in every_float(1 << 26):
        expected = codecs.encode_e2m1(x)
        assert torch.equal(interpret.codes("e2m1_code", x), expected)
        # The only NaN that a product has.
        x = x.view(torch.int32).masked_fill(x.isnan(), 0x7FFFFFFF).view(torch.float32)
        assert torch.equal(interpret.codes("e2m1_code", x, soft=False), expected)


@on_gpu
@pytest.mark.parametrize("function", ["row_scale", "tile_scale"])
def test_scales_of_every_amax(function):
    """Each equals the power of two that a correctly rounded division leads to."""
    for x in every_float():
        x = x[(x >= 0) | x.isnan()]
        if x.numel():
            amax = x.masked_fill(x.isnan(), 0.0).clamp(max=torch.finfo(x.dtype).max)
            assert torch.equal(interpret.codes(function, x), getattr(codecs, function)(amax))


@on_gpu
@pytest.mark.parametrize("mode", ["auto", "fp8", "fp8_ds_mla", "nvfp4_ds_mla"])
def test_soft_coding_gives_norm_rope_the_same_bytes(mode, monkeypatch):
    inputs = testing.norm_rope_inputs(SMALL, 300, mode=mode, device="cuda")
    soft = {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in inputs.items()}
    dsv32_ops.fused_norm_rope(**inputs)
    monkeypatch.setenv("DSV32_OPS_SOFT_FP8", "1")
    dsv32_ops.fused_norm_rope(**soft)
    for name in ("mla_kv_cache", "indexer_k_cache"):
        assert same_bytes(soft[name], inputs[name])


@on_gpu
def test_soft_coding_gives_the_query_the_same_bytes(monkeypatch):
    inputs = testing.q_inputs(model(index_heads=37), 300, 19, device="cuda")
    spread = torch.randn(inputs["ql_nope"].shape, generator=generator(1)).exp().mul(8)
    inputs["ql_nope"] = inputs["ql_nope"] * spread.to("cuda", torch.bfloat16)
    hard = dsv32_ops.fused_q(**inputs)
    monkeypatch.setenv("DSV32_OPS_SOFT_FP8", "1")
    soft = dsv32_ops.fused_q(**inputs)
    for a, b in zip(hard, soft, strict=True):
        assert same_bytes(a, b)
