"""Cross-compilation: every kernel and mode, for GPUs that need not be present.

Triton compiles for any GPU on any machine. What a compile shows (registers, spills, the width of
global accesses, fp64, 64-bit addresses, launch dependencies) is read from its intermediate and
machine code: `faults` lists what is not as it must be, `print_matrix` shows all of it.
"""

from __future__ import annotations

import argparse
import math
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from csrc_free_ops.mtp import eh_norm_kernel, embed_norm_kernel
from csrc_free_ops.norm_rope import norm_rope_kernel
from csrc_free_ops.query import query_kernel

from . import codecs, launch, layouts, models
from .ops import mtp, norm_rope, query

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
    "gfx1201": GPUTarget("hip", "gfx1201", 32),
}
_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e4m3fnuz: "*fp8e4b8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class Case:
    """One kernel in one configuration, with the arguments that a real call would launch it with."""

    name: str
    kernel: Any
    args: tuple[Any, ...]
    constants: dict[str, Any]
    num_warps: int


@dataclass(frozen=True)
class Report:
    """What the code of a compiled case shows.

    registers: per thread (VGPRs on HIP). spilled: bytes of local memory. accesses: how many global
    loads and stores a thread makes, by their width in bytes. possible: the same, if each were as
    wide as its size and the number of threads allow, 16 bytes at most. fp64: double-precision
    instructions. dependencies: the griddepcontrol instructions, in order. narrow_offsets: lines of
    the Triton IR that multiply a token, head or slot index in 32 bits or offset a pointer by one.
    """

    registers: int
    spilled: int
    accesses: Counter[int]
    possible: Counter[int]
    fp64: int
    dependencies: tuple[str, ...]
    narrow_offsets: tuple[str, ...]

    @property
    def wide(self) -> int:
        """16-byte accesses."""
        return self.accesses[16]


def cases() -> Iterator[Case]:
    """Every kernel and mode at model sizes (two tokens: the token count is no configuration)."""
    from . import testing

    v32 = models.PRESETS["deepseek-v3.2"]
    glm = models.PRESETS["glm-5"]
    for mode in layouts.MLA_MODES:
        yield _norm_rope_case(mode, testing.norm_rope_inputs(v32, 2, mode=mode, table_rows=8))
    extras: dict[str, dict[str, Any]] = {
        "ue8m0x4": {"index_scale_format": "ue8m0x4"},
        "shuffled": {"indexer_cache_shuffled": True},
        "no fill": {"fill_topk": False},
        "no indexer": {"has_indexer": False},
        "profile run": {"mla_kv_cache": None, "indexer_k_cache": None},
    }
    inputs = testing.norm_rope_inputs(v32, 2, table_rows=8)
    for name, changes in extras.items():
        yield _norm_rope_case(name, {**inputs, **changes})
    for mode in ("fp8", "fp8_ds_mla", "nvfp4_ds_mla"):
        filled = testing.norm_rope_inputs(v32, 2, mode=mode, table_rows=8)
        yield _norm_rope_case(f"{mode} no fill", {**filled, "fill_topk": False})
    filled = testing.norm_rope_inputs(glm, 2, mode="nvfp4_ds_mla", table_rows=8)
    yield _norm_rope_case("glm-5 nvfp4_ds_mla no fill", {**filled, "fill_topk": False})
    outs = {f"{name}_out": torch.empty(inputs[name].shape, dtype=torch.bfloat16)
            for name in ("kv_c", "k_pe", "index_k")}  # fmt: skip
    yield _norm_rope_case("outs", {**inputs, **outs})
    yield _norm_rope_case("glm-5", testing.norm_rope_inputs(glm, 2, table_rows=8))
    for config, heads in ((v32, 1), (v32, 16), (v32, 128), (glm, 8), (glm, 64)):
        for quantize in (True, False):
            inputs = testing.q_inputs(config, 2, heads, quantize_mqa=quantize, table_rows=8)
            name = f"{config.name} H={heads} {'fp8' if quantize else 'bf16'}"
            yield _query_case(name, inputs)
    yield _query_case(
        "no indexer", {**testing.q_inputs(v32, 2, 16, table_rows=8), "has_indexer": False}
    )
    for hidden in (7168, 6144):
        yield from _mtp_cases(hidden)


def _norm_rope_case(name: str, inputs: dict[str, Any]) -> Case:
    out = torch.empty(inputs["q_c"].shape, dtype=inputs["q_c"].dtype)
    _, args, constants = norm_rope.prepare(**inputs, q_c_out=out, pdl=False)
    warps = launch.NORM_ROPE_WARPS
    return Case(f"fused_norm_rope {name}", norm_rope_kernel, args, constants, warps)


def _query_case(name: str, inputs: dict[str, Any]) -> Case:
    outputs = query._outputs(**inputs)
    _, args, constants = query.prepare(**inputs, outputs=outputs, pdl=False)
    return Case(f"fused_q {name}", query_kernel, args, constants, launch.query_warps(constants))


def _mtp_cases(hidden: int) -> Iterator[Case]:
    ids = torch.zeros(2, dtype=torch.int64)
    rows = torch.empty(2, hidden, dtype=torch.bfloat16)
    weight, out = rows[0], torch.empty(2, 2 * hidden, dtype=torch.bfloat16)
    for name, input_ids in (("fused_eh_norm", None), ("fused_embed_eh_norm", ids)):
        _, args, constants, warps = mtp.prepare_eh(
            ids, input_ids, rows, rows, weight, weight, 1e-6, out=out, pdl=False
        )
        yield Case(f"{name} {hidden}", eh_norm_kernel, args, constants, warps)
    _, args, constants, warps = mtp.prepare_embed(ids, rows, weight, 1e-6, rows, rows, pdl=False)
    yield Case(f"fused_embed_norm {hidden}", embed_norm_kernel, args, constants, warps)


def for_target(case: Case, target: GPUTarget, pdl: bool = False) -> Case:
    """`case` with the constants that the target's capabilities select."""
    if pdl and target.backend != "cuda":
        # LLVM ends the process that compiles NVIDIA's assembly for another GPU.
        raise ValueError(f"pdl: expected False for {target.arch}, got True")
    constants = {**case.constants, "PDL": pdl}
    args = case.args
    if "SOFT" in constants:
        fnuz = target.arch == "gfx942"
        flavour = torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn
        scaled = codecs.fp8_limit(flavour, pow2_scaled=True)
        unscaled = codecs.fp8_limit(flavour, pow2_scaled=False)
        tiles = constants.get("MLA_MODE") == "fp8_ds_mla"
        limits = {"INDEX_LIMIT": scaled, "MQA_LIMIT": unscaled,
                  "MLA_LIMIT": scaled if tiles else unscaled}  # fmt: skip
        constants.update({name: v for name, v in limits.items() if name in constants})
        soft = target.backend == "hip" or int(target.arch) < 89
        constants.update(FNUZ=fnuz, SOFT=soft)
        args = tuple(launch.as_codes(a, soft) if isinstance(a, Tensor) else a for a in args)
    return replace(case, args=args, constants=constants)


def compile_case(case: Case, target: GPUTarget) -> Any:
    """Compile with the specialization that a launch with aligned tensors would get."""
    signature, constants, attributes = {}, dict(case.constants), {}
    runtime = [p for p in case.kernel.params if not p.is_constexpr]
    for param, arg in zip(runtime, case.args, strict=True):
        signature[param.name] = _type(arg)
        if arg is None or (type(arg) is int and arg == 1 and not param.do_not_specialize):
            signature[param.name], constants[param.name] = "constexpr", arg
        elif _divisible(param, arg):
            attributes[(param.num,)] = [["tt.divisibility", 16]]
    signature.update(dict.fromkeys(case.constants, "constexpr"))
    options: dict[str, Any] = {"num_warps": case.num_warps}
    if case.constants["PDL"]:
        options["launch_pdl"] = True
    source = ASTSource(case.kernel, signature, constants, attributes)
    return triton.compile(source, target=target, options=options)


def _type(arg: Any) -> str:
    if isinstance(arg, Tensor):
        return _POINTERS[arg.dtype]
    if isinstance(arg, float):
        return "fp32"
    return "i32" if arg is None or -(2**31) <= arg < 2**31 else "i64"


def _divisible(param: Any, arg: Any) -> bool:
    if isinstance(arg, Tensor):
        return not param.do_not_specialize_on_alignment
    return isinstance(arg, int) and not param.do_not_specialize and arg % 16 == 0


def report(case: Case, compiled: Any, target: GPUTarget) -> Report:
    ttir = compiled.asm["ttir"]
    possible = possible_accesses(ttir, case.num_warps * target.warp_size)
    offsets = tuple(narrow_offsets(ttir))
    if target.backend == "hip":
        code = compiled.asm["amdgcn"]
        return Report(
            registers=_number(r"\.vgpr_count:\s+(\d+)", code),
            spilled=_number(r"\.private_segment_fixed_size:\s+(\d+)", code)
            + 4 * _number(r"\.[vs]gpr_spill_count:\s+(\d+)", code),
            accesses=_hip_accesses(code),
            possible=possible,
            fp64=len(re.findall(r"\bv_\w*f64", code)),
            dependencies=tuple(re.findall(r"griddepcontrol\.(\w+)", code)),
            narrow_offsets=offsets,
        )
    ptx = compiled.asm["ptx"]
    usage = _cuobjdump(compiled.asm["cubin"], "-res-usage")
    return Report(
        registers=_number(r"REG:(\d+)", usage),
        spilled=_number(r"(?:STACK|LOCAL):(\d+)", usage),
        accesses=_ptx_accesses(ptx),
        possible=possible,
        fp64=len(re.findall(r"^(?!\s*\.reg).*\.f64", ptx, re.MULTILINE)),
        dependencies=tuple(re.findall(r"griddepcontrol\.(\w+)", ptx)),
        narrow_offsets=offsets,
    )


def faults(result: Report, target: GPUTarget, pdl: bool) -> list[str]:
    """What the report of a kernel at model sizes must not show."""
    found = []
    if result.spilled:
        found.append(f"{result.spilled} bytes spilled")
    if result.fp64:
        found.append(f"{result.fp64} fp64 instructions")
    # LLVM's AMD backend merges the equal stores of two branches, so fewer remain there.
    if target.backend == "cuda" and result.wide < result.possible[16]:
        found.append(f"{result.wide} of {result.possible[16]} accesses are 16 bytes wide")
    narrow, allowed = (c.total() - c[16] for c in (result.accesses, result.possible))
    if narrow > allowed:
        found.append(f"{narrow} accesses are narrower than 16 bytes, {allowed} must be")
    # Each copy of a kernel's tasks has its own.
    pairs = max(len(result.dependencies) // 2, 1)
    if result.dependencies != (("wait", "launch_dependents") * pairs if pdl else ()):
        found.append(f"griddepcontrol {', '.join(result.dependencies) or 'absent'}")
    found += [f"32-bit offset: {line}" for line in result.narrow_offsets]
    return found


_BYTES = {"i1": 1, "i8": 1, "i16": 2, "f16": 2, "bf16": 2, "i32": 4, "f32": 4, "i64": 8, "f64": 8}
_ACCESS = re.compile(r"tt\.(?:load|store) .* : (?:tensor<([\dx]+)x)?!tt\.ptr<(\w+)>")


def possible_accesses(ttir: str, threads: int) -> Counter[int]:
    """Global accesses per thread by width, were each as wide as its size and `threads` allow."""
    found: Counter[int] = Counter()
    for shape, element in _ACCESS.findall(ttir):
        size = _BYTES[element]
        elements = math.prod(map(int, shape.split("x"))) if shape else 1
        per_thread = max(elements * size // threads, size)
        width = min(per_thread, 16)
        found[width] += per_thread // width
    return found


def _ptx_accesses(ptx: str) -> Counter[int]:
    found: Counter[int] = Counter()
    for vector, bits in re.findall(r"(?:ld|st)\.global[\w.:]*?(?:\.v(\d))?\.b(\d+)\b", ptx):
        nbytes = int(vector or 1) * int(bits) // 8
        found[min(nbytes, 16)] += max(nbytes // 16, 1)
    return found


_HIP_BYTES = {"byte": 1, "short": 2, "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16,
              "8": 1, "16": 2, "32": 4, "64": 8, "96": 12, "128": 16}  # fmt: skip


def _hip_accesses(code: str) -> Counter[int]:
    access = r"\s(?:global|buffer|flat)_(?:load|store)_(?:d16_)?(?:hi_)?[a-z]*?"
    widths = re.findall(access + r"(byte|short|dword\w*|\d+)\b", code)
    return Counter(_HIP_BYTES[width] for width in widths)


def narrow_offsets(ttir: str) -> Iterator[str]:
    """Lines that multiply a data-dependent index in 32 bits or offset a pointer by a 32-bit one.

    Data-dependent are program ids, integer arguments, loaded integers, and what is computed from
    them; a comparison ends that. Constants and lane numbers may be 32-bit: the model bounds them.
    """
    dependent = set(re.findall(r"(%\w+): i(?:32|64)\b", _line_with("tt.func public", ttir)))
    regions: list[str] = []
    for line in ttir.splitlines():
        opens, closes = line.endswith("{"), line.lstrip().startswith("}")
        line = re.sub(r" loc\(.*", "", line.strip())
        # Attributes have equals signs too.
        assigned = re.match(r"(%\w+(?::\d+)?) = (.*)", line)
        result, operation = assigned.groups() if assigned else ("", line)
        operands = re.findall(r"%\w+", operation)
        touched = not dependent.isdisjoint(operands)
        kind = operation.split(" ", 1)[0]
        if touched and _is_narrow(kind, operation, operands, dependent):
            yield line
        name = result.partition(":")[0]
        if kind == "scf.yield" and touched and regions[-1]:
            dependent.add(regions[-1])
        elif name:
            loaded = kind == "tt.load" and re.search(r"tt\.ptr<i\d+>", operation)
            through = touched and kind not in ("arith.cmpi", "tt.load")
            if kind.startswith("tt.get_") or loaded or through:
                dependent.add(name)
            else:
                dependent.discard(name)
        if closes and not opens:
            regions.pop()
        if opens and not closes:
            regions.append(name)


def _is_narrow(kind: str, operation: str, operands: list[str], dependent: set[str]) -> bool:
    if kind in ("arith.muli", "arith.shli"):
        return re.search(r": (?:tensor<[\dx]+x)?i(?:8|16|32)\b", operation) is not None
    if kind == "tt.addptr" and operands[1] in dependent:
        return re.search(r", (?:tensor<[\dx]+x)?i(?:8|16|32)>?$", operation) is not None
    return False


def _line_with(text: str, ttir: str) -> str:
    return next(line for line in ttir.splitlines() if text in line)


def disassembly(cubin: bytes) -> str:
    """Machine code of an NVIDIA GPU as text."""
    return _cuobjdump(cubin, "-sass")


def _cuobjdump(cubin: bytes, option: str) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), option, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _number(pattern: str, text: str) -> int:
    """Sum of the numbers that a pattern finds."""
    return sum(map(int, re.findall(pattern, text)))


def examine(jobs: Iterable[tuple[Case, str, bool]]) -> Iterator[Report | Exception]:
    """Reports, in order, of (case, target name, pdl); the exception where a compile fails.

    One after the other: Python 3.11 parses wrongly when threads parse at the same time ("AST
    constructor recursion depth mismatch"), and Triton parses a kernel for each compile.
    """
    for case, name, pdl in jobs:
        target = TARGETS[name]
        try:
            case = for_target(case, target, pdl)
            yield report(case, compile_case(case, target), target)
        except Exception as error:
            yield error


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--targets",
        metavar="NAME[,NAME...]",
        help=f"some of {', '.join(TARGETS)} (default: all)",
    )
    parser.add_argument("--match", default="", metavar="TEXT", help="only cases with TEXT in them")


def run(options: argparse.Namespace) -> int:
    """The command `targets`: 0 if every kernel compiles without faults, else 1."""
    names = options.targets.split(",") if options.targets else list(TARGETS)
    for name in names:
        if name not in TARGETS:
            raise ValueError(f"targets: expected some of {', '.join(TARGETS)}, got {name!r}")
    selected = [case for case in cases() if options.match in case.name]
    if not selected:
        raise ValueError(f"match: no case has {options.match!r} in its name")
    return print_matrix(selected, names)


def print_matrix(selected: Sequence[Case], names: Sequence[str]) -> int:
    """Print `registers/spilled bytes/16-byte accesses` of every case on every target, then faults.

    Returns 1 if a case does not compile or has a fault, else 0.
    """
    width = max(len(case.name) for case in selected)
    print("registers / bytes spilled / 16-byte global accesses, per thread")
    print(f"{'kernel and mode':{width}}", *(f"{name:>11}" for name in names), sep="  ")
    jobs = [(case, name, False) for case in selected for name in names]
    reports = examine(jobs)
    wrong = []
    for case in selected:
        cells = []
        for name in names:
            result = next(reports)
            if isinstance(result, Exception):
                found, cell = [f"{type(result).__name__}: {result}"], "error"
            else:
                found = faults(result, TARGETS[name], pdl=False)
                cell = f"{result.registers}/{result.spilled}/{result.wide}"
            wrong += [f"{case.name}, {name}: {fault}" for fault in found]
            cells.append(f"{cell + '!' * bool(found):>11}")
        print(f"{case.name:{width}}", *cells, sep="  ", flush=True)
    print(*wrong, sep="\n", end="\n" * bool(wrong))
    return int(bool(wrong))
