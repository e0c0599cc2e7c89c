"""torch.library.opcheck on every op: schema, fake kernel, registration and tracing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layers import EMBED
from support import SMALL, device_cases, model

from dsv32_ops import testing
from dsv32_ops.layouts import MLA_MODES, IndexerCache, mla_layout
from dsv32_ops.platform import FP8_DTYPES

ODD = model(q_lora_rank=7, kv_lora_rank=9, rope_dim=2, index_heads=3, index_dim=4, index_topk=5)
TOKENS = 5

EVERY = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)
forms = pytest.mark.parametrize("form", ["", "_out", "_triton"])


def check(op: str, form: str, inputs: dict[str, Any], **outs: torch.Tensor) -> None:
    """torch's usual checks, on one form of an op; `outs` are for the out form."""
    tensors = [value for value in inputs.values() if isinstance(value, torch.Tensor)]
    skipped = set()
    if any(tensor.dtype in FP8_DTYPES for tensor in tensors):
        # It fills and compares its arguments, for which torch has no fp8 functions.
        skipped.add("test_schema")
    if form == "_triton" and tensors[0].device.type == "cpu":
        # Tracing goes through to the Triton kernel, and Triton asks for a GPU's driver.
        skipped.add("test_aot_dispatch_dynamic")
    if form == "_out":
        inputs = {**inputs, **{name: testing.poison(out) for name, out in outs.items()}}
    tests = [test for test in EVERY if test not in skipped]
    torch.library.opcheck(getattr(torch.ops.dsv32, op + form), (), inputs, test_utils=tests)


# Changes to the arguments of `testing.norm_rope_inputs`, and of the op.
NORM_ROPE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{mode: ({"mode": mode}, {}) for mode in MLA_MODES},
    "fp16": ({"dtype": torch.float16}, {}),
    "fp32": ({"dtype": torch.float32}, {}),
    "any sizes": ({"config": ODD}, {}),
    "one token": ({"num_tokens": 1}, {}),
    "no caches": ({"caches": False}, {}),
    "outs": ({"outs": True}, {}),
    "int32": ({"index_dtype": torch.int32}, {}),
    "ue8m0x4": ({"index_scale_format": "ue8m0x4"}, {}),
    "shuffled": ({"indexer_cache_shuffled": True}, {}),
    "fnuz": ({"mode": "fp8", "fp8_dtype": torch.float8_e4m3fnuz}, {}),
    "no indexer": ({}, {"has_indexer": False}),
    "no fill": ({}, {"fill_topk": False}),
    "interleaved": ({}, {"index_rope_interleave": True}),
    "no scale": ({"mode": "fp8"}, {"mla_k_scale": None}),
}  # fmt: skip
ON_GPU = ["auto", "fp8_ds_mla", "nvfp4_ds_mla", "any sizes", "outs", "no indexer"]


@forms
@device_cases("case", NORM_ROPE, ON_GPU)
def test_norm_rope(device: str, case: str, form: str) -> None:
    given, changes = NORM_ROPE[case]
    given = {"config": SMALL, "num_tokens": TOKENS, **given}
    inputs = testing.norm_rope_inputs(**given, device=device, block_size=16, padding=0.3)
    check("fused_norm_rope", form, {**inputs, **changes}, q_c_out=torch.empty_like(inputs["q_c"]))


@forms
@device_cases("mode", ["auto", "fp8", "fp8_ds_mla"], ["fp8"])
def test_strided_and_typed_caches(device: str, mode: str, form: str) -> None:
    """Gaps between entries and blocks; codes in tensors of the fp8 type."""
    inputs = testing.norm_rope_inputs(SMALL, TOKENS, mode=mode, block_size=16, device=device)
    for name, layout in (("mla_kv_cache", mla_layout(mode)), ("indexer_k_cache", IndexerCache(80))):
        gap = 16 if name == "mla_kv_cache" else 0
        cache, _ = testing.canary_cache(layout, 2, 16, block_gap=64, entry_gap=gap, device=device)
        inputs[name] = cache if mode == "auto" else cache.view(torch.float8_e4m3fn)
    inputs["indexer_slot_mapping"] = inputs["slot_mapping"].flip(0)
    check("fused_norm_rope", form, inputs, q_c_out=torch.empty_like(inputs["q_c"]))


QUERY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp8": ({}, {}),
    "bf16": ({"quantize_mqa": False}, {}),
    "fp32": ({"dtype": torch.float32}, {}),
    "any sizes": ({"config": ODD}, {}),
    "one token": ({"num_tokens": 1}, {}),
    "fnuz": ({"fp8_dtype": torch.float8_e4m3fnuz}, {}),
    "int32": ({"index_dtype": torch.int32}, {}),
    "interleaved": ({}, {"index_rope_interleave": True}),
    "no indexer": ({}, {"has_indexer": False, "index_q": None, "index_weights": None}),
}


@pytest.mark.parametrize("form", ["", "_triton"])
@device_cases("case", QUERY, ["fp8", "bf16", "any sizes", "no indexer"])
def test_query(device: str, case: str, form: str) -> None:
    given, changes = QUERY[case]
    given = {"config": SMALL, "num_tokens": TOKENS, "num_heads": 7, **given}
    check("fused_q", form, {**testing.q_inputs(**given, device=device), **changes})


@forms
@device_cases("op", ["fused_eh_norm", "fused_embed_norm", "fused_embed_eh_norm"])
def test_embedding_ops(device: str, op: str, form: str) -> None:
    make = getattr(testing, op.removeprefix("fused_") + "_inputs")
    for dtype in (torch.bfloat16, torch.float32):
        inputs = make(EMBED, TOKENS, dtype=dtype, device=device)
        for name in ("previous_hidden", "embed_table", "inputs_embeds"):
            if name in inputs:
                inputs[name] = torch.nn.functional.pad(inputs[name], (8, 8))[:, 8:-8]
        row = torch.empty(TOKENS, EMBED.hidden_size, dtype=dtype, device=device)
        outs = {"residual_out": row, "normed_out": row.clone()}
        if op != "fused_embed_norm":
            outs = {"out": torch.empty(TOKENS, 2 * EMBED.hidden_size, dtype=dtype, device=device)}
        check(op, form, inputs, **outs)
