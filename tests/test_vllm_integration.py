"""The drop-in for vLLM: signatures, mapping, and the exchange of functions.

vLLM itself is not needed: a package of stand-ins with its module names takes its place. With
DSV32_OPS_VLLM_SOURCE=<unpacked wheel or .whl>, or vLLM installed, its source is parsed as well.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
import logging
import os
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import dsv32_ops
from dsv32_ops import models, testing
from dsv32_ops.integrations import vllm as drop_in

KERNELS = "vllm.models.deepseek_v32.common.kernels"
EMBED = "vllm.model_executor.layers.fused_embed_norm"
ATTENTION = "vllm.models.deepseek_v32.attention"
MTP = "vllm.models.deepseek_v32.nvidia.mtp"

# vLLM 0.33.0, annotations left out.
SIGNATURES = {
    KERNELS: {
        "fused_norm_rope": (
            "positions, q_c, q_rms_norm_w, q_rms_eps, kv_c, kv_rms_norm_w, kv_rms_eps, k_pe, "
            "k_rope_cos_sin_cache, index_k, index_k_layer_norm_w, index_k_layer_norm_bias, "
            "index_k_layer_norm_eps, index_k_rope_cos_sin_cache, topk_indices_buffer, "
            "slot_mapping=None, indexer_slot_mapping=None, indexer_k_cache=None, "
            "indexer_cache_shuffled=False, mla_kv_cache=None, mla_kv_cache_dtype='auto', "
            "mla_k_scale=None, has_indexer=True, index_rope_interleave=False, q_c_out=None, "
            "kv_c_out=None, k_pe_out=None, index_k_out=None, skip_scale=False"
        ),
        "fused_q": (
            "positions, q_pe, q_pe_cos_sin_cache, index_q, index_q_cos_sin_cache, ql_nope, "
            "q_scale, index_weights, index_weights_softmax_scale, index_weights_head_scale, "
            "has_indexer=True, index_rope_interleave=False, quantize_mqa=True"
        ),
        "fused_eh_norm": "positions, inputs_embeds, previous_hidden, enorm_w, hnorm_w, eps",
    },
    EMBED: {
        "fused_embed_norm": "input_ids, embed_table, chain_weight=None, eps=0.0",
        "fused_embed_eh_norm": (
            "positions, input_ids, embed_table, previous_hidden, enorm_w, hnorm_w, eps"
        ),
    },
}
FUNCTIONS = [(module, name) for module, found in SIGNATURES.items() for name in found]

PLATFORM = """
import torch
class current_platform:
    fp8, blackwell = torch.float8_e4m3fn, False
    fp8_dtype = classmethod(lambda cls: cls.fp8)
    is_cuda = classmethod(lambda cls: True)
    has_device_capability = classmethod(lambda cls, capability: cls.blackwell)
"""
DEEP_GEMM = """
from vllm.platforms import current_platform
def mqa_logits_use_mx_scales():
    return current_platform.blackwell
"""
CUTEDSL = """
takes = True
def is_fused_q_cutedsl_supported(q_pe, index_q, ql_nope, *, has_indexer, quantize_mqa):
    return takes
"""
# Imports and calls in the manner of vLLM's attention layer: fifteen positional arguments, then
# keywords; ten positional arguments, then keywords.
ATTENTION_SOURCE = f"""
from {KERNELS} import fused_norm_rope, fused_q
def norm_rope(a, **rest):
    return fused_norm_rope(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10],
                           a[11], a[12], a[13], a[14], **rest)
def query(a, **rest):
    return fused_q(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], **rest)
"""
MTP_SOURCE = f"""
from {EMBED} import fused_embed_eh_norm, fused_embed_norm
from {KERNELS} import fused_eh_norm
"""


def stub(signatures: dict[str, str]) -> str:
    return "\n".join(
        f"def {name}({parameters}):\n    return 'vllm', locals()\n"
        for name, parameters in signatures.items()
    )


class StandIn:
    """A package named vllm in a folder of its own, with the metadata of an installed one."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("vllm.platforms", PLATFORM)
        self.write("vllm.utils.deep_gemm", DEEP_GEMM)
        self.write("vllm.models.deepseek_v32.nvidia.ops.fused_q_cutedsl", CUTEDSL)
        self.write(KERNELS, stub(SIGNATURES[KERNELS]))
        self.write(EMBED, stub(SIGNATURES[EMBED]))
        self.write(ATTENTION, ATTENTION_SOURCE)
        self.write(MTP, MTP_SOURCE)
        self.set_version("0.33.0")

    def write(self, module: str, source: str) -> None:
        path = self.root.joinpath(*module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        for folder in path.parents:
            if folder == self.root:
                break
            (folder / "__init__.py").touch()
        path.write_text(source)

    def set_version(self, version: str) -> None:
        info = self.root / "vllm-0.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
        importlib.invalidate_caches()

    def __call__(self, module: str) -> Any:
        return importlib.import_module(module)


def drop_vllm_modules() -> dict[str, Any]:
    names = [name for name in sys.modules if name.partition(".")[0] == "vllm"]
    return {name: sys.modules.pop(name) for name in names}


@pytest.fixture
def vllm(tmp_path, monkeypatch):
    before = drop_vllm_modules()
    monkeypatch.delenv("DSV32_OPS_VLLM", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    drop_in._platform.cache_clear()
    yield StandIn(tmp_path)
    drop_in.unregister()
    drop_in._platform.cache_clear()
    drop_vllm_modules()
    sys.modules.update(before)


@pytest.fixture
def lines():
    """(level, message) of each line; a vLLM that is installed stops propagation, so own handler."""
    records: list[tuple[int, str]] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append((record.levelno, record.getMessage()))

    handler = Handler()
    drop_in.logger.addHandler(handler)
    level = drop_in.logger.level
    drop_in.logger.setLevel(logging.DEBUG)
    yield records
    drop_in.logger.setLevel(level)
    drop_in.logger.removeHandler(handler)


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def from_text(text: str) -> list[tuple[str, Any, Any]]:
    return parameters(eval(f"lambda {text}: None", {}))


# --- signatures ---------------------------------------------------------------------------------


@pytest.mark.parametrize("module, name", FUNCTIONS)
def test_signature_is_that_of_vllm_0_33_0(module, name):
    assert parameters(getattr(drop_in, name)) == from_text(SIGNATURES[module][name])


def test_every_function_is_replaced():
    found = {m: [f.__name__ for f in fs] for m, fs in drop_in.REPLACEMENTS.items()}
    assert found == {m: list(names) for m, names in SIGNATURES.items()}


def test_entry_point_is_declared():
    tree = ast.parse((Path(__file__).parents[1] / "setup.py").read_text(encoding="utf-8"))
    (declared,) = [
        ast.literal_eval(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg == "entry_points"
    ]
    (line,) = declared["vllm.general_plugins"]
    name, value = line.split(" = ")
    assert name == "dsv32_ops"
    entry_point = importlib.metadata.EntryPoint(name, value, "vllm.general_plugins")
    assert entry_point.load() is drop_in.register


@pytest.fixture(scope="module")
def wheel():
    path = os.environ.get("DSV32_OPS_VLLM_SOURCE")
    if path is None:
        try:
            path = importlib.metadata.distribution("vllm").locate_file("")
        except importlib.metadata.PackageNotFoundError:
            pytest.skip("vLLM is not installed and DSV32_OPS_VLLM_SOURCE is not set")
    return zipfile.Path(path) if str(path).endswith(".whl") else Path(path)


def source_of(wheel: Any, module: str) -> str:
    return (wheel / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8")


def parse(wheel: Any, module: str) -> ast.Module:
    return ast.parse(source_of(wheel, module))


@pytest.mark.parametrize("module, name", FUNCTIONS)
def test_signature_in_the_source_of_vllm(wheel, module, name):
    (function,) = [
        node
        for node in parse(wheel, module).body
        if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    assert not function.decorator_list
    for argument in function.args.args:
        argument.annotation = None
    text = ast.unparse(function.args)
    assert parameters(getattr(drop_in, name)) == from_text(text)


@pytest.mark.parametrize(
    "caller, names",
    [
        (ATTENTION, {"fused_norm_rope", "fused_q"}),
        ("vllm.models.deepseek_v32.amd.rocm", {"fused_norm_rope", "fused_q"}),
        ("vllm.models.deepseek_v32.amd.mtp", {"fused_eh_norm"}),
        ("vllm.models.deepseek_v32.nvidia.mtp", {"fused_eh_norm", "fused_embed_eh_norm"}),
        ("vllm.models.deepseek_v32.nvidia.model", {"fused_embed_norm"}),
    ],
)
def test_calls_in_the_source_of_vllm(wheel, caller, names):
    """Every call binds, and finds its function through a name in its module, which is rebound."""
    tree = parse(wheel, caller)
    imported = {
        alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module in SIGNATURES
        for alias in node.names
        if alias.asname is None
    }
    assert names <= imported
    called = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
            called.add(node.func.id)
            keywords = {k.arg: None for k in node.keywords}
            assert None not in keywords
            inspect.signature(getattr(drop_in, node.func.id)).bind(*node.args, **keywords)
    assert called == names


# What the two modules of vLLM import, as far as importing them needs it.
REAL_IMPORTS = {
    "vllm.triton_utils": "import triton, triton.language as tl",
    "vllm.v1.attention.ops.common": "pack_ue8m0_x4 = None",
    "vllm.v1.kv_cache_interface": "is_quantized_kv_cache = None",
    "vllm.envs": "",
    "vllm.distributed": "get_tensor_model_parallel_world_size = None",
    "vllm.model_executor.layers.vocab_parallel_embedding": (
        "UnquantizedEmbeddingMethod = VocabParallelEmbedding = object"
    ),
}


@pytest.mark.parametrize("loaded", [True, False])
def test_real_modules_of_vllm_are_replaced(wheel, vllm, lines, loaded):
    for module, source in REAL_IMPORTS.items():
        vllm.write(module, source)
    for module in SIGNATURES:
        vllm.write(module, source_of(wheel, module))
    if loaded:
        everywhere(vllm)
    drop_in.register()
    assert is_ours(vllm) == {True}
    assert [level for level, _ in lines] == [logging.INFO] * (1 if loaded else 2)


# --- the exchange of functions ------------------------------------------------------------------


def everywhere(vllm: StandIn) -> list[tuple[Any, str]]:
    attention, mtp = vllm(ATTENTION), vllm(MTP)
    copies = [(attention, "fused_norm_rope"), (attention, "fused_q"), (mtp, "fused_eh_norm")]
    copies += [(mtp, "fused_embed_norm"), (mtp, "fused_embed_eh_norm")]
    return copies + [(vllm(module), name) for module, name in FUNCTIONS]


def is_ours(vllm: StandIn) -> set[bool]:
    return {getattr(module, name) is getattr(drop_in, name) for module, name in everywhere(vllm)}


@pytest.mark.parametrize("first", [KERNELS, EMBED, ATTENTION, MTP, None])
def test_replaced_whatever_is_imported_before_the_plugin(vllm, first):
    if first:
        vllm(first)
    drop_in.register()
    assert is_ours(vllm) == {True}
    assert set(drop_in.replaced()) == {name for _, name in FUNCTIONS}
    drop_in.unregister()
    assert is_ours(vllm) == {False}
    assert drop_in.replaced() == ()
    assert vllm(ATTENTION).fused_q(*range(10))[0] == "vllm"


def test_replaced_under_another_name(vllm):
    vllm.write(ATTENTION, f"from {KERNELS} import fused_q as rope_and_quantize")
    attention = vllm(ATTENTION)
    drop_in.register()
    assert attention.rope_and_quantize is drop_in.fused_q


def test_registering_imports_none_of_the_modules(vllm):
    drop_in.register()
    assert not [name for name in sys.modules if name.partition(".")[0] == "vllm"]


def test_source_stays_available(vllm):
    drop_in.register()
    kernels = vllm(KERNELS)
    assert "def fused_q(" in inspect.getsource(kernels)
    assert kernels.__spec__.loader.get_source(KERNELS) == inspect.getsource(kernels)


def test_reloaded_module_is_replaced_again(vllm):
    drop_in.register()
    kernels = importlib.reload(vllm(KERNELS))
    assert kernels.fused_q is drop_in.fused_q
    drop_in.unregister()
    assert kernels.fused_q(*range(10))[0] == "vllm"


def test_one_info_line_names_what_was_replaced(vllm, lines):
    everywhere(vllm)
    drop_in.register()
    ((level, line),) = lines
    assert level == logging.INFO
    assert "0.33.0" in line and all(name in line for _, name in FUNCTIONS)


def test_one_info_line_per_later_import(vllm, lines):
    drop_in.register()
    assert lines == []
    everywhere(vllm)
    assert [level for level, _ in lines] == [logging.INFO] * 2
    assert all(sum(name in line for _, line in lines) == 1 for name in ("fused_q", "embed_norm"))


def test_second_registration_changes_nothing(vllm, lines):
    everywhere(vllm)
    for _ in range(3):
        drop_in.register()
    assert len(lines) == 1
    assert sys.meta_path.count(drop_in._finder) == 1
    assert is_ours(vllm) == {True}
    drop_in.unregister()
    assert is_ours(vllm) == {False}
    assert drop_in._finder not in sys.meta_path


def test_logger_reaches_the_handler_of_vllm():
    assert drop_in.logger.name.startswith("vllm.")


@pytest.mark.parametrize("loaded", [True, False])
def test_env_switch(vllm, lines, monkeypatch, loaded):
    monkeypatch.setenv("DSV32_OPS_VLLM", "0")
    if loaded:
        everywhere(vllm)
    drop_in.register()
    assert is_ours(vllm) == {False}
    ((level, line),) = lines
    assert level == logging.INFO and "DSV32_OPS_VLLM=0" in line


@pytest.mark.parametrize("version", ["0.33.0", "0.33.1", "0.33.0+cu130", "0.33.1.dev4+g0123abc"])
def test_known_version(vllm, version):
    vllm.set_version(version)
    drop_in.register()
    assert is_ours(vllm) == {True}


@pytest.mark.parametrize("version", ["0.32.9", "0.34.0", "0.3.33", "1.33.0", "0.330.0", "dev", ""])
def test_unknown_version_leaves_vllm_alone(vllm, lines, version):
    vllm.set_version(version)
    drop_in.register()
    assert is_ours(vllm) == {False}
    ((level, line),) = lines
    assert level == logging.WARNING and "keeps its own" in line and version in line


def test_missing_metadata_leaves_vllm_alone(vllm, lines, monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    drop_in.register()
    assert is_ours(vllm) == {False}
    assert [level for level, _ in lines] == [logging.WARNING]


CHANGED = {
    "renamed": ("q_pe_cos_sin_cache", "cos_sin_cache"),
    "reordered": ("ql_nope, q_scale", "q_scale, ql_nope"),
    "default": ("quantize_mqa=True", "quantize_mqa=False"),
    "no default": ("has_indexer=True, ", "has_indexer, "),
    "added": ("quantize_mqa=True", "quantize_mqa=True, out=None"),
    "keyword only": ("quantize_mqa=True", "*, quantize_mqa=True"),
}


@pytest.mark.parametrize("order", [(KERNELS, EMBED), (EMBED, KERNELS)])
@pytest.mark.parametrize("before", [0, 1, 2])
@pytest.mark.parametrize("change", CHANGED)
def test_changed_signature_leaves_all_of_vllm_alone(vllm, lines, change, before, order):
    old, new = CHANGED[change]
    changed = SIGNATURES[KERNELS]["fused_q"].replace(old, new)
    if change == "no default":
        changed = changed.replace("interleave=False", "interleave").replace("mqa=True", "mqa")
    assert changed != SIGNATURES[KERNELS]["fused_q"]
    vllm.write(KERNELS, stub({**SIGNATURES[KERNELS], "fused_q": changed}))
    for module in order[:before]:
        vllm(module)
    drop_in.register()
    for module in order[before:]:
        vllm(module)
    assert is_ours(vllm) == {False}
    (warning,) = [line for level, line in lines if level == logging.WARNING]
    assert "fused_q" in warning and "signature" in warning
    assert drop_in.replaced() == ()


def test_missing_function_leaves_vllm_alone(vllm, lines):
    vllm.write(KERNELS, stub({"fused_q": SIGNATURES[KERNELS]["fused_q"]}))
    drop_in.register()
    assert vllm(KERNELS).fused_q is not drop_in.fused_q
    ((level, line),) = lines
    assert level == logging.WARNING and "fused_norm_rope" in line


# --- the mapping --------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch):
    """The ops replaced by recorders: (name, bound arguments as the op names them)."""
    recorded: list[tuple[str, dict[str, Any]]] = []

    def recorder(name):
        signature = inspect.signature(getattr(dsv32_ops, name))

        def record(*args, **kwargs):
            recorded.append((name, signature.bind(*args, **kwargs).arguments))
            return f"result of {name}"

        return record

    for _, name in FUNCTIONS:
        monkeypatch.setattr(dsv32_ops, name, recorder(name))
    return recorded


FIFTEEN = dict(
    positions="positions",
    q_c="q_c",
    q_norm_weight="q_rms_norm_w",
    q_norm_eps="q_rms_eps",
    kv_c="kv_c",
    kv_norm_weight="kv_rms_norm_w",
    kv_norm_eps="kv_rms_eps",
    k_pe="k_pe",
    rope_cos_sin="k_rope_cos_sin_cache",
    index_k="index_k",
    index_k_norm_weight="index_k_layer_norm_w",
    index_k_norm_bias="index_k_layer_norm_bias",
    index_k_norm_eps="index_k_layer_norm_eps",
    index_rope_cos_sin="index_k_rope_cos_sin_cache",
    topk_indices_buffer="topk_indices_buffer",
)
CACHES = dict(
    slot_mapping="slots",
    indexer_slot_mapping="indexer slots",
    indexer_k_cache="indexer cache",
    mla_kv_cache="mla cache",
    mla_kv_cache_dtype="fp8",
    mla_k_scale="k scale",
)


def norm_rope(calls, **options):
    """One call with each of the fifteen positional arguments standing for itself."""
    result = drop_in.fused_norm_rope(*FIFTEEN.values(), **options)
    ((name, arguments),) = calls
    return name, arguments, result


def test_norm_rope_arguments_keep_their_meaning(vllm, calls):
    outs = dict(kv_c_out="kv out", k_pe_out="pe out", index_k_out="index out", q_c_out="q out")
    flags = dict(index_rope_interleave=True, indexer_cache_shuffled=True)
    name, arguments, result = norm_rope(calls, **CACHES, **outs, **flags)
    platform = dict(index_scale_format="fp32", fp8_dtype=torch.float8_e4m3fn)
    assert (name, result) == ("fused_norm_rope", "result of fused_norm_rope")
    assert arguments == {**FIFTEEN, **CACHES, **outs, **flags, **platform, "has_indexer": True}


@pytest.mark.parametrize("fnuz, blackwell", [(True, False), (False, True), (False, False)])
def test_platform_of_vllm_decides_the_formats(vllm, calls, fnuz, blackwell):
    platform = vllm("vllm.platforms").current_platform
    platform.fp8 = torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn
    platform.blackwell = blackwell
    _, arguments, _ = norm_rope(calls)
    assert arguments["fp8_dtype"] == platform.fp8
    assert arguments["index_scale_format"] == ("ue8m0x4" if blackwell else "fp32")


def test_skip_scale_drops_the_scale(vllm, calls):
    _, arguments, _ = norm_rope(calls, **CACHES, skip_scale=True)
    assert arguments["mla_k_scale"] is None and arguments["mla_kv_cache_dtype"] == "fp8"


def test_profiling_run_looks_at_no_cache_argument(vllm, calls):
    options = {**CACHES, "indexer_k_cache": None, "mla_kv_cache": None, "mla_kv_cache_dtype": "?"}
    _, arguments, _ = norm_rope(calls, **options)
    assert arguments["slot_mapping"] is None and arguments["indexer_slot_mapping"] is None
    assert arguments["mla_k_scale"] is None and arguments["mla_kv_cache_dtype"] == "auto"


def test_indexer_cache_alone(vllm, calls):
    _, arguments, _ = norm_rope(calls, **{**CACHES, "mla_kv_cache": None})
    assert arguments["slot_mapping"] == "slots"
    assert arguments["indexer_slot_mapping"] == "indexer slots"
    assert arguments["mla_k_scale"] is None and arguments["mla_kv_cache_dtype"] == "auto"


def test_no_indexer_drops_its_arguments(vllm, calls):
    _, arguments, _ = norm_rope(calls, **CACHES, has_indexer=False)
    assert arguments["has_indexer"] is False
    dropped = {name for name, value in arguments.items() if value is None}
    assert dropped == {
        "index_k",
        "index_k_norm_weight",
        "index_k_norm_bias",
        "index_rope_cos_sin",
        "indexer_k_cache",
        "indexer_slot_mapping",
        "q_c_out",
        "kv_c_out",
        "k_pe_out",
        "index_k_out",
    }


@pytest.mark.parametrize("cache", ["mla_kv_cache", "indexer_k_cache"])
def test_cache_without_slot_mapping_is_an_error(vllm, calls, cache):
    with pytest.raises(ValueError, match="slot_mapping"):
        norm_rope(calls, **{cache: "cache"}, indexer_slot_mapping="indexer slots")
    assert calls == []


QUERY = dict(
    positions="positions",
    q_pe="q_pe",
    q_pe_cos_sin="q_pe_cos_sin_cache",
    index_q="index_q",
    index_q_cos_sin="index_q_cos_sin_cache",
    ql_nope="ql_nope",
    q_scale="q_scale",
    index_weights="index_weights",
    index_weights_softmax_scale="softmax",
    index_weights_head_scale="head",
)


@pytest.mark.parametrize("has_indexer", [True, False])
def test_q_arguments_keep_their_meaning(vllm, calls, has_indexer):
    flags = dict(has_indexer=has_indexer, index_rope_interleave=True, quantize_mqa=False)
    result = drop_in.fused_q(*QUERY.values(), **flags)
    ((name, arguments),) = calls
    assert (name, result) == ("fused_q", "result of fused_q")
    expected = {**QUERY, **flags, "fp8_dtype": torch.float8_e4m3fn}
    if not has_indexer:
        expected.update(index_q=None, index_q_cos_sin=None, index_weights=None)
    assert arguments == expected


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize("takes", [True, False])
def test_blackwell_keeps_the_query_kernel_of_vllm(vllm, calls, takes, registered):
    vllm("vllm.platforms").current_platform.blackwell = True
    vllm("vllm.models.deepseek_v32.nvidia.ops.fused_q_cutedsl").takes = takes
    if registered:
        drop_in.register()
        assert vllm(ATTENTION).fused_q is drop_in.fused_q
    result = drop_in.fused_q(*QUERY.values(), quantize_mqa=False)
    if takes:
        assert calls == [] and result[0] == "vllm"
        assert list(result[1].values()) == [*QUERY.values(), True, False, False]
    else:
        assert [name for name, _ in calls] == ["fused_q"]


def test_embedding_arguments_keep_their_meaning(vllm, calls):
    ids = torch.tensor([[3, 1], [2, 0]])
    drop_in.fused_eh_norm("positions", "embeds", "previous", "e", "h", 1e-6)
    drop_in.fused_embed_norm(ids, "table", "weight", 1e-5)
    drop_in.fused_embed_eh_norm("positions", ids, "table", "previous", "e", "h", 1e-6)
    (eh, a), (embed, b), (both, c) = calls
    assert (eh, embed, both) == ("fused_eh_norm", "fused_embed_norm", "fused_embed_eh_norm")
    assert list(a.values()) == ["positions", "embeds", "previous", "e", "h", 1e-6]
    assert torch.equal(b.pop("input_ids"), ids.flatten())
    assert list(b.values()) == ["table", "weight", 1e-5]
    assert torch.equal(c.pop("input_ids"), ids.flatten())
    assert list(c.values()) == ["positions", "table", "previous", "e", "h", 1e-6]


# --- real calls ---------------------------------------------------------------------------------

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
MODES = ["auto", "fp8", "fp8_e4m3", "fp8_ds_mla", "nvfp4_ds_mla"]
CONFIGS = list(models.PRESETS.values())
OURS_ALONE = ("index_scale_format", "fp8_dtype")


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def same_bytes(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    assert actual.stride() == expected.stride()
    return torch.equal(
        actual.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)
    )


def two(build: Any, *sizes: Any, **options: Any) -> list[dict[str, Any]]:
    """The same inputs twice, for the call of the op and for the one in vLLM's style."""
    return [build(*sizes, table_rows=256, **options) for _ in range(2)]


def layer(vllm: StandIn) -> Any:
    """The stand-in attention layer, with our functions in it."""
    attention = vllm(ATTENTION)
    drop_in.register()
    assert attention.fused_q is drop_in.fused_q
    return attention


def norm_rope_in_vllm_style(vllm: StandIn, inputs: dict[str, Any], **more: Any) -> Any:
    rest = {k: v for k, v in inputs.items() if k not in FIFTEEN and k not in OURS_ALONE}
    return layer(vllm).norm_rope([inputs[name] for name in FIFTEEN], **{**rest, **more})


def assert_same_state(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """Every tensor, read or written, is the same after both calls."""
    for name, expected in ours.items():
        if isinstance(expected, torch.Tensor):
            assert same_bytes(theirs[name], expected), name


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_norm_rope_equals_the_op(vllm, device, config, mode):
    options = dict(device=device, mode=mode, seed=5, padding=0.2, outs=True)
    ours, theirs = two(testing.norm_rope_inputs, config, 37, **options)
    expected = dsv32_ops.fused_norm_rope(**ours)
    assert same_bytes(norm_rope_in_vllm_style(vllm, theirs), expected)
    assert_same_state(theirs, ours)


@pytest.mark.parametrize(
    "fp8_dtype, scale_format, shuffled",
    [
        (torch.float8_e4m3fn, "ue8m0x4", False),
        (torch.float8_e4m3fnuz, "fp32", True),
    ],
    ids=["blackwell", "gfx942"],
)
def test_norm_rope_in_the_formats_of_other_devices(vllm, fp8_dtype, scale_format, shuffled):
    platform = vllm("vllm.platforms").current_platform
    platform.fp8, platform.blackwell = fp8_dtype, scale_format == "ue8m0x4"
    formats = dict(
        index_scale_format=scale_format, indexer_cache_shuffled=shuffled, fp8_dtype=fp8_dtype
    )
    ours, theirs, plain = (
        testing.norm_rope_inputs(models.deepseek_v32(), 19, mode="fp8_ds_mla", seed=6, **kinds)
        for kinds in (formats, formats, {})
    )
    expected = dsv32_ops.fused_norm_rope(**ours)
    assert same_bytes(norm_rope_in_vllm_style(vllm, theirs), expected)
    assert_same_state(theirs, ours)
    dsv32_ops.fused_norm_rope(**plain)
    assert not same_bytes(plain["indexer_k_cache"], theirs["indexer_k_cache"])


def test_outs_may_be_the_inputs(vllm, device):
    options = dict(device=device, mode="fp8_ds_mla", seed=7, padding=0.3)
    ours, theirs = two(testing.norm_rope_inputs, models.deepseek_v32(), 33, **options)
    in_place = dict(kv_c_out="kv_c", k_pe_out="k_pe", q_c_out="q_c")
    dsv32_ops.fused_norm_rope(**ours, **{out: ours[name] for out, name in in_place.items()})
    outs = {out: theirs[name] for out, name in in_place.items()}
    assert norm_rope_in_vllm_style(vllm, theirs, **outs) is theirs["q_c"]
    assert_same_state(theirs, ours)


def test_layer_without_its_indexer(vllm, device):
    """A layer that reuses the top-k of an earlier one: indexer tensors given, none written."""
    options = dict(device=device, mode="fp8_ds_mla", seed=8)
    ours, theirs = two(testing.norm_rope_inputs, models.glm_5(), 21, **options)
    nothing = dict.fromkeys(n for n in ours if n.startswith("index_k") and n != "index_k_norm_eps")
    nothing.update(indexer_k_cache=None, indexer_slot_mapping=None, index_rope_cos_sin=None)
    expected = dsv32_ops.fused_norm_rope(**{**ours, **nothing, "has_indexer": False})
    actual = norm_rope_in_vllm_style(vllm, theirs, has_indexer=False)
    assert same_bytes(actual, expected)
    assert_same_state(theirs, ours)
    fresh = testing.norm_rope_inputs(models.glm_5(), 21, **options)
    for name in ("indexer_k_cache", "topk_indices_buffer"):
        assert same_bytes(theirs[name], fresh[name]), name


def test_profiling_run(vllm, device):
    """No caches, but slots and the cache dtype of the layer: norm, outs and fill only."""
    options = dict(device=device, seed=9, outs=True, caches=False)
    ours, theirs = two(testing.norm_rope_inputs, models.deepseek_v32(), 12, **options)
    slots = torch.full((12,), -1, device=device)
    expected = dsv32_ops.fused_norm_rope(**ours)
    actual = norm_rope_in_vllm_style(
        vllm, theirs, slot_mapping=slots, indexer_slot_mapping=slots, mla_kv_cache_dtype="fp8_inc"
    )
    assert same_bytes(actual, expected)
    assert_same_state(theirs, ours)
    assert bool((theirs["topk_indices_buffer"][:12] == -1).all())


def test_skip_scale_means_a_scale_of_one(vllm, device):
    options = dict(device=device, mode="fp8", seed=10)
    ours, theirs = two(testing.norm_rope_inputs, models.deepseek_v32(), 12, **options)
    dsv32_ops.fused_norm_rope(**{**ours, "mla_k_scale": None})
    norm_rope_in_vllm_style(vllm, theirs, skip_scale=True)
    assert_same_state(theirs, ours)


def assert_nothing_written(vllm, error, match, inputs, fresh, **more):
    with pytest.raises(error, match=match):
        norm_rope_in_vllm_style(vllm, inputs, **more)
    assert_same_state(inputs, fresh)


@pytest.mark.parametrize(
    "mode",
    [
        "fp8_e5m2",
        "fp8_inc",
        "fp8_per_token_head",
        "nvfp4",
        "int8_per_token_head",
        "turboquant_k8v4",
    ],
)
def test_cache_dtype_without_a_layout_is_an_error(vllm, device, mode):
    inputs, fresh = two(
        testing.norm_rope_inputs, models.deepseek_v32(), 5, mode="fp8", device=device, outs=True
    )
    more = dict(mla_kv_cache_dtype=mode)
    assert_nothing_written(vllm, ValueError, "fp8_ds_mla", inputs, fresh, **more)


# What vLLM asserts, and what it would only find out on the device.
BAD = {
    "no slots": (ValueError, "slot_mapping", lambda a: dict(slot_mapping=None)),
    "out of another shape": (ValueError, "kv_c_out", lambda a: dict(kv_c_out=a["kv_c_out"][:, :8])),
    "index out without an indexer": (ValueError, "index_k_out", lambda a: dict(has_indexer=False)),
    "cache of another dtype": (
        TypeError,
        "mla_kv_cache",
        lambda a: dict(mla_kv_cache=a["mla_kv_cache"].view(torch.bfloat16)),
    ),
    "block size of no shuffled layout": (
        ValueError,
        "indexer_k_cache",
        lambda a: dict(
            indexer_k_cache=a["indexer_k_cache"].new_full((2, 24, 132), 0xA5),
            indexer_cache_shuffled=True,
        ),
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_assertions_of_vllm_are_errors(vllm, device, case):
    error, match, change = BAD[case]
    inputs, fresh = two(
        testing.norm_rope_inputs,
        models.deepseek_v32(),
        5,
        mode="fp8_ds_mla",
        device=device,
        outs=True,
    )
    assert_nothing_written(vllm, error, match, inputs, fresh, **change(inputs))


@pytest.mark.parametrize("quantize_mqa", [True, False])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_q_equals_the_op(vllm, device, config, quantize_mqa):
    options = dict(device=device, seed=11, quantize_mqa=quantize_mqa)
    ours, theirs = two(testing.q_inputs, config, 9, 16, **options)
    rest = {k: v for k, v in theirs.items() if k not in QUERY and k not in OURS_ALONE}
    actual = layer(vllm).query([theirs[name] for name in QUERY], **rest)
    for got, expected in zip(actual, dsv32_ops.fused_q(**ours), strict=True):
        assert same_bytes(got, expected)
    assert_same_state(theirs, ours)


def test_dense_prefill_hands_over_unabsorbed_heads(vllm, device):
    """Without quantization ql_nope may have any width and strides: it is not read."""
    inputs = testing.q_inputs(models.deepseek_v32(), 9, 16, device=device, quantize_mqa=False)
    expected = dsv32_ops.fused_q(**inputs)
    inputs["ql_nope"] = testing.poison(torch.empty(9, 16, 192, device=device))[..., :128]
    rest = {k: v for k, v in inputs.items() if k not in QUERY and k not in OURS_ALONE}
    for got, want in zip(
        layer(vllm).query([inputs[name] for name in QUERY], **rest), expected, strict=True
    ):
        assert same_bytes(got, want)


@pytest.mark.parametrize("num_tokens", [0, 1, 7])
def test_embedding_functions_equal_the_ops(vllm, device, num_tokens):
    config = models.glm_5()
    drop_in.register()
    mtp = vllm(MTP)
    options = dict(device=device, seed=12)
    eh = testing.eh_norm_inputs(config, num_tokens, **options)
    assert same_bytes(mtp.fused_eh_norm(*eh.values()), dsv32_ops.fused_eh_norm(**eh))

    embed = testing.embed_norm_inputs(config, num_tokens, vocab_rows=50, **options)
    ids, table, weight, eps = embed.values()
    both = mtp.fused_embed_norm(ids.view(-1, 1), table, chain_weight=weight, eps=eps)
    for got, expected in zip(both, dsv32_ops.fused_embed_norm(**embed), strict=True):
        assert same_bytes(got, expected)
    assert same_bytes(mtp.fused_embed_norm(ids, table), table[ids])

    joined = testing.embed_eh_norm_inputs(config, num_tokens, vocab_rows=50, **options)
    names = SIGNATURES[EMBED]["fused_embed_eh_norm"].split(", ")
    theirs = {**joined, "enorm_w": joined["enorm_weight"], "hnorm_w": joined["hnorm_weight"]}
    theirs["input_ids"] = joined["input_ids"].view(1, -1)
    actual = mtp.fused_embed_eh_norm(*(theirs[name] for name in names))
    assert same_bytes(actual, dsv32_ops.fused_embed_eh_norm(**joined))


def test_plain_gather_keeps_to_the_table(vllm, device):
    table = torch.randn(6, 8, device=device)[:, :4]
    ids = torch.tensor([5, 6, -1, 0], device=device)
    if device == "cpu":
        with pytest.raises(IndexError):
            drop_in.fused_embed_norm(ids, table)
    else:
        assert torch.equal(drop_in.fused_embed_norm(ids, table), table[[5, 5, 0, 0]])
    with pytest.raises(ValueError, match="embed_table"):
        drop_in.fused_embed_norm(ids, table[0])
