"""Measure launch configurations on this GPU: the numbers behind the table in dsv32_ops/launch.py.

    python benchmarks/tune.py --out benchmarks/results [--ops fused_q ...] [--tokens 1 64 ...]

Every variant launches the op's own kernel with the op's own arguments and other compile-time
constants; workers compile them in parallel first, so that the measurement finds a warm cache. A
variant that is best at one size may be several times slower at another, so each row shows the whole
range of token counts. Nothing is tuned at call time: copy what wins into launch.py.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from csrc_free_ops.mtp import eh_norm_kernel, embed_norm_kernel
from csrc_free_ops.norm_rope import norm_rope_kernel
from csrc_free_ops.query import query_kernel
from dsv32_ops import launch
from dsv32_ops.bench import cases, results, timing
from dsv32_ops.bench.stream import CONFIGS, StreamBuffers
from dsv32_ops.bench.traffic import traffic
from dsv32_ops.geometry import Grid
from dsv32_ops.ops import mtp, norm_rope, query

TOKENS = (1, 64, 128, 256, 512, 1024, 2048, 4096, 16384, 65536)
V32 = "deepseek-v3.2"


@dataclass(frozen=True)
class Variant:
    """One configuration of one op on one set of inputs."""

    case: cases.Case
    num_warps: int
    pdl: bool = True
    tasks: int = 0
    max_registers: int = 0
    constants: tuple[tuple[str, int], ...] = field(default=())

    @property
    def label(self) -> str:
        parts = [f"warps {self.num_warps}"]
        parts += [f"tasks {self.tasks}"] if self.tasks else []
        parts += [f"registers {self.max_registers}"] if self.max_registers else []
        parts += [f"{name} {value}" for name, value in self.constants]
        return ", ".join(parts if self.pdl else [*parts, "no PDL"])


# Heads per program, by heads and query.
TILES = {
    (16, "fp8"): (2, 4, 8),
    (16, "bf16"): (4, 8, 16),
    (128, "fp8"): (2, 4, 8),
    (128, "bf16"): (16, 32, 64),
}


def variants(op: str) -> Iterator[Variant]:
    if op == "fused_norm_rope":
        for case in cases.select((op,), modes=("auto", "fp8_ds_mla")):
            every_warps = (case.config, case.mode) == (V32, "auto")
            for warps, tasks in itertools.product((1, 2, 4) if every_warps else (1,), (1, 2, 4)):
                yield Variant(case, warps, tasks=tasks)
            if every_warps and case.fill_topk:
                for tasks in (4, 1):
                    yield Variant(case, 1, pdl=False, tasks=tasks)
            if (case.config, case.mode) == ("glm-5", "fp8_ds_mla"):
                # By themselves these take 111 and 100: 18 and 19 programs a multiprocessor, not 21.
                for tasks in (1, 2, 4):
                    yield Variant(case, 1, tasks=tasks, max_registers=96)
    elif op == "fused_q":
        warps_and_index_tiles = ((1, 8), (2, 16), (4, 16), (4, 32))
        for (heads, kind), tiles in TILES.items():
            case = cases.Case(op, V32, heads, query=kind)
            for (warps, index_tile), tile in itertools.product(warps_and_index_tiles, tiles):
                yield _query_variant(case, warps, tile, index_tile, launch.QUERY_FEW_TOKENS)
            for few in (0, 128, 1 << 20) if (heads, kind) == (16, "fp8") else ():
                yield _query_variant(case, 2, 4, 16, few)
    else:
        for warps in (2, 4, 8, 16):
            yield Variant(cases.Case(op, V32), warps)


def _query_variant(case: cases.Case, warps: int, tile: int, index_tile: int, few: int) -> Variant:
    constants = (("TILE", tile), ("INDEX_TILE", index_tile), ("FEW", few))
    return Variant(case, warps, constants=constants)


def tokens_of(op: str) -> list[int]:
    """Token counts that show the whole range, and those at which launch.py changes its mind."""
    tables = launch.NORM_ROPE_PARTS.values() if op == "fused_norm_rope" else ()
    return sorted({*TOKENS, *(limit for table in tables for limit, _ in table)})


def call_of(variant: Variant, inputs: dict[str, Any]) -> tuple[Callable[[], Any], list[Any]]:
    """A launch of the variant, and the outputs that it writes."""
    pdl = variant.pdl and launch.use_pdl(inputs["positions" if "positions" in inputs else
                                                "input_ids"].device)  # fmt: skip
    op = variant.case.op
    if op == "fused_norm_rope":
        outputs = [norm_rope._empty_output(inputs["q_c"])]
        _, args, constants = norm_rope.prepare(**inputs, q_c_out=outputs[0], pdl=pdl)
        kernel, grid = norm_rope_kernel, Grid(inputs["q_c"].shape[0], variant.tasks)
    elif op == "fused_q":
        outputs = list(query._outputs(**inputs))
        _, args, constants = query.prepare(**inputs, outputs=tuple(outputs), pdl=pdl)
        kernel = query_kernel
        grid = launch.query_grid(inputs["q_pe"].shape[0], {**constants, **dict(variant.constants)})
    elif op == "fused_embed_norm":
        outputs = list(mtp._embed_outputs(inputs["input_ids"], inputs["embed_table"]))
        names = ("input_ids", "embed_table", "norm_weight", "eps")
        grid, args, constants, _ = mtp.prepare_embed(*map(inputs.get, names), *outputs, pdl=pdl)
        kernel = embed_norm_kernel
    else:
        outputs = [mtp._eh_output(inputs["previous_hidden"])]
        embeds = "embed_table" if "embed_table" in inputs else "inputs_embeds"
        names = ("positions", "input_ids", embeds, "previous_hidden", "enorm_weight",
                 "hnorm_weight", "eps")  # fmt: skip
        grid, args, constants, _ = mtp.prepare_eh(*map(inputs.get, names), out=outputs[0], pdl=pdl)
        kernel = eh_norm_kernel
    constants = {**constants, **dict(variant.constants)}
    options = {"num_warps": variant.num_warps, **({"launch_pdl": True} if pdl else {})}
    if variant.max_registers:
        options["maxnreg"] = variant.max_registers

    def call() -> None:
        kernel[grid.launch()](*args, **constants, **options)

    return call, outputs


def compile_variant(variant: Variant) -> None:
    call, _ = call_of(variant, cases.build(variant.case, 2, torch.device("cuda")))
    call()
    torch.cuda.synchronize()


def measure(group: list[Variant], num_tokens: int) -> tuple[dict[str, float], float]:
    """Microseconds of each variant of one case, and the streaming floor."""
    device = torch.device("cuda")
    inputs = cases.build(group[0].case, num_tokens, device)
    _, outputs = call_of(group[0], inputs)
    moved = traffic(inputs, outputs)
    copies = timing.num_copies(num_tokens, moved.total)
    sets = [inputs, *(cases.clone(inputs) for _ in range(copies - 1))]
    us = {}
    for variant in group:
        calls = [call_of(variant, inputs)[0] for inputs in sets]
        us[variant.label] = timing.device_time(calls, num_tokens, device).us
    del sets, calls
    stream = StreamBuffers(moved.read, moved.written, copies, device)
    floor = min(
        timing.device_time(stream.calls(config), num_tokens, device).us for config in CONFIGS
    )
    return us, floor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ops", nargs="+", choices=cases.OPS, default=cases.OPS)
    parser.add_argument(
        "--tokens", nargs="+", type=int, help="default: 1 to 65,536 and the limits in launch.py"
    )
    parser.add_argument("--out", type=Path, help="folder for tune-<gpu>-<torch>-<triton>.json")
    options = parser.parse_args()
    every = [variant for op in options.ops for variant in variants(op)]
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(12, os.cpu_count() or 1)) as pool:
        done = pool.imap_unordered(compile_variant, every)
        for _ in track(done, "compiling", total=len(every)):
            pass

    console = Console(width=200)
    found = results.header(torch.device("cuda"), None)
    for case, members in itertools.groupby(every, lambda variant: variant.case):
        group = list(members)
        table = Table(title=f"{case.label()}, us", box=None)
        table.add_column("variant")
        rows: dict[str, list[str]] = {variant.label: [] for variant in group}
        floors = []
        for num_tokens in options.tokens or tokens_of(case.op):
            table.add_column(str(num_tokens), justify="right")
            us, floor = measure(group, num_tokens)
            floors.append(f"{floor:.2f}")
            best = min(us.values())
            for label, value in us.items():
                style = "bold" if value < 1.02 * best else "none"
                rows[label].append(f"[{style}]{value:.2f}[/]")
            row = {**case.fields(), "num_tokens": num_tokens, "floor_us": floor, "us": us}
            found["rows"].append(row)
        for label, cells in rows.items():
            table.add_row(label, *cells)
        table.add_row("floor", *floors)
        console.print(table)
        if options.out:
            results.save(found, options.out / f"tune-{results.file_name(found)}.json")


if __name__ == "__main__":
    main()
