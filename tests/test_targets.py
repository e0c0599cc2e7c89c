"""Cross-compilation: what the code of every kernel and mode shows, on GPUs that are not here."""

import re
import types

import pytest
import torch
import triton
import triton.language as tl

from dsv32_ops import launch, layouts, targets
from dsv32_ops.targets import TARGETS, Case

CASES = {case.name: case for case in targets.cases()}
# Two targets see every case; the others each mode and each kernel once. `python -m dsv32_ops
# targets` examines all cases on all of them.
EVERY_CASE = ("sm_90", "gfx942")
EVERY_MODE = (
    "fused_norm_rope auto",
    "fused_norm_rope fp8",
    "fused_norm_rope fp8_ds_mla",
    "fused_norm_rope nvfp4_ds_mla",
    "fused_norm_rope glm-5",
    "fused_q deepseek-v3.2 H=16 fp8",
    "fused_q glm-5 H=64 bf16",
    "fused_embed_eh_norm 7168",
    "fused_embed_norm 6144",
)
ONE_PER_KERNEL = (
    "fused_norm_rope no indexer",
    "fused_q deepseek-v3.2 H=1 fp8",
    "fused_eh_norm 6144",
    "fused_embed_norm 6144",
)
WITHOUT_PARTS = (
    "fused_norm_rope no fill",
    "fused_norm_rope no indexer",
    "fused_q no indexer",
)
# Of a kernel for sm_90, in bytes.
FIRST_ARGUMENT = 0x210


def faults(names, target, pdl=False):
    found = {}
    jobs = [(CASES[name], target, pdl) for name in names]
    for name, result in zip(names, targets.examine(jobs), strict=True):
        if isinstance(result, Exception):
            found[name] = [repr(result)]
        elif listed := targets.faults(result, TARGETS[target], pdl):
            found[name] = listed
    return found


@pytest.mark.parametrize("target", TARGETS)
def test_no_case_has_a_fault(target):
    names = tuple(CASES) if target in EVERY_CASE else EVERY_MODE
    assert faults(names, target) == {}


def test_the_cases_cover_every_mode():
    for mode in layouts.MLA_MODES:
        assert f"fused_norm_rope {mode}" in CASES
    kernels = {case.kernel for case in CASES.values()}
    assert {CASES[name].kernel for name in ONE_PER_KERNEL} == kernels
    assert {CASES[name].kernel for name in EVERY_MODE} == kernels


@pytest.mark.parametrize("target", ["sm_90", "sm_100", "sm_120"])
def test_launch_dependencies_are_there_exactly_when_asked_for(target):
    assert faults(ONE_PER_KERNEL, target, pdl=True) == {}


def copies(name):
    """Machine code of the copies of a kernel's tasks: (ahead of the wait, behind it)."""
    case = targets.for_target(CASES[name], TARGETS["sm_90"], pdl=True)
    code = targets.disassembly(targets.compile_case(case, TARGETS["sm_90"]).asm["cubin"])
    found = [code.partition("ACQBULK")]
    if branch := re.search(r"BRA 0x(\w+)", found[0][0]):
        start = code.index(f"/*{int(branch[1], 16):04x}*/")
        found = [code[:start].partition("ACQBULK")]
        found.append((code[: branch.end()] + code[start:]).partition("ACQBULK"))
    assert all(wait for _, wait, _ in found)
    return [(ahead, behind) for ahead, _, behind in found]


@pytest.mark.parametrize("name", (*ONE_PER_KERNEL, "fused_norm_rope no fill"))
def test_the_wait_comes_before_the_first_access(name):
    for ahead, behind in copies(name):
        assert not re.search(r"\b(?:LDG|STG)\b", ahead)
        assert re.search(r"\bLDG\b", behind) and re.search(r"\bSTG\b", behind)


@pytest.mark.parametrize(("name", "count"), [("no fill", 2), ("auto", 1)])
def test_without_a_fill_the_tasks_have_a_copy_without_branches(name, count):
    found = copies(f"fused_norm_rope {name}")
    assert len(found) == count
    # The query's row and KV's are eight loads of 16 bytes; the tasks' own branches mask them.
    masked = [len(re.findall(r"@!?P\d LDG\.E\.128", behind)) for _, behind in found]
    assert masked == [0, 8][-count:]


@pytest.mark.parametrize("name", (*EVERY_MODE, *WITHOUT_PARTS))
def test_arguments_are_read_ahead_of_the_wait(name):
    """One of each 64 bytes: the first read of a line misses the constant cache."""

    def lines(text):
        places = (int(place, 16) for place in re.findall(r"c\[0x0\]\[0x(\w+)\]", text))
        return {place // 64 for place in places if place >= FIRST_ARGUMENT}

    for ahead, behind in copies(name):
        assert lines(behind) <= lines(ahead)


def test_launch_dependencies_are_never_used_on_hip(monkeypatch):
    (result,) = targets.examine([(CASES["fused_embed_norm 7168"], "gfx942", True)])
    assert isinstance(result, ValueError)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 4))
    launch._pdl.cache_clear()
    try:
        assert not launch.use_pdl(torch.device("cuda", 0))
    finally:
        launch._pdl.cache_clear()


@triton.jit
def faulty_kernel(
    x_ptr, slots_ptr, out_ptr, row_stride,
    FAULT: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    dims = tl.arange(0, WIDTH)
    token = tl.program_id(0)
    if FAULT == "32-bit product":
        out_ptr += (token * row_stride).to(tl.int64)
    elif FAULT == "32-bit token":
        out_ptr += token
    elif FAULT == "32-bit slot":
        out_ptr += tl.load(slots_ptr + token.to(tl.int64))
    elif FAULT == "32-bit slot in a tile":
        slots = tl.load(slots_ptr + tl.arange(0, 1))
        out_ptr += tl.reshape(slots[:, None] * 656, (1,))
    elif FAULT == "32-bit product after a branch":
        row = token
        if row_stride > 4096:
            row = token + 1
        out_ptr += (row * row_stride).to(tl.int64)
    else:
        out_ptr += token.to(tl.int64) * row_stride
    if FAULT == "wait":
        tl.extra.cuda.gdc_wait()
    if FAULT == "strided":
        x = tl.load(x_ptr + 2 * dims)
    elif FAULT == "unaligned mask":
        x = tl.load(x_ptr + dims, mask=dims < row_stride - 1, other=0.0)
    else:
        x = tl.load(x_ptr + dims)
    if FAULT == "fp64":
        x = (x.to(tl.float64) * 1.1).to(tl.float32)
    tl.store(out_ptr + dims, x - tl.sum(x, axis=0))


FAULTS = {
    "32-bit product": "32-bit offset",
    "32-bit token": "32-bit offset",
    "32-bit slot": "32-bit offset",
    "32-bit slot in a tile": "32-bit offset",
    "32-bit product after a branch": "32-bit offset",
    "strided": "narrower than 16 bytes",
    "unaligned mask": "narrower than 16 bytes",
    "fp64": "fp64 instructions",
    "spill": "bytes spilled",
    "wait": "griddepcontrol wait",
}


def examine_fault(fault, target, pdl=False):
    x = torch.empty(8)
    slots = torch.empty(8, dtype=torch.int32)
    # 512 values per thread, more than there are registers.
    width = 512 * TARGETS[target].warp_size if fault == "spill" else 256
    constants = {"FAULT": fault, "WIDTH": width, "PDL": pdl}
    case = Case(fault, faulty_kernel, (x, slots, x, 4096), constants, num_warps=1)
    (result,) = targets.examine([(case, target, pdl)])
    if isinstance(result, Exception):
        raise result
    return targets.faults(result, TARGETS[target], pdl)


@pytest.mark.parametrize(
    "fault, target", [(f, t) for f in FAULTS for t in EVERY_CASE if (f, t) != ("wait", "gfx942")]
)
def test_a_fault_is_found(fault, target):
    found = examine_fault(fault, target)
    assert any(FAULTS[fault] in text for text in found), found


@pytest.mark.parametrize("target", EVERY_CASE)
def test_the_kernel_of_the_faults_has_none_by_itself(target):
    assert examine_fault("none", target) == []


def test_missing_launch_dependencies_are_found():
    assert examine_fault("none", "sm_90", pdl=True) == ["griddepcontrol absent"]


def test_the_matrix_is_printed(capsys):
    case = CASES["fused_embed_norm 6144"]
    assert targets.print_matrix([case], ["sm_90", "gfx942"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[-2:] == ["sm_90", "gfx942"]
    assert re.fullmatch(r"fused_embed_norm 6144 +\d+/0/\d+ +\d+/0/\d+", lines[2])


def test_the_matrix_shows_faults(capsys):
    x = torch.empty(8)
    constants = {"FAULT": "fp64", "WIDTH": 256, "PDL": False}
    wrong = Case("wrong", faulty_kernel, (x, x, x, 4096), constants, num_warps=1)
    broken = Case("broken", faulty_kernel, (x, x, x, 4096), {**constants, "WIDTH": 3}, num_warps=1)
    assert targets.print_matrix([wrong, broken], ["sm_90"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"^wrong +\d+/0/\d+!$", out, re.MULTILINE)
    assert re.search(r"^broken +error!$", out, re.MULTILINE)
    assert "wrong, sm_90: " in out and "fp64 instructions" in out


@pytest.mark.parametrize(
    "options", [{"targets": "sm_70", "match": ""}, {"targets": None, "match": "no such case"}]
)
def test_an_unknown_selection_is_refused(options):
    with pytest.raises(ValueError, match="expected some of|no case"):
        targets.run(types.SimpleNamespace(**options))
