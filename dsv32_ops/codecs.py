"""Number formats: e4m3 (OCP and FNUZ), e2m1 and power-of-two scales, bit-exact, in plain PyTorch.

Every function is vectorized, takes fp32 and runs on any device. Codes are uint8 tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

FLOAT32_MAX = torch.finfo(torch.float32).max
E2M1_MAX = 6.0
# The floor of a row is on amax, that of a tile on the ratio amax / limit.
ROW_AMAX_FLOOR = 1e-4
TILE_RATIO_FLOOR = 1e-4


@dataclass(frozen=True)
class _E4m3:
    bias: int
    limit: float
    pow2_limit: float
    nan_code: int
    has_negative_zero: bool


_E4M3 = {
    torch.float8_e4m3fn: _E4m3(7, 448.0, 448.0, 0x7F, True),
    torch.float8_e4m3fnuz: _E4m3(8, 240.0, 224.0, 0x80, False),
}
FP8_DTYPES = tuple(_E4M3)


def _e4m3(fp8_dtype: torch.dtype) -> _E4m3:
    try:
        return _E4M3[fp8_dtype]
    except KeyError:
        names = ", ".join(str(dtype) for dtype in FP8_DTYPES)
        raise TypeError(f"fp8_dtype: expected one of {names}, got {fp8_dtype}") from None


def fp8_limit(fp8_dtype: torch.dtype, pow2_scaled: bool) -> float:
    """Largest magnitude that quantization to `fp8_dtype` may produce.

    448 for e4m3fn. For e4m3fnuz 240, the largest code, but 224 where a power-of-two scale was
    chosen from amax: 224 is half of 448, so that the two flavours' row scales differ by exactly 2.
    """
    spec = _e4m3(fp8_dtype)
    return spec.pow2_limit if pow2_scaled else spec.limit


def divide(x: Tensor, divisor: float) -> Tensor:
    """`x / divisor`, correctly rounded: CUDA turns a division by a host scalar into a multiply."""
    return x / x.new_full((), divisor)


def pow2ceil(r: Tensor) -> Tensor:
    """Smallest power of two >= r, from exponent and mantissa bits.

    r: fp32, positive, normal, at most 2**127. Returns fp32 of the same shape.
    """
    bits = r.view(torch.int32)
    round_up = (bits & 0x7FFFFF) != 0
    return (((bits >> 23) + round_up) << 23).view(torch.float32)


def finite_amax(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    """`max |x|` over `dim`; NaN lanes are ignored, infinities count as the largest finite fp32."""
    magnitude = x.abs().nan_to_num_(nan=0.0, posinf=FLOAT32_MAX)
    return magnitude.amax(dim, keepdim=keepdim)


def row_scale(amax: Tensor, fp8_dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """`pow2ceil(max(amax, 1e-4) / limit)`: the scale of an indexer row; 2**-22 for a zero row."""
    return pow2ceil(divide(amax.clamp(min=ROW_AMAX_FLOOR), fp8_limit(fp8_dtype, True)))


def tile_scale(amax: Tensor, fp8_dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """`pow2ceil(max(amax / limit, 1e-4))`: the scale of a ds_mla tile; 2**-13 for a zero tile."""
    return pow2ceil(divide(amax, fp8_limit(fp8_dtype, True)).clamp(min=TILE_RATIO_FLOOR))


def encode_fp8(
    x: Tensor, fp8_dtype: torch.dtype = torch.float8_e4m3fn, limit: float | None = None
) -> Tensor:
    """e4m3 codes of fp32 `x`: clamp to +-limit, then round to nearest even.

    limit: None for the largest value of the format (448, FNUZ 240). Infinities saturate. NaN
    becomes 0x7F (FNUZ 0x80) whatever its sign. -0 and negatives that round to zero become 0x80
    in e4m3fn, 0 in FNUZ. Returns uint8 of the same shape.
    """
    spec = _e4m3(fp8_dtype)
    clamped = x.clamp(-(limit or spec.limit), limit or spec.limit)
    if x.device.type == "cpu":
        # In range, torch's cast rounds correctly in every version and is several times faster.
        # It would copy the sign of a NaN, so NaN is made positive first.
        return clamped.nan_to_num_(nan=float("nan")).to(fp8_dtype).view(torch.uint8)
    return _encode_fp8_bits(clamped, spec)


def _encode_fp8_bits(clamped: Tensor, spec: _E4m3) -> Tensor:
    magnitude = clamped.abs()
    bits = magnitude.view(torch.int32)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - spec.bias) << 3)
    # Adding 2**(21 - bias) leaves multiples of the subnormal step 2**(-2 - bias) as last bits.
    magic = magnitude.new_full((), 2.0 ** (21 - spec.bias))
    subnormal = (magnitude + magic).view(torch.int32) - magic.view(torch.int32)
    code = torch.where(magnitude < 2.0 ** (1 - spec.bias), subnormal, normal)
    negative = clamped.view(torch.int32) < 0
    if not spec.has_negative_zero:
        negative &= code != 0
    code = torch.where(negative, code | 0x80, code)
    return torch.where(clamped.isnan(), spec.nan_code, code).to(torch.uint8)


@cache
def _e4m3_values(fp8_dtype: torch.dtype) -> tuple[float, ...]:
    spec = _e4m3(fp8_dtype)
    values = []
    for code in range(256):
        exponent, mantissa = (code >> 3) & 15, code & 7
        if exponent:
            value = (8 + mantissa) * 2.0 ** (exponent - spec.bias - 3)
        else:
            value = mantissa * 2.0 ** (-2 - spec.bias)
        values.append(-value if code & 0x80 else value)
    for code in (0x7F, 0xFF) if spec.has_negative_zero else (0x80,):
        values[code] = float("nan")
    return tuple(values)


def decode_fp8(codes: Tensor, fp8_dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """fp32 values of e4m3 codes. codes: uint8, or a tensor of `fp8_dtype` itself."""
    table = torch.tensor(_e4m3_values(fp8_dtype), dtype=torch.float32, device=codes.device)
    return table[codes.view(torch.uint8).long()]


def encode_e2m1(x: Tensor) -> Tensor:
    """e2m1 codes 0..15 of fp32 `x`: 0, 0.5, 1, 1.5, 2, 3, 4, 6, round to nearest even.

    Saturates at 6. NaN becomes +6 (code 7). Bit 3 is the sign, kept on -0 and on negatives that
    round to zero. Returns uint8 of the same shape.
    """
    magnitude = x.abs()
    # A tie belongs to the even code: below odd codes the comparison is strict.
    code = (magnitude > 0.25).to(torch.uint8)
    for odd_midpoint, even_midpoint in ((1.25, 0.75), (2.5, 1.75), (5.0, 3.5)):
        code += magnitude > odd_midpoint
        code += magnitude >= even_midpoint
    code |= (x.view(torch.int32) < 0).to(torch.uint8) << 3
    return code.masked_fill_(x.isnan(), 7)


_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def decode_e2m1(nibbles: Tensor) -> Tensor:
    """fp32 values of e2m1 codes. nibbles: uint8 in 0..15."""
    values = _E2M1_MAGNITUDES + tuple(-value for value in _E2M1_MAGNITUDES)
    return torch.tensor(values, dtype=torch.float32, device=nibbles.device)[nibbles.long()]
