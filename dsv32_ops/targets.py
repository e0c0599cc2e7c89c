"""Cross-compilation: every kernel and mode, for GPUs that need not be present."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
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
    """What the machine code of a case shows.

    `registers` counts per thread (VGPRs on HIP); `spilled` is the bytes of local memory; `wide`
    the number of 16-byte global accesses; `fp64` arithmetic and `waits` (griddepcontrol) likewise.
    """

    registers: int
    spilled: int
    wide: int
    fp64: int
    waits: int


def cases() -> Iterator[Case]:
    """Every kernel and mode at model sizes (two tokens: the token count is no configuration)."""
    from . import testing

    v32 = models.PRESETS["deepseek-v3.2"]
    glm = models.PRESETS["glm-5"]
    for mode in layouts.MLA_MODES:
        yield _norm_rope_case(mode, testing.norm_rope_inputs(v32, 2, mode=mode, table_rows=8))
    extras = {
        "ue8m0x4": {"index_scale_format": "ue8m0x4"},
        "shuffled": {"indexer_cache_shuffled": True},
        "no fill": {"fill_topk": False},
        "no indexer": {"has_indexer": False},
        "profile run": {"mla_kv_cache": None, "indexer_k_cache": None},
    }
    inputs = testing.norm_rope_inputs(v32, 2, table_rows=8)
    for name, changes in extras.items():
        yield _norm_rope_case(name, {**inputs, **changes})
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
    args, constants = norm_rope.prepare(**inputs, q_c_out=out, pdl=False)
    return Case(
        f"fused_norm_rope {name}", norm_rope_kernel, args, constants, launch.NORM_ROPE_WARPS
    )


def _query_case(name: str, inputs: dict[str, Any]) -> Case:
    outputs = query._outputs(**inputs)
    _, args, constants = query.prepare(**inputs, outputs=outputs, pdl=False)
    return Case(f"fused_q {name}", query_kernel, args, constants, launch.QUERY_WARPS)


def _mtp_cases(hidden: int) -> Iterator[Case]:
    ids = torch.zeros(2, dtype=torch.int64)
    rows = torch.empty(2, hidden, dtype=torch.bfloat16)
    weight, out = rows[0], torch.empty(2, 2 * hidden, dtype=torch.bfloat16)
    for name, input_ids in (("fused_eh_norm", None), ("fused_embed_eh_norm", ids)):
        _, args, constants, warps = mtp.prepare_eh(
            ids, input_ids, rows, rows, weight, weight, 1e-6, out, pdl=False
        )
        yield Case(f"{name} {hidden}", eh_norm_kernel, args, constants, warps)
    _, args, constants, warps = mtp.prepare_embed(ids, rows, weight, 1e-6, rows, rows, pdl=False)
    yield Case(f"fused_embed_norm {hidden}", embed_norm_kernel, args, constants, warps)


def for_target(case: Case, target: GPUTarget, pdl: bool = False) -> Case:
    """`case` with the constants that the target's capabilities select."""
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
        no_e4m3 = target.backend == "cuda" and int(target.arch) < 89
        soft = fnuz or no_e4m3
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


def report(compiled: Any, target: GPUTarget) -> Report:
    if target.backend == "hip":
        code = compiled.asm["amdgcn"]
        return Report(
            registers=_number(r"\.vgpr_count:\s+(\d+)", code),
            spilled=4 * (_number(r"\.vgpr_spill_count:\s+(\d+)", code)
                         + _number(r"\.sgpr_spill_count:\s+(\d+)", code)),
            wide=len(re.findall(r"(?:global|buffer)_(?:load|store)_(?:dwordx4|b128)", code)),
            fp64=len(re.findall(r"\bv_\w+_f64", code)),
            waits=0,
        )  # fmt: skip
    ptx = compiled.asm["ptx"]
    usage = _resource_usage(compiled.asm["cubin"])
    return Report(
        registers=_number(r"REG:(\d+)", usage),
        spilled=_number(r"STACK:(\d+)", usage) + _number(r"LOCAL:(\d+)", usage),
        wide=len(re.findall(r"(?:ld|st)\.global[\w.:]*\.v(?:4\.b32|2\.b64)", ptx)),
        fp64=len(re.findall(r"\b(?:add|sub|mul|fma|div|cvt)\S*\.f64", ptx)),
        waits=ptx.count("griddepcontrol"),
    )


def _resource_usage(cubin: bytes) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found.group(1)) if found else 0
