"""``python -m dsv32_ops verify``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch

from dsv32_ops import models
from dsv32_ops.bench import console
from dsv32_ops.bench.options import positive, positives
from dsv32_ops.bench.results import device_name
from dsv32_ops.verify.job import TOKENS, Job, Result
from dsv32_ops.verify.run import verify

COLUMNS = ("op", "tokens", "grid", "verdict", "largest error", "bit-equal", "time", "GB/s")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--preset", choices=sorted(models.PRESETS), default="deepseek-v3.2")
    parser.add_argument(
        "--config", metavar="FILE", help="a Hugging Face config.json instead of a preset"
    )
    parser.add_argument(
        "--heads", type=positive, default=16, help="local query heads (default: 16, one rank of 8)"
    )
    parser.add_argument(
        "--tokens",
        type=positives,
        metavar="N[,N...]",
        help=f"token counts (default: {','.join(map(str, TOKENS))})",
    )
    parser.add_argument("--mode", default="auto", help="mla_kv_cache_dtype (default: auto)")
    parser.add_argument(
        "--query", choices=("fp8", "bf16"), default="fp8", help="fused_q's output (default: fp8)"
    )
    parser.add_argument("--device", help="torch device (default: cuda if there is one, else cpu)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")


def run(options: argparse.Namespace) -> int:
    """Verify, print, and return 1 if a comparison failed."""
    config = (
        models.load_config(options.config) if options.config else models.PRESETS[options.preset]
    )
    device = pick_device(options.device)
    job = Job(
        config,
        options.heads,
        device,
        mode=options.mode,
        quantize_mqa=options.query == "fp8",
        seed=options.seed,
    )
    tokens = options.tokens or TOKENS
    with _threads(device), console.progress(2 * len(tokens)) as steps:
        results = verify(job, tokens, steps)
    if options.json:
        print(json.dumps(_as_json(job, results), indent=2))
    else:
        _print(job, results)
    return 1 if any(result.failures for result in results) else 0


@contextmanager
def _threads(device: torch.device) -> Iterator[None]:
    """One thread on a CPU. The CPU kernels work in chunks of a megabyte, so that a second one
    gains little; on cores shared with other processes each of the many thousand parallel regions
    waits a time slice for a thread that does not run (measured: 90 ns an element instead of 1)."""
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def pick_device(name: str | None) -> torch.device:
    """The named device, or the best one present; it becomes the current one."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise ValueError(f"--device: {error}") from error
    if device.type == "cpu":
        return device
    device = torch.device(device.type, device.index or 0)
    if device.type != "cuda" or device.index >= torch.cuda.device_count():
        raise ValueError(f"--device: expected cpu or cuda (HIP too) with a GPU here, got {name}")
    torch.cuda.set_device(device)
    return device


def _print(job: Job, results: Sequence[Result]) -> None:
    query = "fp8" if job.quantize_mqa else "bf16"
    title = (
        f"{job.config.name}, {job.num_heads} heads, MLA cache {job.mode}, {query} query, "
        f"{device_name(job.device)}, torch {torch.__version__}"
    )
    styles = ["bold red" if result.failures else None for result in results]
    console.print_table(title, COLUMNS, [_row(result) for result in results], styles)
    against = "float64, sampled rows" if job.device.type == "cpu" else "the reference, all bytes"
    print(
        f"Compared with {against}. In full: top-k fill, live slots written, other bytes kept.\n"
        "Errors are relative to each value; allowed is twice the error of the same math in fp32, "
        "rounded to the output's type."
    )
    for result in results:
        for failure in result.failures:
            print(f"FAILED {result.op}, {result.num_tokens:,} tokens: {failure}")
    if not console.has_rich():
        print(console.RICH_HINT, file=sys.stderr)


def _row(result: Result) -> tuple[str, ...]:
    """Errors are relative to the value; beside it what is allowed, or how many codes apart."""
    error = "none"
    if result.allowed_error and result.largest_error:
        error = f"{result.largest_error:.1e} of {result.allowed_error:.1e}"
    if result.code_steps:
        error += f", {result.code_steps} code step{'s' * (result.code_steps > 1)}"
    return (
        result.op,
        f"{result.num_tokens:,}",
        result.grid,
        result.verdict,
        error,
        _share(result.fraction_equal),
        console.microseconds(result.us),
        f"{result.gb_s:,.0f}" if result.gb_s >= 100 else f"{result.gb_s:.3g}",
    )


def _share(fraction: float) -> str:
    """Cut, not rounded: 100 % means all."""
    return f"{int(fraction * 1e5) / 1e3:.3f} %"


def _as_json(job: Job, results: Sequence[Result]) -> dict[str, Any]:
    return {
        "device": device_name(job.device),
        "torch": torch.__version__,
        "config": job.config.name,
        "heads": job.num_heads,
        "mode": job.mode,
        "query": "fp8" if job.quantize_mqa else "bf16",
        "results": [asdict(result) for result in results],
    }
