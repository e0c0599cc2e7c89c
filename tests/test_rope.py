from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv32_ops.models import PRESETS
from dsv32_ops.rope import cos_sin_table, rope_frequencies

V32 = PRESETS["deepseek-v3.2"]
YARN = V32.rope_scaling
assert YARN is not None


def scalar_frequency(i, dim, theta, factor=1.0, original=4096, fast=32.0, slow=1.0):
    """YaRN's frequency of pair i from wavelengths, one number at a time."""
    base = math.exp(-2.0 * i / dim * math.log(theta))
    if factor == 1.0:
        return base
    # The real-valued pair j whose wavelength 2 pi theta^(2j/dim) fits `turns` times in `original`.
    first, last = (
        dim / 2 * math.log(original / turns / (2 * math.pi), theta) for turns in (fast, slow)
    )
    begin, end = max(0, math.floor(first)), min(dim - 1, math.ceil(last))
    if i <= begin:
        return base
    if i >= end:
        return base / factor
    share = (i - begin) / (end - begin)
    return base * (1 - share) + base / factor * share


# Half an ulp of fp32 below 1, plus the angle's error in float64: 2e5 rad * a few 2^-53.
TOLERANCE = 2.0**-25 + 1e-10


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_tables_follow_the_scalar_formula(name):
    config = PRESETS[name]
    scaling = config.rope_scaling or {}
    table = cos_sin_table(163_840, 64, theta=config.rope_theta, scaling=config.rope_scaling)
    for i in (0, 1, 9, 10, 11, 16, 22, 23, 24, 31):
        frequency = scalar_frequency(
            i,
            64,
            config.rope_theta,
            scaling.get("factor", 1.0),
            fast=scaling.get("beta_fast", 32.0),
            slow=scaling.get("beta_slow", 1.0),
        )
        for position in (0, 1, 2, 4095, 4096, 65_535, 65_536, 163_839):
            angle = position * frequency
            assert abs(table[position, i].item() - math.cos(angle)) <= TOLERANCE
            assert abs(table[position, 32 + i].item() - math.sin(angle)) <= TOLERANCE


def test_the_cos_half_comes_first():
    table = cos_sin_table(3, 6)
    assert table.shape == (3, 6) and table.is_contiguous()
    assert table[0].tolist() == [1, 1, 1, 0, 0, 0]
    assert table[1, 0].item() == pytest.approx(math.cos(1), abs=TOLERANCE)
    assert table[1, 3].item() == pytest.approx(math.sin(1), abs=TOLERANCE)


def test_deepseek_blends_pairs_10_to_23():
    plain, _ = rope_frequencies(64, theta=10000.0)
    yarn, table_scale = rope_frequencies(64, theta=10000.0, scaling=YARN)
    ratio = yarn / plain
    assert table_scale == 1.0
    assert (ratio[:11] == 1).all()
    torch.testing.assert_close(ratio[23:], torch.full((9,), 1 / 40, dtype=torch.float64))
    assert ((ratio[11:23] < 1) & (ratio[11:23] > 1 / 40)).all()
    steps = ratio[10:24].diff()
    # A straight ramp: equal steps from 1 to 1/40 over 13 pairs.
    torch.testing.assert_close(steps, torch.full((13,), (1 / 40 - 1) / 13, dtype=torch.float64))


@given(
    factor=st.floats(1.0, 64.0),
    half=st.integers(1, 64),
    theta=st.floats(100.0, 1e7),
    original=st.integers(256, 65_536),
    slow=st.floats(0.25, 4.0),
    widening=st.floats(1.0, 64.0),
)
def test_yarn_slows_later_pairs_more_and_never_beyond_factor(
    factor, half, theta, original, slow, widening
):
    scaling = {
        "type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_slow": slow,
        "beta_fast": slow * widening,
    }
    plain, _ = rope_frequencies(2 * half, theta=theta)
    yarn, _ = rope_frequencies(2 * half, theta=theta, scaling=scaling)
    ratio = yarn / plain
    rounding = 1e-12
    assert (ratio <= 1 + rounding).all() and (ratio >= 1 / factor - rounding).all()
    assert (ratio.diff() <= rounding).all()


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 0.7, "mscale_all_dim": 0.7}, 1.0),
        ({}, 1 + 0.1 * math.log(40)),
        ({"mscale": 2.0, "mscale_all_dim": 0.0}, 1 + 0.2 * math.log(40)),
        (
            {"mscale": 1.0, "mscale_all_dim": 0.5},
            (1 + 0.1 * math.log(40)) / (1 + 0.05 * math.log(40)),
        ),
        ({"attention_factor": 1.25, "mscale": 9.0}, 1.25),
    ],
)
def test_cos_squared_plus_sin_squared_is_the_table_scale_squared(extra, expected):
    scaling = {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, **extra}
    table = cos_sin_table(2048, 64, scaling=scaling).double()
    squares = table[:, :32].square() + table[:, 32:].square()
    # Each entry is off by half an fp32 ulp at most: 2^-24 relative, doubled by the square.
    torch.testing.assert_close(
        squares, torch.full_like(squares, expected**2), rtol=2.0**-23, atol=0.0
    )


def test_a_factor_of_one_is_the_plain_table():
    scaling = {**YARN, "factor": 1.0}
    assert torch.equal(cos_sin_table(4096, 64, scaling=scaling), cos_sin_table(4096, 64))


@pytest.mark.parametrize("scaling", [None, {"type": "default"}, {"rope_type": "default"}])
def test_plain_scalings_leave_the_table_alone(scaling):
    assert torch.equal(cos_sin_table(64, 8, scaling=scaling), cos_sin_table(64, 8))
    assert not torch.equal(cos_sin_table(64, 8, theta=500.0), cos_sin_table(64, 8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_tables_are_the_float32_table_rounded(dtype):
    wide = cos_sin_table(5000, 64, scaling=YARN)
    assert torch.equal(cos_sin_table(5000, 64, scaling=YARN, dtype=dtype), wide.to(dtype))


def test_fewer_rows_are_a_prefix():
    assert torch.equal(cos_sin_table(7, 64, scaling=YARN), cos_sin_table(900, 64, scaling=YARN)[:7])
    assert cos_sin_table(0, 64).shape == (0, 64)


@pytest.mark.parametrize("rope_dim", [-2, 0, 1, 63])
def test_odd_or_missing_dims_are_refused(rope_dim):
    with pytest.raises(ValueError, match=f"rope_dim.*got {rope_dim}"):
        cos_sin_table(4, rope_dim)


def test_bad_scalings_are_refused():
    with pytest.raises(ValueError, match="default.*yarn.*'linear'"):
        cos_sin_table(4, 64, scaling={"type": "linear", "factor": 2.0})
    for missing in ("factor", "original_max_position_embeddings"):
        with pytest.raises(ValueError, match=missing):
            cos_sin_table(4, 64, scaling={k: v for k, v in YARN.items() if k != missing})
    with pytest.raises(ValueError, match="factor.*positive.*-1"):
        cos_sin_table(4, 64, scaling={**YARN, "factor": -1})
    with pytest.raises(ValueError, match="max_positions"):
        cos_sin_table(-1, 64)
