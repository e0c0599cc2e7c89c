"""Every op in every mode, once: what compute-sanitizer watches. Prints the number of calls.

Small sizes with odd ends, so that each masked lane of a kernel would leave its tensor.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from support import FNUZ, SMALL, TINY

import dsv32_ops
from dsv32_ops import launch, testing
from dsv32_ops.layouts import MLA_MODES

DEVICE = "cuda"
N = 3
ODD = replace(SMALL, q_lora_rank=37, kv_lora_rank=70, rope_dim=6, index_dim=84, hidden_size=43)
INDEX_FORMATS: tuple[dict[str, Any], ...] = (
    {},
    {"index_scale_format": "ue8m0x4"},
    {"indexer_cache_shuffled": True},
)


def norm_rope_calls() -> Iterator[dict[str, Any]]:
    def inputs(config: Any = SMALL, num_tokens: int = N, **more: Any) -> dict[str, Any]:
        return testing.norm_rope_inputs(
            config, num_tokens, device=DEVICE, block_size=16, outs=True, **more
        )

    for i, mode in enumerate(MLA_MODES):
        call = inputs(mode=mode, **INDEX_FORMATS[i % 3])
        # The last slot of each cache, a negative one and one past the cache.
        call["slot_mapping"] = torch.tensor([31, -1, 32], device=DEVICE)
        call["indexer_slot_mapping"] = torch.tensor([2**40, 31], device=DEVICE)
        call["positions"] = torch.tensor([96, -1, 97], device=DEVICE)
        yield call
    for mode in ("fp8", "fp8_ds_mla"):
        yield inputs(mode=mode, fp8_dtype=FNUZ)
    for config in (ODD, TINY, replace(SMALL, index_rope_interleave=True)):
        yield inputs(config)
    # One program for all tasks of a token, as in large batches.
    yield inputs(num_tokens=launch.NORM_ROPE_PARTS[True][-1][0] + 1)
    for config, mode in ((ODD, "auto"), *((SMALL, mode) for mode in MLA_MODES)):
        many = inputs(config, launch.NORM_ROPE_PARTS[False][-1][0] + 1, mode=mode)
        yield {**many, "fill_topk": False}
    yield testing.norm_rope_inputs(SMALL, N, device=DEVICE, caches=False)
    yield testing.norm_rope_inputs(replace(SMALL, has_indexer=False), N, device=DEVICE)
    yield {**inputs(), "fill_topk": False}


def query_calls() -> Iterator[dict[str, Any]]:
    for quantize in (True, False):
        for config, heads in ((SMALL, 5), (ODD, launch.QUERY_FEW_HEADS + 3), (ODD, 17), (TINY, 1)):
            yield testing.q_inputs(config, N, heads, device=DEVICE, quantize_mqa=quantize)
    # Token by token, as in large batches.
    yield testing.q_inputs(SMALL, launch.QUERY_FEW_TOKENS + 1, 5, device=DEVICE)
    yield testing.q_inputs(SMALL, N, 5, device=DEVICE, fp8_dtype=FNUZ)
    yield testing.q_inputs(replace(SMALL, index_rope_interleave=True), N, 5, device=DEVICE)
    yield testing.q_inputs(replace(SMALL, has_indexer=False), N, 5, device=DEVICE)


def mtp_calls() -> Iterator[tuple[str, dict[str, Any]]]:
    for config in (ODD, SMALL):
        yield "fused_eh_norm", testing.eh_norm_inputs(config, N, device=DEVICE)
        yield "fused_embed_norm", testing.embed_norm_inputs(config, N, device=DEVICE)
        yield "fused_embed_eh_norm", testing.embed_eh_norm_inputs(config, N, device=DEVICE)


def calls() -> Iterator[tuple[str, dict[str, Any]]]:
    # Both codings of e4m3: the instruction, and integer arithmetic.
    for soft in ("0", "1"):
        os.environ["DSV32_OPS_SOFT_FP8"] = soft
        yield from (("fused_norm_rope", call) for call in norm_rope_calls())
        yield from (("fused_q", call) for call in query_calls())
    yield from mtp_calls()


def main() -> None:
    count = 0
    for op, call in calls():
        getattr(dsv32_ops, op)(**call)
        torch.cuda.synchronize()
        count += 1
    print(f"{count} calls")


if __name__ == "__main__":
    main()
