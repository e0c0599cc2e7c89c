"""The operators in float64 NumPy: the authority that CPU and Triton kernels are compared with.

Float arguments are arrays that already hold the exact values of their bf16 / fp16 / fp32 tensors.
Norms and rotations are computed in float64. Quantization follows fp32 operation by operation, so
rows that are exact fp32 numbers have exactly one right encoding; rows that come out of a norm carry
an error bound, and the `assert_*` helpers accept another code only where that bound reaches a
rounding boundary.

An error bound is twice the deviation of a float32 run of the same formula, as a share of the terms
that were added up to get the value (a rotation may cancel, its rounding errors do not).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray

FLT_MAX = float(np.finfo(np.float32).max)
FLT_OVERFLOW = 2.0**128 - 2.0**103  # from here on, rounding to fp32 gives inf
FP32_QUANTUM = 2.0**-149
MIN_REL_ERR = 2.0**-21  # eight fp32 roundings, as in x, x^2, sum, mean, eps, sqrt, rstd, w
MAX_REL_ERR = 2.0**-16  # an fp32 run further off than this is no yardstick

FLOAT_MODES = ("auto", "bfloat16", "float16")
FP8_MODES = ("fp8", "fp8_e4m3")
MLA_MODES = (*FLOAT_MODES, *FP8_MODES, "fp8_ds_mla", "nvfp4_ds_mla")

_ITEM_SIZE = {"bfloat16": 2, "float16": 2, "float32": 4}


class Ideal(NamedTuple):
    """A float64 result and the absolute error that fp32 arithmetic may have made in it."""

    value: Array
    err: Array


# Formats


def _minifloat_values(exponent_bits: int, mantissa_bits: int, bias: int) -> Array:
    half = 1 << (exponent_bits + mantissa_bits)
    codes = np.arange(half)
    exponent, mantissa = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    significand = np.where(exponent > 0, 1 << mantissa_bits, 0) + mantissa
    shift = np.maximum(exponent, 1) - bias - mantissa_bits
    magnitude = np.ldexp(significand.astype(np.float64), shift)
    return np.concatenate([magnitude, -magnitude])


def _frozen(values: Array, *nan_codes: int) -> Array:
    values[list(nan_codes)] = np.nan
    values.setflags(write=False)
    return values


E4M3FN_VALUES = _frozen(_minifloat_values(4, 3, 7), 0x7F, 0xFF)
E4M3FNUZ_VALUES = _frozen(_minifloat_values(4, 3, 8), 0x80)
E2M1_VALUES = _frozen(_minifloat_values(2, 1, 1))


def format_limit(values: Array, *, pow2_scaled: bool = False) -> float:
    """Largest magnitude a code may take: 448, 240 or 6; 224 for power-of-two scaled e4m3fnuz."""
    if pow2_scaled and np.nanmax(values) == 240.0:
        return 224.0
    return float(np.nanmax(values))


def round_to_codes(x: Any, values: Array, limit: float | None = None) -> Array:
    """Codes of the nearest table values, ties to the even code, saturating at +-limit.

    NaN becomes the table's first NaN (0x7F, 0x80), or +6 (7) in e2m1, which has none. A negative
    zero keeps its sign wherever the format has one.
    """
    x = np.asarray(x, np.float64)
    half = len(values) // 2
    nan_codes = np.flatnonzero(np.isnan(values))
    magnitudes = values[:half][~np.isnan(values[:half])]
    middles = np.append((magnitudes[1:] + magnitudes[:-1]) / 2, np.inf)
    size = np.minimum(np.abs(x), format_limit(values) if limit is None else limit)
    below = np.searchsorted(middles[:-1], size, side="left")
    codes = below + ((middles[below] == size) & (below % 2 == 1))
    negative = np.signbit(x)
    if np.isnan(values[half]):  # the code of -0 is taken by NaN
        negative = negative & (codes > 0)
    codes = np.where(negative, codes + half, codes)
    nan_code = int(nan_codes[0]) if nan_codes.size else half - 1
    return np.where(np.isnan(x), nan_code, codes).astype(np.uint8)


def _float_bits(x: Any, exponent_bits: int, mantissa_bits: int) -> Array:
    """Bits of an IEEE float, rounded to nearest even once, straight from float64."""
    x = np.asarray(x, np.float64)
    finite = np.where(np.isfinite(x), np.abs(x), 0.0)
    lowest = 2 - (1 << (exponent_bits - 1))
    exponent = np.where(finite > 0, np.frexp(finite)[1].astype(np.int64) - 1, lowest)
    exponent = np.maximum(exponent, lowest)
    significand = np.rint(np.ldexp(finite, mantissa_bits - exponent)).astype(np.int64)
    inf = ((1 << exponent_bits) - 1) << mantissa_bits
    bits = np.minimum(((exponent - lowest) << mantissa_bits) + significand, inf)
    bits = np.where(np.isinf(x), inf, bits)
    bits = bits | (np.signbit(x).astype(np.int64) << (exponent_bits + mantissa_bits))
    return np.where(np.isnan(x), inf | (1 << (mantissa_bits - 1)), bits)


def bf16_bits(x: Any) -> Array:
    """bf16 bit patterns (uint16); NaN is 0x7FC0."""
    return _float_bits(x, 8, 7).astype(np.uint16)


def fp16_bits(x: Any) -> Array:
    """fp16 bit patterns (uint16); NaN is 0x7E00."""
    return _float_bits(x, 5, 10).astype(np.uint16)


def round_bf16(x: Any) -> Array:
    return float_from_bytes(float_to_bytes(x, "bfloat16"), "bfloat16")


def round_fp16(x: Any) -> Array:
    return float_from_bytes(float_to_bytes(x, "float16"), "float16")


def round_fp32(x: Any) -> Array:
    with np.errstate(over="ignore", under="ignore"):
        return np.asarray(x, np.float64).astype(np.float32).astype(np.float64)


def round_float(x: Any, dtype: str) -> Array:
    """x rounded once to "bfloat16", "float16" or "float32", as float64."""
    return {"bfloat16": round_bf16, "float16": round_fp16, "float32": round_fp32}[dtype](x)


def float_to_bytes(x: Any, dtype: str) -> Array:
    """[..., n] values -> [..., n * itemsize] little-endian bytes."""
    x = np.atleast_1d(np.asarray(x, np.float64))
    if dtype == "float32":
        raw = round_fp32(x).astype("<f4")
    else:
        raw = (bf16_bits(x) if dtype == "bfloat16" else fp16_bits(x)).astype("<u2")
    return np.ascontiguousarray(raw).view(np.uint8)


def float_from_bytes(raw: Array, dtype: str) -> Array:
    """[..., n * itemsize] little-endian bytes -> [..., n] float64 values."""
    raw = np.ascontiguousarray(raw, np.uint8)
    if dtype == "bfloat16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return raw.view("<f2" if dtype == "float16" else "<f4").astype(np.float64)


# Scales


def pow2ceil(r: Any) -> Array:
    """The smallest power of two >= r, for positive finite r."""
    r = np.asarray(r, np.float64)
    if not np.all((r > 0) & np.isfinite(r)):
        raise ValueError("pow2ceil takes positive finite numbers")
    mantissa, exponent = np.frexp(r)
    return np.ldexp(1.0, exponent - (mantissa == 0.5))


def finite_amax(x: Any, axis: int = -1) -> Array:
    """max |x| without NaN lanes, infinities counted as the largest finite fp32."""
    size = np.abs(np.asarray(x, np.float64))
    return np.minimum(np.where(np.isnan(size), 0.0, size), FLT_MAX).max(axis=axis, initial=0.0)


def row_scale(amax: Any, limit: float = 448.0) -> Array:
    """pow2ceil(max(amax, 1e-4) / limit): the floor is on amax."""
    return pow2ceil(np.maximum(np.asarray(amax, np.float64), 1e-4) / limit)


def tile_scale(amax: Any, limit: float = 448.0) -> Array:
    """pow2ceil(max(amax / limit, 1e-4)): the floor is on the ratio."""
    return pow2ceil(np.maximum(np.asarray(amax, np.float64) / limit, 1e-4))


# Norms and rotations


def _overflow(x: Array) -> Array:
    if x.dtype == np.float32:
        return x
    return np.where(np.abs(x) >= FLT_OVERFLOW, np.copysign(np.inf, x), x)


def rms_norm(x: Any, weight: Any, eps: float, dtype: Any = np.float64) -> Array:
    """x * rsqrt(mean(x^2) + eps) * weight over the last axis; fp32 overflow becomes inf."""
    x, weight = np.asarray(x, dtype), np.asarray(weight, dtype)
    with np.errstate(all="ignore"):
        mean_square = _overflow(_overflow(x * x).sum(-1, keepdims=True)) / dtype(x.shape[-1])
        rstd = dtype(1) / np.sqrt(mean_square + dtype(np.float32(eps)))
        return _overflow(_overflow(x * rstd) * weight)


def _moments(x: Array, eps: float, dtype: Any) -> tuple[Array, Array]:
    count = dtype(x.shape[-1])
    centred = _overflow(x - _overflow(x.sum(-1, keepdims=True)) / count)
    variance = _overflow(_overflow(centred * centred).sum(-1, keepdims=True)) / count
    return centred, dtype(1) / np.sqrt(variance + dtype(np.float32(eps)))


def layer_norm(x: Any, weight: Any, bias: Any, eps: float, dtype: Any = np.float64) -> Array:
    """(x - mean) * rsqrt(mean((x - mean)^2) + eps) * weight + bias over the last axis."""
    x, weight, bias = (np.asarray(a, dtype) for a in (x, weight, bias))
    with np.errstate(all="ignore"):
        centred, rstd = _moments(x, eps, dtype)
        return _overflow(_overflow(_overflow(centred * rstd) * weight) + bias)


def _layer_norm_terms(x: Any, weight: Any, bias: Any, eps: float) -> Array:
    x = np.asarray(x, np.float64)
    with np.errstate(all="ignore"):
        centred, rstd = _moments(x, eps, np.float64)
        terms = np.abs(centred) + np.abs(x).mean(-1, keepdims=True)
        return terms * rstd * np.abs(np.asarray(weight)) + np.abs(np.asarray(bias))


def _pairs(rope_dim: int, interleaved: bool) -> tuple[Array, Array]:
    i = np.arange(rope_dim // 2)
    return (2 * i, 2 * i + 1) if interleaved else (i, i + rope_dim // 2)


def rope(x: Any, cos_sin_rows: Any, interleaved: bool, dtype: Any = np.float64) -> Array:
    """(a, b) -> (a cos - b sin, b cos + a sin) on the first R dims, the rest passes through.

    cos_sin_rows [..., R] holds one row per row of x, or broadcasts against it.
    """
    x, rows = np.asarray(x, dtype), np.asarray(cos_sin_rows, dtype)
    cos, sin = np.split(rows, 2, axis=-1)
    first, second = _pairs(rows.shape[-1], interleaved)
    a, b = x[..., first], x[..., second]
    out = x.copy()
    with np.errstate(all="ignore"):
        out[..., first] = _overflow(a * cos - b * sin)
        out[..., second] = _overflow(b * cos + a * sin)
    return out


def _rope_terms(terms: Array, cos_sin_rows: Any, interleaved: bool) -> Array:
    cos, sin = np.split(np.abs(np.asarray(cos_sin_rows, np.float64)), 2, axis=-1)
    first, second = _pairs(2 * cos.shape[-1], interleaved)
    a, b = np.abs(terms[..., first]), np.abs(terms[..., second])
    out = np.abs(terms)
    with np.errstate(all="ignore"):
        out[..., first], out[..., second] = a * cos + b * sin, b * cos + a * sin
    return out


def clamp_rows(table: Any, rows: Any) -> Array:
    """table[rows] with the rows clamped into the table."""
    table = np.asarray(table)
    return table[np.clip(np.asarray(rows, np.int64), 0, len(table) - 1)]


def error_bound(value: Array, low: Array, terms: Array | None = None) -> Array:
    """Twice the largest deviation of the fp32 run, as a share of terms, times terms."""
    terms = np.abs(value) if terms is None else terms
    usable = np.isfinite(value) & np.isfinite(low) & np.isfinite(terms)
    with np.errstate(all="ignore"):
        off = np.abs(low.astype(np.float64) - value) - 4 * FP32_QUANTUM
        share = np.where(usable & (terms > 0), off / terms, 0.0).max(initial=0.0)
    rel_err = min(max(2 * share, MIN_REL_ERR), MAX_REL_ERR)
    return np.where(usable, rel_err * np.where(usable, terms, 0.0) + 4 * FP32_QUANTUM, 0.0)


def _ideal(compute: Callable[[Any], Array], terms: Array | None = None) -> Ideal:
    value = compute(np.float64)
    return Ideal(value, error_bound(value, compute(np.float32), terms))


def _ideal_rope(x: Any, rows: Any, interleaved: bool) -> Ideal:
    terms = _rope_terms(np.asarray(x, np.float64), rows, interleaved)
    return _ideal(lambda dtype: rope(x, rows, interleaved, dtype), terms)


def _scaled_err(err: Any, ratio: Array, scale: Any) -> Array:
    """Error of ratio = value / scale; exact values stay exact, others round once or twice more."""
    err = np.broadcast_to(np.asarray(err, np.float64), ratio.shape)
    finite = np.where(np.isfinite(ratio), np.abs(ratio), 0.0)
    with np.errstate(all="ignore"):
        return np.where(err > 0, err / scale + 2.0**-23 * finite, 0.0)


# MLA cache entries


@dataclass(frozen=True)
class MlaRows:
    """Expected entries of one mode. Fields that a mode does not have are None.

    bytes [N, entry]; scale is fp32-exact ([N, 4], [N, 32] or one number), scale_codes its e4m3
    codes (nvfp4, in block order); a ratio is what was rounded to the codes beside it.
    """

    mode: str
    cache_dtype: str
    values: Array
    limit: float
    bytes: Array
    kv: Array
    k_pe: Array
    amax: Array | None = None
    scale: Any = None
    scale_codes: Array | None = None
    kv_codes: Array | None = None
    kv_ratio: Array | None = None
    rope_codes: Array | None = None
    rope_ratio: Array | None = None

    def take(self, rows: Any) -> MlaRows:
        """The same for some of the tokens (indices or a mask)."""
        return _take(self, rows)


def _take(record: Any, rows: Any) -> Any:
    shared = ("values",)
    picked = {
        name: value[rows]
        for name, value in vars(record).items()
        if isinstance(value, np.ndarray) and value.ndim and name not in shared
    }
    return replace(record, **picked)


def _check_mode(mode: str, kv_dim: int, rope_dim: int) -> None:
    if mode not in MLA_MODES:
        raise ValueError(f"unknown MLA cache mode {mode!r}, expected one of {', '.join(MLA_MODES)}")
    if mode.endswith("ds_mla") and (kv_dim, rope_dim) != (512, 64):
        raise ValueError(f"{mode} needs Dkv 512 and R 64, got {kv_dim} and {rope_dim}")


def mla_fields(
    mode: str, kv_dim: int = 512, rope_dim: int = 64, cache_dtype: str = "bfloat16"
) -> dict[str, tuple[int, int]]:
    """Byte range (offset, length) of every field inside an entry."""
    _check_mode(mode, kv_dim, rope_dim)
    if mode == "fp8_ds_mla":
        return {"kv": (0, 512), "scale": (512, 16), "rope": (528, 128)}
    if mode == "nvfp4_ds_mla":
        return {"kv": (0, 256), "rope": (256, 64), "scale": (320, 32)}
    size = 1
    if mode in FLOAT_MODES:
        size = _ITEM_SIZE[cache_dtype if mode == "auto" else mode]
    return {"kv": (0, kv_dim * size), "rope": (kv_dim * size, rope_dim * size)}


def entry_bytes(
    mode: str, kv_dim: int = 512, rope_dim: int = 64, cache_dtype: str = "bfloat16"
) -> int:
    return sum(length for _, length in mla_fields(mode, kv_dim, rope_dim, cache_dtype).values())


def nvfp4_scale_byte(block: Any) -> Array:
    """Byte, among the 32 scale bytes, of the scale of 16-block `block`."""
    block = np.asarray(block)
    return 8 * (block & 3) + (block >> 2)


def _tiles(x: Array, width: int) -> Array:
    return x.reshape(len(x), x.shape[-1] // width, width)


def nvfp4_ratio(x: Array, sf: Array) -> Array:
    """x * (1 / sf) in fp32: [N, 512] values and [N, 32] decoded scales."""
    with np.errstate(all="ignore"):
        return round_fp32(x * round_fp32(1.0 / np.repeat(sf, 16, axis=-1)))


def mla_cache_rows(
    mode: str,
    kv: Any,
    k_pe: Any,
    *,
    scale: Any = None,
    cache_dtype: str = "bfloat16",
    values: Array = E4M3FN_VALUES,
) -> MlaRows:
    """Expected entries for normed kv [N, Dkv] and rotated k_pe [N, R].

    scale: the per-tensor scale of the fp8 modes. cache_dtype: the cache's dtype in mode "auto".
    values: the fp8 flavour (nvfp4 is always e4m3fn).
    """
    kv, k_pe = np.asarray(kv, np.float64), np.asarray(k_pe, np.float64)
    _check_mode(mode, kv.shape[-1], k_pe.shape[-1])
    if mode in FLOAT_MODES:
        dtype = cache_dtype if mode == "auto" else mode
        raw = float_to_bytes(np.concatenate([kv, k_pe], axis=-1), dtype)
        return MlaRows(mode, dtype, values, FLT_MAX, raw, kv, k_pe)
    encode = {"fp8_ds_mla": _fp8_ds_mla_rows, "nvfp4_ds_mla": _nvfp4_rows}.get(mode)
    if encode is not None:
        return encode(kv, k_pe, values)
    return _fp8_rows(mode, kv, k_pe, values, scale)


def _fp8_rows(mode: str, kv: Array, k_pe: Array, values: Array, scale: Any) -> MlaRows:
    scale = 1.0 if scale is None else float(np.float32(np.asarray(scale).reshape(-1)[0]))
    limit = format_limit(values)
    with np.errstate(all="ignore"):
        kv_ratio, rope_ratio = round_fp32(kv / scale), round_fp32(k_pe / scale)
    kv_codes = round_to_codes(kv_ratio, values, limit)
    rope_codes = round_to_codes(rope_ratio, values, limit)
    raw = np.concatenate([kv_codes, rope_codes], axis=-1)
    return MlaRows(
        mode,
        "uint8",
        values,
        limit,
        raw,
        kv,
        k_pe,
        scale=scale,
        kv_codes=kv_codes,
        kv_ratio=kv_ratio,
        rope_codes=rope_codes,
        rope_ratio=rope_ratio,
    )


def _fp8_ds_mla_rows(kv: Array, k_pe: Array, values: Array) -> MlaRows:
    limit = format_limit(values, pow2_scaled=True)
    amax = finite_amax(_tiles(kv, 128))
    scale = tile_scale(amax, limit)
    ratio = kv / np.repeat(scale, 128, axis=-1)
    codes = round_to_codes(ratio, values, limit)
    raw = [codes, float_to_bytes(scale, "float32"), float_to_bytes(k_pe, "bfloat16")]
    return MlaRows(
        "fp8_ds_mla",
        "uint8",
        values,
        limit,
        np.concatenate(raw, axis=-1),
        kv,
        k_pe,
        amax=amax,
        scale=scale,
        kv_codes=codes,
        kv_ratio=ratio,
    )


def _nvfp4_rows(kv: Array, k_pe: Array, _values: Array) -> MlaRows:
    amax = finite_amax(_tiles(kv, 16))
    scale_codes = round_to_codes(np.maximum(round_fp32(amax / 6), 2.0**-9), E4M3FN_VALUES)
    scale = E4M3FN_VALUES[scale_codes]
    ratio = nvfp4_ratio(kv, scale)
    codes = round_to_codes(ratio, E2M1_VALUES)
    rope_codes = round_to_codes(k_pe, E4M3FN_VALUES)
    permuted = np.empty_like(scale_codes)
    permuted[:, nvfp4_scale_byte(np.arange(32))] = scale_codes
    raw = np.concatenate([codes[:, 0::2] | (codes[:, 1::2] << 4), rope_codes, permuted], axis=-1)
    return MlaRows(
        "nvfp4_ds_mla",
        "uint8",
        E4M3FN_VALUES,
        448.0,
        raw,
        kv,
        k_pe,
        amax=amax,
        scale=scale,
        scale_codes=scale_codes,
        kv_codes=codes,
        kv_ratio=ratio,
        rope_codes=rope_codes,
        rope_ratio=k_pe,
    )


class MlaParts(NamedTuple):
    """What lies in entry bytes: fp8 / e2m1 codes, or float64 values where the field is a float."""

    kv: Array
    rope: Array
    scale: Array | None


def split_mla(
    mode: str, raw: Array, kv_dim: int = 512, rope_dim: int = 64, cache_dtype: str = "bfloat16"
) -> MlaParts:
    """Parse entries [n, entry]. Scales are fp32 values (fp8_ds_mla) or codes in block order."""
    field = {
        name: raw[:, start : start + length]
        for name, (start, length) in mla_fields(mode, kv_dim, rope_dim, cache_dtype).items()
    }
    if mode in FLOAT_MODES:
        dtype = cache_dtype if mode == "auto" else mode
        both = float_from_bytes(field["kv"], dtype), float_from_bytes(field["rope"], dtype)
        return MlaParts(*both, None)
    if mode == "fp8_ds_mla":
        rope_part = float_from_bytes(field["rope"], "bfloat16")
        return MlaParts(field["kv"], rope_part, float_from_bytes(field["scale"], "float32"))
    if mode == "nvfp4_ds_mla":
        codes = np.stack([field["kv"] & 15, field["kv"] >> 4], axis=-1).reshape(len(raw), 512)
        return MlaParts(codes, field["rope"], field["scale"][:, nvfp4_scale_byte(np.arange(32))])
    return MlaParts(field["kv"], field["rope"], None)


# Indexer cache entries


@dataclass(frozen=True)
class IndexerRows:
    """Expected indexer rows: bytes [N, Di + 4] are the codes, then the scale bytes."""

    scale_format: str
    values: Array
    limit: float
    bytes: Array
    index_k: Array
    amax: Array
    scale: Array
    codes: Array
    ratio: Array

    def take(self, rows: Any) -> IndexerRows:
        """The same for some of the tokens (indices or a mask)."""
        return _take(self, rows)


def scale_bytes(scale: Array, scale_format: str) -> Array:
    """[N] powers of two -> [N, 4] bytes."""
    if scale_format == "fp32":
        return float_to_bytes(np.asarray(scale)[:, None], "float32")
    if scale_format != "ue8m0x4":
        raise ValueError(f"unknown index_scale_format {scale_format!r}, expected fp32 or ue8m0x4")
    biased = np.frexp(scale)[1] - 1 + 127
    return np.repeat(biased.astype(np.uint8)[:, None], 4, axis=1)


def scale_from_bytes(raw: Array, scale_format: str) -> Array:
    """[n, 4] bytes -> [n] scales; NaN where four exponent bytes are not the same."""
    if scale_format == "fp32":
        return float_from_bytes(raw, "float32")[:, 0]
    same = (raw == raw[:, :1]).all(axis=1)
    return np.where(same, np.ldexp(1.0, raw[:, 0].astype(np.int64) - 127), np.nan)


def indexer_rows(
    index_k: Any, *, scale_format: str = "fp32", values: Array = E4M3FN_VALUES
) -> IndexerRows:
    """Expected codes and scales for keys [N, Di]; plain and shuffled differ in placement only."""
    index_k = np.asarray(index_k, np.float64)
    limit = format_limit(values, pow2_scaled=True)
    amax = finite_amax(index_k)
    scale = row_scale(amax, limit)
    ratio = index_k / scale[:, None]
    codes = round_to_codes(ratio, values, limit)
    raw = np.concatenate([codes, scale_bytes(scale, scale_format)], axis=-1)
    return IndexerRows(scale_format, values, limit, raw, index_k, amax, scale, codes, ratio)


# Placement. Offsets are in bytes from the cache's first element.


def live_rows(slot_mapping: Any, num_tokens: int, capacity: int) -> Array:
    """[num_tokens] mask: 0 <= slot < capacity; rows past the end of the map are padding."""
    slots = np.asarray(slot_mapping, np.int64)[:num_tokens]
    live = np.zeros(num_tokens, bool)
    live[: len(slots)] = (slots >= 0) & (slots < capacity)
    return live


def mla_entry_offsets(
    slots: Any, *, block_size: int, block_stride: int, entry_stride: int
) -> Array:
    """[n] offset of each slot's entry; strides in bytes."""
    slots = np.asarray(slots, np.int64)
    return slots // block_size * block_stride + slots % block_size * entry_stride


def mla_offsets(
    slots: Any, *, block_size: int, block_stride: int, entry_stride: int, entry_bytes: int
) -> Array:
    """[n, entry_bytes] offset of every byte of each slot's entry."""
    base = mla_entry_offsets(
        slots, block_size=block_size, block_stride=block_stride, entry_stride=entry_stride
    )
    return base[:, None] + np.arange(entry_bytes)


def indexer_code_offsets(
    slots: Any, *, block_size: int, block_stride: int, head_dim: int = 128, shuffled: bool = False
) -> Array:
    """[n, head_dim] offset of every code."""
    slots = np.asarray(slots, np.int64)[:, None]
    block, o, d = slots // block_size, slots % block_size, np.arange(head_dim)
    if not shuffled:
        return block * block_stride + o * head_dim + d
    if block_size % 16:
        raise ValueError(f"a shuffled block_size is a multiple of 16, got {block_size}")
    inside = o // 16 * 16 * head_dim + d // 16 * 256 + o % 16 * 16 + d % 16
    return block * block_stride + inside


def indexer_scale_offsets(
    slots: Any, *, block_size: int, block_stride: int, head_dim: int = 128
) -> Array:
    """[n, 4] offset of every scale byte."""
    slots = np.asarray(slots, np.int64)[:, None]
    base = slots // block_size * block_stride + block_size * head_dim
    return base + 4 * (slots % block_size) + np.arange(4)


def indexer_offsets(
    slots: Any, *, block_size: int, block_stride: int, head_dim: int = 128, shuffled: bool = False
) -> Array:
    """[n, head_dim + 4] offsets, in the order of IndexerRows.bytes."""
    where = {"block_size": block_size, "block_stride": block_stride, "head_dim": head_dim}
    codes = indexer_code_offsets(slots, shuffled=shuffled, **where)
    return np.concatenate([codes, indexer_scale_offsets(slots, **where)], axis=-1)


def place(cache: Array, offsets: Array, rows: Array) -> Array:
    """A copy of the flat bytes `cache` with rows [n, B] written at offsets [n, B]."""
    out = np.array(cache, np.uint8).reshape(-1)
    out[offsets] = rows
    return out


# Operators


@dataclass(frozen=True)
class NormRope:
    """q, kv, k_pe, index_k before any rounding; topk: the buffer afterwards; cache rows per token.

    mla and indexer hold a row for every token, live or not.
    """

    q: Ideal
    kv: Ideal
    k_pe: Ideal
    index_k: Ideal | None
    topk: Array | None
    mla: MlaRows
    indexer: IndexerRows | None


_UNREAD = {
    "slot_mapping",
    "indexer_slot_mapping",
    "indexer_k_cache",
    "mla_kv_cache",
    "indexer_cache_shuffled",
    "kv_c_out",
    "k_pe_out",
    "index_k_out",
    "q_c_out",
}


def _ideal_index_k(
    x: Any, weight: Any, bias: Any, eps: float, rows: Any, interleaved: bool
) -> Ideal:
    terms = _rope_terms(_layer_norm_terms(x, weight, bias, eps), rows, interleaved)
    return _ideal(
        lambda dtype: rope(layer_norm(x, weight, bias, eps, dtype), rows, interleaved, dtype), terms
    )


def norm_rope(
    positions: Any,
    q_c: Any,
    q_norm_weight: Any,
    q_norm_eps: float,
    kv_c: Any,
    kv_norm_weight: Any,
    kv_norm_eps: float,
    k_pe: Any,
    rope_cos_sin: Any,
    index_k: Any = None,
    index_k_norm_weight: Any = None,
    index_k_norm_bias: Any = None,
    index_k_norm_eps: float = 0.0,
    index_rope_cos_sin: Any = None,
    topk_indices_buffer: Any = None,
    *,
    mla_kv_cache_dtype: str = "auto",
    mla_k_scale: Any = None,
    has_indexer: bool = True,
    index_rope_interleave: bool = False,
    fill_topk: bool = True,
    index_scale_format: str = "fp32",
    cache_dtype: str = "bfloat16",
    values: Array = E4M3FN_VALUES,
    **unread: Any,
) -> NormRope:
    """Arguments as in the operator. Slots, caches and outs may be passed and are not read.

    cache_dtype and values describe what the operator learns from the tensors.
    """
    if unread.keys() - _UNREAD:
        raise TypeError(f"unknown arguments {sorted(unread.keys() - _UNREAD)}")
    rows = clamp_rows(rope_cos_sin, positions)
    kv = _ideal(lambda dtype: rms_norm(kv_c, kv_norm_weight, kv_norm_eps, dtype))
    rotated = _ideal_rope(k_pe, rows, True)
    topk = None if topk_indices_buffer is None else np.array(topk_indices_buffer)
    key, indexer = None, None
    if has_indexer:
        key = _ideal_index_k(
            index_k,
            index_k_norm_weight,
            index_k_norm_bias,
            index_k_norm_eps,
            clamp_rows(index_rope_cos_sin, positions),
            index_rope_interleave,
        )
        indexer = indexer_rows(key.value, scale_format=index_scale_format, values=values)
        if topk is not None and fill_topk:
            topk[: len(np.asarray(positions))] = -1
    return NormRope(
        q=_ideal(lambda dtype: rms_norm(q_c, q_norm_weight, q_norm_eps, dtype)),
        kv=kv,
        k_pe=rotated,
        index_k=key,
        topk=topk,
        mla=mla_cache_rows(
            mla_kv_cache_dtype,
            kv.value,
            rotated.value,
            scale=mla_k_scale,
            cache_dtype=cache_dtype,
            values=values,
        ),
        indexer=indexer,
    )


@dataclass(frozen=True)
class FusedQ:
    """mqa: what is rounded to mqa_codes ([ql_nope | rope] / q_scale); without codes, rotated q_pe.

    index_q: rotated queries; index_ratio = index_q / index_scale is rounded to index_codes.
    index_weights are exact fp32 numbers for index_scale.
    """

    mqa: Ideal
    mqa_codes: Array | None
    index_q: Ideal
    index_amax: Array
    index_scale: Array
    index_ratio: Array
    index_codes: Array
    index_weights: Array
    values: Array
    weight_factors: tuple[Array, float, float]

    def weights_for(self, scale: Array) -> Array:
        return folded_weights(self.weight_factors[0], scale, *self.weight_factors[1:])


def folded_weights(weights: Any, scale: Any, softmax_scale: float, head_scale: float) -> Array:
    """((w * scale) * softmax_scale) * head_scale, each product rounded to fp32."""
    with np.errstate(all="ignore"):
        out = np.asarray(weights, np.float32) * np.asarray(scale, np.float32)
        out = out * np.float32(softmax_scale) * np.float32(head_scale)
    return out.astype(np.float64)


def _mqa(q_pe: Any, rows: Array, ql_nope: Any, q_scale: Any) -> Ideal:
    rotated = _ideal_rope(q_pe, rows, True)
    scale = float(np.float32(np.asarray(q_scale).reshape(-1)[0]))
    with np.errstate(all="ignore"):
        nope = round_fp32(np.asarray(ql_nope, np.float64) / scale)
        pe = rotated.value / scale
    pe_err = _scaled_err(rotated.err, pe, scale)
    err = np.concatenate([np.zeros_like(nope), pe_err], axis=-1)
    return Ideal(np.concatenate([nope, pe], axis=-1), err)


def fused_q(
    positions: Any,
    q_pe: Any,
    q_pe_cos_sin: Any,
    index_q: Any,
    index_q_cos_sin: Any,
    ql_nope: Any,
    q_scale: Any,
    index_weights: Any,
    index_weights_softmax_scale: float,
    index_weights_head_scale: float,
    has_indexer: bool = True,
    index_rope_interleave: bool = False,
    quantize_mqa: bool = True,
    *,
    values: Array = E4M3FN_VALUES,
) -> FusedQ:
    """Arguments as in the operator. Without an indexer the index results have zero heads."""
    rows = clamp_rows(q_pe_cos_sin, positions)[:, None, :]
    mqa = _mqa(q_pe, rows, ql_nope, q_scale) if quantize_mqa else _ideal_rope(q_pe, rows, True)
    num_tokens = len(np.asarray(positions))
    if has_indexer:
        index_rows = clamp_rows(index_q_cos_sin, positions)[:, None, :]
        rotated = _ideal_rope(index_q, index_rows, index_rope_interleave)
        weights = np.asarray(index_weights, np.float64)
    else:
        dim = 0 if index_q is None else np.shape(index_q)[-1]
        rotated = Ideal(np.zeros((num_tokens, 0, dim)), np.zeros((num_tokens, 0, dim)))
        weights = np.zeros((num_tokens, 0))
    limit = format_limit(values, pow2_scaled=True)
    amax = finite_amax(rotated.value)
    scale = row_scale(amax, limit)
    ratio = rotated.value / scale[..., None]
    factors = (weights, index_weights_softmax_scale, index_weights_head_scale)
    return FusedQ(
        mqa=mqa,
        mqa_codes=round_to_codes(mqa.value, values) if quantize_mqa else None,
        index_q=rotated,
        index_amax=amax,
        index_scale=scale,
        index_ratio=ratio,
        index_codes=round_to_codes(ratio, values, limit),
        index_weights=folded_weights(weights, scale, *factors[1:]),
        values=values,
        weight_factors=factors,
    )


def eh_norm(
    positions: Any,
    inputs_embeds: Any,
    previous_hidden: Any,
    enorm_weight: Any,
    hnorm_weight: Any,
    eps: float,
) -> Ideal:
    """[N, 2 hidden]: norm of the embedding, a zero row at position 0 | norm of previous_hidden."""
    at_start = (np.asarray(positions) == 0)[:, None]
    embeds = np.where(at_start, 0.0, np.asarray(inputs_embeds, np.float64))
    left = _ideal(lambda dtype: rms_norm(embeds, enorm_weight, eps, dtype))
    right = _ideal(lambda dtype: rms_norm(previous_hidden, hnorm_weight, eps, dtype))
    return Ideal(*(np.concatenate(both, axis=-1) for both in zip(left, right, strict=True)))


def embed_norm(
    input_ids: Any, embed_table: Any, norm_weight: Any, eps: float
) -> tuple[Array, Ideal]:
    """(table rows unchanged, their RMSNorm)."""
    residual = clamp_rows(embed_table, input_ids)
    return residual, _ideal(lambda dtype: rms_norm(residual, norm_weight, eps, dtype))


def embed_eh_norm(
    positions: Any,
    input_ids: Any,
    embed_table: Any,
    previous_hidden: Any,
    enorm_weight: Any,
    hnorm_weight: Any,
    eps: float,
) -> Ideal:
    """eh_norm of the gathered rows."""
    embeds = clamp_rows(embed_table, input_ids)
    return eh_norm(positions, embeds, previous_hidden, enorm_weight, hnorm_weight, eps)


# Comparison


def _report(name: str, bad: Array, describe: Callable[[tuple[int, ...]], str]) -> None:
    if bad.any():
        first = tuple(int(i) for i in np.argwhere(bad)[0])
        rows = len(np.unique(np.argwhere(bad)[:, 0])) if bad.ndim else 1
        raise AssertionError(
            f"{name}: {int(bad.sum())} of {bad.size} wrong, in {rows} rows; "
            f"first at {list(first)}: {describe(first)}"
        )


def _same_shape(name: str, actual: Array, expected: Array) -> None:
    if actual.shape != expected.shape:
        raise AssertionError(f"{name}: shape {actual.shape}, expected {expected.shape}")


def code_order(codes: Any, values: Array) -> Array:
    """Integers in the order of the values; neighbouring codes differ by one, -0 is below +0."""
    half = len(values) // 2
    codes = np.asarray(codes).astype(np.int64)
    has_negative_zero = 0 if np.isnan(values[half]) else 1
    return np.where(codes >= half, -(codes - half) - has_negative_zero, codes)


def _is_near(
    actual: Array, own: Array, ideal: Array, err: Array, values: Array, limit: float | None
) -> Array:
    low, high = (code_order(round_to_codes(ideal + e, values, limit), values) for e in (-err, err))
    order, own_order = code_order(actual, values), code_order(own, values)
    inside = (order >= low) & (order <= high) & (np.abs(order - own_order) <= 1)
    return inside & ~np.isnan(ideal) & ~np.isnan(values[actual])


def assert_codes_near(
    actual_codes: Any,
    ideal: Any,
    values: Array,
    limit: float | None = None,
    *,
    rel_err: float = 0.0,
    abs_err: Any = 0.0,
    min_equal: float = 0.99,
    name: str = "codes",
) -> None:
    """Every code is a right rounding of a value within the error of `ideal`.

    The error is rel_err * |ideal| + abs_err. More than min_equal of the codes (or all but one) are
    the oracle's own, and none is more than one step away. NaN has one code.
    """
    actual, ideal = np.asarray(actual_codes), np.asarray(ideal, np.float64)
    _same_shape(name, actual, ideal)
    own = round_to_codes(ideal, values, limit)
    wrong = actual != own
    differ = int(wrong.sum())
    with np.errstate(all="ignore"):
        err = np.where(np.isfinite(ideal), rel_err * np.abs(ideal) + abs_err, 0.0)
    wrong[wrong] = ~_is_near(actual[wrong], own[wrong], ideal[wrong], err[wrong], values, limit)

    def describe(at: tuple[int, ...]) -> str:
        return (
            f"code {int(actual[at]):#04x} ({values[actual[at]]:.9g}), expected "
            f"{int(own[at]):#04x} ({values[own[at]]:.9g}) for {ideal[at]:.9g} +- {err[at]:.3g}"
        )

    _report(name, wrong, describe)
    if differ > max(1, (1 - min_equal) * actual.size):
        raise AssertionError(f"{name}: {differ} of {actual.size} codes differ, all near midpoints")


def assert_scales(
    actual: Any,
    amax: Any,
    floor_rule: Callable[[Any, float], Array],
    rel_err: float = 0.0,
    *,
    abs_err: Any = 0.0,
    limit: float = 448.0,
    name: str = "scales",
) -> None:
    """Scales are floor_rule(amax, limit), with floor_rule = row_scale or tile_scale.

    One power of two beside it only where amax lies within the error of the boundary.
    """
    actual, amax = np.asarray(actual, np.float64), np.asarray(amax, np.float64)
    _same_shape(name, actual, amax)
    err = rel_err * amax + abs_err
    low, high = (floor_rule(np.clip(amax + e, 0, FLT_MAX), limit) for e in (-err, err))
    own = floor_rule(amax, limit)
    low, high = np.maximum(low, own / 2), np.minimum(high, own * 2)

    def describe(at: tuple[int, ...]) -> str:
        return f"{actual[at]:.9g}, expected {own[at]:.9g} for amax {amax[at]:.9g}"

    _report(name, (actual != own) & (actual != low) & (actual != high), describe)


def assert_float_near(
    actual: Any,
    ideal: Ideal | Any,
    dtype: str,
    *,
    rel_err: float = 0.0,
    abs_err: Any = 0.0,
    name: str = "values",
) -> None:
    """Every value is the rounding to dtype of some number within the error of `ideal`.

    An Ideal brings its own error, twice that of an fp32 run; rel_err * |ideal| + abs_err is added.
    NaN matches any NaN, and nothing else does.
    """
    value, own_err = ideal if isinstance(ideal, Ideal) else (np.asarray(ideal, np.float64), 0.0)
    actual = np.asarray(actual, np.float64)
    _same_shape(name, actual, value)
    with np.errstate(all="ignore"):
        err = np.where(np.isfinite(value), rel_err * np.abs(value) + abs_err + own_err, 0.0)
        low, high = round_float(value - err, dtype), round_float(value + err, dtype)
        inside = (actual >= low) & (actual <= high)
    wrong = np.where(np.isnan(value), ~np.isnan(actual), ~inside)

    def describe(at: tuple[int, ...]) -> str:
        span = f"[{low[at]:.9g}, {high[at]:.9g}]"
        return f"{actual[at]:.9g}, expected {dtype} {span} for {value[at]:.17g}"

    _report(name, wrong, describe)


def share_rounded_down(codes: Any, ideal: Any, values: Array, limit: float | None = None) -> float:
    """Share of inexact codes that lie nearer to zero than `ideal`: near one half unless biased."""
    ideal, got = np.asarray(ideal, np.float64), values[np.asarray(codes)]
    limit = format_limit(values) if limit is None else limit
    counted = np.isfinite(got) & (np.abs(ideal) < limit) & (got != ideal)
    return float((np.abs(got) < np.abs(ideal))[counted].mean()) if counted.any() else 0.5


def _tile_err(err: Any, shape: tuple[int, ...], width: int) -> Array:
    return _tiles(np.broadcast_to(np.asarray(err, np.float64), shape), width).max(axis=-1)


def _assert_fp8_ds_mla_kv(parts: MlaParts, rows: MlaRows, kv_err: Any) -> None:
    tile_err = _tile_err(kv_err, rows.kv.shape, 128)
    assert_scales(
        parts.scale, rows.amax, tile_scale, abs_err=tile_err, limit=rows.limit, name="tile scales"
    )
    scale = np.repeat(np.asarray(parts.scale), 128, axis=-1)
    ratio = rows.kv / scale
    err = _scaled_err(kv_err, ratio, scale)
    assert_codes_near(parts.kv, ratio, rows.values, rows.limit, abs_err=err, name="kv codes")


def _assert_nvfp4_kv(parts: MlaParts, rows: MlaRows, kv_err: Any) -> None:
    sf_ratio = np.maximum(round_fp32(np.asarray(rows.amax) / 6), 2.0**-9)
    sf_err = _scaled_err(_tile_err(kv_err, rows.kv.shape, 16), sf_ratio, 6.0)
    assert_codes_near(parts.scale, sf_ratio, E4M3FN_VALUES, abs_err=sf_err, name="block scales")
    sf = E4M3FN_VALUES[parts.scale]
    ratio = nvfp4_ratio(rows.kv, sf)
    err = _scaled_err(kv_err, ratio, np.repeat(sf, 16, axis=-1))
    assert_codes_near(parts.kv, ratio, E2M1_VALUES, abs_err=err, name="kv e2m1 codes")


def assert_mla_rows(
    actual: Array, rows: MlaRows, *, kv_err: Any = 0.0, k_pe_err: Any = 0.0
) -> None:
    """Entries [n, entry] against rows; the errors are those of rows.kv and rows.k_pe.

    Codes are judged under the scales found in the entries, after those have been judged.
    """
    actual = np.asarray(actual, np.uint8)
    _same_shape("MLA entries", actual, rows.bytes)
    dims = rows.kv.shape[-1], rows.k_pe.shape[-1]
    parts = split_mla(rows.mode, actual, *dims, rows.cache_dtype)
    if rows.mode in FLOAT_MODES:
        assert_float_near(parts.kv, rows.kv, rows.cache_dtype, abs_err=kv_err, name="kv")
        assert_float_near(parts.rope, rows.k_pe, rows.cache_dtype, abs_err=k_pe_err, name="k_pe")
        return
    if rows.mode == "fp8_ds_mla":
        _assert_fp8_ds_mla_kv(parts, rows, kv_err)
        assert_float_near(parts.rope, rows.k_pe, "bfloat16", abs_err=k_pe_err, name="k_pe")
        return
    scale = 1.0
    if rows.mode == "nvfp4_ds_mla":
        _assert_nvfp4_kv(parts, rows, kv_err)
    else:
        scale = rows.scale
        err = _scaled_err(kv_err, np.asarray(rows.kv_ratio), scale)
        assert_codes_near(parts.kv, rows.kv_ratio, rows.values, abs_err=err, name="kv codes")
    err = _scaled_err(k_pe_err, np.asarray(rows.rope_ratio), scale)
    assert_codes_near(parts.rope, rows.rope_ratio, rows.values, abs_err=err, name="k_pe codes")


def assert_indexer_rows(actual: Array, rows: IndexerRows, *, err: Any = 0.0) -> None:
    """Rows [n, Di + 4] (codes, then scale bytes) against rows; err is that of rows.index_k."""
    actual = np.asarray(actual, np.uint8)
    _same_shape("indexer rows", actual, rows.bytes)
    scale = scale_from_bytes(actual[:, -4:], rows.scale_format)
    row_err = _tile_err(err, rows.index_k.shape, rows.index_k.shape[-1])[:, 0]
    assert_scales(
        scale, rows.amax, row_scale, abs_err=row_err, limit=rows.limit, name="indexer scales"
    )
    ratio = rows.index_k / scale[:, None]
    code_err = _scaled_err(err, ratio, scale[:, None])
    assert_codes_near(
        actual[:, :-4], ratio, rows.values, rows.limit, abs_err=code_err, name="indexer codes"
    )


def assert_index_q(codes: Array, weights: Any, ideal: FusedQ) -> None:
    """Index query codes and folded weights; the scale between them is the one the codes imply."""
    value, err = ideal.index_q
    limit = format_limit(ideal.values, pow2_scaled=True)
    codes = np.asarray(codes, np.uint8)
    _same_shape("index_q codes", codes, value)
    amax, row_err = ideal.index_amax, err.max(axis=-1, initial=0.0)
    low, high = (row_scale(np.clip(amax + e, 0, FLT_MAX), limit) for e in (-row_err, row_err))
    matches = [
        (round_to_codes(value / s[..., None], ideal.values, limit) == codes).sum(axis=-1)
        for s in (low, high)
    ]
    scale = np.where(matches[0] >= matches[1], low, high)
    ratio = value / scale[..., None]
    code_err = _scaled_err(err, ratio, scale[..., None])
    assert_codes_near(codes, ratio, ideal.values, limit, abs_err=code_err, name="index_q codes")
    assert_float_near(weights, ideal.weights_for(scale), "float32", name="index weights")


def assert_untouched(actual: Array, before: Array, written: Array, name: str = "cache") -> None:
    """Bytes outside the mask `written` are what they were."""
    bad = (actual != before) & ~written
    _report(f"{name} bytes outside the written entries", bad, lambda at: f"{int(actual[at]):#04x}")


def _gather(
    actual: Any, before: Any, slots: Array, offsets_of: Callable[[Array], Array], width: int
) -> Array:
    actual, before = np.asarray(actual).reshape(-1), np.asarray(before).reshape(-1)
    rows = np.empty((len(slots), width), np.uint8)
    written = np.zeros(actual.shape, bool)
    for start in range(0, len(slots), 4096):  # 64-bit offsets of every byte are 8 times the cache
        part = slice(start, start + 4096)
        offsets = offsets_of(slots[part])
        rows[part] = actual[offsets]
        written[offsets] = True
    assert_untouched(actual, before, written)
    return rows


def _live_err(err: Any, live: Array) -> Any:
    return err[live] if isinstance(err, np.ndarray) and err.ndim else err


def assert_mla_cache(
    actual: Array,
    before: Array,
    slot_mapping: Any,
    rows: MlaRows,
    *,
    num_blocks: int,
    block_size: int,
    block_stride: int,
    entry_stride: int,
    kv_err: Any = 0.0,
    k_pe_err: Any = 0.0,
) -> None:
    """A whole cache as flat bytes, gaps included: live entries hold rows, all else is `before`."""
    live = live_rows(slot_mapping, len(rows.kv), num_blocks * block_size)
    slots = np.asarray(slot_mapping, np.int64)[np.flatnonzero(live)]
    width = rows.bytes.shape[-1]

    def offsets_of(part: Array) -> Array:
        return mla_offsets(
            part,
            block_size=block_size,
            block_stride=block_stride,
            entry_stride=entry_stride,
            entry_bytes=width,
        )

    got = _gather(actual, before, slots, offsets_of, width)
    errs = {"kv_err": _live_err(kv_err, live), "k_pe_err": _live_err(k_pe_err, live)}
    assert_mla_rows(got, rows.take(live), **errs)


def assert_indexer_cache(
    actual: Array,
    before: Array,
    slot_mapping: Any,
    rows: IndexerRows,
    *,
    num_blocks: int,
    block_size: int,
    block_stride: int,
    shuffled: bool = False,
    err: Any = 0.0,
) -> None:
    """A whole cache as flat bytes, gaps included: live tokens hold rows, all else is `before`."""
    live = live_rows(slot_mapping, len(rows.index_k), num_blocks * block_size)
    slots = np.asarray(slot_mapping, np.int64)[np.flatnonzero(live)]
    head_dim = rows.index_k.shape[-1]

    def offsets_of(part: Array) -> Array:
        return indexer_offsets(
            part,
            block_size=block_size,
            block_stride=block_stride,
            head_dim=head_dim,
            shuffled=shuffled,
        )

    got = _gather(actual, before, slots, offsets_of, head_dim + 4)
    assert_indexer_rows(got, rows.take(live), err=_live_err(err, live))
