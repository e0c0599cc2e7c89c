"""Roots and quotients without slow paths equal Triton's correctly rounded ones, on the GPU's own
reciprocal square root."""

import pytest
import torch
import triton
import triton.language as tl

from csrc_free_ops.numerics import divide_by, inverse_rms, reciprocal, widen

pytestmark = pytest.mark.gpu

BLOCK = 1024


@triton.jit
def _wrong(quick, exact):
    """Other bits, and not NaN in both."""
    same = quick.to(tl.int32, bitcast=True) == exact.to(tl.int32, bitcast=True)
    return ~(same | ((quick != quick) & (exact != exact)))


@triton.jit
def _compare_roots(bits_ptr, wrong_ptr, BLOCK: tl.constexpr):
    """1 / sqrt(x), but where the root's mantissa is all ones."""
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(bits_ptr + lanes).to(tl.float32, bitcast=True)
    root = tl.sqrt_rn(x)
    known = (root.to(tl.int32, bitcast=True) & 0x7FFFFF) == 0x7FFFFF
    wrong = _wrong(inverse_rms(x, 0.0, 1, BRANCH=False), tl.div_rn(1.0, root)) & ~known
    tl.store(wrong_ptr + lanes, wrong.to(tl.int8))


@triton.jit
def _compare_scalar_roots(bits_ptr, wrong_ptr):
    x = tl.load(bits_ptr + tl.program_id(0)).to(tl.float32, bitcast=True)
    quick = inverse_rms(x, 0.0, 1, BRANCH=True)
    wrong = _wrong(quick, tl.div_rn(1.0, tl.sqrt_rn(x)))
    tl.store(wrong_ptr + tl.program_id(0), wrong.to(tl.int8))


@triton.jit
def _compare_quotients(bits_ptr, wrong_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(bits_ptr + lanes).to(tl.float32, bitcast=True)
    wrong = _wrong(divide_by(x, SIZE), tl.div_rn(x, SIZE * 1.0))
    tl.store(wrong_ptr + lanes, wrong.to(tl.int8))


@triton.jit
def _compare_reciprocals(codes_ptr, wrong_ptr, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    x = tl.load(codes_ptr + lanes)
    tl.store(wrong_ptr + lanes, _wrong(reciprocal(x), tl.div_rn(1.0, x)).to(tl.int8))


@triton.jit
def _compare_widening(x_ptr, wrong_ptr, BLOCK: tl.constexpr):
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + lanes)
    tl.store(wrong_ptr + lanes, _wrong(widen(x), x.to(tl.float32)).to(tl.int8))


def mantissas(*exponents: int) -> torch.Tensor:
    """All fp32 of these biased exponents, as bits."""
    mantissa = torch.arange(2**23, dtype=torch.int32, device="cuda")
    return torch.cat([mantissa + (exponent << 23) for exponent in exponents])


def specials() -> torch.Tensor:
    """Zero, infinities, NaN, denormals, and the neighbourhood of where arguments are scaled."""
    values = [0.0, -1.0, float("inf"), -float("inf"), float("nan"), 1e-45, 1e-38, 3e38]
    values += [1e-30 * (1 + step * 2.0**-23) for step in range(-4, 5)]
    special = torch.tensor(values + [2.0**k for k in range(-149, 128)])
    padding = torch.ones(-special.numel() % BLOCK)
    return torch.cat([special, padding]).cuda().view(torch.int32)


def bits_of(wrong: torch.Tensor, bits: torch.Tensor) -> list[str]:
    return [hex(x & 0xFFFFFFFF) for x in bits[wrong.bool()][:8].tolist()]


def test_roots() -> None:
    """Even and odd exponents, scaled ones, denormals, the largest."""
    for bits in (mantissas(127, 128), mantissas(0, 20, 254), specials()):
        wrong = torch.ones(bits.numel(), dtype=torch.int8, device="cuda")
        _compare_roots[(bits.numel() // BLOCK,)](bits, wrong, BLOCK=BLOCK)
        assert not wrong.any(), bits_of(wrong, bits)


def test_roots_of_scalars() -> None:
    random = mantissas(127, 128)[torch.randint(2**24, (4096,), device="cuda")]
    bits = torch.cat([specials(), random])
    wrong = torch.ones(bits.numel(), dtype=torch.int8, device="cuda")
    _compare_scalar_roots[(bits.numel(),)](bits, wrong)
    assert not wrong.any(), bits_of(wrong, bits)


@pytest.mark.parametrize("size", [6, 24, 96, 512, 1536, 6144, 7168, 1000003])
def test_quotients_by_a_size(size: int) -> None:
    infinite = torch.full((BLOCK,), 0x7F800000, dtype=torch.int32, device="cuda")
    bits = torch.cat([mantissas(100, 127, 254), infinite])
    wrong = torch.ones(bits.numel(), dtype=torch.int8, device="cuda")
    _compare_quotients[(bits.numel() // BLOCK,)](bits, wrong, SIZE=size, BLOCK=BLOCK)
    assert not wrong.any(), bits_of(wrong, bits)


def test_reciprocals_of_e4m3_values() -> None:
    """Of the positive finite ones, which scales are."""
    codes = torch.arange(128, dtype=torch.uint8, device="cuda").clamp(1, 126)
    codes = codes.view(torch.float8_e4m3fn).float()
    wrong = torch.ones(128, dtype=torch.int8, device="cuda")
    _compare_reciprocals[(1,)](codes, wrong, BLOCK=128)
    assert not wrong.any(), codes[wrong.bool()].tolist()


def test_every_bf16_is_widened() -> None:
    x = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16).view(torch.bfloat16)
    wrong = torch.ones(x.numel(), dtype=torch.int8, device="cuda")
    _compare_widening[(x.numel() // BLOCK,)](x, wrong, BLOCK=BLOCK)
    assert not wrong.any()
