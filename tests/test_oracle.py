"""The oracle against facts worked out by hand, and its comparison helpers against wrong results."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
from oracle import E2M1_VALUES, E4M3FN_VALUES, E4M3FNUZ_VALUES, Ideal, round_to_codes


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def fp32(x):
    return np.asarray(x, np.float32).astype(np.float64)


# Formats


@pytest.mark.parametrize(
    ("values", "code", "value"),
    [
        (E4M3FN_VALUES, 0x01, 2.0**-9),
        (E4M3FN_VALUES, 0x07, 7 * 2.0**-9),
        (E4M3FN_VALUES, 0x08, 2.0**-6),
        (E4M3FN_VALUES, 0x38, 1.0),
        (E4M3FN_VALUES, 0x7E, 448.0),
        (E4M3FN_VALUES, 0xFE, -448.0),
        (E4M3FNUZ_VALUES, 0x01, 2.0**-10),
        (E4M3FNUZ_VALUES, 0x40, 1.0),
        (E4M3FNUZ_VALUES, 0x7E, 224.0),
        (E4M3FNUZ_VALUES, 0x7F, 240.0),
        (E4M3FNUZ_VALUES, 0xFF, -240.0),
    ],
)
def test_fp8_table_entries(values, code, value):
    assert values[code] == value


def test_tables_have_only_their_nans():
    assert np.flatnonzero(np.isnan(E4M3FN_VALUES)).tolist() == [0x7F, 0xFF]
    assert np.flatnonzero(np.isnan(E4M3FNUZ_VALUES)).tolist() == [0x80]
    assert E2M1_VALUES.tolist()[:8] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert E2M1_VALUES.tolist()[8:] == [0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert np.signbit(E2M1_VALUES[8]) and np.signbit(E4M3FN_VALUES[0x80])


@pytest.mark.parametrize(
    ("x", "code"),
    [
        (448.0, 0x7E),
        (464.0, 0x7E),
        (1e30, 0x7E),
        (np.inf, 0x7E),
        (-np.inf, 0xFE),
        (432.0, 0x7E),  # between 416 (0x7D) and 448 (0x7E): the even one is above
        (400.0, 0x7C),  # between 384 (0x7C) and 416 (0x7D): the even one is below
        (1.0625, 0x38),
        (1.1875, 0x3A),
        (1.0625 + 2**-40, 0x39),
        (0.0009765625, 0x00),  # half of the smallest subnormal
        (0.0009765625 + 2**-40, 0x01),
        (0.0029296875, 0x02),  # one and a half of it
        (-0.0009765625, 0x80),
        (-0.0, 0x80),
        (np.nan, 0x7F),
        (-np.nan, 0x7F),
    ],
)
def test_e4m3fn_code(x, code):
    assert round_to_codes(x, E4M3FN_VALUES, 448.0) == code


@pytest.mark.parametrize(
    ("x", "limit", "code"),
    [
        (240.0, 240.0, 0x7F),
        (np.inf, 240.0, 0x7F),
        (240.0, 224.0, 0x7E),
        (-np.inf, 224.0, 0xFE),
        (-0.0, 240.0, 0x00),
        (-(2.0**-11), 240.0, 0x00),
        (3 * 2.0**-11, 240.0, 0x02),
        (np.nan, 224.0, 0x80),
    ],
)
def test_e4m3fnuz_code(x, limit, code):
    assert round_to_codes(x, E4M3FNUZ_VALUES, limit) == code


def test_e2m1_codes():
    x = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.0001, 6.5, np.inf, -np.inf, np.nan, -0.0, -0.25]
    codes = [0, 2, 2, 4, 4, 6, 6, 7, 7, 7, 15, 7, 8, 8]
    assert round_to_codes(x, E2M1_VALUES, 6.0).tolist() == codes


@pytest.mark.parametrize("values", [E4M3FN_VALUES, E4M3FNUZ_VALUES, E2M1_VALUES])
def test_every_code_is_its_own_rounding(values):
    codes = np.flatnonzero(~np.isnan(values))
    assert np.array_equal(round_to_codes(values[codes], values), codes)


def test_code_is_nearest_by_brute_force(rng):
    x = rng.normal(size=2000) * np.exp2(rng.integers(-12, 10, 2000))
    got = E4M3FN_VALUES[round_to_codes(x, E4M3FN_VALUES)]
    finite = E4M3FN_VALUES[~np.isnan(E4M3FN_VALUES)]
    assert np.array_equal(np.abs(got - x), np.abs(finite[:, None] - x).min(axis=0))


def test_bf16_rounds_once():
    # float64 -> fp32 -> bf16 would reach the tie 1 + 2^-8 and then fall to the even 1.0
    x = 1 + 2.0**-8 + 2.0**-40
    assert oracle.bf16_bits(x) == 0x3F81
    assert oracle.bf16_bits(np.float64(np.float32(x))) == 0x3F80
    assert oracle.round_bf16(x).item() == 1 + 2.0**-7


def test_bf16_bits():
    x = [1.0, -2.0, 3.4e38, 3.4e39, -np.inf, np.nan, 2.0**-133, 2.0**-134, 3 * 2.0**-134, -0.0]
    bits = [0x3F80, 0xC000, 0x7F80, 0x7F80, 0xFF80, 0x7FC0, 0x0001, 0x0000, 0x0002, 0x8000]
    assert oracle.bf16_bits(x).tolist() == bits


def test_bf16_and_fp16_against_numpy(rng):
    x = rng.normal(size=20000) * np.exp2(rng.integers(-30, 20, 20000))
    with np.errstate(over="ignore"):
        assert np.array_equal(oracle.fp16_bits(x), x.astype(np.float16).view(np.uint16))
    bits = x.astype(np.float32).view(np.uint32).astype(np.int64)
    exact = (bits >> 16 << 16).astype(np.uint32).view(np.float32).astype(np.float64)
    assert np.array_equal(oracle.round_bf16(exact), exact)
    step = np.abs(exact) * 2.0**-7
    assert (np.abs(oracle.round_bf16(x) - x) <= step / 2 * (1 + 2.0**-20)).all()


# Scales


@pytest.mark.parametrize("limit", [448.0, 224.0])
@pytest.mark.parametrize("k", [-20, -7, 0, 9, 100])
def test_pow2ceil_one_ulp_around_the_boundary(limit, k):
    edge = np.float32(limit * 2.0**k)
    amax = [np.nextafter(edge, np.float32(0)), edge, np.nextafter(edge, np.float32(np.inf))]
    scales = oracle.pow2ceil(np.array(amax, np.float64) / limit)
    assert scales.tolist() == [2.0**k, 2.0**k, 2.0 ** (k + 1)]
    divided_in_fp32 = np.array(amax, np.float32) / np.float32(limit)
    assert oracle.pow2ceil(divided_in_fp32).tolist() == scales.tolist()


def test_pow2ceil_extremes():
    assert oracle.pow2ceil([2.0**-149, 1.5 * 2.0**-149, 3.0]).tolist() == [2.0**-149, 2.0**-148, 4]
    with pytest.raises(ValueError, match="positive finite"):
        oracle.pow2ceil([1.0, np.nan])


def test_zero_rows_have_their_floor_scale():
    assert oracle.row_scale(0.0) == 2.0**-22
    assert oracle.tile_scale(0.0) == 2.0**-13
    assert oracle.row_scale(0.0, 224.0) == 2.0**-21
    assert oracle.tile_scale(0.0, 224.0) == 2.0**-13


def test_amax_of_non_finite_rows():
    x = np.array([[np.nan, -3.0, 1.0], [np.nan, -np.inf, 1.0], [np.nan] * 3])
    assert oracle.finite_amax(x).tolist() == [3.0, oracle.FLT_MAX, 0.0]
    assert oracle.row_scale(oracle.finite_amax(x))[1] == 2.0**120


# Norms and rotations


def test_rms_norm_by_hand():
    assert oracle.rms_norm([[3.0, 4.0]], [1.0, 2.0], 0.0) == pytest.approx(
        np.array([[3 / np.sqrt(12.5), 8 / np.sqrt(12.5)]]), rel=1e-15
    )
    assert oracle.rms_norm([[1.0]], [1.0], 3.0)[0, 0] == 0.5


def test_norm_eps_is_fp32():
    eps = float(np.float32(0.1))
    assert oracle.rms_norm([[2.0]], [1.0], 0.1)[0, 0] == 2 / np.sqrt(4 + eps)
    assert eps != 0.1


def test_layer_norm_by_hand():
    got = oracle.layer_norm([[1.0, 3.0]], [10.0, 10.0], [0.5, 0.5], 0.0)
    assert got.tolist() == [[-9.5, 10.5]]


def test_square_overflow_is_that_of_fp32():
    x = np.array([[1e30, 1.0]])
    assert oracle.rms_norm(x, [1.0, 1.0], 1e-6).tolist() == [[0.0, 0.0]]
    assert oracle.rms_norm(x, [1.0, 1.0], 1e-6, np.float32).tolist() == [[0.0, 0.0]]


def test_rope_by_90_degrees():
    quarter_turn = np.array([[0.0, 0.0, 1.0, 1.0]])
    x = np.array([[1.0, 2.0, 3.0, 4.0, 5.0]])
    assert oracle.rope(x, quarter_turn, True).tolist() == [[-2, 1, -4, 3, 5]]
    assert oracle.rope(x, quarter_turn, False).tolist() == [[-3, -4, 1, 2, 5]]


def test_rope_reads_the_cos_half_then_the_sin_half():
    rows = np.array([[2.0, 3.0, 0.0, 10.0]])
    assert oracle.rope([[1.0, 0.0, 1.0, 0.0]], rows, True).tolist() == [[2, 0, 3, 10]]
    assert oracle.rope([[1.0, 1.0, 0.0, 0.0]], rows, False).tolist() == [[2, 3, 0, 10]]


def test_rope_error_bound_covers_cancellation():
    rows = fp32([[0.6, 0.8]])
    x = fp32([[0.8, 0.6]])
    ideal = oracle._ideal_rope(x, rows, True)
    assert abs(ideal.value[0, 0]) < 1e-7
    assert 2.0**-22 < ideal.err[0, 0] < 2.0**-17


def test_positions_clamp_into_their_table():
    table = np.arange(6.0).reshape(3, 2)
    assert oracle.clamp_rows(table, [-5, 1, 3]).tolist() == [[0, 1], [2, 3], [4, 5]]


# Layouts


def entry(mode, rng, n=5, **kwargs):
    kv, k_pe = fp32(rng.normal(size=(n, 512))), fp32(rng.normal(size=(n, 64)))
    return oracle.mla_cache_rows(mode, kv, k_pe, **kwargs)


@pytest.mark.parametrize(
    ("mode", "nbytes"),
    [("auto", 1152), ("bfloat16", 1152), ("fp8", 576), ("fp8_ds_mla", 656), ("nvfp4_ds_mla", 352)],
)
def test_fields_tile_the_entry(mode, nbytes, rng):
    covered = np.zeros(nbytes, int)
    for start, length in oracle.mla_fields(mode).values():
        covered[start : start + length] += 1
    assert (covered == 1).all()
    assert oracle.entry_bytes(mode) == nbytes
    assert entry(mode, rng).bytes.shape == (5, nbytes)


def test_unknown_mode_lists_the_modes():
    with pytest.raises(ValueError, match="fp8_ds_mla, nvfp4_ds_mla"):
        oracle.mla_fields("fp8_dsmla")


def test_fp8_ds_mla_entry_by_hand():
    kv, k_pe = np.zeros((1, 512)), np.zeros((1, 64))
    kv[0, 0], kv[0, 128], kv[0, 129], k_pe[0, 1] = 448.0, 449.0, -2.0, 1.0
    raw = oracle.mla_cache_rows("fp8_ds_mla", kv, k_pe).bytes[0]
    assert raw[0] == 0x7E
    assert raw[128] == round_to_codes(224.5, E4M3FN_VALUES) and raw[129] == 0xB8
    assert raw[512:528].view("<f4").tolist() == [1.0, 2.0, 2.0**-13, 2.0**-13]
    assert raw[528:532].tolist() == [0, 0, 0x80, 0x3F]


def test_fp8_entry_divides_both_parts(rng):
    rows = oracle.mla_cache_rows("fp8", [[3.0]], [[7.0, -1e9]], scale=np.array([3.0]))
    assert rows.bytes.tolist() == [[0x38, int(round_to_codes(fp32(7 / 3), E4M3FN_VALUES)), 0xFE]]
    fnuz = oracle.mla_cache_rows("fp8", [[3.0]], [[7.0, -1e9]], values=E4M3FNUZ_VALUES)
    assert fnuz.bytes[0, 2] == 0xFF


def test_float_entry_by_hand():
    for mode, one in (("bfloat16", 0x3F80), ("float16", 0x3C00)):
        raw = oracle.mla_cache_rows(mode, [[1.0]], [[0.0, 1.0]]).bytes
        assert raw.view("<u2").tolist() == [[one, 0, one]]
    raw = oracle.mla_cache_rows("auto", [[1.0]], [[0.0, 1.0]], cache_dtype="float32").bytes
    assert raw.view("<f4").tolist() == [[1.0, 0.0, 1.0]]


def test_nvfp4_scale_byte_permutation():
    blocks = np.arange(32)
    assert sorted(oracle.nvfp4_scale_byte(blocks)) == blocks.tolist()
    assert oracle.nvfp4_scale_byte([0, 1, 2, 3, 4, 5, 31]).tolist() == [0, 8, 16, 24, 1, 9, 31]


def test_nvfp4_entry_by_hand():
    kv, k_pe = np.zeros((1, 512)), np.zeros((1, 64))
    kv[0, 16:18] = 6.0, -3.0
    k_pe[0, 2] = 1.0
    raw = oracle.mla_cache_rows("nvfp4_ds_mla", kv, k_pe).bytes[0]
    assert raw[8] == 7 | (13 << 4)
    assert raw[256 + 2] == 0x38
    scales = raw[320:]
    assert scales[8] == 0x38
    assert (np.delete(scales, 8) == 0x01).all()  # zero blocks: 2^-9


def test_nvfp4_saturates_at_the_largest_scale():
    kv = np.zeros((1, 512))
    kv[0, :3] = np.inf, np.nan, -1e6
    rows = oracle.mla_cache_rows("nvfp4_ds_mla", kv, np.zeros((1, 64)))
    assert rows.scale_codes[0, 0] == 0x7E
    assert rows.kv_codes[0, :4].tolist() == [7, 7, 15, 0]


@pytest.mark.parametrize("mode", ["auto", "fp8", "fp8_ds_mla", "nvfp4_ds_mla"])
def test_split_inverts_the_entry(mode, rng):
    rows = entry(mode, rng)
    parts = oracle.split_mla(mode, rows.bytes)
    if mode == "auto":
        assert np.array_equal(parts.kv, oracle.round_bf16(rows.kv))
        return
    assert np.array_equal(parts.kv, rows.kv_codes)
    if mode == "nvfp4_ds_mla":
        assert np.array_equal(parts.scale, rows.scale_codes)
        step = np.repeat(rows.scale, 16, axis=-1)
        assert (np.abs(E2M1_VALUES[parts.kv] * step - rows.kv) <= 1.2 * step).all()
    if mode == "fp8_ds_mla":
        assert np.array_equal(parts.scale, rows.scale)
        back = E4M3FN_VALUES[parts.kv] * np.repeat(parts.scale, 128, axis=-1)
        assert (np.abs(back - rows.kv) <= np.abs(rows.kv) / 16 + 2.0**-20).all()


def test_indexer_rows_by_hand():
    key = np.zeros((3, 128))
    key[0, 5], key[1, 0], key[2, :2] = 448.0, 449.0, (np.nan, 1.0)
    rows = oracle.indexer_rows(key)
    assert rows.scale.tolist() == [1.0, 2.0, 2.0**-8]
    assert rows.bytes[0, 5] == 0x7E and rows.bytes[2, :2].tolist() == [0x7F, 0x78]
    assert rows.bytes[:, 128:].view("<f4")[:, 0].tolist() == rows.scale.tolist()
    exponents = oracle.indexer_rows(key, scale_format="ue8m0x4").bytes[:, 128:]
    assert exponents.tolist() == [[127] * 4, [128] * 4, [119] * 4]
    assert oracle.scale_from_bytes(exponents, "ue8m0x4").tolist() == rows.scale.tolist()
    assert oracle.indexer_rows(np.zeros((1, 128))).scale[0] == 2.0**-22


def test_fnuz_rows_scale_by_224():
    rows = oracle.indexer_rows(np.full((1, 16), 240.0), values=E4M3FNUZ_VALUES)
    assert rows.scale[0] == 2.0 and (rows.codes == round_to_codes(120.0, E4M3FNUZ_VALUES)).all()


# Placement


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("head_dim", [16, 128])
def test_indexer_offsets_are_a_bijection_onto_block_bytes(shuffled, head_dim):
    block_size, stride = 32, 32 * (head_dim + 4) + 40
    slots = np.arange(block_size, 2 * block_size)
    offsets = oracle.indexer_offsets(
        slots, block_size=block_size, block_stride=stride, head_dim=head_dim, shuffled=shuffled
    )
    codes = np.arange(block_size * head_dim) + stride
    assert np.array_equal(np.sort(offsets[:, :head_dim].ravel()), codes)
    scales = stride + block_size * head_dim + np.arange(4 * block_size)
    assert np.array_equal(offsets[:, head_dim:].ravel(), scales)


def test_shuffled_offset_by_hand():
    at = {"block_size": 32, "block_stride": 10000, "shuffled": True}
    offsets = oracle.indexer_code_offsets([32 + 17], **at)[0]
    assert offsets[[0, 15, 16, 127]].tolist() == [
        10000 + 2048 + 16,
        10000 + 2048 + 31,
        10000 + 2048 + 256 + 16,
        10000 + 2048 + 7 * 256 + 31,
    ]
    with pytest.raises(ValueError, match="multiple of 16"):
        oracle.indexer_code_offsets([0], block_size=8, block_stride=2000, shuffled=True)


def test_mla_offsets_follow_the_strides():
    at = {"block_size": 4, "block_stride": 3000, "entry_stride": 700, "entry_bytes": 656}
    offsets = oracle.mla_offsets([0, 3, 4, 2**33], **at)
    assert offsets[:, 0].tolist() == [0, 2100, 3000, 2**31 * 3000]
    assert (offsets[:, -1] - offsets[:, 0] == 655).all()
    every = oracle.mla_offsets(np.arange(12), **at).ravel()
    assert len(np.unique(every)) == every.size


def test_live_rows():
    assert oracle.live_rows([0, -1, 7, 8], 6, 8).tolist() == [True, False, True, *[False] * 3]
    assert oracle.live_rows([0, 1, 2], 2, 8).tolist() == [True, True]


def test_place_writes_rows_and_nothing_else():
    before = np.full(10, 0xA5, np.uint8)
    after = oracle.place(before, np.array([[2, 3], [7, 6]]), np.array([[1, 2], [3, 4]]))
    assert after.tolist() == [0xA5, 0xA5, 1, 2, 0xA5, 0xA5, 4, 3, 0xA5, 0xA5]
    assert (before == 0xA5).all()


# Operators


def norm_rope_args(rng, n, dims=(8, 16, 4, 16), **kwargs):
    q_dim, kv_dim, rope_dim, index_dim = dims
    angles = rng.uniform(0, 6.28, (50, rope_dim // 2))
    table = fp32(np.concatenate([np.cos(angles), np.sin(angles)], axis=-1))

    def draw(*shape):
        return fp32(rng.normal(size=shape))

    return {
        "positions": rng.integers(0, 50, n),
        "q_c": draw(n, q_dim),
        "q_norm_weight": draw(q_dim),
        "q_norm_eps": 1e-6,
        "kv_c": draw(n, kv_dim),
        "kv_norm_weight": draw(kv_dim),
        "kv_norm_eps": 1e-6,
        "k_pe": draw(n, rope_dim),
        "rope_cos_sin": table,
        "index_k": draw(n, index_dim),
        "index_k_norm_weight": draw(index_dim),
        "index_k_norm_bias": draw(index_dim),
        "index_k_norm_eps": 1e-6,
        "index_rope_cos_sin": table,
        "topk_indices_buffer": rng.integers(0, 9, (n + 2, 3)).astype(np.int32),
        **kwargs,
    }


def test_norm_rope_tasks(rng):
    args = norm_rope_args(rng, 6)
    got = oracle.norm_rope(**args)
    assert (got.topk[:6] == -1).all()
    assert np.array_equal(got.topk[6:], args["topk_indices_buffer"][6:])
    pair = args["k_pe"][2, 2:4]
    cos, sin = args["rope_cos_sin"][args["positions"][2]][[1, 3]]
    assert got.k_pe.value[2, 2] == pair[0] * cos - pair[1] * sin
    assert got.k_pe.value[2, 3] == pair[1] * cos + pair[0] * sin
    normed = oracle.layer_norm(
        args["index_k"], args["index_k_norm_weight"], args["index_k_norm_bias"], 1e-6
    )
    assert np.array_equal(got.index_k.value[:, 4:], normed[:, 4:])
    assert not np.isclose(got.index_k.value[:, :4], normed[:, :4]).all()


def test_norm_rope_switches(rng):
    args = norm_rope_args(rng, 3)
    unfilled = oracle.norm_rope(**args, fill_topk=False)
    assert np.array_equal(unfilled.topk, args["topk_indices_buffer"])
    without = oracle.norm_rope(**{**args, "index_k": None}, has_indexer=False, slot_mapping=[1])
    assert without.index_k is None and without.indexer is None
    assert np.array_equal(without.topk, args["topk_indices_buffer"])
    half = oracle.norm_rope(**args).index_k.value
    assert not np.array_equal(
        half, oracle.norm_rope(**args, index_rope_interleave=True).index_k.value
    )
    with pytest.raises(TypeError, match="has_indxer"):
        oracle.norm_rope(**args, has_indxer=True)


def test_a_non_finite_row_changes_no_other_row(rng):
    args = norm_rope_args(rng, 4)
    clean = oracle.norm_rope(**args, mla_kv_cache_dtype="fp8")
    for name, value in (("kv_c", np.inf), ("index_k", np.nan), ("k_pe", -np.inf)):
        args[name][1, 0] = value
    dirty = oracle.norm_rope(**args, mla_kv_cache_dtype="fp8")
    others = [0, 2, 3]
    assert np.array_equal(dirty.mla.bytes[others], clean.mla.bytes[others])
    assert np.array_equal(dirty.indexer.bytes[others], clean.indexer.bytes[others])
    assert dirty.indexer.scale[1] == 2.0**-22 and (dirty.indexer.codes[1] == 0x7F).all()


def q_args(rng, n=5, heads=3, index_heads=2):
    def draw(*shape):
        return fp32(rng.normal(size=shape))

    return {
        "positions": rng.integers(0, 20, n),
        "q_pe": draw(n, heads, 4),
        "q_pe_cos_sin": draw(20, 4),
        "index_q": draw(n, index_heads, 16),
        "index_q_cos_sin": draw(20, 4),
        "ql_nope": draw(n, heads, 8),
        "q_scale": np.array([0.3], np.float32),
        "index_weights": draw(n, index_heads),
        "index_weights_softmax_scale": 0.1,
        "index_weights_head_scale": 0.7,
    }


def test_fused_q_by_hand(rng):
    args = q_args(rng)
    got = oracle.fused_q(**args)
    assert got.mqa.value.shape == (5, 3, 12) and got.mqa_codes.shape == (5, 3, 12)
    nope = args["ql_nope"].astype(np.float32) / np.float32(0.3)
    assert np.array_equal(got.mqa.value[..., :8], nope)
    assert (got.mqa.err[..., :8] == 0).all() and (got.mqa.err[..., 8:] > 0).all()
    w = np.float32(args["index_weights"][1, 1]) * np.float32(got.index_scale[1, 1])
    assert got.index_weights[1, 1] == np.float32(w * np.float32(0.1)) * np.float32(0.7)
    ratio = np.abs(got.index_ratio).max(axis=-1)
    assert ((ratio <= 448) & (ratio > 224)).all()


def test_fused_q_variants(rng):
    args = q_args(rng)
    plain = oracle.fused_q(**{**args, "ql_nope": None}, quantize_mqa=False)
    assert plain.mqa_codes is None and plain.mqa.value.shape == (5, 3, 4)
    bare = oracle.fused_q(**args, has_indexer=False)
    assert bare.index_codes.shape == (5, 0, 16) and bare.index_weights.shape == (5, 0)
    oracle.assert_index_q(bare.index_codes, bare.index_weights, bare)


def test_position_zero_takes_a_zero_embedding(rng):
    embeds, hidden = rng.normal(size=(3, 8)), rng.normal(size=(3, 8))
    embeds[1] = np.nan
    ones = np.ones(8)
    got = oracle.eh_norm([5, 0, 1], embeds, hidden, ones, ones, 1e-6).value
    assert (got[1, :8] == 0).all()
    assert np.array_equal(got[:, 8:], oracle.rms_norm(hidden, ones, 1e-6))
    assert np.array_equal(got[[0, 2], :8], oracle.rms_norm(embeds[[0, 2]], ones, 1e-6))


def test_embed_ops_gather_and_clamp(rng):
    table, hidden, weight = rng.normal(size=(4, 8)), rng.normal(size=(3, 8)), rng.normal(size=8)
    residual, normed = oracle.embed_norm([9, -1, 2], table, weight, 1e-6)
    assert np.array_equal(residual, table[[3, 0, 2]])
    assert np.array_equal(normed.value, oracle.rms_norm(residual, weight, 1e-6))
    both = oracle.embed_eh_norm([1, 2, 0], [9, -1, 2], table, hidden, weight, weight, 1e-6)
    by_hand = oracle.eh_norm([1, 2, 0], residual, hidden, weight, weight, 1e-6)
    assert np.array_equal(both.value, by_hand.value)


# Comparison helpers


def test_fp32_run_passes_and_truncation_fails(rng):
    x, weight = fp32(rng.normal(size=(40, 300))), fp32(rng.normal(size=300))
    ideal = oracle._ideal(lambda dtype: oracle.rms_norm(x, weight, 1e-6, dtype))
    low = oracle.rms_norm(x, weight, 1e-6, np.float32)
    for dtype in ("bfloat16", "float16", "float32"):
        oracle.assert_float_near(oracle.round_float(low, dtype), ideal, dtype)
    truncated = (low.view(np.uint32) >> 16 << 16).view(np.float32)
    with pytest.raises(AssertionError, match="q: .* wrong, in 40 rows; first at"):
        oracle.assert_float_near(truncated, ideal, "bfloat16", name="q")
    with pytest.raises(AssertionError):
        oracle.assert_float_near(low * np.float32(1 + 2.0**-14), ideal, "float32")


def test_float_comparison_of_non_finite_values():
    ideal = np.array([np.nan, np.inf, 1e6, 1.0])
    good = np.array([np.nan, np.inf, np.inf, 1.0])
    oracle.assert_float_near(good, ideal, "float16")
    for at, value in ((0, 0.0), (1, 65504.0), (2, 65504.0), (3, np.nan)):
        bad = good.copy()
        bad[at] = value
        with pytest.raises(AssertionError, match=rf"first at \[{at}\]"):
            oracle.assert_float_near(bad, ideal, "float16")


def test_codes_are_exact_away_from_midpoints():
    ideal = np.array([1.0, 1.0625, 1.0625 * (1 + 2e-7), 1.1, np.nan, 0.0])
    own = round_to_codes(ideal, E4M3FN_VALUES)
    assert own.tolist() == [0x38, 0x38, 0x39, 0x39, 0x7F, 0x00]
    other_side = own.copy()
    other_side[1] = 0x39
    oracle.assert_codes_near(own, ideal, E4M3FN_VALUES, rel_err=0)
    oracle.assert_codes_near(other_side, ideal, E4M3FN_VALUES, rel_err=1e-6)
    with pytest.raises(AssertionError, match=r"first at \[1\]: code 0x39 \(1.125\), expected 0x38"):
        oracle.assert_codes_near(other_side, ideal, E4M3FN_VALUES, rel_err=0)
    for at, code in ((0, 0x39), (3, 0x38), (4, 0xFF), (4, 0x00), (5, 0x80), (0, 0x7F)):
        bad = own.copy()
        bad[at] = code
        with pytest.raises(AssertionError, match=rf"first at \[{at}\]"):
            oracle.assert_codes_near(bad, ideal, E4M3FN_VALUES, rel_err=1e-6)


def test_codes_never_two_steps_off_nor_often_one():
    ideal = np.full(1000, 1.0625)
    with pytest.raises(AssertionError, match="1000 of 1000 wrong"):
        oracle.assert_codes_near(np.full(1000, 0x3A), ideal, E4M3FN_VALUES, rel_err=0.5)
    with pytest.raises(AssertionError, match="all near midpoints"):
        oracle.assert_codes_near(np.full(1000, 0x39), ideal, E4M3FN_VALUES, rel_err=1e-6)


def test_code_order_is_the_order_of_values():
    for values in (E4M3FN_VALUES, E4M3FNUZ_VALUES, E2M1_VALUES):
        codes = np.flatnonzero(~np.isnan(values))
        by_order = codes[np.argsort(oracle.code_order(codes, values))]
        assert (np.diff(values[by_order]) >= 0).all()
        assert (np.diff(np.sort(oracle.code_order(codes, values))) == 1).all()


def test_scales_may_differ_only_at_the_boundary():
    amax = np.array([448.0, 447.0, 448.0 * (1 + 1e-7)])
    oracle.assert_scales([1.0, 1.0, 2.0], amax, oracle.row_scale)
    oracle.assert_scales([2.0, 1.0, 1.0], amax, oracle.row_scale, 1e-6)
    for bad in ([2.0, 1.0, 2.0], [1.0, 1.0, 1.0]):
        with pytest.raises(AssertionError, match="for amax 448"):
            oracle.assert_scales(bad, amax, oracle.row_scale)
    for bad in ([1.0, 2.0, 2.0], [0.5, 1.0, 2.0], [4.0, 1.0, 2.0], [np.nan, 1.0, 2.0]):
        with pytest.raises(AssertionError):
            oracle.assert_scales(bad, amax, oracle.row_scale, 1e-6)


@pytest.mark.parametrize("mode", oracle.MLA_MODES)
def test_mla_cache_comparison_sees_every_byte(mode, rng):
    args = norm_rope_args(rng, 6, dims=(8, 512, 64, 64))
    got = oracle.norm_rope(**args, mla_kv_cache_dtype=mode, mla_k_scale=0.01)
    width = got.mla.bytes.shape[1]
    at = {"block_size": 3, "block_stride": 3 * (width + 16) + 32, "entry_stride": width + 16}
    before = np.full(3 * at["block_stride"], 0xA5, np.uint8)
    slots = np.array([4, -1, 0, 9, 7])
    live = oracle.live_rows(slots, 6, 9)
    offsets = oracle.mla_offsets(slots[live[:5]], entry_bytes=width, **at)
    after = oracle.place(before, offsets, got.mla.bytes[live])

    def check(cache):
        oracle.assert_mla_cache(
            cache,
            before,
            slots,
            got.mla,
            num_blocks=3,
            kv_err=got.kv.err,
            k_pe_err=got.k_pe.err,
            **at,
        )

    check(after)
    for at_byte in [*rng.choice(offsets.ravel(), 24, replace=False), offsets[0, -1] + 1, 0]:
        bad = after.copy()
        bad[at_byte] ^= 0x44
        with pytest.raises(AssertionError):
            check(bad)


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0x4"])
def test_indexer_cache_comparison_sees_every_byte(scale_format, shuffled, rng):
    args = norm_rope_args(rng, 6)
    got = oracle.norm_rope(**args, index_scale_format=scale_format)
    at = {"block_size": 16, "block_stride": 16 * 20 + 8, "shuffled": shuffled}
    slots = np.array([17, -1, 32, 3, 16])
    live = oracle.live_rows(slots, 6, 32)
    offsets = oracle.indexer_offsets(slots[live[:5]], head_dim=16, **at)
    before = np.full(2 * at["block_stride"], 0xA5, np.uint8)
    after = oracle.place(before, offsets, got.indexer.bytes[live])

    def check(cache):
        oracle.assert_indexer_cache(
            cache, before, slots, got.indexer, num_blocks=2, err=got.index_k.err, **at
        )

    check(after)
    for at_byte in [*offsets.ravel(), at["block_stride"] - 1, 0]:
        bad = after.copy()
        bad[at_byte] ^= 0x44
        with pytest.raises(AssertionError):
            check(bad)


def test_boundary_scale_is_accepted_with_its_codes():
    key = np.zeros((2, 16))
    key[:, 0], key[:, 1] = 448.0, (100.0, 33.0)
    exact, other = oracle.indexer_rows(key), oracle.indexer_rows(key * (1 + 2.0**-22))
    assert exact.scale.tolist() == [1, 1] and other.scale.tolist() == [2, 2]
    oracle.assert_indexer_rows(other.bytes, exact, err=448 * 2.0**-21)
    with pytest.raises(AssertionError, match="indexer scales"):
        oracle.assert_indexer_rows(other.bytes, exact)


def test_index_q_comparison(rng):
    got = oracle.fused_q(**q_args(rng))
    oracle.assert_index_q(got.index_codes, got.index_weights, got)
    with pytest.raises(AssertionError, match="index weights"):
        oracle.assert_index_q(got.index_codes, got.index_weights * (1 + 2.0**-22), got)
    bad = got.index_codes.copy()
    bad[2, 1, 3] ^= 2
    with pytest.raises(AssertionError, match=r"index_q codes: 1 of 160 wrong.*\[2, 1, 3\]"):
        oracle.assert_index_q(bad, got.index_weights, got)


def test_share_rounded_down_shows_truncation(rng):
    x = rng.uniform(1, 400, 20000)
    codes = round_to_codes(x, E4M3FN_VALUES)
    assert abs(oracle.share_rounded_down(codes, x, E4M3FN_VALUES) - 0.5) < 0.03
    truncated = codes - (E4M3FN_VALUES[codes] > x)
    assert oracle.share_rounded_down(truncated, x, E4M3FN_VALUES) == 1.0


def test_65537_tokens(rng):
    n = 65537
    args = norm_rope_args(rng, n)
    got = oracle.norm_rope(**args, mla_kv_cache_dtype="fp8")
    assert got.mla.bytes.shape == (n, 20) and got.indexer.bytes.shape == (n, 20)
    assert got.q.err.max() < 1e-4

    low = np.float32
    kv = oracle.rms_norm(args["kv_c"], args["kv_norm_weight"], args["kv_norm_eps"], low)
    k_pe = oracle.rope(args["k_pe"], args["rope_cos_sin"][args["positions"]], True, low)
    rows = oracle.mla_cache_rows("fp8", kv, k_pe).bytes
    oracle.assert_mla_rows(rows, got.mla, kv_err=got.kv.err, k_pe_err=got.k_pe.err)
    oracle.assert_float_near(kv, Ideal(got.kv.value, got.kv.err), "float32")
