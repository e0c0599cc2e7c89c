from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dsv32_ops import layouts, testing
from dsv32_ops.models import PRESETS
from dsv32_ops.testing import canary_cache, changed_canaries, compare_codes, compare_floats, poison

V32, KIMI = PRESETS["deepseek-v3.2"], PRESETS["kimi-k2"]
BUILDERS = {
    "norm_rope": lambda n, **kw: testing.norm_rope_inputs(V32, n, **kw),
    "q": lambda n, **kw: testing.q_inputs(V32, n, 16, **kw),
    "eh_norm": lambda n, **kw: testing.eh_norm_inputs(V32, n, **kw),
    "embed_norm": lambda n, **kw: testing.embed_norm_inputs(V32, n, vocab_rows=50, **kw),
    "embed_eh_norm": lambda n, **kw: testing.embed_eh_norm_inputs(V32, n, vocab_rows=50, **kw),
}


def draws(strategy, count=400):
    seen = []

    @settings(
        max_examples=count,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(value):
        seen.append(value)

    collect()
    return seen


def test_token_counts_cluster_around_the_boundary():
    # Hypothesis does not repeat itself: only beside another value is a count drawn more than once.
    pairs = draws(st.tuples(testing.token_counts(), st.integers(0, 2**30)))
    seen = Counter(count for count, _ in pairs)
    boundary = (*range(65_534, 65_539), 131_069, 131_070, 131_071)
    assert all(seen[count] for count in boundary)
    assert sum(seen[count] for count in boundary) > sum(seen.values()) / 4
    assert seen[0] and seen[1] and seen[2**31 - 1]
    assert any(count > 2**24 for count in seen)
    assert any(count % 16 == 0 and count > 131_072 for count in seen)
    assert any(count % 2 for count in seen if count < 65_000)


@pytest.mark.parametrize("max_value", [0, 1, 2, 15, 16, 300, 65_534, 65_537, 131_070])
def test_token_counts_stay_within_their_bound(max_value):
    seen = draws(testing.token_counts(max_value), count=100)
    assert min(seen) == 0 and max(seen) == max_value


def test_a_negative_bound_is_refused():
    with pytest.raises(ValueError, match="max_value"):
        testing.token_counts(-1)


def test_norm_rope_inputs_are_column_slices_of_fused_projections():
    inputs = testing.norm_rope_inputs(V32, 5)
    q_c, kv_c, k_pe, index_k = (inputs[name] for name in ("q_c", "kv_c", "k_pe", "index_k"))
    assert [t.shape[1] for t in (q_c, kv_c, k_pe, index_k)] == [1536, 512, 64, 128]
    assert all(t.stride() == (2112, 1) for t in (q_c, kv_c, k_pe))
    assert kv_c.data_ptr() - q_c.data_ptr() == 2 * 1536
    assert k_pe.data_ptr() - q_c.data_ptr() == 2 * 2048
    assert index_k.stride() == (128 + 64, 1)
    assert inputs["index_k_norm_weight"].dtype == inputs["index_k_norm_bias"].dtype == torch.float32
    assert inputs["q_norm_weight"].dtype == torch.bfloat16
    assert inputs["topk_indices_buffer"].shape == (7, 2048)


def test_q_inputs_have_the_strides_of_a_model():
    inputs = testing.q_inputs(V32, 5, 16)
    assert inputs["q_pe"].shape == (5, 16, 64)
    assert inputs["q_pe"].stride() == (16 * 192, 192, 1)
    assert inputs["ql_nope"].shape == (5, 16, 512)
    assert inputs["ql_nope"].stride() == (512, 5 * 512, 1)
    assert inputs["index_q"].shape == (5, 64, 128)
    assert inputs["index_weights"].stride() == (128 + 64, 1)
    assert testing.q_inputs(V32, 2)["q_pe"].shape == (2, 128, 64)


def test_an_unquantized_query_leaves_nothing_readable_in_ql_nope():
    assert testing.q_inputs(V32, 3, 2, quantize_mqa=False)["ql_nope"].isnan().all()
    assert not testing.q_inputs(V32, 3, 2)["ql_nope"].isnan().any()


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_inputs_are_never_zero_and_follow_the_seed(name):
    first, again, other = (BUILDERS[name](19, seed=seed) for seed in (3, 3, 4))
    floats = 0
    for key, value in first.items():
        if not isinstance(value, torch.Tensor):
            assert value == again[key]
            continue
        assert testing.same_bytes(value, again[key])
        if value.is_floating_point() and "cos_sin" not in key and "cache" not in key:
            floats += 1
            assert (value != 0).all() and value.isfinite().all()
            assert "scale" in key or not torch.equal(value, other[key])
    assert floats >= 2


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_inputs_do_not_depend_on_the_device(name):
    on_cpu, on_gpu = BUILDERS[name](700), BUILDERS[name](700, device="cuda")
    for key, value in on_cpu.items():
        if isinstance(value, torch.Tensor):
            assert on_gpu[key].is_cuda and on_gpu[key].stride() == value.stride()
            assert testing.same_bytes(on_gpu[key].cpu(), value)


@pytest.mark.parametrize("num_tokens", [0, 1])
@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_inputs_exist_for_no_and_one_token(name, num_tokens):
    inputs = BUILDERS[name](num_tokens)
    first = inputs.get("positions", inputs.get("input_ids"))
    assert first is not None and first.shape == (num_tokens,)


def test_rows_of_a_large_tensor_differ_and_some_are_scaled():
    rows = testing.eh_norm_inputs(V32, 700)["previous_hidden"]
    assert rows.numel() > 4 * 2**20
    assert torch.unique(rows[:, :8].float(), dim=0).shape[0] == 700
    spread = rows.float().std(dim=1)
    # 7,168 normal values: the sample deviation is within 5 % of 1 unless the row was scaled.
    scaled = (spread.log2().round() != 0).float().mean()
    assert 0.15 < scaled < 0.35
    assert spread.max() > 16 and spread.min() < 1 / 16


def test_positions_stay_in_the_tables_and_the_tables_differ():
    inputs = testing.norm_rope_inputs(V32, 500, table_rows=37)
    assert inputs["rope_cos_sin"].shape == inputs["index_rope_cos_sin"].shape == (37, 64)
    assert inputs["positions"].max() == 36 and inputs["positions"].min() == 0
    assert not torch.equal(inputs["rope_cos_sin"], inputs["index_rope_cos_sin"])
    shared = testing.norm_rope_inputs(V32, 5, shared_table=True)
    assert shared["rope_cos_sin"] is shared["index_rope_cos_sin"]


def test_slots_are_distinct_live_and_out_of_order():
    inputs = testing.norm_rope_inputs(V32, 1000, block_size=16, extra_blocks=3)
    slots = inputs["slot_mapping"]
    blocks = inputs["mla_kv_cache"].shape[0]
    assert blocks == 63 + 3 == inputs["indexer_k_cache"].shape[0]
    assert slots.unique().numel() == 1000
    assert slots.min() >= 0 and slots.max() < 16 * blocks
    assert (slots.diff() < 0).sum() > 300


def test_padding_is_the_share_of_dead_slots():
    slots = testing.norm_rope_inputs(V32, 2000, padding=0.3)["slot_mapping"]
    # 2,000 draws at 0.3: four standard deviations are 0.041.
    assert abs((slots == -1).float().mean().item() - 0.3) < 0.041
    assert (testing.norm_rope_inputs(V32, 9, padding=1.0)["slot_mapping"] == -1).all()


@pytest.mark.parametrize("mode", layouts.MLA_MODES)
def test_caches_and_outs_come_poisoned(mode):
    inputs = testing.norm_rope_inputs(V32, 70, mode=mode, outs=True)
    layout = layouts.mla_layout(mode)
    assert inputs["mla_kv_cache"].shape == (3, 64, layout.entry_width)
    assert inputs["mla_kv_cache"].dtype == layout.dtype
    for name in ("mla_kv_cache", "indexer_k_cache", "topk_indices_buffer"):
        assert (testing.as_bytes(inputs[name]) == 0xA5).all()
    for name in ("kv_c_out", "k_pe_out", "index_k_out"):
        assert inputs[name].isnan().all()
    assert (inputs["mla_k_scale"] is not None) == (mode in ("fp8", "fp8_e4m3"))


def test_a_profiling_run_and_a_model_without_indexer_leave_arguments_out():
    profile = testing.norm_rope_inputs(V32, 4, caches=False)
    for name in ("slot_mapping", "mla_kv_cache", "indexer_k_cache"):
        assert profile[name] is None
    kimi = testing.norm_rope_inputs(KIMI, 4, outs=True) | testing.q_inputs(KIMI, 4, 2)
    for name in ("index_k", "index_k_norm_weight", "index_q", "index_weights", "indexer_k_cache"):
        assert kimi[name] is None
    assert not kimi["has_indexer"] and "index_k_out" not in kimi
    layer = dataclasses.replace(V32, has_indexer=False)
    assert testing.q_inputs(layer, 4, 2)["index_q"] is None


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.int32, torch.int64],
)
def test_poison_fills_a_view_and_spares_its_gaps(dtype):
    whole = torch.ones(4, 6).to(dtype)
    view = whole[:, :5]
    assert poison(view) is view
    if dtype.is_floating_point and dtype.itemsize > 1:
        assert view.isnan().all()
    else:
        assert (testing.as_bytes(view) == 0xA5).all()
    assert (whole[:, 5].float() == 1).all()


@pytest.mark.parametrize(("block_gap", "entry_gap"), [(0, 0), (48, 0), (0, 16), (112, 32)])
@pytest.mark.parametrize("mode", layouts.MLA_MODES)
def test_canaries_show_every_byte_outside_the_cache(mode, block_gap, entry_gap):
    layout = layouts.mla_layout(mode)
    cache, buffer = canary_cache(layout, 3, 4, guard=64, block_gap=block_gap, entry_gap=entry_gap)
    assert cache.shape == (3, 4, layout.entry_width)
    assert cache.stride(1) * cache.element_size() == layout.entry_bytes + entry_gap
    body = 3 * (4 * (layout.entry_bytes + entry_gap) + block_gap)
    assert buffer.numel() == 2 * 64 + body and (buffer == 0xA5).all()

    cache.view(torch.uint8).fill_(0x11)
    assert changed_canaries(cache, buffer).numel() == 0
    outside = (buffer == 0xA5).nonzero().flatten()
    assert outside.numel() == buffer.numel() - cache.numel() * cache.element_size()
    for offset in (0, 63, 64 + body, buffer.numel() - 1, int(outside[outside.numel() // 2])):
        buffer[offset] = 0x12
        assert changed_canaries(cache, buffer).tolist() == [offset]
        buffer[offset] = 0xA5


def test_canaries_of_an_indexer_cache():
    layout = layouts.IndexerCache()
    cache, buffer = canary_cache(layout, 2, 16, block_gap=64)
    assert cache.stride() == (16 * 132 + 64, 132, 1)
    layout.encode(cache, torch.arange(32), torch.randn(32, 128))
    assert changed_canaries(cache, buffer).numel() == 0
    with pytest.raises(ValueError, match="entry_gap"):
        canary_cache(layout, 2, 16, entry_gap=4)
    with pytest.raises(ValueError, match="guard: expected a multiple of 4"):
        canary_cache(layout, 2, 16, guard=6)


def test_codes_are_compared_in_the_order_of_values():
    for dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz):
        codes = torch.arange(256, dtype=torch.uint8)
        values = codes.view(dtype).float()
        ordered = codes[~values.isnan()][values[~values.isnan()].argsort(stable=True)]
        report = compare_codes(ordered[1:], ordered[:-1], dtype)
        assert report.max_step == 1 and report.equal == 0
        assert compare_codes(ordered[-1:], ordered[:1], dtype).max_step > 250


def test_code_reports_count_equal_bytes_and_tell_nan_from_numbers():
    actual = torch.tensor([0x00, 0x38, 0x38, 0x7E], dtype=torch.uint8)
    expected = torch.tensor([0x80, 0x38, 0x3A, 0x7E], dtype=torch.uint8)
    step, equal = compare_codes(actual, expected)
    assert (step, equal) == (2, 0.5)
    assert compare_codes(actual.view(torch.float8_e4m3fn), expected).max_step == 2
    number, nan, other_nan = torch.tensor([[0x7E], [0x7F], [0xFF]], dtype=torch.uint8)
    assert compare_codes(nan, other_nan).max_step == 0
    assert compare_codes(nan, number).max_step == compare_codes(number, other_nan).max_step == 1000
    assert compare_codes(actual[:0], expected[:0]) == (0, 1.0)


def test_code_comparison_refuses_what_it_cannot_compare():
    codes = torch.zeros(4, dtype=torch.uint8)
    with pytest.raises(ValueError, match="shape"):
        compare_codes(codes, codes[:3])
    with pytest.raises(TypeError, match="one-byte"):
        compare_codes(codes.float(), codes.float())
    with pytest.raises(TypeError, match="fp8_dtype"):
        compare_codes(codes, codes, torch.float8_e5m2)


def test_float_reports_have_error_and_steps():
    expected = torch.tensor([1.0, -2.0, 0.0, 3.0, float("nan"), float("inf")])
    actual = expected.clone()
    assert compare_floats(actual, expected) == (0.0, 0.0, 0)
    actual[1] = torch.nextafter(actual[1], torch.tensor(0.0))
    report = compare_floats(actual, expected)
    assert report.max_step == 1
    assert report.max_error == 2.0**-23
    assert report.rms_error == pytest.approx(2.0**-23 / 6**0.5)
    actual[3] = float("nan")
    assert compare_floats(actual, expected).max_error == float("inf")
    with pytest.raises(ValueError, match="bfloat16"):
        compare_floats(expected, expected.bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_float_steps_cross_zero(dtype):
    tiny = torch.tensor([1], dtype=torch.int16 if dtype.itemsize == 2 else torch.int32).view(dtype)
    assert compare_floats(tiny, -tiny).max_step == 2
    assert compare_floats(torch.zeros_like(tiny), -torch.zeros_like(tiny)).max_step == 0


def test_same_bytes_tells_what_equality_hides():
    zero = torch.zeros(2)
    assert testing.same_bytes(zero, zero.clone())
    assert not testing.same_bytes(zero, -zero)
    assert not testing.same_bytes(zero, zero.bfloat16())
    assert testing.same_bytes(torch.full((2,), float("nan")), torch.full((2,), float("nan")))
    strided = torch.arange(6.0).view(2, 3).t()
    assert testing.same_bytes(strided, strided.contiguous())
