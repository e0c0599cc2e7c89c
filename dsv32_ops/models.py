"""Sizes of the models that the ops serve: presets, and a reader of Hugging Face configs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ModelConfig:
    """What the ops need to know of a model. ``num_heads`` counts the whole model's heads.

    Without an indexer ``index_heads``, ``index_dim`` and ``index_topk`` are 0. Models in which only
    some layers have an indexer are described with it; ``dataclasses.replace`` makes the other kind.
    """

    name: str
    hidden_size: int
    q_lora_rank: int
    kv_lora_rank: int
    rope_dim: int
    num_heads: int
    index_heads: int
    index_dim: int
    index_topk: int
    index_rope_interleave: bool
    has_indexer: bool
    rope_theta: float
    rope_scaling: dict[str, Any] | None = field(hash=False)
    max_positions: int
    rms_norm_eps: float
    vocab_size: int
    nope_dim: int = 128


def deepseek_v32() -> ModelConfig:
    """DeepSeek-V3.2: half-split indexer RoPE, YaRN from 4,096 to 163,840 positions."""
    return ModelConfig(
        name="deepseek-v3.2",
        hidden_size=7168,
        q_lora_rank=1536,
        kv_lora_rank=512,
        rope_dim=64,
        num_heads=128,
        index_heads=64,
        index_dim=128,
        index_topk=2048,
        index_rope_interleave=False,
        has_indexer=True,
        rope_theta=10000.0,
        rope_scaling=_yarn(factor=40.0, beta_fast=32.0, beta_slow=1.0),
        max_positions=163840,
        rms_norm_eps=1e-6,
        vocab_size=129280,
    )


def glm_5() -> ModelConfig:
    """GLM-5: interleaved indexer RoPE, no RoPE scaling.

    Assumed, not taken from a released config: theta 1,000,000, 202,752 positions, eps 1e-5,
    vocabulary 154,880, 192 unrotated dims per head. ``load_config`` reads the real ones.
    """
    return ModelConfig(
        name="glm-5",
        hidden_size=6144,
        q_lora_rank=2048,
        kv_lora_rank=512,
        rope_dim=64,
        num_heads=64,
        index_heads=32,
        index_dim=128,
        index_topk=2048,
        index_rope_interleave=True,
        has_indexer=True,
        rope_theta=1000000.0,
        rope_scaling=None,
        max_positions=202752,
        rms_norm_eps=1e-5,
        vocab_size=154880,
        nope_dim=192,
    )


def kimi_k2() -> ModelConfig:
    """Kimi-K2: MLA without an indexer, YaRN from 4,096 to 131,072 positions.

    Assumed, not taken from a released config: both betas 1, eps 1e-6, vocabulary 163,840.
    """
    return ModelConfig(
        name="kimi-k2",
        hidden_size=7168,
        q_lora_rank=1536,
        kv_lora_rank=512,
        rope_dim=64,
        num_heads=64,
        index_heads=0,
        index_dim=0,
        index_topk=0,
        index_rope_interleave=False,
        has_indexer=False,
        rope_theta=50000.0,
        rope_scaling=_yarn(factor=32.0, beta_fast=1.0, beta_slow=1.0),
        max_positions=131072,
        rms_norm_eps=1e-6,
        vocab_size=163840,
    )


def _yarn(factor: float, beta_fast: float, beta_slow: float) -> dict[str, Any]:
    return {
        "type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": 4096,
        "beta_fast": beta_fast,
        "beta_slow": beta_slow,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }


PRESETS: dict[str, ModelConfig] = {
    config.name: config for config in (deepseek_v32(), glm_5(), kimi_k2())
}

_INDEX_FIELDS = ("index_n_heads", "index_head_dim", "index_topk")
# The released configs of this family do not say how the indexer pairs its dims.
_INTERLEAVED_INDEXERS = ("glm_moe_dsa",)


def load_config(path: str | os.PathLike[str]) -> ModelConfig:
    """Read a Hugging Face ``config.json`` (the file, or the folder that holds it).

    =====================================  =====================================================
    field                                  read from
    =====================================  =====================================================
    hidden_size, q_lora_rank,              the same names
    kv_lora_rank, rms_norm_eps, vocab_size
    rope_dim                               qk_rope_head_dim
    nope_dim                               qk_nope_head_dim, 128 when absent
    num_heads                              num_attention_heads
    max_positions                          max_position_embeddings
    index_heads, index_dim, index_topk     index_n_heads, index_head_dim, index_topk: all three,
                                           or none of them for a model without an indexer
    index_rope_interleave                  indexer_rope_interleave, else True for glm_moe_dsa
    rope_theta                             rope_theta, or rope_parameters["rope_theta"]
    rope_scaling                           rope_scaling or rope_parameters; None for "default"
    =====================================  =====================================================

    A config whose language model sits under ``text_config`` is read from there.

    Raises:
        ValueError: no JSON object, or a missing field; the message names the field and the file.
        OSError: the file cannot be read.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: not a JSON file ({error})") from error
    if isinstance(data, dict) and isinstance(data.get("text_config"), dict):
        data = data["text_config"]
    if not isinstance(data, dict):
        raise ValueError(f"{file}: expected a JSON object, got {type(data).__name__}")
    return _from_fields(data, file)


def _from_fields(data: Mapping[str, Any], file: Path) -> ModelConfig:
    def need(key: str, source: Mapping[str, Any] = data) -> Any:
        if source.get(key) is None:
            raise ValueError(f"{file}: field {key!r} is missing")
        return source[key]

    model_type = str(data.get("model_type", file.parent.name or "config"))
    has_indexer = any(data.get(key) is not None for key in _INDEX_FIELDS)
    index_heads, index_dim, index_topk = (
        (need(key) for key in _INDEX_FIELDS) if has_indexer else (0, 0, 0)
    )
    rope = dict(data.get("rope_scaling") or data.get("rope_parameters") or {})
    theta = rope.pop("rope_theta", None)
    plain = rope.get("rope_type", rope.get("type", "default")) == "default"
    return ModelConfig(
        name=model_type,
        hidden_size=need("hidden_size"),
        q_lora_rank=need("q_lora_rank"),
        kv_lora_rank=need("kv_lora_rank"),
        rope_dim=need("qk_rope_head_dim"),
        num_heads=need("num_attention_heads"),
        index_heads=index_heads,
        index_dim=index_dim,
        index_topk=index_topk,
        index_rope_interleave=bool(
            data.get("indexer_rope_interleave", model_type in _INTERLEAVED_INDEXERS)
        ),
        has_indexer=has_indexer,
        rope_theta=float(need("rope_theta") if theta is None else theta),
        rope_scaling=None if plain else rope,
        max_positions=need("max_position_embeddings"),
        rms_norm_eps=float(need("rms_norm_eps")),
        vocab_size=need("vocab_size"),
        nope_dim=data.get("qk_nope_head_dim") or 128,
    )
