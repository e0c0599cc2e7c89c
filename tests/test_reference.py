"""The reference against float64, and its rules: independent rows, gating, aliasing, shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dsv32_ops import codecs, reference
from dsv32_ops.layouts import MLA_MODES, IndexerCache, mla_layout

CANARY = 0xA5
FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
UNIT = 2.0**-24
BLOCK_SIZE, TABLE_ROWS = 16, 97


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def norm_rope_args(
    num_tokens: int,
    *,
    q_dim: int = 96,
    kv_dim: int = 512,
    rope_dim: int = 64,
    index_dim: int = 128,
    mode: str = "fp8_ds_mla",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments with the strides of fused projections; caches are canaries, outputs NaN."""
    g = seeded(seed)
    widths = (q_dim, kv_dim, rope_dim)
    q_c, kv_c, k_pe = torch.randn(num_tokens, sum(widths), generator=g).to(dtype).split(widths, 1)
    table = torch.randn(TABLE_ROWS, rope_dim, generator=g)
    blocks = num_tokens // BLOCK_SIZE + 2
    layout = mla_layout(mode, kv_dim=kv_dim, rope_dim=rope_dim, dtype=dtype)
    mla_cache = layout.empty(blocks, BLOCK_SIZE)
    indexer_cache = IndexerCache(index_dim).empty(blocks, BLOCK_SIZE)
    for cache in (mla_cache, indexer_cache):
        cache.view(torch.uint8).fill_(CANARY)
    return dict(
        positions=torch.randint(TABLE_ROWS, (num_tokens,), generator=g),
        q_c=q_c,
        q_norm_weight=torch.randn(q_dim, generator=g).to(dtype),
        q_norm_eps=1e-6,
        kv_c=kv_c,
        kv_norm_weight=torch.randn(kv_dim, generator=g),
        kv_norm_eps=1e-5,
        k_pe=k_pe,
        rope_cos_sin=table,
        index_k=torch.randn(num_tokens, index_dim + 8, generator=g).to(dtype)[:, :index_dim],
        index_k_norm_weight=torch.randn(index_dim, generator=g),
        index_k_norm_bias=torch.randn(index_dim, generator=g),
        index_k_norm_eps=1e-6,
        index_rope_cos_sin=table.to(dtype)[:, : 2 * (min(rope_dim, index_dim) // 2)],
        topk_indices_buffer=torch.full((num_tokens + 2, 5), 77, dtype=torch.int32),
        slot_mapping=torch.randperm(blocks * BLOCK_SIZE, generator=g)[:num_tokens],
        indexer_k_cache=indexer_cache,
        mla_kv_cache=mla_cache,
        mla_kv_cache_dtype=mode,
        mla_k_scale=torch.tensor([0.37]),
        kv_c_out=torch.full((num_tokens, kv_dim), torch.nan, dtype=dtype),
        k_pe_out=torch.full((num_tokens, rope_dim), torch.nan, dtype=dtype),
        index_k_out=torch.full((num_tokens, index_dim), torch.nan, dtype=dtype),
    )


TOKEN_ARGS = ("positions", "q_c", "kv_c", "k_pe", "index_k", "slot_mapping")
OUTS = ("kv_c_out", "k_pe_out", "index_k_out")
CACHES = ("mla_kv_cache", "indexer_k_cache")
WRITTEN = (*OUTS, *CACHES, "topk_indices_buffer")


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def run(args: dict[str, Any], **changes: Any) -> dict[str, torch.Tensor]:
    """Everything a call wrote, as bytes; the arguments stay as they are."""
    args = {**args, **changes}
    args.update({name: args[name].clone() for name in WRITTEN if args[name] is not None})
    q_out = reference.fused_norm_rope(**args)
    written = {name: raw(args[name]) for name in WRITTEN if args[name] is not None}
    return {"q": raw(q_out), **written}


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name in actual:
        assert torch.equal(actual[name], expected[name]), name


def query_args(num_tokens: int, *, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    g = seeded(1)
    heads, index_heads, nope, rope_dim, dim = 3, 4, 48, 16, 32
    table = torch.randn(TABLE_ROWS, rope_dim, generator=g)

    def normal(*shape: int) -> torch.Tensor:
        scales = torch.randint(-6, 7, (*shape[:-1], 1), generator=g)
        return (torch.randn(*shape, generator=g) * torch.exp2(scales.float())).to(dtype)

    return dict(
        positions=torch.randint(TABLE_ROWS, (num_tokens,), generator=g),
        q_pe=normal(num_tokens, heads, 24 + rope_dim)[..., 24:],
        q_pe_cos_sin=table,
        index_q=normal(num_tokens, index_heads, dim),
        index_q_cos_sin=table,
        ql_nope=normal(heads, num_tokens, nope).transpose(0, 1),
        q_scale=torch.tensor([0.37]),
        index_weights=normal(num_tokens, dim + index_heads)[:, dim:],
        index_weights_softmax_scale=dim**-0.5,
        # Not a power of two, so that the order of the products shows.
        index_weights_head_scale=0.3,
    )


QUERY_TOKEN_ARGS = ("positions", "q_pe", "index_q", "ql_nope", "index_weights")


# Float64


def rms_norm64(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    rstd = (x.square().mean(-1, keepdim=True) + np.float32(eps).item()).rsqrt()
    return x * rstd * weight.double()


def rope64(x: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """As a complex product; x [n, D]."""
    out = x.double().clone()
    half = cos_sin.shape[1] // 2
    turn = torch.complex(cos_sin[:, :half].double(), cos_sin[:, half:].double())
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    turned = torch.complex(out[:, first], out[:, second]) * turn
    out[:, first], out[:, second] = turned.real, turned.imag
    return out


@pytest.mark.parametrize("dim", [1, 2, 5, 96, 1536, 7168])
def test_rms_norm_against_float64(dim):
    x, weight = torch.randn(64, dim, generator=seeded(2)), torch.randn(dim, generator=seeded(3))
    exact = rms_norm64(x, weight, 1e-6)
    error = (reference.rms_norm(x, weight, 1e-6) - exact).abs()
    # Relative: ceil(log2 D) additions, square, division, eps, halved by the root; root,
    # reciprocal and two products in full.
    units = (int(np.ceil(np.log2(dim))) + 3) / 2 + 4
    assert (error <= 1.01 * units * UNIT * exact.abs()).all()


@pytest.mark.parametrize("dim", [1, 2, 5, 128])
def test_layer_norm_against_float64(dim):
    x = torch.randn(64, dim, generator=seeded(2)) + 3.0
    weight, bias = torch.randn(dim, generator=seeded(3)), torch.randn(dim, generator=seeded(4))
    wide = x.double()
    centered = wide - wide.mean(-1, keepdim=True)
    rstd = (centered.square().mean(-1, keepdim=True) + np.float32(1e-6).item()).rsqrt()
    exact = centered * rstd * weight + bias
    error = (reference.layer_norm(x, weight, bias, 1e-6) - exact).abs()
    # The mean is off by (log2 D + 2) units of max |x|, which enters the centered value and,
    # squared, vanishes from the variance; the rest as in the RMS norm.
    depth = int(np.ceil(np.log2(dim)))
    centering = (depth + 3) * UNIT * wide.abs().amax(-1, keepdim=True)
    scaling = ((depth + 3) / 2 + 4) * UNIT * centered.abs() + centering
    variance = centering * rstd * centered.abs()
    bound = (scaling + variance) * rstd * weight.abs() + UNIT * exact.abs()
    assert (error <= 1.01 * bound).all()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "rope_dim"), [(2, 2), (64, 64), (128, 64), (7, 4)])
def test_rope_against_float64(interleaved, dim, rope_dim):
    x, table = (
        torch.randn(64, dim, generator=seeded(5)),
        torch.randn(64, rope_dim, generator=seeded(9)),
    )
    exact = rope64(x, table, interleaved)
    rotated = reference.rope(x, table, interleaved)
    half = rope_dim // 2
    a, b = (
        (x[:, 0:rope_dim:2], x[:, 1:rope_dim:2]) if interleaved else x[:, :rope_dim].split(half, 1)
    )
    # One rounding of the second product and one of the sum, both at most |a cos| + |b sin| or
    # |b cos| + |a sin|.
    terms = (a.abs() + b.abs()) * table.view(64, 2, half).abs().amax(1)
    bound = 2 * UNIT * (terms.repeat_interleave(2, 1) if interleaved else terms.repeat(1, 2))
    assert ((rotated - exact).abs()[:, :rope_dim] <= 1.01 * bound).all()
    assert torch.equal(rotated[:, rope_dim:], x[:, rope_dim:])


def test_rope_rounds_like_a_fused_multiply_add():
    """a * cos cancels against the rounded b * sin: only a fused multiply-add keeps the rest."""
    a, cos = 1.0 + 2.0**-12, 1.0 + 2.0**-12
    x = torch.tensor([[a, 1.0]])
    product = np.float32(a) * np.float32(cos)
    rotated = reference.rope(x, torch.tensor([[cos, float(product)]]), True)
    assert rotated[0, 0].item() == a * cos - float(product) == 2.0**-24


@pytest.mark.parametrize("dim", [1, 3, 128, 1000, 7168, 40001])
def test_sum_of_a_row_depends_on_the_row_alone(dim):
    x = torch.randn(9, dim + 3, generator=seeded(6))[:, 1 : dim + 1]
    together = reference._sum_rows(x.clone())
    for i in range(9):
        assert torch.equal(reference._sum_rows(x[i : i + 1].clone()), together[i : i + 1])


# Norm and RoPE


@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norm_rope_outputs_against_float64(dtype, interleave):
    args = norm_rope_args(33, dtype=dtype, mode="auto")
    args["index_rope_interleave"] = interleave
    q = reference.fused_norm_rope(**args)
    cos_sin = args["rope_cos_sin"][args["positions"]]
    index_cos_sin = args["index_rope_cos_sin"].float()[args["positions"]]
    key = args["index_k"].double()
    normed = torch.nn.functional.layer_norm(
        key,
        key.shape[1:],
        args["index_k_norm_weight"].double(),
        args["index_k_norm_bias"].double(),
        args["index_k_norm_eps"],
    )
    expected = {
        "q": rms_norm64(args["q_c"], args["q_norm_weight"], args["q_norm_eps"]),
        "kv_c_out": rms_norm64(args["kv_c"], args["kv_norm_weight"], args["kv_norm_eps"]),
        "k_pe_out": rope64(args["k_pe"], cos_sin, True),
        "index_k_out": rope64(normed, index_cos_sin, interleave),
    }
    step = torch.finfo(dtype).eps / 2
    for name, exact in expected.items():
        actual = q if name == "q" else args[name]
        assert actual.dtype == dtype
        # One rounding to the output's dtype, and at most 64 units of fp32 before it.
        bound = step * exact.abs() + 64 * UNIT * exact.abs().amax() + torch.finfo(dtype).tiny
        assert ((actual.double() - exact).abs() <= bound).all(), name
    kv, k_pe = mla_layout("auto", dtype=dtype).decode(args["mla_kv_cache"], args["slot_mapping"])
    assert torch.equal(kv, args["kv_c_out"].float())
    assert torch.equal(k_pe, args["k_pe_out"].float())


@pytest.mark.parametrize("mode", MLA_MODES)
def test_caches_hold_the_fp32_outputs(mode):
    """With fp32 outs the cache is their encoding, to the byte: no rounding in between."""
    args = norm_rope_args(50, mode=mode)
    for name in OUTS:
        args[name] = args[name].float()
    if mode == "float16":
        args["mla_kv_cache"] = args["mla_kv_cache"].view(torch.float16)
    expected_mla = args["mla_kv_cache"].clone()
    expected_indexer = args["indexer_k_cache"].clone()
    reference.fused_norm_rope(**args)
    slots, outs = args["slot_mapping"], [args[name] for name in OUTS]
    scale = args["mla_k_scale"]
    mla_layout(mode, dtype=expected_mla.dtype).encode(expected_mla, slots, *outs[:2], scale)
    IndexerCache().encode(expected_indexer, slots, outs[2])
    assert torch.equal(raw(args["mla_kv_cache"]), raw(expected_mla))
    assert torch.equal(args["indexer_k_cache"], expected_indexer)


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 17, 1000, 4099])
def test_norm_rope_rows_are_independent(num_tokens):
    args = norm_rope_args(num_tokens, q_dim=384)
    together = run(args)
    alone = {name: args[name].clone() for name in WRITTEN}
    q = torch.empty_like(args["q_c"], memory_format=torch.contiguous_format)
    picked = range(num_tokens) if num_tokens < 20 else [0, 1, 7, 511, 512, num_tokens - 1]
    for i in picked:
        row = slice(i, i + 1)
        one = {**args, **{name: args[name][row].clone() for name in TOKEN_ARGS}}
        one.update({name: alone[name][row] for name in (*OUTS, "topk_indices_buffer")})
        one.update({name: alone[name] for name in CACHES})
        q[row] = reference.fused_norm_rope(**one)
        assert torch.equal(raw(q[row]), together["q"][row])
        for name in OUTS:
            assert torch.equal(raw(alone[name][row]), together[name][row]), name
    slots = args["slot_mapping"][list(picked)]
    for name in CACHES[:1]:
        block, offset = slots // BLOCK_SIZE, slots % BLOCK_SIZE
        assert torch.equal(alone[name][block, offset], together[name][block, offset])
    decode = IndexerCache().decode
    assert torch.equal(
        decode(alone["indexer_k_cache"], slots), decode(together["indexer_k_cache"], slots)
    )


@pytest.mark.parametrize("elements", [1, 5000, 1 << 30])
def test_chunking_does_not_show(elements, monkeypatch):
    args, query = norm_rope_args(300), query_args(300)
    expected, expected_query = run(args), reference.fused_q(**query)
    monkeypatch.setattr(reference, "_CHUNK_ELEMENTS", elements)
    assert_same(run(args), expected)
    for actual, tensor in zip(reference.fused_q(**query), expected_query, strict=True):
        assert torch.equal(raw(actual), raw(tensor))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_strided_inputs_equal_contiguous(dtype):
    args = norm_rope_args(77, dtype=dtype)
    packed = {name: args[name].contiguous() for name in TOKEN_ARGS}
    assert not args["q_c"].is_contiguous()
    assert_same(run(args, **packed), run(args))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_inputs_are_left_alone(dtype):
    args, query = norm_rope_args(20, dtype=dtype), query_args(20, dtype=dtype)
    before = {n: v.clone() for n, v in args.items() if torch.is_tensor(v) and n not in WRITTEN}
    before_query = {n: v.clone() for n, v in query.items() if torch.is_tensor(v)}
    reference.fused_norm_rope(**args)
    reference.fused_q(**query)
    for tensors, current in ((before, args), (before_query, query)):
        for name, tensor in tensors.items():
            assert torch.equal(current[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_outs_may_be_the_inputs(dtype, monkeypatch):
    monkeypatch.setattr(reference, "_CHUNK_ELEMENTS", 3000)
    args = norm_rope_args(40, dtype=dtype)
    expected = run(args)
    returned = reference.fused_norm_rope(
        **{**args, "kv_c_out": args["kv_c"], "k_pe_out": args["k_pe"]}, q_c_out=args["q_c"]
    )
    assert returned is args["q_c"]
    for name, source in (("q", "q_c"), ("kv_c_out", "kv_c"), ("k_pe_out", "k_pe")):
        assert torch.equal(raw(args[source]), expected[name])
    for name in (*CACHES, "index_k_out", "topk_indices_buffer"):
        assert torch.equal(raw(args[name]), expected[name]), name


def test_outs_keep_their_own_dtype():
    args = norm_rope_args(9)
    args.update(kv_c_out=args["kv_c_out"].half(), k_pe_out=args["k_pe_out"].float())
    q_c_out = torch.full(args["q_c"].shape, torch.nan)
    reference.fused_norm_rope(**args, q_c_out=q_c_out)
    exact = reference.rms_norm(args["q_c"].float(), args["q_norm_weight"], args["q_norm_eps"])
    assert torch.equal(q_c_out, exact)
    kv = reference.rms_norm(args["kv_c"].float(), args["kv_norm_weight"], args["kv_norm_eps"])
    assert torch.equal(args["kv_c_out"], kv.half())


def test_returned_tensor_is_packed():
    for num_tokens in (0, 1, 5):
        q = reference.fused_norm_rope(**norm_rope_args(num_tokens))
        assert q.shape == (num_tokens, 96) and q.stride() == (96, 1)


def changed_slots(before: torch.Tensor, after: torch.Tensor) -> list[int]:
    """MLA slots of which any byte changed."""
    changed = (raw(before) != raw(after)).any(-1).flatten()
    return changed.nonzero().flatten().tolist()


def test_each_cache_is_gated_by_its_own_slots():
    args = norm_rope_args(8)
    args["indexer_k_cache"] = args["indexer_k_cache"][:1]
    mla_capacity = args["mla_kv_cache"].shape[0] * BLOCK_SIZE
    args["slot_mapping"] = torch.tensor([3, -1, mla_capacity, mla_capacity - 1, 2**62, -(2**63)])
    args["indexer_slot_mapping"] = torch.tensor([-7, 5, 16, 2, 15], dtype=torch.int32)
    before = {name: args[name].clone() for name in CACHES}
    reference.fused_norm_rope(**args)
    mla_slots = changed_slots(before["mla_kv_cache"], args["mla_kv_cache"])
    assert mla_slots == [3, mla_capacity - 1]
    written = torch.full_like(before["indexer_k_cache"], CANARY)
    live = torch.tensor([1, 3, 4])
    keys = run({**args, "index_k_out": args["index_k_out"].float()})["index_k_out"]
    slots = args["indexer_slot_mapping"][live]
    IndexerCache().encode(written, slots, keys.view(torch.float32)[live])
    assert torch.equal(args["indexer_k_cache"], written)


def test_indexer_slots_default_to_the_slots():
    args = norm_rope_args(8)
    assert_same(run(args), run(args, indexer_slot_mapping=args["slot_mapping"]))


def test_padding_rows_still_get_query_norm_and_fill():
    args = norm_rope_args(12)
    whole = run(args)
    short = run(args, slot_mapping=args["slot_mapping"][:5].int())
    for name in ("q", *OUTS, "topk_indices_buffer"):
        assert torch.equal(short[name], whole[name]), name
    before = raw(args["mla_kv_cache"])
    slots = changed_slots(before, short["mla_kv_cache"])
    assert slots == sorted(args["slot_mapping"][:5].tolist())


def test_topk_fill_covers_the_rows_of_the_call():
    args = norm_rope_args(6)
    reference.fused_norm_rope(**args)
    filled = args["topk_indices_buffer"]
    assert (filled[:6] == -1).all() and (filled[6:] == 77).all()
    for off in ({"fill_topk": False}, {"has_indexer": False}):
        args = norm_rope_args(6)
        reference.fused_norm_rope(**{**args, **off})
        assert (args["topk_indices_buffer"] == 77).all()


def test_without_caches_and_outs_the_query_norm_and_the_fill_remain():
    args = norm_rope_args(6)
    expected = run(args)
    nothing = dict.fromkeys((*OUTS, *CACHES, "slot_mapping", "indexer_slot_mapping"))
    assert_same(
        run(args, **nothing), {name: expected[name] for name in ("q", "topk_indices_buffer")}
    )


def test_without_an_indexer():
    args = norm_rope_args(6)
    expected = run(args)
    absent = [name for name in args if name.startswith("index") and not name.endswith("eps")]
    args.update(dict.fromkeys(absent), has_indexer=False)
    args["topk_indices_buffer"] = torch.empty(0, 0, dtype=torch.int32)
    written = run(args)
    for name in ("q", "kv_c_out", "k_pe_out", "mla_kv_cache"):
        assert torch.equal(written[name], expected[name]), name


def test_indexer_tensors_are_required_with_an_indexer():
    for name in ("index_k", "index_k_norm_bias", "index_rope_cos_sin"):
        with pytest.raises(ValueError, match=f"{name}: expected a tensor, got None"):
            reference.fused_norm_rope(**{**norm_rope_args(2), name: None})


@pytest.mark.parametrize("num_tokens", [0, 1, 3])
def test_smallest_sizes(num_tokens):
    args = norm_rope_args(
        num_tokens, q_dim=1, kv_dim=1, rope_dim=2, index_dim=4, mode="auto", dtype=torch.float32
    )
    expected = rms_norm64(args["q_c"], args["q_norm_weight"], args["q_norm_eps"])
    q = reference.fused_norm_rope(**args)
    torch.testing.assert_close(q.double(), expected, rtol=8 * UNIT, atol=0)
    kv = mla_layout("auto", kv_dim=1, rope_dim=2, dtype=torch.float32)
    decoded = torch.cat(kv.decode(args["mla_kv_cache"], args["slot_mapping"]), 1)
    assert torch.equal(decoded, torch.cat([args["kv_c_out"], args["k_pe_out"]], 1))


def test_positions_are_clamped_into_the_table():
    args, query = norm_rope_args(4), query_args(4)
    wild = torch.tensor([-1, -(2**40), TABLE_ROWS, 2**62])
    tame = torch.tensor([0, 0, TABLE_ROWS - 1, TABLE_ROWS - 1])
    assert_same(run(args, positions=wild), run(args, positions=tame.int()))
    for a, b in zip(
        reference.fused_q(**{**query, "positions": wild}),
        reference.fused_q(**{**query, "positions": tame}),
        strict=True,
    ):
        assert torch.equal(raw(a), raw(b))


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -3e38])
def test_a_non_finite_row_changes_no_other_row(poison):
    args, query = norm_rope_args(9), query_args(9)
    expected, expected_query = run(args), reference.fused_q(**query)
    others = torch.arange(9) != 4
    for name in ("q_c", "kv_c", "k_pe", "index_k"):
        args[name][4] = poison
    for name in ("q_pe", "index_q", "ql_nope"):
        query[name][4] = poison
    written = run(args)
    for name in ("q", *OUTS):
        assert torch.equal(written[name][others], expected[name][others]), name
    slot = int(args["slot_mapping"][4])
    kept = torch.ones(expected["mla_kv_cache"].shape[0] * BLOCK_SIZE, dtype=torch.bool)
    kept[slot] = False
    entries, expected_entries = written["mla_kv_cache"], expected["mla_kv_cache"]
    assert torch.equal(entries.flatten(0, 1)[kept], expected_entries.flatten(0, 1)[kept])
    for a, b in zip(reference.fused_q(**query), expected_query, strict=True):
        assert torch.equal(raw(a)[others], raw(b)[others])


def test_cache_dtype_decides_the_fp8_flavour():
    args = norm_rope_args(5)
    bytes_of = run(args, fp8_dtype=FNUZ)
    typed = {name: args[name].view(FNUZ) for name in CACHES}
    assert_same(run(args, **typed), bytes_of)
    assert not torch.equal(bytes_of["mla_kv_cache"], run(args)["mla_kv_cache"])


@pytest.mark.parametrize(
    "options",
    [
        {"index_scale_format": "ue8m0x4"},
        {"indexer_cache_shuffled": True},
        {"index_rope_interleave": True},
    ],
)
def test_indexer_options_reach_the_cache(options):
    args = norm_rope_args(20)
    args["index_k_out"] = args["index_k_out"].float()
    expected = args["indexer_k_cache"].clone()
    reference.fused_norm_rope(**args, **options)
    layout = IndexerCache(
        128,
        options.get("index_scale_format", "fp32"),
        options.get("indexer_cache_shuffled", False),
    )
    layout.encode(expected, args["slot_mapping"], args["index_k_out"])
    assert torch.equal(args["indexer_k_cache"], expected)
    plain = norm_rope_args(20)
    reference.fused_norm_rope(**plain)
    assert not torch.equal(args["indexer_k_cache"], plain["indexer_k_cache"])


def test_needs_no_grad():
    args = norm_rope_args(3)
    args["q_norm_weight"] = torch.nn.Parameter(args["q_norm_weight"])
    args["kv_norm_weight"] = torch.nn.Parameter(args["kv_norm_weight"])
    assert not reference.fused_norm_rope(**args).requires_grad
    assert not args["kv_c_out"].requires_grad


# Queries


@pytest.mark.parametrize("fp8_dtype", [None, FN, FNUZ])
@pytest.mark.parametrize("interleave", [False, True])
def test_query_codes_scales_and_weights(fp8_dtype, interleave):
    args = query_args(21)
    index_q, weights, mqa_q = reference.fused_q(
        **args, index_rope_interleave=interleave, fp8_dtype=fp8_dtype
    )
    fp8_dtype = fp8_dtype or FN
    assert index_q.dtype == mqa_q.dtype == fp8_dtype and weights.dtype == torch.float32
    cos_sin = args["q_pe_cos_sin"][args["positions"]]
    scale = np.float32(0.37)
    for head in range(3):
        rotated = reference.rope(args["q_pe"][:, head].float(), cos_sin, True)
        query = torch.cat([args["ql_nope"][:, head].float(), rotated], 1)
        codes = codecs.encode_fp8(torch.from_numpy(query.numpy() / scale), fp8_dtype)
        assert torch.equal(mqa_q[:, head].view(torch.uint8), codes)
    for head in range(4):
        key = reference.rope(args["index_q"][:, head].float(), cos_sin, interleave)
        row_scale = codecs.row_scale(codecs.finite_amax(key, 1), fp8_dtype)
        limit = codecs.fp8_limit(fp8_dtype, True)
        codes = codecs.encode_fp8(key / row_scale.unsqueeze(1), fp8_dtype, limit)
        assert torch.equal(index_q[:, head].view(torch.uint8), codes)
        expected = args["index_weights"][:, head].float().numpy() * row_scale.numpy()
        expected = expected * np.float32(args["index_weights_softmax_scale"])
        expected = expected * np.float32(args["index_weights_head_scale"])
        np.testing.assert_array_equal(weights[:, head].numpy(), expected)


def quotients_at_ties(scale: float) -> torch.Tensor:
    """fp32 numbers whose quotient by scale is near a midpoint of two codes."""
    values = codecs.decode_fp8(torch.arange(8, 127, dtype=torch.uint8))
    ties = (values[1:] + values[:-1]) / 2 * scale
    steps = torch.arange(-2, 3, dtype=torch.int32)
    return (ties.view(torch.int32).unsqueeze(1) + steps).view(torch.float32).flatten()


def test_true_division_by_the_per_tensor_scales():
    """A product with the reciprocal rounds some quotients to the other side of a tie."""
    scale, x = np.float32(0.37), quotients_at_ties(0.37)
    codes = codecs.encode_fp8(torch.from_numpy(x.numpy() / scale))
    reciprocal = codecs.encode_fp8(torch.from_numpy(x.numpy() * (np.float32(1) / scale)))
    assert not torch.equal(codes, reciprocal)
    args = query_args(1)
    args.update(ql_nope=x.view(1, 1, -1).expand(1, 3, -1), index_q=None)
    mqa_q = reference.fused_q(**args, has_indexer=False)[2]
    assert torch.equal(mqa_q[0, 2, : len(x)].view(torch.uint8), codes)
    layout = mla_layout("fp8", kv_dim=len(x), rope_dim=len(x))
    cache, slot = layout.empty(1, 1), torch.tensor([0])
    layout.encode(cache, slot, x.unsqueeze(0), x.unsqueeze(0), torch.tensor([0.37]))
    assert torch.equal(cache.flatten(), codes.repeat(2))


@pytest.mark.parametrize("num_tokens", [1, 2, 17, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_query_rows_are_independent(num_tokens, dtype):
    args = query_args(num_tokens, dtype=dtype)
    together = reference.fused_q(**args)
    for i in range(num_tokens) if num_tokens < 20 else [0, 63, 64, 999]:
        row = slice(i, i + 1)
        one = {name: args[name][row].clone() for name in QUERY_TOKEN_ARGS}
        for alone, all_rows in zip(reference.fused_q(**{**args, **one}), together, strict=True):
            assert torch.equal(raw(alone), raw(all_rows)[row])


def test_query_strided_equals_contiguous():
    args = query_args(50)
    packed = {name: args[name].contiguous() for name in QUERY_TOKEN_ARGS}
    assert not args["ql_nope"].is_contiguous()
    outputs = reference.fused_q(**args), reference.fused_q(**{**args, **packed})
    for strided, contiguous in zip(*outputs, strict=True):
        assert torch.equal(raw(strided), raw(contiguous))


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_query_output_shapes(num_tokens):
    args = query_args(num_tokens)
    index_q, weights, mqa_q = reference.fused_q(**args)
    assert index_q.shape == (num_tokens, 4, 32) and index_q.stride() == (128, 32, 1)
    assert weights.shape == (num_tokens, 4) and weights.stride() == (4, 1)
    assert mqa_q.shape == (num_tokens, 3, 64) and mqa_q.stride() == (192, 64, 1)
    bare = {**args, "index_q": None, "index_q_cos_sin": None, "index_weights": None}
    index_q, weights, mqa_again = reference.fused_q(**bare, has_indexer=False)
    assert index_q.shape == (num_tokens, 0, 0) and index_q.dtype == FN
    assert weights.shape == (num_tokens, 0) and weights.dtype == torch.float32
    assert torch.equal(raw(mqa_again), raw(mqa_q))


def test_query_without_quantization_is_the_rotated_q_pe():
    args = query_args(13)
    args.update(ql_nope=torch.empty(0), q_scale=torch.empty(0))
    _, _, mqa_q = reference.fused_q(**args, quantize_mqa=False)
    cos_sin = args["q_pe_cos_sin"][args["positions"]]
    rotated = reference.rope(args["q_pe"].float(), cos_sin, True)
    assert mqa_q.dtype == torch.bfloat16 and torch.equal(mqa_q, rotated.bfloat16())


# Embedding ops


def embed_args(num_tokens: int) -> dict[str, Any]:
    g = seeded(8)
    hidden, vocab = 200, 31
    return dict(
        positions=torch.randint(0, 3, (num_tokens,), generator=g),
        input_ids=torch.randint(0, vocab, (num_tokens,), generator=g),
        embed_table=torch.randn(vocab, hidden, generator=g).bfloat16(),
        previous_hidden=torch.randn(num_tokens, hidden + 8, generator=g).bfloat16()[:, :hidden],
        enorm_weight=torch.randn(hidden, generator=g),
        hnorm_weight=torch.randn(hidden, generator=g).bfloat16(),
        eps=1e-6,
    )


def eh_args(args: dict[str, Any]) -> dict[str, Any]:
    rest = {name: v for name, v in args.items() if name not in ("input_ids", "embed_table")}
    return {**rest, "inputs_embeds": args["embed_table"][args["input_ids"].long()]}


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 300])
def test_eh_norm(num_tokens):
    args = embed_args(num_tokens)
    eh = eh_args(args)
    actual = reference.fused_eh_norm(**eh)
    embeds = torch.where(eh["positions"].unsqueeze(1) == 0, 0.0, eh["inputs_embeds"].double())
    exact = torch.cat(
        [
            rms_norm64(embeds, eh["enorm_weight"], 1e-6),
            rms_norm64(eh["previous_hidden"], eh["hnorm_weight"], 1e-6),
        ],
        1,
    )
    assert actual.shape == (num_tokens, 400) and actual.stride() == (400, 1)
    # One rounding to bf16 and ten of fp32, see the RMS norm above.
    assert ((actual.double() - exact).abs() <= (2.0**-8 + 10 * UNIT) * exact.abs()).all()
    assert torch.equal(raw(reference.fused_embed_eh_norm(**args)), raw(actual))
    out = torch.full((num_tokens, 408), torch.nan, dtype=torch.bfloat16)
    assert reference.fused_embed_eh_norm(**args, out=out[:, :400]).data_ptr() == out.data_ptr()
    assert torch.equal(out[:, :400], actual) and out[:, 400:].isnan().all()


def test_eh_norm_does_not_read_embeddings_at_position_zero():
    eh = eh_args(embed_args(4))
    eh["positions"] = torch.tensor([0, 1, 0, 2], dtype=torch.int32)
    eh["inputs_embeds"][0], eh["inputs_embeds"][2] = torch.nan, torch.inf
    left = reference.fused_eh_norm(**eh)[:, :200]
    assert (left[[0, 2]] == 0).all() and (left[[1, 3]] != 0).any(1).all()


def test_embed_norm_is_gather_then_norm():
    args = embed_args(40)
    table, weight = args["embed_table"], args["enorm_weight"]
    ids = args["input_ids"].int()
    residual, normed = reference.fused_embed_norm(ids, table, weight, 1e-6)
    gathered = table[ids.long()]
    expected = reference.rms_norm(gathered.float(), weight, 1e-6).bfloat16()
    assert torch.equal(residual, gathered) and torch.equal(normed, expected)
    outs = {name: torch.full_like(gathered, torch.nan) for name in ("residual_out", "normed_out")}
    reference.fused_embed_norm(ids, table, weight, 1e-6, **outs)
    assert torch.equal(outs["residual_out"], residual)
    assert torch.equal(outs["normed_out"], normed)


def test_ids_are_clamped_into_the_table():
    args = embed_args(3)
    table, weight = args["embed_table"], args["enorm_weight"]
    wild, tame = torch.tensor([-1, 31, 2**40]), torch.tensor([0, 30, 30])
    for actual, expected in zip(
        reference.fused_embed_norm(wild, table, weight, 1e-6),
        reference.fused_embed_norm(tame, table, weight, 1e-6),
        strict=True,
    ):
        assert torch.equal(actual, expected)
    assert torch.equal(
        reference.fused_embed_eh_norm(**{**args, "input_ids": wild}),
        reference.fused_embed_eh_norm(**{**args, "input_ids": tame}),
    )
