"""Runs the ops and compares."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import dsv32_ops
from dsv32_ops import reference, testing
from dsv32_ops.bench import timing
from dsv32_ops.bench.traffic import traffic
from dsv32_ops.ops import norm_rope, query
from dsv32_ops.verify import entries, exact
from dsv32_ops.verify.job import TOKENS, Job, Result
from dsv32_ops.verify.verdict import Checker

_Q_OUTPUTS = ("index_q_fp8", "index_weights_out", "mqa_q")
_CACHES = ("mla_kv_cache", "indexer_k_cache")
# Slots whose byte offsets are held at once, 8 bytes for each byte of an entry.
_SLOTS_AT_ONCE = 8192
# On a CPU a call of this length is not repeated for a better time.
_LONG_SECONDS = 0.2


def verify(
    job: Job, tokens: Iterable[int] = TOKENS, progress: Callable[[str], None] = lambda _: None
) -> list[Result]:
    """Run both ops at each token count. A failed comparison is reported, not raised."""
    results = []
    for num_tokens in tokens:
        for op, check in (("fused_norm_rope", _check_norm_rope), ("fused_q", _check_q)):
            progress(f"{op}, {num_tokens:,} tokens")
            results.append(check(job, num_tokens))
    return results


def _check_norm_rope(job: Job, num_tokens: int) -> Result:
    inputs, buffers = job.norm_rope_inputs(num_tokens)
    checker = Checker(job.fp8_dtype, job.allowed)
    q_c, us = _first_call(dsv32_ops.fused_norm_rope, inputs, job.device)
    if job.device.type != "cpu":
        _reference_norm_rope(checker, job, inputs, buffers, q_c)
    _sample_norm_rope(checker, job, inputs, buffers, q_c)
    _all_rows(checker, inputs, buffers)
    us = _settled_time(dsv32_ops.fused_norm_rope, inputs, job.device, us)
    return _result("fused_norm_rope", inputs, [q_c], checker, us, job.device)


def _reference_norm_rope(
    checker: Checker,
    job: Job,
    inputs: Mapping[str, Any],
    buffers: Mapping[str, Tensor],
    q_c: Tensor,
) -> None:
    """Every element of q_c and every byte of every live slot."""
    copies = dict(inputs)
    copies["topk_indices_buffer"] = testing.poison(torch.empty_like(inputs["topk_indices_buffer"]))
    expected_buffers = job.fresh_caches(copies)
    expected = {"q_c": reference.fused_norm_rope(**copies)}
    checker.outputs("", {"q_c": q_c}, expected, slack=1.5)
    for name in _caches_in(inputs):
        for slots in entries.live_slots(name, inputs).split(_SLOTS_AT_ONCE):
            actual = _parts(job, name, inputs, buffers, slots)
            wanted = _parts(job, name, copies, expected_buffers, slots)
            values = {part: wanted[part].values for part in wanted}
            checker.cache_parts(f"{name} ", actual, values, slack=1.5)


def _sample_norm_rope(
    checker: Checker,
    job: Job,
    inputs: Mapping[str, Any],
    buffers: Mapping[str, Tensor],
    q_c: Tensor,
) -> None:
    rows = job.sample(q_c.shape[0])
    truth = exact.norm_rope_rows(inputs, rows)
    checker.outputs("sample ", {"q_c": q_c[rows]}, {"q_c": truth["q_c"]}, slack=1.0)
    slots = inputs["slot_mapping"][rows].long()
    live = slots >= 0
    truth = {name: value[live] for name, value in truth.items()}
    for name in _caches_in(inputs):
        actual = _parts(job, name, inputs, buffers, slots[live])
        if name == "indexer_k_cache":
            wanted = entries.exact_indexer_parts(truth, job.fp8_dtype)
        else:
            wanted = entries.exact_mla_parts(job.mode, truth, inputs, job.fp8_dtype)
        checker.cache_parts(f"sample {name} ", actual, wanted, slack=1.0)


def _all_rows(checker: Checker, inputs: Mapping[str, Any], buffers: Mapping[str, Tensor]) -> None:
    """What holds exactly. Puts the canary back into the live slots to see the other bytes."""
    topk = inputs["topk_indices_buffer"]
    filled = inputs["positions"].shape[0] if inputs["has_indexer"] else 0
    canary = testing.poison(torch.empty_like(topk[:1, :1]))
    checker.that(bool((topk[:filled] == -1).all()), "topk_indices_buffer: rows that are not -1")
    checker.that(bool((topk[filled:] == canary).all()), "topk_indices_buffer: extra rows written")
    for name in _caches_in(inputs):
        buffer, unwritten = buffers[name], 0
        start = inputs[name].data_ptr() - buffer.data_ptr()
        for slots in entries.live_slots(name, inputs).split(_SLOTS_AT_ONCE):
            offsets = start + entries.offsets(name, inputs[name], slots)
            unwritten += int((buffer[offsets] == testing.POISON_BYTE).all(-1).sum())
            buffer[offsets] = testing.POISON_BYTE
        checker.that(not unwritten, f"{name}: {unwritten} live slots were not written")
        changed = int((buffer != testing.POISON_BYTE).sum())
        checker.that(not changed, f"{name}: {changed} bytes outside of the live slots changed")


def _check_q(job: Job, num_tokens: int) -> Result:
    inputs = job.q_inputs(num_tokens)
    checker = Checker(job.fp8_dtype, job.allowed)
    outputs, us = _first_call(dsv32_ops.fused_q, inputs, job.device)
    actual = dict(zip(_Q_OUTPUTS, outputs, strict=True))
    if job.device.type != "cpu":
        expected = dict(zip(_Q_OUTPUTS, reference.fused_q(**inputs), strict=True))
        checker.outputs("", actual, expected, slack=1.5)
        del expected
    _sample_q(checker, job, inputs, actual)
    us = _settled_time(dsv32_ops.fused_q, inputs, job.device, us)
    return _result("fused_q", inputs, outputs, checker, us, job.device)


def _sample_q(
    checker: Checker, job: Job, inputs: Mapping[str, Any], actual: Mapping[str, Tensor]
) -> None:
    rows = job.sample(inputs["positions"].shape[0])
    truth = exact.q_rows(inputs, rows)
    wanted = {"mqa_q": truth["mqa_q"]}
    if job.quantize_mqa:
        wanted["mqa_q"] = exact.codes(truth["mqa_q"], job.fp8_dtype)
    if job.config.has_indexer:
        quantized = exact.quantize_row(truth["index_q"], job.fp8_dtype)
        scale = quantized.scale.squeeze(-1)
        wanted["index_q_fp8"] = quantized.codes
        wanted["index_weights_out"] = truth["index_weights_out"] * scale
    sampled = {name: actual[name][rows] for name in wanted}
    checker.outputs("sample ", sampled, wanted, slack=1.0)


def _caches_in(inputs: Mapping[str, Any]) -> list[str]:
    return [name for name in _CACHES if inputs[name] is not None]


def _parts(
    job: Job,
    name: str,
    inputs: Mapping[str, Any],
    buffers: Mapping[str, Tensor],
    slots: Tensor,
) -> dict[str, entries.Part]:
    cache = inputs[name]
    start = cache.data_ptr() - buffers[name].data_ptr()
    raw = buffers[name][start + entries.offsets(name, cache, slots)]
    if name == "indexer_k_cache":
        return entries.indexer_parts(raw)
    return entries.mla_parts(job.mode, raw, job.config.kv_lora_rank, cache.dtype)


def _first_call(
    op: Callable[..., Any], inputs: Mapping[str, Any], device: torch.device
) -> tuple[Any, float]:
    start = time.perf_counter()
    out = op(**inputs)
    if device.type != "cpu":
        torch.cuda.synchronize(device)
    return out, (time.perf_counter() - start) * 1e6


def _settled_time(
    op: Callable[..., Any], inputs: Mapping[str, Any], device: torch.device, first_us: float
) -> float:
    """Microseconds per call. The first one on a GPU compiles; a long one on a CPU will do."""
    if device.type == "cpu" and first_us > _LONG_SECONDS * 1e6:
        return first_us
    return timing.device_time([lambda: op(**inputs)], inputs["positions"].shape[0], device).us


def _result(
    op: str,
    inputs: Mapping[str, Any],
    outputs: Sequence[Tensor],
    checker: Checker,
    us: float,
    device: torch.device,
) -> Result:
    return Result(
        op=op,
        num_tokens=inputs["positions"].shape[0],
        grid=_grid(op, inputs, outputs, device),
        verdict="FAILED" if checker.failures else "ok",
        largest_error=checker.error,
        allowed_error=checker.allowed,
        code_steps=checker.steps,
        fraction_equal=checker.equal,
        us=us,
        gb_s=traffic(inputs, outputs).gb_s(us),
        failures=checker.failures,
    )


def _grid(
    op: str, inputs: Mapping[str, Any], outputs: Sequence[Tensor], device: torch.device
) -> str:
    """The launch geometry, x (tokens) first; a CPU kernel has none."""
    if device.type == "cpu":
        return "cpu"
    if op == "fused_norm_rope":
        grid, *_ = norm_rope.prepare(**inputs, q_c_out=outputs[0], pdl=False)
    else:
        index_q, index_weights, mqa_q = outputs
        grid, *_ = query.prepare(**inputs, outputs=(index_q, index_weights, mqa_q), pdl=False)
    return " x ".join(f"{count:,}" for count in grid.launch())
