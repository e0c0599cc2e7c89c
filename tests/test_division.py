"""`numerics.divide` gives the e4m3 code of a correctly rounded division, whatever the scale."""

import pytest
import torch
import triton
import triton.language as tl

from csrc_free_ops.numerics import divide, e4m3_code, split_reciprocal

pytestmark = pytest.mark.gpu


@triton.jit
def _count_wrong_codes(x, scale, wrong_ptr):
    power, high, low = split_reciprocal(scale)
    fast = e4m3_code(divide(x, power, high, low), 448.0, False, False)
    exact = e4m3_code(tl.div_rn(x, scale), 448.0, False, False)
    wrong = (fast != exact).to(tl.int32)
    tl.atomic_add(wrong_ptr, tl.sum(wrong, axis=0))


@triton.jit
def _every_mantissa(midpoints_ptr, wrong_ptr, BLOCK: tl.constexpr):
    """x within 6 ulp of a midpoint times the scale, over all scales in [1, 2)."""
    scale_bits = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK) + 0x3F800000
    scale = scale_bits.to(tl.float32, bitcast=True)
    x = scale * tl.load(midpoints_ptr + tl.program_id(1))
    for step in range(-6, 7):
        near = (x.to(tl.int32, bitcast=True) + step).to(tl.float32, bitcast=True)
        _count_wrong_codes(near, scale, wrong_ptr)


@triton.jit
def _every_bf16(scales_ptr, wrong_ptr, BLOCK: tl.constexpr):
    """All 2^16 bf16, NaN, infinities, denormals and -0 included, over one scale."""
    scale = tl.load(scales_ptr + tl.program_id(0))
    bits = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = (bits << 16).to(tl.float32, bitcast=True)
    _count_wrong_codes(x, scale, wrong_ptr + tl.program_id(0))


def test_every_mantissa_of_a_scale_beside_every_midpoint() -> None:
    """Elsewhere the quotient may be off by an ulp: no code changes there."""
    normal = torch.arange(17, 32, 2) / 16
    subnormal = torch.arange(1, 16, 2) / 1024
    midpoints = torch.cat([normal, subnormal]).cuda()
    wrong = torch.zeros(1, dtype=torch.int32, device="cuda")
    _every_mantissa[(2**23 // 1024, midpoints.numel())](midpoints, wrong, BLOCK=1024)
    assert wrong.item() == 0


def test_every_bf16_with_scales_of_every_size_and_special_ones() -> None:
    special = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45, 1.1754944e-38, 3.4e38]
    powers = torch.tensor([2.0]).pow(torch.arange(-149, 128))
    odd = powers * (1 + torch.rand(277, generator=torch.Generator().manual_seed(3)))
    scales = torch.cat([torch.tensor(special), powers, -powers, odd, -odd]).cuda()
    wrong = torch.zeros(scales.numel(), dtype=torch.int32, device="cuda")
    _every_bf16[(scales.numel(), 64)](scales, wrong, BLOCK=1024)
    assert not wrong.any(), f"scales {scales[wrong.bool()].tolist()}"


def test_the_comparison_sees_a_wrong_code() -> None:
    @triton.jit
    def reciprocal_only(scales_ptr, wrong_ptr, BLOCK: tl.constexpr):
        scale = tl.load(scales_ptr)
        x = (tl.arange(0, BLOCK) + 1).to(tl.float32)
        fast = e4m3_code(x * tl.div_rn(1.0, scale), 448.0, False, False)
        exact = e4m3_code(tl.div_rn(x, scale), 448.0, False, False)
        tl.atomic_add(wrong_ptr, tl.sum((fast != exact).to(tl.int32), axis=0))

    wrong = torch.zeros(1, dtype=torch.int32, device="cuda")
    # 17 / 3 * 3 lies on a midpoint; 3's reciprocal alone misses it.
    for scale in (3.0, 5.0, 7.0, 11.0, 13.0, 41.0):
        reciprocal_only[(1,)](torch.tensor([scale], device="cuda"), wrong, BLOCK=1024)
    assert wrong.item() > 0
