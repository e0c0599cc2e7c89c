"""vLLM 0.33's fused ops for DeepSeek sparse attention, served by dsv32_ops.

The five functions have the parameter names, order and defaults of vLLM 0.33.0's functions of the
same names (``vllm/models/deepseek_v32/common/kernels.py`` and
``vllm/model_executor/layers/fused_embed_norm.py``). ``register`` is the entry point in the group
``vllm.general_plugins`` that puts them in the place of vLLM's.

They need vLLM: its platform decides the fp8 flavour and the scale format of the indexer cache, so
that the caches stay readable for the rest of the engine.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.metadata
import inspect
import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import torch

import dsv32_ops

# A child of vLLM's logger: vLLM installs no handler on the root logger, so that an info line
# of any other logger would not be shown.
logger = logging.getLogger("vllm.dsv32_ops")

SUPPORTED_VERSIONS = "0.33.x"


class _Platform(NamedTuple):
    fp8_dtype: torch.dtype
    index_scale_format: str
    keeps_fused_q: Callable[..., bool] | None


@functools.cache
def _platform() -> _Platform:
    """What vLLM decides by device; asked at the first call, when its platform is settled."""
    current_platform = import_module("vllm.platforms").current_platform
    mx_scales = import_module("vllm.utils.deep_gemm").mqa_logits_use_mx_scales()
    keeps_fused_q = None
    if current_platform.is_cuda() and current_platform.has_device_capability(100):
        cutedsl = import_module("vllm.models.deepseek_v32.nvidia.ops.fused_q_cutedsl")
        keeps_fused_q = cutedsl.is_fused_q_cutedsl_supported
    return _Platform(
        current_platform.fp8_dtype(), "ue8m0x4" if mx_scales else "fp32", keeps_fused_q
    )


def fused_norm_rope(
    positions: torch.Tensor,
    q_c: torch.Tensor,
    q_rms_norm_w: torch.Tensor,
    q_rms_eps: float,
    kv_c: torch.Tensor,
    kv_rms_norm_w: torch.Tensor,
    kv_rms_eps: float,
    k_pe: torch.Tensor,
    k_rope_cos_sin_cache: torch.Tensor,
    index_k: torch.Tensor | None,
    index_k_layer_norm_w: torch.Tensor | None,
    index_k_layer_norm_bias: torch.Tensor | None,
    index_k_layer_norm_eps: float,
    index_k_rope_cos_sin_cache: torch.Tensor | None,
    topk_indices_buffer: torch.Tensor,
    slot_mapping: torch.Tensor | None = None,
    indexer_slot_mapping: torch.Tensor | None = None,
    indexer_k_cache: torch.Tensor | None = None,
    indexer_cache_shuffled: bool = False,
    mla_kv_cache: torch.Tensor | None = None,
    mla_kv_cache_dtype: str = "auto",
    mla_k_scale: torch.Tensor | None = None,
    has_indexer: bool = True,
    index_rope_interleave: bool = False,
    q_c_out: torch.Tensor | None = None,
    kv_c_out: torch.Tensor | None = None,
    k_pe_out: torch.Tensor | None = None,
    index_k_out: torch.Tensor | None = None,
    skip_scale: bool = False,
) -> torch.Tensor:
    """``dsv32_ops.fused_norm_rope`` in vLLM's call style; returns the normed ``q_c``.

    - ``q_c_out`` is written and returned when given, else a packed tensor is allocated.
    - ``skip_scale`` says that ``mla_k_scale`` is 1: the scale is then not read.
    - Without a cache to write, the slot mappings, the cache dtype and the scale are not looked
      at (vLLM passes them in profiling runs and under context parallelism).
    - ``has_indexer=False`` drops the indexer's inputs and its cache.

    Beyond vLLM's function: each cache is gated by its own slot mapping alone, and the ``*_out``
    tensors receive every row, padding included.

    Errors: ValueError or TypeError, before any write, where vLLM asserts or would write a layout
    that nobody reads: a cache without ``slot_mapping``, a cache dtype other than the modes of
    ``dsv32_ops`` (vLLM writes e4m3 codes for ``fp8_e5m2`` and ``fp8_inc``), and what the op
    itself checks.
    """
    if not has_indexer:
        index_k = index_k_layer_norm_w = index_k_layer_norm_bias = None
        index_k_rope_cos_sin_cache = indexer_k_cache = None
    if indexer_k_cache is None and mla_kv_cache is None:
        slot_mapping = None
    elif slot_mapping is None:
        raise ValueError("slot_mapping: expected a tensor beside the caches, got None")
    if indexer_k_cache is None:
        indexer_slot_mapping = None
    if mla_kv_cache is None:
        mla_kv_cache_dtype = "auto"
    if skip_scale or mla_kv_cache is None:
        mla_k_scale = None
    platform = _platform()
    return dsv32_ops.fused_norm_rope(
        positions,
        q_c,
        q_rms_norm_w,
        q_rms_eps,
        kv_c,
        kv_rms_norm_w,
        kv_rms_eps,
        k_pe,
        k_rope_cos_sin_cache,
        index_k,
        index_k_layer_norm_w,
        index_k_layer_norm_bias,
        index_k_layer_norm_eps,
        index_k_rope_cos_sin_cache,
        topk_indices_buffer,
        slot_mapping=slot_mapping,
        indexer_slot_mapping=indexer_slot_mapping,
        indexer_k_cache=indexer_k_cache,
        mla_kv_cache=mla_kv_cache,
        mla_kv_cache_dtype=mla_kv_cache_dtype,
        mla_k_scale=mla_k_scale,
        has_indexer=has_indexer,
        index_rope_interleave=index_rope_interleave,
        index_scale_format=platform.index_scale_format,
        indexer_cache_shuffled=indexer_cache_shuffled,
        kv_c_out=kv_c_out,
        k_pe_out=k_pe_out,
        index_k_out=index_k_out,
        fp8_dtype=platform.fp8_dtype,
        q_c_out=q_c_out,
    )


def fused_q(
    positions: torch.Tensor,
    q_pe: torch.Tensor,
    q_pe_cos_sin_cache: torch.Tensor,
    index_q: torch.Tensor | None,
    index_q_cos_sin_cache: torch.Tensor | None,
    ql_nope: torch.Tensor,
    q_scale: torch.Tensor,
    index_weights: torch.Tensor | None,
    index_weights_softmax_scale: float,
    index_weights_head_scale: float,
    has_indexer: bool = True,
    index_rope_interleave: bool = False,
    quantize_mqa: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``dsv32_ops.fused_q`` in vLLM's call style: ``(index_q_fp8, index_weights_out, mqa_q)``.

    Blackwell keeps vLLM's own function for every call that its CuTeDSL kernel takes: that kernel
    is written for the architecture, and dsv32_ops has not been measured against it there. Calls
    that would reach vLLM's Triton kernel are served by dsv32_ops, as on every other GPU.

    Without an indexer the first two results have zero heads (vLLM returns one-element dummies);
    int32 positions are accepted too.
    """
    platform = _platform()
    if platform.keeps_fused_q is not None and platform.keeps_fused_q(
        q_pe, index_q, ql_nope, has_indexer=has_indexer, quantize_mqa=quantize_mqa
    ):
        return _vllm_fused_q()(
            positions,
            q_pe,
            q_pe_cos_sin_cache,
            index_q,
            index_q_cos_sin_cache,
            ql_nope,
            q_scale,
            index_weights,
            index_weights_softmax_scale,
            index_weights_head_scale,
            has_indexer=has_indexer,
            index_rope_interleave=index_rope_interleave,
            quantize_mqa=quantize_mqa,
        )
    if not has_indexer:
        index_q = index_q_cos_sin_cache = index_weights = None
    return dsv32_ops.fused_q(
        positions,
        q_pe,
        q_pe_cos_sin_cache,
        index_q,
        index_q_cos_sin_cache,
        ql_nope,
        q_scale,
        index_weights,
        index_weights_softmax_scale,
        index_weights_head_scale,
        has_indexer=has_indexer,
        index_rope_interleave=index_rope_interleave,
        quantize_mqa=quantize_mqa,
        fp8_dtype=platform.fp8_dtype,
    )


def fused_eh_norm(
    positions: torch.Tensor,
    inputs_embeds: torch.Tensor,
    previous_hidden: torch.Tensor,
    enorm_w: torch.Tensor,
    hnorm_w: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """``dsv32_ops.fused_eh_norm`` in vLLM's call style: [N, 2 * hidden]."""
    return dsv32_ops.fused_eh_norm(positions, inputs_embeds, previous_hidden, enorm_w, hnorm_w, eps)


def fused_embed_norm(
    input_ids: torch.Tensor,
    embed_table: torch.Tensor,
    chain_weight: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``dsv32_ops.fused_embed_norm`` in vLLM's call style: ``(residual, normed)``.

    ``input_ids`` may have any shape and counts as flat. Without ``chain_weight`` the result is
    the residual alone, a gather by torch. An id outside the table reads the nearest row on a GPU
    (torch's gather alone would end the process there) and is an IndexError on a CPU.
    """
    input_ids = input_ids.view(-1)
    if chain_weight is not None:
        return dsv32_ops.fused_embed_norm(input_ids, embed_table, chain_weight, eps)
    if embed_table.ndim != 2:
        raise ValueError(f"embed_table: expected 2 dimensions, got {tuple(embed_table.shape)}")
    if not input_ids.is_cpu:
        input_ids = input_ids.clamp(0, embed_table.shape[0] - 1)
    return embed_table.index_select(0, input_ids)


def fused_embed_eh_norm(
    positions: torch.Tensor,
    input_ids: torch.Tensor,
    embed_table: torch.Tensor,
    previous_hidden: torch.Tensor,
    enorm_w: torch.Tensor,
    hnorm_w: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """``dsv32_ops.fused_embed_eh_norm`` in vLLM's call style: [N, 2 * hidden]."""
    return dsv32_ops.fused_embed_eh_norm(
        positions, input_ids.view(-1), embed_table, previous_hidden, enorm_w, hnorm_w, eps
    )


REPLACEMENTS: dict[str, tuple[Callable[..., Any], ...]] = {
    "vllm.models.deepseek_v32.common.kernels": (fused_norm_rope, fused_q, fused_eh_norm),
    "vllm.model_executor.layers.fused_embed_norm": (fused_embed_norm, fused_embed_eh_norm),
}

_originals: dict[str, Callable[..., Any]] = {}


def _vllm_fused_q() -> Callable[..., Any]:
    if "fused_q" in _originals:
        return _originals["fused_q"]
    return import_module("vllm.models.deepseek_v32.common.kernels").fused_q


class _ReplaceOnImport(importlib.abc.MetaPathFinder):
    """Replaces the functions right after one of the two modules has been executed.

    vLLM loads plugins in every process, before it knows the model. Importing the modules there
    would pull in vLLM's model code (the package of kernels.py imports all of it) for every model
    and in processes that never run one, so the work waits for vLLM's own import.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in REPLACEMENTS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_replace(module: ModuleType) -> None:
            execute(module)
            try:
                _replace_imported(fullname)
            except Exception as error:  # as in register
                _leave_alone(error)

        # The loader belongs to this one spec; kept as it is otherwise, so that tracebacks and
        # inspect still find the source through it.
        spec.loader.exec_module = execute_and_replace  # type: ignore[method-assign]
        return spec


_finder = _ReplaceOnImport()


def register() -> None:
    """Puts the functions of this module in the place of vLLM's; safe to call again.

    A module that is imported already is replaced at once, in every loaded ``vllm`` module that
    holds one of its functions; the others right after their import. One info line names what was
    replaced, a second one where the two modules are imported later, one after the other.

    Nothing is replaced, and one line says why, under ``DSV32_OPS_VLLM=0``, with a vLLM other than
    0.33.x, and when a signature differs from 0.33.0's. Never raises.
    """
    if os.environ.get("DSV32_OPS_VLLM") == "0":
        logger.info("DSV32_OPS_VLLM=0: vLLM keeps its own kernels")
        return
    try:
        version = importlib.metadata.version("vllm")
        if version.split(".")[:2] != SUPPORTED_VERSIONS.split(".")[:2]:
            raise LookupError(f"vLLM {version} is not known to dsv32_ops, {SUPPORTED_VERSIONS} is")
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)
        _replace_imported(*REPLACEMENTS)
    except Exception as error:  # vLLM must start, whatever it looks like inside
        _leave_alone(error)


def unregister() -> None:
    """Gives vLLM its own functions back, wherever ``register`` replaced them."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    ours = {f.__name__: f for functions in REPLACEMENTS.values() for f in functions}
    _rebind({ours[name]: original for name, original in _originals.items()})
    _originals.clear()


def replaced() -> tuple[str, ...]:
    """Names of vLLM's functions that are replaced in this process at the moment."""
    return tuple(_originals)


def _leave_alone(reason: Exception) -> None:
    unregister()
    logger.warning("vLLM keeps its own kernels: %s", reason)


def _replace_imported(*names: str) -> None:
    """Replaces the functions of those of the modules that are imported."""
    pairs: dict[Callable[..., Any], Callable[..., Any]] = {}
    for name in names:
        if name in sys.modules:
            pairs.update(_checked_pairs(sys.modules[name], REPLACEMENTS[name]))
    if pairs:
        _originals.update({ours.__name__: original for original, ours in pairs.items()})
        _rebind(pairs)
        version = importlib.metadata.version("vllm")
        functions = ", ".join(ours.__name__ for ours in pairs.values())
        logger.info("dsv32_ops replaced in vLLM %s: %s", version, functions)


def _checked_pairs(
    module: ModuleType, functions: tuple[Callable[..., Any], ...]
) -> dict[Callable[..., Any], Callable[..., Any]]:
    """{vLLM's function: ours}, without those that are ours already."""
    pairs = {}
    for ours in functions:
        original = getattr(module, ours.__name__, None)
        if original is None:
            raise LookupError(f"{module.__name__} has no {ours.__name__}")
        if original is ours:
            continue
        if _parameters(original) != _parameters(ours):
            raise LookupError(f"the signature of {module.__name__}.{ours.__name__} has changed")
        pairs[original] = ours
    return pairs


def _parameters(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    """Names, kinds and defaults; annotations may change without harm."""
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def _rebind(pairs: dict[Callable[..., Any], Callable[..., Any]]) -> None:
    """Exchanges functions by identity in all loaded vllm modules (``from ... import`` copies)."""
    by_id = {id(old): new for old, new in pairs.items()}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "vllm" and isinstance(module, ModuleType):
            for attribute, value in list(vars(module).items()):
                if id(value) in by_id:
                    setattr(module, attribute, by_id[id(value)])
