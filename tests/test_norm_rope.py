"""`fused_norm_rope` against the float64 oracle, to the byte where the inputs leave one answer."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given, settings
from support import (
    BF16,
    FN,
    FNUZ,
    FP16,
    FP32,
    PER_TOKEN,
    SMALL,
    SPECIAL_VALUES,
    TINY,
    array,
    assert_like_fake,
    byte_array,
    device_cases,
    fp8_values,
    generator,
    is_packed,
    model,
    name_of,
    on_devices,
    on_gpu,
    oracle_arguments,
    poisoned_memory,
    sample_rows,
    share_towards_zero,
    special_values,
    to_device,
)

import dsv32_ops
from dsv32_ops import launch, reference, testing
from dsv32_ops.layouts import MLA_MODES, IndexerCache, mla_layout
from dsv32_ops.models import PRESETS, ModelConfig
from dsv32_ops.testing import POISON_BYTE, as_bytes, poison, same_bytes

MOST_PARTS_TOKENS = max(parts[-1][0] for parts in launch.NORM_ROPE_PARTS.values())

V32, GLM, KIMI = PRESETS["deepseek-v3.2"], PRESETS["glm-5"], PRESETS["kimi-k2"]
OUTS = ("kv_c_out", "k_pe_out", "index_k_out")
CACHES = ("mla_kv_cache", "indexer_k_cache")
WRITTEN = (*OUTS, *CACHES, "topk_indices_buffer")
INDEX_ARGUMENTS = (
    "index_k", "index_k_norm_weight", "index_k_norm_bias", "index_rope_cos_sin"
)  # fmt: skip
GUARD = 256
INT32_MIN, INT64_MIN = -(2**31), -(2**63)


class Caches(NamedTuple):
    """A combination of cache formats; fp8 is the element type of the caches, None for uint8."""

    mode: str
    dtype: torch.dtype = BF16
    fp8: torch.dtype | None = None
    fp8_dtype: torch.dtype | None = None
    scale_format: str = "fp32"
    shuffled: bool = False


DS_MLA = Caches("fp8_ds_mla")
MLA_FORMATS = [
    Caches("auto"),
    Caches("auto", FP16),
    Caches("auto", FP32),
    Caches("bfloat16", FP32),
    Caches("float16"),
    Caches("fp8"),
    Caches("fp8_e4m3", fp8=FN),
    Caches("fp8", FP32, fp8=FNUZ),
    Caches("fp8_e4m3", fp8_dtype=FNUZ),
    DS_MLA,
    Caches("fp8_ds_mla", FP16, fp8=FN),
    Caches("fp8_ds_mla", fp8=FNUZ),
    Caches("nvfp4_ds_mla"),
]
INDEXER_FORMATS: list[dict[str, Any]] = [
    {"scale_format": scale_format, "shuffled": shuffled}
    for scale_format, shuffled in itertools.product(("fp32", "ue8m0x4"), (False, True))
]
ALL_FORMATS = [mla._replace(**key) for mla in MLA_FORMATS for key in INDEXER_FORMATS]
# Tasks of one token share nothing but its position: on a GPU each format of either cache once.
GPU_FORMATS = [
    mla._replace(**INDEXER_FORMATS[(i + 3) % len(INDEXER_FORMATS)])
    for i, mla in enumerate(MLA_FORMATS)
]


class Call:
    """Arguments of one call, and the guarded memory in which its caches lie with gaps."""

    def __init__(
        self,
        config: ModelConfig,
        num_tokens: int,
        device: str,
        formats: Caches = DS_MLA,
        *,
        block_size: int = 16,
        index_block_size: int | None = None,
        outs: bool = True,
        gaps: bool = True,
        seed: int = 0,
        index_dtype: torch.dtype = torch.int64,
    ) -> None:
        self.inputs = testing.norm_rope_inputs(
            config,
            num_tokens,
            device=device,
            dtype=formats.dtype,
            mode=formats.mode,
            caches=False,
            outs=outs,
            seed=seed,
            weight_dtype=FP32,
            index_dtype=index_dtype,
            index_scale_format=formats.scale_format,
            indexer_cache_shuffled=formats.shuffled,
            fp8_dtype=formats.fp8_dtype,
        )
        self.buffers: dict[str, torch.Tensor] = {}
        layouts: dict[str, Any] = {
            "mla_kv_cache": mla_layout(
                formats.mode,
                kv_dim=config.kv_lora_rank,
                rope_dim=config.rope_dim,
                dtype=formats.dtype,
            )
        }
        if config.has_indexer:
            layouts["indexer_k_cache"] = IndexerCache(config.index_dim, shuffled=formats.shuffled)
        self.slots("slot_mapping", num_tokens, block_size, seed)
        sizes = {"mla_kv_cache": block_size, "indexer_k_cache": index_block_size or block_size}
        if index_block_size is not None:
            self.slots("indexer_slot_mapping", num_tokens, index_block_size, seed + 1)
        for name, layout in layouts.items():
            blocks = num_tokens // sizes[name] + 2
            cache, buffer = testing.canary_cache(
                layout,
                blocks,
                sizes[name],
                guard=GUARD,
                block_gap=48 if gaps else 0,
                entry_gap=16 if gaps and name == "mla_kv_cache" else 0,
                device=device,
            )
            if formats.fp8 is not None and cache.dtype == torch.uint8:
                cache = cache.view(formats.fp8)
            self.inputs[name], self.buffers[name] = cache, buffer

    def slots(self, name: str, num_tokens: int, block_size: int, seed: int) -> None:
        """Distinct slots in random order; about one row in five is padding."""
        g = generator(seed)
        slots = torch.randperm((num_tokens // block_size + 2) * block_size, generator=g)
        slots = slots[:num_tokens].masked_fill_(torch.rand(num_tokens, generator=g) < 0.2, -1)
        self.inputs[name] = slots.to(self.inputs["positions"])

    def poison(self) -> None:
        for buffer in self.buffers.values():
            buffer.fill_(POISON_BYTE)
        for name in (*OUTS, "topk_indices_buffer"):
            if self.inputs.get(name) is not None:
                poison(self.inputs[name])

    def run(self, op: Any = dsv32_ops.fused_norm_rope, **changes: Any) -> dict[str, torch.Tensor]:
        """Everything that one call on poisoned memory writes, as bytes."""
        self.poison()
        with poisoned_memory():
            q_out = op(**{**self.inputs, **changes})
        return self.written(q_out, {**self.inputs, **changes})

    def written(self, q_out: torch.Tensor, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
        tensors = {name: inputs.get(name) for name in (*OUTS, "topk_indices_buffer")}
        tensors = {"q": q_out, **tensors, **self.buffers}
        return {name: as_bytes(t).clone() for name, t in tensors.items() if t is not None}

    def run_in_pieces(self, pieces: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The same from one call per piece, a tensor of rows."""
        self.poison()
        whole = self.inputs
        q_out = torch.empty_like(whole["q_c"], memory_format=torch.contiguous_format)
        by_row = {name: whole[name] for name in OUTS if whole.get(name) is not None}
        by_row["topk_indices_buffer"] = whole["topk_indices_buffer"]
        for rows in pieces:
            tokens = {name: whole[name][rows] for name in PER_TOKEN & whole.keys()
                      if whole[name] is not None}  # fmt: skip
            outs = {name: poison(out[rows]) for name, out in by_row.items()}
            q_out[rows] = dsv32_ops.fused_norm_rope(**{**whole, **tokens, **outs})
            for name, out in outs.items():
                by_row[name][rows] = out
        return self.written(q_out, whole)

    def entries(self, name: str, rows: torch.Tensor) -> np.ndarray:
        """Bytes of the entries of some rows, all of them live, in the oracle's order."""
        cache, mapping = self.inputs[name], self.inputs["slot_mapping"]
        if name == "indexer_k_cache" and self.inputs["indexer_slot_mapping"] is not None:
            mapping = self.inputs["indexer_slot_mapping"]
        offsets = self.offsets(name, array(mapping[rows]))
        picked = torch.from_numpy(offsets).to(cache.device)
        return self.buffers[name][GUARD:][picked].cpu().numpy()

    def offsets(self, name: str, slots: np.ndarray) -> np.ndarray:
        cache = self.inputs[name]
        block_size, size = cache.shape[1], cache.element_size()
        where = {"block_size": block_size, "block_stride": cache.stride(0) * size}
        if name == "mla_kv_cache":
            where["entry_stride"] = cache.stride(1) * size
            return oracle.mla_offsets(slots, entry_bytes=cache.shape[2] * size, **where)
        head_dim, shuffled = cache.shape[2] - 4, self.inputs["indexer_cache_shuffled"]
        return oracle.indexer_offsets(slots, head_dim=head_dim, shuffled=shuffled, **where)


def expect(inputs: dict[str, Any], rows: Any = None) -> oracle.NormRope:
    cache = inputs["mla_kv_cache"]
    options: dict[str, Any] = {"values": fp8_values(inputs)}
    if cache is not None and cache.dtype in (BF16, FP16, FP32):
        options["cache_dtype"] = name_of(cache.dtype)
    return oracle.norm_rope(**oracle_arguments(inputs, rows), **options)


def assert_floats(name: str, actual: torch.Tensor, ideal: oracle.Ideal) -> None:
    oracle.assert_float_near(array(actual), ideal, name_of(actual.dtype), name=name)


def assert_outs(inputs: dict[str, Any], q_out: torch.Tensor, ideal: oracle.NormRope) -> None:
    assert q_out.dtype == inputs["q_c"].dtype and is_packed(q_out)
    assert_floats("q", q_out, ideal.q)
    for name, expected in zip(OUTS, (ideal.kv, ideal.k_pe, ideal.index_k), strict=True):
        if inputs.get(name) is not None:
            assert expected is not None
            assert_floats(name, inputs[name], expected)
    assert ideal.topk is not None
    assert np.array_equal(array(inputs["topk_indices_buffer"]), ideal.topk)


def assert_caches(call: Call, inputs: dict[str, Any], ideal: oracle.NormRope) -> None:
    """Guards, gaps, dead slots and live entries: every byte of the memory around the caches."""
    for name, buffer in call.buffers.items():
        cache, mapping = inputs[name], inputs["slot_mapping"]
        if cache is None:
            assert (buffer == POISON_BYTE).all()
            continue
        actual = buffer.cpu().numpy()
        assert (actual[:GUARD] == POISON_BYTE).all(), f"bytes in front of {name}"
        actual, size = actual[GUARD:], cache.element_size()
        blocks, block_size, _ = cache.shape
        where = {"num_blocks": blocks, "block_size": block_size}
        where["block_stride"] = cache.stride(0) * size
        before = np.full_like(actual, POISON_BYTE)
        if name == "mla_kv_cache":
            where["entry_stride"] = cache.stride(1) * size
            errors: dict[str, Any] = {"kv_err": ideal.kv.err, "k_pe_err": ideal.k_pe.err}
            oracle.assert_mla_cache(actual, before, array(mapping), ideal.mla, **where, **errors)
            continue
        if inputs["indexer_slot_mapping"] is not None:
            mapping = inputs["indexer_slot_mapping"]
        assert ideal.index_k is not None and ideal.indexer is not None
        oracle.assert_indexer_cache(
            actual,
            before,
            array(mapping),
            ideal.indexer,
            shuffled=inputs["indexer_cache_shuffled"],
            err=ideal.index_k.err,
            **where,
        )


def check(call: Call, op: Any = dsv32_ops.fused_norm_rope, **changes: Any) -> torch.Tensor:
    """One call on poisoned memory against the oracle, to the last byte of every written tensor."""
    call.poison()
    inputs = {**call.inputs, **changes}
    ideal = expect(inputs)
    kept = {
        name: t.clone()
        for name, t in inputs.items()
        if isinstance(t, torch.Tensor) and name not in WRITTEN
    }
    with poisoned_memory():
        q_out = op(**inputs)
    for name, before in kept.items():
        assert same_bytes(inputs[name], before), f"{name} was written"
    assert_outs(inputs, q_out, ideal)
    assert_caches(call, inputs, ideal)
    return q_out


def assert_same(
    actual: dict[str, torch.Tensor],
    expected: dict[str, torch.Tensor],
    names: Iterable[str] | None = None,
) -> None:
    for name in expected if names is None else names:
        assert torch.equal(actual[name], expected[name]), name


# Sizes and formats


@pytest.mark.parametrize("num_tokens", [1, 2, 37])
@device_cases(
    "case",
    [
        (V32, DS_MLA),
        (V32, Caches("auto", FP16)),
        (V32, Caches("fp8", FP32)),
        (GLM, Caches("auto")),
        (GLM, Caches("nvfp4_ds_mla", FP32)),
        (KIMI, Caches("auto")),
        (KIMI, Caches("fp8", FP16)),
    ],
)
def test_a_layer_of_each_model(device, case, num_tokens):
    config, formats = case
    check(Call(config, num_tokens, device, formats, block_size=64, gaps=False, outs=False))


@device_cases("formats", ALL_FORMATS, gpu=GPU_FORMATS)
def test_every_cache_format(device, formats):
    check(Call(SMALL, 53, device, formats))


@device_cases("formats", [f for f in GPU_FORMATS if f.mode in ("fp8", "fp8_e4m3")][:1])
def test_a_missing_k_scale_is_one(device, formats):
    call = Call(SMALL, 20, device, formats)
    check(call, mla_k_scale=None)
    one = torch.ones(1, device=device)
    assert_same(call.run(mla_k_scale=None), call.run(mla_k_scale=one))


@device_cases("mode", MLA_MODES, gpu=["auto", "fp8_ds_mla", "nvfp4_ds_mla"])
def test_only_the_fp8_modes_read_the_k_scale(device, mode):
    call = Call(SMALL, 20, device, Caches(mode, FP16 if mode == "float16" else BF16))
    scale = torch.full((1,), torch.nan, device=device)
    same = torch.equal(
        call.run(mla_k_scale=scale)["mla_kv_cache"], call.run(mla_k_scale=None)["mla_kv_cache"]
    )
    assert same == (mode not in ("fp8", "fp8_e4m3"))


ODD_SIZES = [
    model(name="1-1-2-2", q_lora_rank=1, kv_lora_rank=1, rope_dim=2, index_dim=2, index_topk=1),
    model(name="7-3-6-6", q_lora_rank=7, kv_lora_rank=3, rope_dim=6, index_dim=6, index_topk=5),
    model(name="5-1-2-4", q_lora_rank=5, kv_lora_rank=1, rope_dim=2, index_dim=4),
    model(name="33-20-6-8", q_lora_rank=33, kv_lora_rank=20, rope_dim=6, index_dim=8),
    model(name="100-65-10-45", q_lora_rank=100, kv_lora_rank=65, rope_dim=10, index_dim=45),
]


@pytest.mark.parametrize("num_tokens", [1, 19])
@device_cases(
    "case",
    [
        (config, interleave, dtype)
        for config in ODD_SIZES
        for interleave in (False, True)
        for dtype in (BF16, FP16, FP32)
    ],
    gpu=[
        (config, i % 2 == 0, (BF16, FP16, FP32)[i % 3]) for i, config in enumerate(ODD_SIZES)
    ] + [(ODD_SIZES[0], False, FP32), (ODD_SIZES[3], True, BF16)],
)  # fmt: skip
def test_odd_sizes(device, case, num_tokens):
    config, interleave, dtype = case
    config = replace(config, index_rope_interleave=interleave)
    check(Call(config, num_tokens, device, Caches("fp8" if interleave else "auto", dtype),
               block_size=4))  # fmt: skip


@device_cases("dtype", [BF16, FP16], gpu=[BF16])
def test_weights_and_tables_are_widened_not_narrowed(device, dtype):
    """Activations of one type, weights of another and tables of a third: all are exact in fp32."""
    call = Call(SMALL, 20, device)
    for name, value in call.inputs.items():
        if name.endswith(("norm_weight", "norm_bias")):
            call.inputs[name] = value.to(FP32 if dtype == BF16 else FP16)
        if name.endswith("cos_sin"):
            call.inputs[name] = value.to(dtype)
    check(call)


@device_cases("dtype", [BF16, FP16, FP32], gpu=[FP16])
def test_the_caches_element_type_is_its_own(device, dtype):
    """Mode auto rounds from fp32 straight to the cache's type, whatever the activations' is."""
    call = Call(SMALL, 20, device, Caches("auto", dtype))
    others = testing.norm_rope_inputs(SMALL, 20, device=device, dtype=FP32, caches=False)
    check(call, **{name: others[name] for name in ("q_c", "kv_c", "k_pe", "index_k")})


# Slots


SLOT_MAPS = {
    "negative": lambda slots: slots[:3].tolist() + [-1, -2, INT32_MIN] + slots[6:].tolist(),
    "shorter": lambda slots: slots[:7].tolist(),
    "empty": lambda slots: [],
    "longer": lambda slots: slots.tolist() + [0, 1, 2],
    "all dead": lambda slots: [-1] * len(slots),
}


def distinct_slots(count: int) -> torch.Tensor:
    """From 3 on, so that the rows past a map's end have slots of their own."""
    return torch.randperm(60, generator=generator(3))[:count] + 3


@pytest.mark.parametrize("kind", SLOT_MAPS)
@device_cases("dtype", [torch.int32, torch.int64])
def test_each_row_writes_its_live_slot_and_no_other(device, dtype, kind):
    num_tokens = 33
    call = Call(SMALL, num_tokens, device, index_dtype=dtype)
    slots = SLOT_MAPS[kind](distinct_slots(num_tokens))
    call.inputs["slot_mapping"] = torch.tensor(slots, dtype=dtype, device=device)
    check(call)


@device_cases("dtype", [torch.int64], gpu=[torch.int32, torch.int64])
def test_negative_slots_of_any_size_are_padding(device, dtype):
    call = Call(SMALL, 6, device, index_dtype=dtype)
    lowest = torch.iinfo(dtype).min
    slots = [5, -1, lowest, lowest + 1, 31, -(2**31)]
    call.inputs["slot_mapping"] = torch.tensor(slots, dtype=dtype, device=device)
    check(call)


@on_gpu
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_past_the_cache_are_skipped_on_a_gpu(dtype):
    call = Call(SMALL, 8, "cuda", index_dtype=dtype)
    capacity, highest = 2 * 16, torch.iinfo(dtype).max
    slots = [capacity - 1, capacity, capacity + 1, highest, 2**30, 3, min(2**40, highest), -1]
    call.inputs["slot_mapping"] = torch.tensor(slots, dtype=dtype, device="cuda")
    check(call)


@pytest.mark.parametrize("past", [0, 1, 2**40])
def test_slots_past_the_cache_are_an_error_on_a_cpu(past):
    call = Call(SMALL, 8, "cpu")
    call.inputs["slot_mapping"][3] = 32 + past
    call.poison()
    with pytest.raises(IndexError, match=f"slot_mapping.*32.* {32 + past} .*row 3"):
        dsv32_ops.fused_norm_rope(**call.inputs)
    assert all((buffer == POISON_BYTE).all() for buffer in call.buffers.values())


@device_cases("dtype", [torch.int32, torch.int64])
def test_each_cache_has_a_slot_map_and_a_block_size_of_its_own(device, dtype):
    call = Call(SMALL, 50, device, index_block_size=32, index_dtype=dtype)
    mla, indexer = (call.inputs[name] >= 0 for name in ("slot_mapping", "indexer_slot_mapping"))
    assert (mla & ~indexer).any() and (~mla & indexer).any()
    check(call)
    call.inputs["slot_mapping"] = call.inputs["slot_mapping"][:11]
    check(call)


@on_devices
def test_the_indexer_map_defaults_to_the_slot_map(device):
    call = Call(SMALL, 20, device)
    written = call.run()
    assert_same(call.run(indexer_slot_mapping=call.inputs["slot_mapping"]), written)


@on_devices
def test_a_cache_write_needs_only_its_own_cache(device):
    call = Call(SMALL, 20, device)
    whole = call.run()
    for name in CACHES:
        written = call.run(**{name: None})
        assert (written[name] == POISON_BYTE).all()
        assert_same(written, whole, whole.keys() - {name})


@on_devices
def test_positions_of_padding_rows_do_not_matter(device):
    """They are clamped, and no error: padding rows hold whatever the last step left there."""
    call = Call(SMALL, 30, device)
    wild = torch.tensor([-1, 2**40, INT64_MIN, 97], device=device)
    call.inputs["slot_mapping"][5:9] = -1
    call.inputs["positions"][5:9] = wild
    check(call)


@on_gpu
def test_positions_are_clamped_into_their_table_on_a_gpu():
    call = Call(SMALL, 30, "cuda")
    call.inputs["positions"][::3] += 90
    call.inputs["positions"][1::3] -= 90
    check(call)


# Outs and what runs without them


@on_devices
def test_a_profile_run_norms_the_query_and_fills(device):
    call = Call(SMALL, 20, device, outs=False)
    nothing = dict.fromkeys((*CACHES, "slot_mapping"))
    check(call, **nothing)


@pytest.mark.parametrize("given", [c for n in (1, 2) for c in itertools.combinations(OUTS, n)])
def test_outs_are_independent_of_each_other_and_of_the_slots(given):
    call = Call(SMALL, 20, "cpu")
    check(call, **{name: None for name in OUTS if name not in given})
    check(call, **dict.fromkeys(CACHES), **{name: None for name in OUTS if name not in given})


@on_devices
def test_outs_without_caches_hold_every_row(device):
    check(Call(SMALL, 20, device), **dict.fromkeys((*CACHES, "slot_mapping")))


@device_cases("dtype", [BF16, FP16, FP32], gpu=[FP32])
def test_outs_have_types_and_strides_of_their_own(device, dtype):
    call = Call(SMALL, 20, device)
    wide = {}
    for name in OUTS:
        rows, width = call.inputs[name].shape
        wide[name] = torch.full((rows, width + 5), 7.0, dtype=dtype, device=device)
        call.inputs[name] = wide[name][:, 2 : width + 2]
    check(call)
    for tensor in wide.values():
        assert (tensor[:, :2] == 7).all() and (tensor[:, -3:] == 7).all()


@device_cases("dtype", [BF16, FP32], gpu=[BF16])
def test_the_out_form_writes_the_callers_tensor_and_returns_nothing(device, dtype):
    call = Call(SMALL, 20, device)
    whole = torch.full((20, 31), 7.0, dtype=dtype, device=device)
    q_c_out = poison(whole[:, 3:27])
    call.poison()
    ideal = expect(call.inputs)
    assert torch.ops.dsv32.fused_norm_rope_out(q_c_out=q_c_out, **call.inputs) is None
    assert_floats("q_c_out", q_c_out, ideal.q)
    assert (whole[:, :3] == 7).all() and (whole[:, 27:] == 7).all()
    assert_caches(call, call.inputs, ideal)
    assert dsv32_ops.fused_norm_rope(**call.inputs, q_c_out=q_c_out) is q_c_out


@pytest.mark.parametrize("fill_topk", [True, False])
@device_cases("dtype", [BF16, FP32], gpu=[BF16])
def test_outs_may_be_the_inputs_themselves(device, dtype, fill_topk):
    for num_tokens in (20, 300 if device == "cpu" else MOST_PARTS_TOKENS + 300):
        call = Call(SMALL, num_tokens, device, Caches("fp8_ds_mla", dtype))
        call.inputs["fill_topk"] = fill_topk
        expected = call.run()
        q_c, kv_c, k_pe = (call.inputs[name] for name in ("q_c", "kv_c", "k_pe"))
        in_place = {"kv_c_out": kv_c, "k_pe_out": k_pe}
        call.poison()
        q_out = dsv32_ops.fused_norm_rope(**{**call.inputs, **in_place}, q_c_out=q_c)
        assert_same(call.written(q_out, {**call.inputs, **in_place}), expected)


@on_devices
def test_only_the_first_fifteen_arguments_are_needed(device):
    inputs = list(Call(SMALL, 9, device).inputs.items())
    q_out = torch.ops.dsv32.fused_norm_rope(*(value for _, value in inputs[:15]))
    named = dict(inputs[:15])
    assert same_bytes(torch.ops.dsv32.fused_norm_rope(**named), q_out)
    assert_floats("q", q_out, expect({**dict(inputs), "mla_kv_cache": None}).q)
    assert (named["topk_indices_buffer"][:9] == -1).all()


# The indexer and the top-k buffer


@device_cases("columns", [1, 5, 8, 2048], gpu=[5])
def test_the_fill_covers_all_columns_of_the_tokens_rows(device, columns):
    call = Call(SMALL, 20, device)
    buffer = torch.full((26, columns + 3), 7, dtype=torch.int32, device=device)
    view = buffer[:, :columns]
    dsv32_ops.fused_norm_rope(**{**call.inputs, "topk_indices_buffer": view})
    expected = torch.full_like(buffer, 7)
    expected[:20, :columns] = -1
    assert torch.equal(buffer, expected)


@pytest.mark.parametrize("shape", [(0,), (0, 8), (1, 8), (3, 2, 2)])
@device_cases("task", [{"has_indexer": False}, {"fill_topk": False}])
def test_without_the_task_the_buffer_is_not_touched(device, task, shape):
    call = Call(SMALL, 9, device)
    buffer = torch.full(shape, 77, dtype=torch.int32, device=device)
    if "has_indexer" in task:
        task = {**task, "index_k_out": None}
    dsv32_ops.fused_norm_rope(**{**call.inputs, **task, "topk_indices_buffer": buffer})
    assert (buffer == 77).all()


@on_devices
def test_without_an_indexer_only_its_part_is_missing(device):
    call = Call(SMALL, 20, device)
    whole = call.run()
    off = {"has_indexer": False, "index_k_out": None}
    for absent in ({}, dict.fromkeys((*INDEX_ARGUMENTS, "indexer_k_cache"))):
        written = call.run(**off, **absent)
        assert (written["indexer_k_cache"] == POISON_BYTE).all()
        assert (written["topk_indices_buffer"] == POISON_BYTE).all()
        assert_same(written, whole, ("q", "kv_c_out", "k_pe_out", "mla_kv_cache"))


@device_cases("interleave", [False, True], gpu=[True])
def test_a_table_narrower_than_the_keys_leaves_the_rest_unrotated(device, interleave):
    call = Call(replace(SMALL, index_rope_interleave=interleave), 20, device)
    call.inputs["index_rope_cos_sin"] = call.inputs["index_rope_cos_sin"][:, 3:15]
    check(call)


# Bytes with one right answer


def nudge(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
    """fp32 numbers, some of them moved to a neighbour."""
    x = x.astype(np.float32)
    step = rng.integers(-1, 2, x.shape)
    towards = np.where(step > 0, np.float32(np.inf), np.float32(-np.inf))
    return np.where(step == 0, x, np.nextafter(x, towards))


def hard_values(
    rng: np.random.Generator, values: np.ndarray, limit: float, count: int, tile: int
) -> np.ndarray:
    """Midpoints between codes, some one ulp off, times a power of two per tile.

    The largest of a tile is limit * 2^k or one ulp to either side, where its scale has to change.
    """
    magnitudes = np.unique(np.abs(values[~np.isnan(values)]))
    magnitudes = magnitudes[magnitudes <= limit]
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    tiles = rng.choice(middles[middles < 0.9 * limit], (-(-count // tile), tile))
    tiles[:, rng.integers(tile)] = limit
    x = np.ldexp(tiles, rng.integers(-4, 4, (len(tiles), 1))).reshape(-1)[:count]
    return nudge(rng, x * rng.choice([-1.0, 1.0], count)).astype(np.float64)


def hard_kv(rng: np.random.Generator, formats: Caches, values: np.ndarray) -> np.ndarray:
    if formats.mode == "nvfp4_ds_mla":
        sf = rng.choice(oracle.E4M3FN_VALUES[8:0x7F], 32)  # the amax of a block is 6 sf
        x = rng.choice([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0], (32, 16))
        x[:, 3] = 6.0
        return nudge(rng, (x * rng.choice([-1, 1], x.shape) * sf[:, None]).reshape(-1))
    if formats.mode == "fp8_ds_mla":
        return hard_values(rng, values, 448.0 if values[0x7E] == 448 else 224.0, 512, 128)
    return hard_values(rng, values, oracle.format_limit(values), 512, 512)


def make_exact(call: Call, rng: np.random.Generator, formats: Caches) -> dict[str, np.ndarray]:
    """Change the call so that norms and rotations are exact, and return what they give.

    Rows of +-2^e have rstd 2^-e, so the kv norm gives the weights and their signs; a LayerNorm
    weight of zero gives the bias; a table of 0 and +-1 swaps and negates.
    """
    inputs, values = call.inputs, fp8_values(call.inputs)
    device, num_tokens = inputs["positions"].device, inputs["positions"].shape[0]
    kv_weight = hard_kv(rng, formats, values)
    if inputs["mla_k_scale"] is not None:  # x / 0.37 is a midpoint where x * (1 / 0.37) is not
        kv_weight = oracle.round_fp32(kv_weight * float(inputs["mla_k_scale"]))
    limit = oracle.format_limit(values, pow2_scaled=True)
    bias = hard_values(rng, values, limit, inputs["index_k"].shape[1], inputs["index_k"].shape[1])
    signs = rng.choice([-1.0, 1.0], (num_tokens, kv_weight.size))
    sizes = np.ldexp(1.0, rng.integers(-3, 4, (num_tokens, 1)))
    turns = np.array([(1, 0), (0, 1), (-1, 0), (0, -1)], float)
    rope_dim = inputs["k_pe"].shape[1]
    table = turns[rng.integers(0, 4, (97, rope_dim // 2))].transpose(0, 2, 1).reshape(97, rope_dim)

    def tensor(x: np.ndarray, dtype: torch.dtype = FP32) -> torch.Tensor:
        return torch.from_numpy(x).to(device, dtype)

    k_pe = array(inputs["k_pe"])
    if inputs["k_pe"].dtype == FP32:
        flat = hard_values(rng, values, oracle.format_limit(values), k_pe.size, rope_dim)
        k_pe = flat.reshape(k_pe.shape)
    inputs.update(
        kv_norm_weight=tensor(kv_weight),
        kv_norm_eps=0.0,
        index_k_norm_weight=torch.zeros_like(inputs["index_k_norm_weight"]),
        index_k_norm_bias=tensor(bias),
        rope_cos_sin=tensor(table),
        index_rope_cos_sin=tensor(table),
    )
    inputs["kv_c"].copy_(tensor(signs * sizes))
    inputs["k_pe"].copy_(tensor(k_pe))
    rows = table[array(inputs["positions"])]
    interleaved = inputs["index_rope_interleave"]
    return {
        "kv": signs * kv_weight,
        "k_pe": oracle.rope(k_pe, rows, True),
        "index_k": oracle.rope(np.tile(bias, (num_tokens, 1)), rows, interleaved),
    }


@device_cases("formats", ALL_FORMATS, gpu=GPU_FORMATS)
def test_caches_of_exact_rows_are_right_to_the_byte(device, formats):
    """At midpoints, at amax = 448 * 2^k, and one ulp to either side of both."""
    for seed in range(4):
        rng = np.random.default_rng(seed)
        call = Call(SMALL, 29, device, formats, seed=seed)
        call.inputs["index_rope_interleave"] = bool(seed % 2) if device == "cpu" else False
        exact = make_exact(call, rng, formats)
        values, index_k = fp8_values(call.inputs), exact.pop("index_k")
        cache_dtype = name_of(call.inputs["mla_kv_cache"].dtype)
        options: dict[str, Any] = {"cache_dtype": cache_dtype} if formats.mode == "auto" else {}
        if call.inputs["mla_k_scale"] is not None:
            options["scale"] = array(call.inputs["mla_k_scale"])
        rows = {
            "mla_kv_cache": oracle.mla_cache_rows(formats.mode, **exact, values=values, **options),
            "indexer_k_cache": oracle.indexer_rows(
                index_k, scale_format=formats.scale_format, values=values
            ),
        }
        written, slots = call.run(), array(call.inputs["slot_mapping"])
        for name, expected in rows.items():
            before = np.full(written[name].shape, POISON_BYTE, np.uint8)
            offsets = call.offsets(name, slots[slots >= 0]) + GUARD
            after = oracle.place(before, offsets, expected.bytes[slots >= 0])
            actual = written[name].cpu().numpy()
            assert np.array_equal(actual, after), (name, seed, np.flatnonzero(actual != after)[:9])


@device_cases("fp8", [None, FNUZ])
def test_a_row_of_448_times_a_power_of_two_has_that_power_as_its_scale(device, fp8):
    """And one ulp more has the next. The LayerNorm's bias makes the row, cos = 1 keeps it."""
    limit = 448.0 if fp8 is None else 224.0
    call = Call(SMALL, 5, device, Caches("fp8_ds_mla", fp8=fp8))
    make_exact(call, np.random.default_rng(0), DS_MLA)
    call.inputs["rope_cos_sin"][:, :32], call.inputs["rope_cos_sin"][:, 32:] = 1.0, 0.0
    call.inputs["index_rope_cos_sin"] = call.inputs["rope_cos_sin"]
    call.inputs["slot_mapping"] = torch.arange(5, device=device)
    bias, kv_weight = (call.inputs[n] for n in ("index_k_norm_bias", "kv_norm_weight"))
    for exponent in (-20, -12, 0, 1, 30, 100):
        top = np.float32(limit * 2.0**exponent)
        for amax in (np.nextafter(top, np.float32(0)), top, np.nextafter(top, np.float32(np.inf))):
            bias.fill_(1e-7)[11] = -float(amax)
            kv_weight.fill_(1e-7).view(4, 128)[:, 17] = float(amax)
            call.run()
            above = amax > top
            index_scale = call.entries("indexer_k_cache", torch.arange(5))[:, -4:]
            assert (index_scale.copy().view("<f4") == 2.0 ** (exponent + above)).all()
            tile_scale = call.entries("mla_kv_cache", torch.arange(5))[:, 512:528]
            # The floor of a tile is on the ratio: 2^-13, which is above 1e-4.
            expected = max(2.0 ** (exponent + above), 2.0**-13)
            assert (tile_scale.copy().view("<f4") == expected).all()


@device_cases("formats", [f for f in GPU_FORMATS if f.dtype == BF16 and f.mode != "float16"])
def test_floor_of_the_scales(device, formats):
    """A zero row has scale 2^-22 in the indexer cache, a zero tile 2^-13 (e4m3fnuz: one more)."""
    call = Call(SMALL, 5, device, formats)
    call.inputs["kv_c"].zero_()
    call.inputs["index_k_norm_bias"].zero_()
    call.inputs["index_k"].fill_(3.0)
    call.inputs["slot_mapping"] = torch.arange(5, device=device)
    check(call)
    one_more = 2.0 if fp8_values(call.inputs)[0x7F] == 240 else 1.0
    raw = call.entries("indexer_k_cache", torch.arange(5))
    scale = oracle.scale_from_bytes(raw[:, -4:], formats.scale_format)
    assert (scale == one_more * 2.0**-22).all() and ((raw[:, :-4] & 0x7F) == 0).all()
    if formats.mode == "fp8_ds_mla":
        tiles = call.entries("mla_kv_cache", torch.arange(5))[:, 512:528].copy().view("<f4")
        assert (tiles == 2.0**-13).all()
    if formats.mode == "nvfp4_ds_mla":
        assert (call.entries("mla_kv_cache", torch.arange(5))[:, 320:] == 1).all()


@on_gpu
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_rotated_k_pe_has_the_bytes_of_the_reference_on_a_gpu(dtype):
    """A rotation sums nothing, so no order of additions excuses a difference."""
    call = Call(SMALL, 300, "cuda", Caches("fp8", dtype))
    on_cpu = to_device(call.inputs, "cpu")
    call.run()
    reference.fused_norm_rope(**on_cpu)
    assert same_bytes(call.inputs["k_pe_out"].cpu(), on_cpu["k_pe_out"])
    rows = (call.inputs["slot_mapping"] >= 0).nonzero().flatten()
    slots = on_cpu["slot_mapping"][rows.cpu()]
    entries = on_cpu["mla_kv_cache"][slots // 16, slots % 16, 512:]
    assert np.array_equal(call.entries("mla_kv_cache", rows)[:, 512:], byte_array(entries))


# Values that are no numbers


ACTIVATIONS = ("q_c", "kv_c", "k_pe", "index_k")


def with_special_rows(call: Call) -> torch.Tensor:
    """Rows that hold special values, alone and among numbers; returns the mask of the others."""
    clean = torch.ones(call.inputs["q_c"].shape[0], dtype=torch.bool)
    for name in ACTIVATIONS:
        for i, value in enumerate(special_values(call.inputs[name])):
            call.inputs[name][3 * i] = value
            call.inputs[name][3 * i + 1, ::5] = value
            call.inputs[name][3 * i + 2, -1] = value
    clean[: 3 * len(SPECIAL_VALUES)] = False
    return clean.to(call.inputs["q_c"].device)


@device_cases("formats", GPU_FORMATS)
def test_non_finite_rows_follow_the_oracle(device, formats):
    call = Call(SMALL, 60, device, formats)
    with_special_rows(call)
    call.inputs["slot_mapping"] = torch.arange(60, device=device)
    check(call)
    raw = call.entries("indexer_k_cache", torch.arange(60))
    scale = oracle.scale_from_bytes(raw[:, -4:], formats.scale_format)
    assert np.isfinite(scale).all() and (np.frexp(scale)[0] == 0.5).all()


@device_cases("formats", [f for f in GPU_FORMATS if f.mode in ("fp8", "fp8_ds_mla", "auto")])
def test_a_non_finite_row_changes_no_other_row(device, formats):
    call = Call(SMALL, 60, device, formats)
    slots = torch.arange(60, device=device)
    call.inputs["slot_mapping"] = slots
    expected = call.run()
    entries = {name: call.entries(name, slots) for name in CACHES}
    clean = with_special_rows(call)
    written = call.run()
    for name in ("q", *OUTS, "topk_indices_buffer"):
        rows = written[name].view(-1, written[name].numel() // (62 if "topk" in name else 60))
        before = expected[name].view_as(rows)
        assert torch.equal(rows[:60][clean], before[:60][clean]), name
    for name in CACHES:
        live = clean.cpu().numpy()
        assert np.array_equal(call.entries(name, slots)[live], entries[name][live]), name


# Properties


@pytest.mark.parametrize("fill_topk", [True, False])
@device_cases("formats", GPU_FORMATS)
def test_any_split_of_the_batch_gives_the_same_bytes(device, formats, fill_topk):
    """On a GPU the whole is past the limit of the split grid, the pieces are not."""
    num_tokens = 301 if device == "cpu" else MOST_PARTS_TOKENS + 301
    call = Call(SMALL, num_tokens, device, formats)
    call.inputs["fill_topk"] = fill_topk
    whole = call.run()
    order = torch.randperm(num_tokens, generator=generator(1)).to(device)
    pieces = [order[:1], order[1:3], order[3:100], *order[100:].split(500)]
    assert_same(call.run_in_pieces(pieces), whole)


BORDERS = [(fill, limit) for fill, parts in launch.NORM_ROPE_PARTS.items() for limit, _ in parts]


@pytest.mark.parametrize("fill", [True, False])
def test_tasks_are_split_by_the_table(fill):
    def parts(num_tokens):
        return launch.norm_rope_grid(num_tokens, {"TOPK": 2048 * fill}).launch()[1]

    table = (*launch.NORM_ROPE_PARTS[fill], (1 << 20, 1))
    assert [parts(limit) for limit, _ in table] == [count for _, count in table]
    assert [parts(limit + 1) for limit, _ in table[:-1]] == [count for _, count in table[1:]]
    assert parts(1) == table[0][1]
    # A task belongs to part t modulo their number, a power of two.
    assert {count for _, count in table} <= {1, 2, 4}


@on_gpu
@pytest.mark.parametrize("beside", [0, 1])
@pytest.mark.parametrize(("fill_topk", "border"), BORDERS)
def test_all_grids_give_the_same_bytes_around_their_borders(border, beside, fill_topk):
    call = Call(SMALL, border + beside, "cuda")
    call.inputs["fill_topk"] = fill_topk
    pieces = torch.arange(border + beside, device="cuda").split(100)
    actual, expected = call.run_in_pieces(pieces), call.run()
    if not fill_topk:
        del actual["topk_indices_buffer"], expected["topk_indices_buffer"]
    assert_same(actual, expected)


@device_cases("dtype", [BF16, FP16, FP32], gpu=[BF16])
def test_strided_equals_contiguous(device, dtype):
    call = Call(SMALL, 77, device, Caches("fp8_ds_mla", dtype))
    packed = {name: call.inputs[name].contiguous() for name in ACTIVATIONS}
    assert not any(call.inputs[name].is_contiguous() for name in ACTIVATIONS)
    assert_same(call.run(**packed), call.run())
    rows = {name: call.inputs[name].repeat_interleave(2, 0)[::2] for name in ACTIVATIONS}
    assert_same(call.run(**rows), call.run())


@on_devices
def test_two_runs_give_the_same_bytes(device):
    for num_tokens in (40, 300 if device == "cpu" else MOST_PARTS_TOKENS + 300):
        call = Call(SMALL, num_tokens, device)
        first = call.run()
        assert_same(call.run(), first)


@device_cases("num_tokens", [0, 1, 5])
def test_the_fake_kernel_gives_the_real_output(device, num_tokens):
    for formats in (DS_MLA, Caches("auto", FP32)):
        inputs = Call(SMALL, num_tokens, device, formats).inputs
        assert_like_fake(dsv32_ops.fused_norm_rope, inputs)


@device_cases("num_tokens", [1, 2])
def test_the_returned_tensor_is_packed_whatever_the_strides(device, num_tokens):
    call = Call(SMALL, num_tokens, device)
    q_out = dsv32_ops.fused_norm_rope(**call.inputs)
    assert q_out.shape == (num_tokens, 24) and q_out.stride() == (24, 1)
    assert q_out.untyped_storage().nbytes() == num_tokens * 48


@on_devices
def test_no_tokens(device):
    call = Call(SMALL, 0, device)
    written = call.run()
    assert written["q"].numel() == 0
    for name in (*CACHES, "topk_indices_buffer"):
        assert (written[name] == POISON_BYTE).all()
    call.inputs.update(slot_mapping=torch.tensor([3, 4], device=device))
    assert_same(call.run(), written)
    q_c_out = torch.empty(0, 24, dtype=BF16, device=device)
    torch.ops.dsv32.fused_norm_rope_out(q_c_out=q_c_out, **call.inputs)


# Token counts


def check_tiny(num_tokens: int, device: str) -> None:
    # bf16 pairs have an exact mean; of fp32 pairs a LayerNorm of two would amplify its rounding.
    call = Call(TINY, num_tokens, device, Caches("auto"), block_size=64, outs=False)
    check(call)


@device_cases("num_tokens", [65_535, 65_536, 65_537])
def test_token_counts_around_2_to_the_16(device, num_tokens):
    check_tiny(num_tokens, device)


@settings(max_examples=10)
@given(num_tokens=testing.token_counts(max_value=131_072))
def test_any_token_count(num_tokens):
    check_tiny(num_tokens, "cpu")


@on_gpu
@pytest.mark.parametrize("num_tokens", [65_535, 65_536, 65_537])
def test_model_sizes_around_2_to_the_16(num_tokens):
    """Sampled rows against the oracle, all rows against calls of 1,000 tokens (the other grid)."""
    call = Call(V32, num_tokens, "cuda", block_size=64, gaps=False, outs=False)
    call.inputs["slot_mapping"] = torch.arange(num_tokens - 1, -1, -1, device="cuda")
    whole = call.run()
    rows = sample_rows(num_tokens, "cuda")
    ideal = expect(call.inputs, rows)
    q_out = whole["q"].view(BF16).view(num_tokens, -1)
    assert_floats("q", q_out[rows], ideal.q)
    errors = {"kv_err": ideal.kv.err, "k_pe_err": ideal.k_pe.err}
    oracle.assert_mla_rows(call.entries("mla_kv_cache", rows), ideal.mla, **errors)
    assert ideal.index_k is not None and ideal.indexer is not None
    entries = call.entries("indexer_k_cache", rows)
    oracle.assert_indexer_rows(entries, ideal.indexer, err=ideal.index_k.err)
    filled = whole["topk_indices_buffer"].view(torch.int32).view(num_tokens + 2, -1)
    assert (filled[:num_tokens] == -1).all() and (filled[num_tokens:] != -1).all()
    pieces = torch.arange(num_tokens, device="cuda").split(1000)
    assert_same(call.run_in_pieces(pieces), whole)


# Rounding bias


def assert_unbiased(share: float) -> None:
    """Half of 10^5 inexact roundings go down, within 5 sigma and the density's slope of 1 %."""
    assert abs(share - 0.5) < 0.02


@device_cases("formats", [DS_MLA, GPU_FORMATS[6]])
def test_codes_and_outs_round_to_nearest_without_bias(device, formats):
    num_tokens = 400
    call = Call(SMALL, num_tokens, device, formats)
    call.inputs["slot_mapping"] = torch.arange(num_tokens, device=device)
    ideal = expect(call.inputs)
    call.run()
    rows = torch.arange(num_tokens, device=device)
    values = fp8_values(call.inputs)
    codes = call.entries("mla_kv_cache", rows)[:, :512]
    key_codes = call.entries("indexer_k_cache", rows)[:, :-4]
    assert ideal.mla.kv_ratio is not None and ideal.indexer is not None
    for got, ratio in ((codes, ideal.mla.kv_ratio), (key_codes, ideal.indexer.ratio)):
        assert_unbiased(oracle.share_rounded_down(got, ratio, values))
        assert oracle.share_rounded_down(truncated(ratio, values), ratio, values) == 1.0
    if formats.dtype == BF16:
        assert_unbiased(share_towards_zero(array(call.inputs["kv_c_out"]), ideal.kv.value))


def truncated(ratio: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Codes of a kernel that cuts digits off instead of rounding."""
    codes = oracle.round_to_codes(ratio, values)
    return codes - (np.abs(values[codes]) > np.abs(ratio))
