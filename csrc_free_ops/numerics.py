"""Norms, rotations, scales and number formats, as fp32 arithmetic with one rounding per step.

Contraction into FMA is a compiler option that torch.compile does not forward to user kernels
(torch 2.13), so nothing here may depend on it: a product whose sum is rounded once is written as
`tl.fma`, one that must be rounded on its own goes through `square`, and divisions are `tl.div_rn`
or steps of `tl.fma`. The eager op and the traced kernel then agree bit for bit.
"""

import triton
import triton.language as tl


@triton.jit
def widen(x):
    """x as fp32: bfloat16 by one shift or mask, where `.to` takes two for every other element."""
    if x.dtype == tl.bfloat16:
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        result = bits.to(tl.float32, bitcast=True)
    else:
        result = x.to(tl.float32)
    return result


@triton.jit
def square(x):
    """x*x rounded to fp32: with a +0 addend the compiler cannot merge it into a later sum."""
    return tl.fma(x, x, 0.0)


@triton.jit
def square_sum(a, b):
    """a*a + b*b, two instructions for two elements of a sum of squares."""
    return tl.fma(a, a, square(b))


@triton.jit
def divide_by(x, SIZE: tl.constexpr):
    """x / SIZE correctly rounded, wherever the quotient is normal; SIZE below 2^20.

    A power of two has an exact reciprocal. Any other comes in two parts, the high one rounded
    toward zero so that an infinite x stays infinite. `div_rn` takes 10 instructions and a branch.
    """
    if (SIZE & (SIZE - 1)) == 0:
        result = x * (1.0 / SIZE)
    else:
        INVERSE: tl.constexpr = 1.0 / SIZE
        # Its upper 24 bits, by Veltkamp's way to split, and a little below the reciprocal.
        BELOW: tl.constexpr = INVERSE * (1.0 - 5.9604644775390625e-08)
        SCALED: tl.constexpr = BELOW * 536870913.0
        HIGH: tl.constexpr = SCALED - (SCALED - BELOW)
        LOW: tl.constexpr = INVERSE - HIGH
        result = tl.fma(x, HIGH, x * LOW)
    return result


@triton.jit
def newton_reciprocal(x, y):
    """1 / x from y, an approximation of it to 20 bits, in two steps.

    Correctly rounded for a normal x, but for one with a mantissa of ones. `div_rn` takes 10
    instructions and a branch to a slow path, which splits the schedule of a kernel.
    """
    # Triton's unary minus is 0 - x, an instruction; this one is part of the next.
    minus_x = x * -1.0
    y = tl.fma(y, tl.fma(minus_x, y, 1.0), y)
    return tl.fma(y, tl.fma(minus_x, y, 1.0), y)


@triton.jit
def inverse_rms(sum_of_squares, eps, SIZE: tl.constexpr, BRANCH: tl.constexpr):
    """1 / sqrt(mean + eps), each step correctly rounded: all but the quotient of a root whose
    mantissa is all ones, which is the neighbour.

    `sqrt_rn` and `div_rn` take 12 instructions more for any argument. Those that the quick way does
    not cover (denormal, 0, infinite) are scaled or selected, or with BRANCH left to the two: ptxas
    issues the loads in front of a branch together, and without one spreads them over the kernel.
    """
    x = divide_by(sum_of_squares, SIZE) + tl.cast(eps, tl.float32)
    if BRANCH:
        if (x > 1.0e-30) & (x < float("inf")):
            result = _inverse_root(x)
        else:
            result = tl.div_rn(1.0, tl.sqrt_rn(x))
    else:
        small = x < 1.0e-30
        x = tl.where(small, x * 1.2676506002282294e30, x)
        result = _inverse_root(x)
        # 0 and infinity, where it is NaN.
        result = tl.where(result == result, result, tl.rsqrt(x))
        result = tl.where(small, result * 1125899906842624.0, result)
    return result


@triton.jit
def _inverse_root(x):
    y = tl.rsqrt(x)
    root = x * y
    root = tl.fma(tl.fma(root * -1.0, root, x), y * 0.5, root)
    return newton_reciprocal(root, y)


@triton.jit
def rotate(a, b, cos, sin):
    """fp32 pair (a, b) turned by an angle: (a cos - b sin, b cos + a sin)."""
    a = widen(a)
    b = widen(b)
    cos = widen(cos)
    sin = widen(sin)
    # Triton's unary minus is 0 - x, which loses the sign of a zero.
    return tl.fma(a, cos, b * sin * -1.0), tl.fma(b, cos, a * sin)


@triton.jit
def row_amax(x):
    """amax over axis 1 in which NaN does not count; NaN if there is nothing else.

    Reductions ignore NaN: max.f32 and v_max_f32 return the other operand. So does the maximum with
    a scale's floor, by which a row of NaN has the scale of zeros.
    """
    return tl.max(tl.abs(x), axis=1)


@triton.jit
def _pow2ceil_ratio_bits(amax, LIMIT: tl.constexpr):
    """Bits of the smallest power of two >= amax / LIMIT, for LIMIT = 1.75 * 2^k; an infinite amax
    counts as the largest finite one.

    The carry into the exponent starts behind a mantissa of 1.75. No input of 2^31 is different with
    a correctly rounded division; exp2(ceil(log2(ratio))) picks the wrong power for 904 of 2,278
    ratios within 8 ulp of a power of two on an H200.
    """
    tl.static_assert(LIMIT == 448.0 or LIMIT == 224.0)
    EXPONENT: tl.constexpr = 8 if LIMIT == 448.0 else 7
    bits = amax.to(tl.int32, bitcast=True)
    return ((bits + 0x001FFFFF) & 0x7F800000) - (EXPONENT << 23)


@triton.jit
def pow2_reciprocal(scale):
    """1 / scale, exact, for a power of two in [2^-126, 2^126]."""
    return (0x7F000000 - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def pow2_exponent(scale):
    """Biased exponent byte of a power of two (the ue8m0 code)."""
    return (scale.to(tl.int32, bitcast=True) >> 23).to(tl.uint8)


@triton.jit
def row_scale(amax, LIMIT: tl.constexpr):
    """Indexer scale: the floor is on amax, so a zero row has 2^-22."""
    return _pow2ceil_ratio_bits(tl.maximum(amax, 1e-4), LIMIT).to(tl.float32, bitcast=True)


@triton.jit
def tile_scale(amax, LIMIT: tl.constexpr):
    """ds_mla scale: the floor of 1e-4 is on the ratio, so a zero tile has 2^-13.

    2^-13, the power of two above 1e-4, is a floor with the same scales, and exact.
    """
    floored = tl.maximum(amax, LIMIT * 0.0001220703125)
    return _pow2ceil_ratio_bits(floored, LIMIT).to(tl.float32, bitcast=True)


@triton.jit
def reciprocal(x):
    """1 / x for x in [2^-100, 2^100]; see `newton_reciprocal`."""
    y = tl.rsqrt(x)
    return newton_reciprocal(x, y * y)


@triton.jit
def split_reciprocal(scale):
    """(power, high, low) of a scalar, for `divide`: 1 / scale = power * (high + low) to 48 bits.

    power is a power of two with the sign of scale, so that nothing in between overflows or becomes
    denormal. high is rounded toward zero and low is never 0: both are positive, and an infinite x
    stays infinite.
    """
    bits = scale.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) & 0xFF
    # 2^-127 is denormal.
    power_bits = tl.where(exponent == 254, 0x00400000, (254 - exponent) << 23)
    power_bits = tl.where(exponent == 255, 0, power_bits)
    power = (power_bits | (bits & -0x80000000)).to(tl.float32, bitcast=True)
    mantissa = tl.where(tl.abs(scale) == float("inf"), 1.0, scale * power)
    inverse = reciprocal(mantissa)
    # Of 0 it is NaN.
    inverse = tl.where(inverse == inverse, inverse, tl.rsqrt(mantissa))
    bits = inverse.to(tl.int32, bitcast=True)
    too_large = tl.fma(inverse * -1.0, mantissa, 1.0) < 0.0
    high = tl.where(too_large, bits - 1, bits).to(tl.float32, bitcast=True)
    rest = tl.fma(high * -1.0, mantissa, 1.0)
    low = rest * inverse
    low = tl.fma(tl.fma(low * -1.0, mantissa, rest), inverse, low)
    low_bits = low.to(tl.int32, bitcast=True)
    # 1.5 - 2^-23 is the one mantissa for which low has to be rounded down (x = 1.25 scale).
    one_and_a_half = mantissa.to(tl.int32, bitcast=True) == 0x3FBFFFFF
    low = tl.where(one_and_a_half, low_bits - 1, low_bits).to(tl.float32, bitcast=True)
    return power, high, tl.where(low > 0.0, low, 1e-30)


@triton.jit
def divide(x, power, high, low):
    """x / scale, to the e4m3 code of the correctly rounded quotient: three instructions an element.

    Before its one rounding the quotient is off by less than 2^-22 ulp, so it is the correctly
    rounded one or its neighbour. That changes the code only beside a midpoint of two codes, where
    the GPU suite tries every mantissa of a scale. A `div_rn` an element made `fused_q`
    compute-bound.
    """
    x = x * power
    return tl.fma(x, high, x * low)


@triton.jit
def e4m3_code(x, LIMIT: tl.constexpr, FNUZ: tl.constexpr, SOFT: tl.constexpr):
    """e4m3 byte of an fp32 value: nearest even, saturating at LIMIT, NaN becomes a NaN code.

    The conversion instruction of sm_89 and later saturates by itself. SOFT codes in integer
    arithmetic for every other GPU (Triton refuses fp8e4nv below sm_89) and for e4m3fnuz; on an H200
    it equals the instruction for every fp32 input.
    """
    if SOFT:
        code = _soft_e4m3_code(x, LIMIT, FNUZ)
    else:
        tl.static_assert(LIMIT == 448.0 and not FNUZ, "only SOFT knows other limits")
        code = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return code


@triton.jit
def _soft_e4m3_code(x, LIMIT: tl.constexpr, FNUZ: tl.constexpr):
    # fp32's exponent bias is 127; e4m3fn's is 7 and e4m3fnuz's 8. Below the smallest normal the
    # codes are multiples of 2^-9 (2^-10): adding the fp32 whose ulp is that lets the adder round.
    EXPONENT_GAP: tl.constexpr = 119 if FNUZ else 120
    MAGIC: tl.constexpr = 8192.0 if FNUZ else 16384.0
    MAGIC_BITS: tl.constexpr = 0x46000000 if FNUZ else 0x46800000
    MIN_NORMAL_BITS: tl.constexpr = (EXPONENT_GAP + 1) << 23

    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = tl.minimum(tl.abs(x), LIMIT)
    magnitude_bits = magnitude.to(tl.int32, bitcast=True)
    rounded = magnitude_bits + 0x0007FFFF + ((magnitude_bits >> 20) & 1)
    normal = (rounded >> 20) - (EXPONENT_GAP << 3)
    subnormal = (magnitude + MAGIC).to(tl.int32, bitcast=True) - MAGIC_BITS
    code = tl.where(magnitude_bits < MIN_NORMAL_BITS, subnormal, normal)
    if FNUZ:
        # 0x80 is the NaN, so zero has no sign.
        code = tl.where(code == 0, 0, code | sign)
        code = tl.where(x != x, 0x80, code)
    else:
        code = tl.where(x != x, 0x7F, code | sign)
    return code.to(tl.uint8)


@triton.jit
def e4m3_value(code):
    """fp32 value of a non-negative finite e4m3fn code."""
    # Exponent and mantissa in the places of fp32's, also of a denormal, which must not be flushed;
    # the biases differ by 120.
    scaled = (code.to(tl.int32) << 20).to(tl.float32, bitcast=True)
    return scaled * 1329227995784915872903807060280344576.0


@triton.jit
def e2m1_code(x, SOFT: tl.constexpr):
    """e2m1 code of an fp32 product, in the low byte: nearest even, saturating at 6, NaN becomes +6.

    The codes of 0 to 2, 2 to 4 and 4 to 6 are 2|x|, |x| + 2 and |x| / 2 + 4, of which the smallest
    is the right one. Added to 2^23, each is rounded once, to an integer in the low bits. Seven
    instructions, three of them FMA; Hopper has none for the conversion.
    """
    if SOFT:
        # Elsewhere a NaN may be negative; NVIDIA's products have but one NaN, 0x7FFFFFFF.
        x = tl.where(x != x, 6.0, x)
    # NaN loses this comparison.
    size = tl.minimum(tl.abs(x), 6.0)
    halves = tl.fma(size, 2.0, 8388608.0).to(tl.int32, bitcast=True)
    ones = (size + 8388610.0).to(tl.int32, bitcast=True)
    twos = tl.fma(size, 0.5, 8388612.0).to(tl.int32, bitcast=True)
    # As integers, since there is an instruction for the smallest of three.
    code = tl.minimum(tl.minimum(halves, ones), twos)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)
