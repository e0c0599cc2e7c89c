"""`numerics.divide` gives the e4m3 code of a correctly rounded division, whatever the scale."""

import pytest
import torch
import triton
import triton.language as tl

from csrc_free_ops.numerics import quotient_code, shares_reciprocal
from dsv32_ops import codecs

pytestmark = pytest.mark.gpu


@triton.jit
def _codes_near_midpoints(scales_ptr, targets_ptr, fast_ptr, exact_ptr, TARGETS: tl.constexpr):
    """Codes of x / scale for x within 8 ulp of target * scale, where the code changes."""
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(scales_ptr + row)
    lanes = tl.arange(0, TARGETS)[:, None]
    steps = tl.arange(0, 16)[None, :]
    x = (tl.load(targets_ptr + lanes) * scale).to(tl.int32, bitcast=True) + steps - 8
    x = x.to(tl.float32, bitcast=True)
    out = row * (TARGETS * 16) + lanes * 16 + steps
    tl.store(exact_ptr + out, quotient_code(x, scale, False, 2, 448.0, False, False))
    if shares_reciprocal(scale):
        tl.store(fast_ptr + out, quotient_code(x, scale, True, 2, 448.0, False, False))
    else:
        tl.store(fast_ptr + out, quotient_code(x, scale, False, 2, 448.0, False, False))


@triton.jit
def _count_wrong_codes(wrong_ptr, BLOCK: tl.constexpr):
    """x = (1024 + i) * 2^k over scales with every mantissa: the codes of one step and of div_rn."""
    significand = 1024 + tl.program_id(1)
    mantissas = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    scale = (mantissas + 0x3F800000).to(tl.float32, bitcast=True)
    wrong = tl.zeros([BLOCK], tl.int32)
    # Quotients from below the smallest code to above the largest.
    for exponent in range(-22, 0):
        x = significand.to(tl.float32) * tl.exp2(exponent.to(tl.float32))
        x = tl.zeros([BLOCK], tl.float32) + x
        fast = quotient_code(x, scale, True, 1, 448.0, False, False)
        exact = quotient_code(x, scale, False, 1, 448.0, False, False)
        wrong += (fast != exact).to(tl.int32)
    tl.atomic_add(wrong_ptr, tl.sum(wrong, axis=0))


def test_one_step_is_enough_for_every_16_bit_input_and_every_scale() -> None:
    wrong = torch.zeros(1, dtype=torch.int32, device="cuda")
    _count_wrong_codes[(2**23 // 1024, 1024)](wrong, BLOCK=1024)
    assert wrong.item() == 0


def _scales(kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    if kind == "random":
        return torch.randn(1 << 16, generator=generator)
    if kind == "near eighths":
        # x / scale comes closest to a midpoint between two fp32 where scale is just off k / 8.
        eighths = torch.arange(8, 16).float() / 8
        bits = eighths.view(torch.int32)[:, None] + torch.arange(-512, 513)
        return bits.view(torch.float32).flatten()
    special = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45, 1.1754944e-38, 3.4e38]
    powers = torch.tensor([2.0]).pow(torch.arange(-149, 128)) * (1 + torch.rand(277) / 2)
    return torch.cat([torch.tensor(special), powers, -powers])


@pytest.mark.parametrize("kind", ["random", "near eighths", "extreme"])
def test_codes_equal_those_of_a_correctly_rounded_division(kind: str) -> None:
    values = codecs.decode_fp8(torch.arange(0x7F, dtype=torch.uint8))
    midpoints = (values[1:] + values[:-1]) / 2
    targets = torch.cat([values, midpoints, torch.tensor([464.0, 3e38, float("inf")])])
    targets = torch.nn.functional.pad(targets, (0, 256 - targets.numel()), value=float("nan"))
    scales = _scales(kind).cuda()
    fast = torch.full((scales.numel(), 256 * 16), 0xA5, dtype=torch.uint8, device="cuda")
    exact = torch.full_like(fast, 0x5A)
    _codes_near_midpoints[(scales.numel(),)](scales, targets.cuda(), fast, exact, TARGETS=256)
    wrong = (fast != exact).nonzero()
    assert wrong.numel() == 0, (
        f"{len(wrong)} codes differ, first at scale {scales[wrong[0, 0]].item()!r}, "
        f"target {targets[wrong[0, 1].item() // 16].item()!r}"
    )
