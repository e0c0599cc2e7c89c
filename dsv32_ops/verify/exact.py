"""Single rows of the ops in float64, to check an implementation against.

Shares no code with ``reference.py``, the codecs or the kernels: rotations are complex products,
codes are looked up among the values of the format.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

FLOAT32_MAX = 3.4028234663852886e38
# Errors are taken relative to the value, but to no less than this share of the row's largest:
# a difference of two products that cancel carries the rounding of the products.
CANCELLATION_FLOOR = 2.0**-10


class Quantized(NamedTuple):
    """Codes (uint8) and their scales: float64, or uint8 codes where the format stores such."""

    codes: Tensor
    scale: Tensor


def norm_rope_rows(
    arguments: Mapping[str, Any], rows: Tensor, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """q_c, kv, k_pe and index_k of ``rows``, computed in ``dtype`` and not rounded further."""
    a = arguments
    out = {
        "q_c": _rms_norm(a["q_c"][rows], a["q_norm_weight"], a["q_norm_eps"], dtype),
        "kv": _rms_norm(a["kv_c"][rows], a["kv_norm_weight"], a["kv_norm_eps"], dtype),
        "k_pe": rotate(a["k_pe"][rows], _angles(a["rope_cos_sin"], a, rows, dtype), True),
    }
    if a["has_indexer"]:
        normed = _layer_norm(
            a["index_k"][rows],
            a["index_k_norm_weight"],
            a["index_k_norm_bias"],
            a["index_k_norm_eps"],
            dtype,
        )
        angles = _angles(a["index_rope_cos_sin"], a, rows, dtype)
        out["index_k"] = rotate(normed, angles, a["index_rope_interleave"])
    return out


def q_rows(
    arguments: Mapping[str, Any], rows: Tensor, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """mqa_q (divided by q_scale when it will be quantized), index_q, and index_weights_out but for
    the row scale."""
    a = arguments
    angles = _angles(a["q_pe_cos_sin"], a, rows, dtype).unsqueeze(1)
    mqa = rotate(a["q_pe"][rows], angles, True)
    if a["quantize_mqa"]:
        mqa = torch.cat((a["ql_nope"][rows].to(dtype), mqa), -1) / a["q_scale"].to(dtype)
    out = {"mqa_q": mqa}
    if a["has_indexer"]:
        angles = _angles(a["index_q_cos_sin"], a, rows, dtype).unsqueeze(1)
        out["index_q"] = rotate(a["index_q"][rows], angles, a["index_rope_interleave"])
        factor = _fp32(a["index_weights_softmax_scale"]) * _fp32(a["index_weights_head_scale"])
        out["index_weights_out"] = a["index_weights"][rows].to(dtype) * factor
    return out


def quantize_row(x: Tensor, fp8_dtype: torch.dtype) -> Quantized:
    """An indexer row: scale = the power of two at or above max(amax, 1e-4) / limit."""
    limit = _limit(fp8_dtype, scaled=True)
    scale = _power_of_two_above(_amax(x).clamp(min=_fp32(1e-4)) / limit)
    return Quantized(codes(x / scale, fp8_dtype, limit), scale)


def quantize_tiles(x: Tensor, fp8_dtype: torch.dtype) -> Quantized:
    """Tiles of 128: scale = the power of two at or above max(amax / limit, 1e-4)."""
    limit = _limit(fp8_dtype, scaled=True)
    tiles = x.unflatten(-1, (-1, 128))
    scale = _power_of_two_above((_amax(tiles) / limit).clamp(min=_fp32(1e-4)))
    return Quantized(codes(tiles / scale, fp8_dtype, limit).flatten(-2), scale.squeeze(-1))


def quantize_fp4(x: Tensor) -> Quantized:
    """Blocks of 16: e4m3 code of max(amax / 6, 2^-9) in ``scale``, e2m1 codes 0 to 15."""
    blocks = x.unflatten(-1, (-1, 16))
    scale = codes((_amax(blocks) / 6).clamp(min=2.0**-9), torch.float8_e4m3fn)
    step = scale.view(torch.float8_e4m3fn).double()
    payload = _nearest(blocks / step, _E2M1).masked_fill(blocks.isnan(), 7)
    return Quantized(payload.flatten(-2), scale.squeeze(-1))


def codes(x: Tensor, fp8_dtype: torch.dtype, limit: float | None = None) -> Tensor:
    """e4m3 codes: the nearest value, ties to the even code, saturating at ``limit``."""
    limit = _limit(fp8_dtype, scaled=False) if limit is None else limit
    values = torch.arange(128, dtype=torch.uint8).view(fp8_dtype).double()
    out = _nearest(x, values[values <= limit].tolist(), sign=0x80)
    if fp8_dtype == torch.float8_e4m3fnuz:
        return out.masked_fill(out == 0x80, 0).masked_fill(x.isnan(), 0x80)
    return out.masked_fill(x.isnan(), 0x7F)


_E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def _nearest(x: Tensor, values: list[float], sign: int = 8) -> Tensor:
    """Index of the value nearest to |x|, ties to the even index, plus the sign bit."""
    grid = torch.tensor(values, dtype=torch.float64, device=x.device)
    middles = (grid[1:] + grid[:-1]) / 2
    magnitude = x.abs().nan_to_num(nan=values[-1])
    index = torch.bucketize(magnitude, middles)
    tie = magnitude == middles[index.clamp(max=len(middles) - 1)]
    index = index + (tie & (index % 2 == 1))
    return (index + sign * torch.signbit(x)).to(torch.uint8)


def rotate(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """Multiply the pairs among the leading dims, read as complex numbers, by ``angles``."""
    rope_dim = 2 * angles.shape[-1]
    head, tail = x[..., :rope_dim].to(angles.real.dtype), x[..., rope_dim:].to(angles.real.dtype)
    if interleaved:
        pairs = torch.view_as_complex(head.unflatten(-1, (-1, 2)).contiguous())
        return torch.cat((torch.view_as_real(pairs * angles).flatten(-2), tail), -1)
    first, second = head.chunk(2, -1)
    turned = torch.complex(first.contiguous(), second.contiguous()) * angles
    return torch.cat((turned.real, turned.imag, tail), -1)


def scaled_error(actual: Tensor, exact: Tensor) -> Tensor:
    """|actual - exact| / (|exact| + 2^-10 of the row's largest), in float64; NaN becomes inf."""
    exact = exact.double()
    size = exact.abs() + CANCELLATION_FLOOR * exact.abs().amax(-1, keepdim=True)
    error = (actual.double() - exact).abs() / size.clamp(min=torch.finfo(torch.float32).tiny)
    return error.nan_to_num(nan=float("inf"))


def _rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    x = x.to(dtype)
    return x / (x.square().mean(-1, keepdim=True) + _fp32(eps)).sqrt() * weight.to(dtype)


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    x = x.to(dtype)
    variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    return (x - mean) / (variance + _fp32(eps)).sqrt() * weight.to(dtype) + bias.to(dtype)


def _angles(
    table: Tensor, arguments: Mapping[str, Any], rows: Tensor, dtype: torch.dtype
) -> Tensor:
    positions = arguments["positions"][rows].long().clamp(0, table.shape[0] - 1)
    cos, sin = table[positions].to(dtype).chunk(2, -1)
    return torch.complex(cos.contiguous(), sin.contiguous())


def _amax(x: Tensor) -> Tensor:
    finite = x.abs().nan_to_num(nan=0.0, posinf=FLOAT32_MAX)
    return finite.amax(-1, keepdim=True)


def _power_of_two_above(x: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.ones_like(x), exponent - (mantissa == 0.5).int())


def _limit(fp8_dtype: torch.dtype, scaled: bool) -> float:
    if fp8_dtype == torch.float8_e4m3fnuz:
        return 224.0 if scaled else 240.0
    return 448.0


def _fp32(value: float) -> float:
    """Floats reach a kernel as fp32."""
    return torch.tensor(value, dtype=torch.float32).item()
