"""Cos/sin tables for rotary embeddings, plain and YaRN as the DeepSeek models configure it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

_PLAIN_TYPES = ("default", "none")
_YARN_TYPES = ("yarn", "deepseek_yarn")


def cos_sin_table(
    max_positions: int,
    rope_dim: int,
    *,
    theta: float = 10000.0,
    scaling: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Row ``p`` is ``[c * cos(p * f_0), ..., c * cos(p * f_n) | c * sin(p * f_0), ...]``.

    With ``i`` from 0 to ``rope_dim / 2 - 1``::

        plain   f_i = theta^(-2i / rope_dim)
                c   = 1
        YaRN    f_i = theta^(-2i / rope_dim) * ((1 - r_i) + r_i / factor)
                c   = m(mscale) / m(mscale_all_dim)
                r_i = (i - low) / (high - low), held between 0 and 1
                d(b) = rope_dim * ln(original / (2 pi b)) / (2 ln theta)
                low  = max(floor(d(beta_fast)), 0),  high = min(ceil(d(beta_slow)), rope_dim - 1)
                m(k) = 1 + 0.1 k ln(factor)  when factor > 1, else 1

    ``d(b)`` is the pair whose angle turns ``b`` times within the original context: pairs below
    ``low`` turn often and stay as trained, those above ``high`` are slowed down by ``factor``,
    those between are blended. DeepSeek-V3.2 has mscale = mscale_all_dim = 1, hence c = 1: the
    table is not scaled there.

    Args:
        max_positions: rows P of the table.
        rope_dim: rotary dimensions R, even.
        theta: base of the frequencies.
        scaling: None, or a Hugging Face ``rope_scaling`` mapping. Its type (``rope_type`` or
            ``type``) is ``default`` or ``yarn``; YaRN reads ``factor`` and
            ``original_max_position_embeddings`` (both required), ``beta_fast`` (32), ``beta_slow``
            (1), ``mscale`` (1), ``mscale_all_dim`` (0), and ``attention_factor``, which replaces c.
        dtype: of the table. Computed in float64 and rounded once to float32; a narrower dtype is
            that float32 table rounded, so tables of different dtypes agree.
        device: of the table. Computed on the CPU, so its bytes do not depend on the device.

    Returns:
        [P, R], contiguous: the cos half, then the sin half.

    Raises:
        ValueError: an odd or non-positive ``rope_dim``, an unknown scaling type, a missing or
            impossible YaRN parameter.

    Source: Su et al., RoFormer (arXiv 2104.09864); Peng et al., YaRN (arXiv 2309.00071); the
    parameters in DeepSeek-V3.2's ``config.json``.
    """
    if rope_dim < 2 or rope_dim % 2:
        raise ValueError(f"rope_dim: expected a positive even number, got {rope_dim}")
    if max_positions < 0:
        raise ValueError(f"max_positions: expected at least 0, got {max_positions}")
    frequencies, table_scale = rope_frequencies(rope_dim, theta=theta, scaling=scaling)
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float64), frequencies)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1).mul_(table_scale)
    return table.to(torch.float32).to(dtype).to(device)


def rope_frequencies(
    rope_dim: int, *, theta: float = 10000.0, scaling: Mapping[str, Any] | None = None
) -> tuple[torch.Tensor, float]:
    """``(f, c)`` of ``cos_sin_table``: float64 frequencies [R / 2] and the factor on the table."""
    pair = torch.arange(rope_dim // 2, dtype=torch.float64)
    plain = theta ** (-2.0 * pair / rope_dim)
    if scaling is None:
        return plain, 1.0
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind in _PLAIN_TYPES:
        return plain, 1.0
    if kind not in _YARN_TYPES:
        known = ", ".join(_PLAIN_TYPES + _YARN_TYPES)
        raise ValueError(f"scaling type: expected one of {known}, got {kind!r}")
    factor = _positive(scaling, "factor")
    low, high = _blending_range(rope_dim, theta, scaling)
    ramp = ((pair - low) / (high - low)).clamp(0.0, 1.0)
    return plain * ((1.0 - ramp) + ramp / factor), _table_scale(factor, scaling)


def _blending_range(rope_dim: int, theta: float, scaling: Mapping[str, Any]) -> tuple[float, float]:
    original = _positive(scaling, "original_max_position_embeddings")

    def dim_that_turns(key: str, default: float) -> float:
        turns = _positive(scaling, key, default)
        return rope_dim * math.log(original / (2 * math.pi * turns)) / (2 * math.log(theta))

    low = max(math.floor(dim_that_turns("beta_fast", 32.0)), 0)
    high = min(math.ceil(dim_that_turns("beta_slow", 1.0)), rope_dim - 1)
    # A range without width makes the ramp a step; the models' own code widens it by 0.001.
    return float(low), float(high) if high != low else high + 0.001


def _table_scale(factor: float, scaling: Mapping[str, Any]) -> float:
    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)
    log_factor = math.log(factor) if factor > 1.0 else 0.0
    mscale = float(scaling.get("mscale", 1.0))
    mscale_all_dim = float(scaling.get("mscale_all_dim", 0.0))
    return (1.0 + 0.1 * mscale * log_factor) / (1.0 + 0.1 * mscale_all_dim * log_factor)


def _positive(scaling: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = scaling.get(key, default)
    if value is None:
        raise ValueError(f"scaling: YaRN needs {key!r}, got only {sorted(scaling)}")
    if not value > 0:
        raise ValueError(f"scaling[{key!r}]: expected a positive number, got {value!r}")
    return float(value)
