"""Codecs against a nearest-even search over an independently built table, in float64 NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dsv32_ops import codecs

FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
CASES = [(FN, None), (FN, 224.0), (FNUZ, None), (FNUZ, 224.0)]
LOWER_HALVES = (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)


def fp8_magnitudes(fp8_dtype: torch.dtype) -> np.ndarray:
    """Values of the codes 0, 1, ... up to the largest finite one."""
    bias, count = (7, 127) if fp8_dtype is FN else (8, 128)
    codes = np.arange(count)
    exponent, mantissa = codes // 8, codes % 8
    subnormal = np.ldexp(mantissa / 8.0, 1 - bias)
    return np.where(exponent == 0, subnormal, np.ldexp(1 + mantissa / 8.0, exponent - bias))


E2M1_MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def nearest_even(magnitude: np.ndarray, table: np.ndarray, limit: float) -> np.ndarray:
    """Index of the table value nearest to each magnitude; of two, the even index."""
    clamped = np.minimum(magnitude, limit)
    above = np.clip(np.searchsorted(table, clamped), 1, len(table) - 1)
    below = above - 1
    down, up = clamped - table[below], table[above] - clamped
    take_up = (up < down) | ((up == down) & (above % 2 == 0))
    return np.where(take_up, above, below)


def expected_fp8(x: np.ndarray, fp8_dtype: torch.dtype, limit: float | None) -> np.ndarray:
    table = fp8_magnitudes(fp8_dtype)
    nan = np.isnan(x)
    wide = np.where(nan, 0.0, x).astype(np.float64)
    code = nearest_even(np.abs(wide), table, table[-1] if limit is None else limit)
    negative = np.signbit(wide)
    if fp8_dtype is FNUZ:
        negative &= code != 0
    code = code + 128 * negative
    return np.where(nan, 0x7F if fp8_dtype is FN else 0x80, code).astype(np.uint8)


def expected_e2m1(x: np.ndarray) -> np.ndarray:
    nan = np.isnan(x)
    wide = np.where(nan, 6.0, x).astype(np.float64)
    code = nearest_even(np.abs(wide), E2M1_MAGNITUDES, 6.0)
    return (code + 8 * np.signbit(wide)).astype(np.uint8)


def all_upper_halves() -> np.ndarray:
    """Every sign, exponent and upper mantissa of fp32, with lower halves around all ties."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    bits = np.concatenate([upper | np.uint32(lower) for lower in LOWER_HALVES])
    return bits.view(np.float32)


def around_midpoints(table: np.ndarray) -> np.ndarray:
    points = np.concatenate([table, (table[1:] + table[:-1]) / 2]).astype(np.float32)
    ends = np.array([-np.inf, np.inf], dtype=np.float32)
    near = np.concatenate([points, *(np.nextafter(points, end) for end in ends)])
    return np.concatenate([near, -near])


def bit_path(x: torch.Tensor, fp8_dtype: torch.dtype, limit: float | None) -> torch.Tensor:
    """What devices without torch's own cast on the CPU run."""
    bound = codecs.fp8_limit(fp8_dtype, False) if limit is None else limit
    return codecs._encode_fp8_bits(x.clamp(-bound, bound), codecs._E4M3[fp8_dtype])


@pytest.mark.parametrize("encode", [codecs.encode_fp8, bit_path])
@pytest.mark.parametrize(("fp8_dtype", "limit"), CASES)
def test_encode_fp8_is_nearest_even(encode, fp8_dtype, limit):
    values = np.concatenate([all_upper_halves(), around_midpoints(fp8_magnitudes(fp8_dtype))])
    actual = encode(torch.from_numpy(values), fp8_dtype, limit)
    assert actual.dtype == torch.uint8
    np.testing.assert_array_equal(actual.numpy(), expected_fp8(values, fp8_dtype, limit))


def test_encode_e2m1_is_nearest_even():
    values = np.concatenate([all_upper_halves(), around_midpoints(E2M1_MAGNITUDES)])
    actual = codecs.encode_e2m1(torch.from_numpy(values))
    assert actual.dtype == torch.uint8
    np.testing.assert_array_equal(actual.numpy(), expected_e2m1(values))


@pytest.mark.parametrize(
    ("fp8_dtype", "nan", "largest", "minus_zero"), [(FN, 0x7F, 0x7E, 0x80), (FNUZ, 0x80, 0x7F, 0)]
)
@pytest.mark.parametrize("size", [1, 7, 8, 33])
def test_encode_fp8_specials_at_every_vector_length(fp8_dtype, nan, largest, minus_zero, size):
    specials = torch.tensor([0x7FC00000, -0x00400000, 0x7F800001, -1], dtype=torch.int32)
    for value in specials.view(torch.float32):
        assert codecs.encode_fp8(value.repeat(size), fp8_dtype).tolist() == [nan] * size
    for value, code in ((torch.inf, largest), (-torch.inf, largest | 0x80), (-0.0, minus_zero)):
        x = torch.full((size,), value)
        assert codecs.encode_fp8(x, fp8_dtype).tolist() == [code] * size
    tiny = torch.full((size,), -1e-30)
    assert codecs.encode_fp8(tiny, fp8_dtype).tolist() == [minus_zero] * size


def test_encode_e2m1_specials():
    x = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf, 0.0, -0.0, -0.1])
    assert codecs.encode_e2m1(x).tolist() == [7, 7, 7, 15, 0, 8, 8]


@pytest.mark.parametrize("fp8_dtype", [FN, FNUZ])
def test_decode_fp8_every_code(fp8_dtype):
    codes = torch.arange(256, dtype=torch.uint8)
    values = codecs.decode_fp8(codes, fp8_dtype)
    magnitudes = fp8_magnitudes(fp8_dtype)
    signed = np.full(256, np.nan, dtype=np.float32)
    signed[: len(magnitudes)], signed[128 : 128 + len(magnitudes)] = magnitudes, -magnitudes
    if fp8_dtype is FNUZ:
        signed[128] = np.nan
    np.testing.assert_array_equal(values.numpy(), signed)
    assert torch.equal(torch.signbit(values[128]), torch.tensor(fp8_dtype is FN))
    assert codecs.decode_fp8(codes.view(fp8_dtype), fp8_dtype).isnan().equal(values.isnan())
    finite = ~values.isnan()
    assert torch.equal(codecs.encode_fp8(values, fp8_dtype)[finite], codes[finite])


def test_decode_e2m1_every_code():
    codes = torch.arange(16, dtype=torch.uint8)
    values = codecs.decode_e2m1(codes)
    np.testing.assert_array_equal(values[:8].numpy(), E2M1_MAGNITUDES)
    np.testing.assert_array_equal(values[8:].numpy(), -E2M1_MAGNITUDES)
    assert torch.equal(codecs.encode_e2m1(values), codes)


def test_encoders_take_strided_input():
    x = torch.randn(6, 40)[:, 3:39:2]
    for encode in (codecs.encode_fp8, bit_path_fn, codecs.encode_e2m1):
        assert torch.equal(encode(x), encode(x.contiguous()))


def bit_path_fn(x: torch.Tensor) -> torch.Tensor:
    return bit_path(x, FN, None)


def test_rounding_has_no_bias():
    """Truncation passes loose tolerances; it does not leave half of the values rounded down."""
    count = 1 << 16
    x = torch.rand(count, generator=torch.Generator().manual_seed(7)) + 1.0
    for decoded in (
        codecs.decode_fp8(codecs.encode_fp8(x)),
        codecs.decode_e2m1(codecs.encode_e2m1(x * 2)) / 2,
    ):
        down = int((decoded < x).sum())
        # Five standard deviations of a fair coin.
        assert abs(down - count / 2) < 5 * (count / 4) ** 0.5


def near(value: float, ulps: int) -> np.ndarray:
    bits = np.float32(value).view(np.int32) + np.arange(-ulps, ulps + 1, dtype=np.int32)
    return bits.view(np.float32)


def expected_pow2ceil(r: np.ndarray) -> np.ndarray:
    mantissa, exponent = np.frexp(r.astype(np.float64))
    return np.ldexp(1.0, np.where(mantissa == 0.5, exponent - 1, exponent)).astype(np.float32)


def test_pow2ceil():
    powers = np.concatenate([near(2.0**k, 8) for k in range(-125, 127)])
    random = np.exp2(np.random.default_rng(3).uniform(-126, 127, 4096)).astype(np.float32)
    r = np.concatenate([powers, random])
    np.testing.assert_array_equal(codecs.pow2ceil(torch.from_numpy(r)), expected_pow2ceil(r))


@pytest.mark.parametrize(("fp8_dtype", "limit"), [(FN, 448.0), (FNUZ, 224.0)])
def test_scales_near_every_step(fp8_dtype, limit):
    amax = np.concatenate([near(limit * 2.0**k, 8) for k in range(-40, 119)])
    amax = np.concatenate([amax, near(1e-4, 8), near(limit * 1e-4, 8), np.zeros(1, np.float32)])
    floor, divisor = np.float32(1e-4), np.float32(limit)
    row = expected_pow2ceil(np.maximum(amax, floor) / divisor)
    tile = expected_pow2ceil(np.maximum(amax / divisor, floor))
    x = torch.from_numpy(amax)
    np.testing.assert_array_equal(codecs.row_scale(x, fp8_dtype), row)
    np.testing.assert_array_equal(codecs.tile_scale(x, fp8_dtype), tile)


def test_scale_floors():
    zero = torch.zeros(1)
    assert codecs.row_scale(zero).item() == 2.0**-22
    assert codecs.tile_scale(zero).item() == 2.0**-13
    assert codecs.row_scale(zero, FNUZ).item() == 2.0**-21


def test_scale_of_infinite_row_is_finite():
    amax = codecs.finite_amax(torch.tensor([[1.0, -torch.inf]]), -1)
    for scale in (codecs.row_scale, codecs.tile_scale):
        assert scale(amax).item() == 2.0**120
        assert scale(amax, FNUZ).item() == 2.0**121


def test_finite_amax():
    x = torch.tensor(
        [[-3.0, 2.0], [torch.nan, -1.0], [-torch.inf, 1.0], [torch.nan, torch.nan], [-0.0, 0.0]]
    )
    before = x.clone()
    largest = torch.finfo(torch.float32).max
    assert codecs.finite_amax(x, -1).tolist() == [3.0, 1.0, largest, 0.0, 0.0]
    assert codecs.finite_amax(x, 0, keepdim=True).tolist() == [[largest, 2.0]]
    torch.testing.assert_close(x, before, rtol=0, atol=0, equal_nan=True)


def test_fp8_limit():
    assert codecs.fp8_limit(FN, True) == codecs.fp8_limit(FN, False) == 448.0
    assert (codecs.fp8_limit(FNUZ, True), codecs.fp8_limit(FNUZ, False)) == (224.0, 240.0)
    with pytest.raises(TypeError, match="float8_e4m3fnuz.*float16"):
        codecs.fp8_limit(torch.float16, True)


def test_divide_is_correctly_rounded():
    x = np.random.default_rng(5).standard_normal(4096).astype(np.float32)
    for divisor in (448.0, 6.0, 1536.0):
        expected = (x.astype(np.float64) / divisor).astype(np.float32)
        np.testing.assert_array_equal(codecs.divide(torch.from_numpy(x), divisor), expected)
