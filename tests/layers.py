"""A stack of attention front ends, for the tests of torch.compile, CUDA graphs and export."""

from __future__ import annotations

from typing import Any

import torch
from support import generator, model
from torch import Tensor

from dsv32_ops import testing
from dsv32_ops.layouts import IndexerCache, mla_layout
from dsv32_ops.models import ModelConfig

WEIGHTS = (
    "q_norm_weight", "kv_norm_weight", "index_k_norm_weight", "index_k_norm_bias",
    "rope_cos_sin", "index_rope_cos_sin", "mla_k_scale",
)  # fmt: skip
HEADS = 7
# torch.compile takes equal symbolic sizes for one and the same.
DISTINCT = model(
    q_lora_rank=6,
    kv_lora_rank=10,
    rope_dim=4,
    index_heads=2,
    index_dim=12,
    index_topk=5,
    nope_dim=3,
)
EMBED = model(hidden_size=48, vocab_size=90)


class Layers(torch.nn.Module):
    """Both ops in each of `num_layers` layers, which share one top-k buffer.

    The caches are buffers [layers, blocks, block_size, entry], so that a layer's is a view.
    `suffix` "_triton" takes the ops' traced forms.
    """

    topk: Tensor
    mla_cache: Tensor
    index_cache: Tensor

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_layers: int = 2,
        num_blocks: int = 3,
        block_size: int = 16,
        mode: str = "auto",
        cache_dtype: torch.dtype | None = None,
        max_tokens: int = 64,
        suffix: str = "",
        device: str = "cpu",
    ) -> None:
        super().__init__()
        self.config, self.num_layers, self.mode = config, num_layers, mode
        self.norm_rope = getattr(torch.ops.dsv32, "fused_norm_rope" + suffix)
        self.query = getattr(torch.ops.dsv32, "fused_q" + suffix)
        inputs = testing.norm_rope_inputs(config, 1, mode=mode, caches=False, device=device)
        for name in WEIGHTS:
            self.register_buffer(name, inputs[name])
        self.register_buffer("q_scale", torch.tensor([0.37], device=device))
        topk = torch.empty(max_tokens, max(config.index_topk, 1), dtype=torch.int32, device=device)
        self.register_buffer("topk", testing.poison(topk))
        size = (num_layers * num_blocks, block_size, device)
        mla = mla_layout(mode, kv_dim=config.kv_lora_rank, rope_dim=config.rope_dim).empty(*size)
        mla = mla if cache_dtype is None else mla.view(cache_dtype)
        self.register_buffer("mla_cache", _stacked(mla, num_layers))
        index = IndexerCache(config.index_dim).empty(*size) if config.has_indexer else None
        self.register_buffer("index_cache", _stacked(index, num_layers))

    def layer(self, layer: int, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
        c = self.config
        q_c, kv_c, k_pe = batch["latent"].split((c.q_lora_rank, c.kv_lora_rank, c.rope_dim), 1)
        index_k: Tensor | None = None
        index_weights: Tensor | None = None
        index_cache: Tensor | None = None
        if c.has_indexer:
            index_k, index_weights = batch["index"].split((c.index_dim, c.index_heads), 1)
            index_cache = self.index_cache[layer]
        normed = self.norm_rope(
            batch["positions"],
            q_c, self.q_norm_weight, 1e-6, kv_c, self.kv_norm_weight, 1e-6, k_pe, self.rope_cos_sin,
            index_k, self.index_k_norm_weight, self.index_k_norm_bias, 1e-6,
            self.index_rope_cos_sin, self.topk,
            slot_mapping=batch["slot_mapping"],
            indexer_k_cache=index_cache, mla_kv_cache=self.mla_cache[layer],
            mla_kv_cache_dtype=self.mode, mla_k_scale=self.mla_k_scale,
            has_indexer=c.has_indexer,
        )  # fmt: skip
        queries = self.query(
            batch["positions"], batch["query"][..., c.nope_dim :], self.rope_cos_sin,
            batch.get("index_q"), self.index_rope_cos_sin, batch["nope"].transpose(0, 1),
            self.q_scale, index_weights, 0.125, 0.3, has_indexer=c.has_indexer,
        )  # fmt: skip
        return normed, *queries

    def forward(self, batch: dict[str, Tensor]) -> list[Tensor]:
        return [output for layer in range(self.num_layers) for output in self.layer(layer, batch)]


def _stacked(cache: Tensor | None, num_layers: int) -> Tensor | None:
    return None if cache is None else testing.poison(cache).unflatten(0, (num_layers, -1))


def make_batch(
    layers: Layers, num_tokens: int, *, seed: int = 0, live: int | None = None, heads: int = HEADS
) -> dict[str, Tensor]:
    """What changes from step to step. `live` rows, or as many as fit, have a slot."""
    config, device = layers.config, layers.topk.device
    key = testing.norm_rope_inputs(config, num_tokens, caches=False, seed=seed, device=device)
    query = testing.q_inputs(config, num_tokens, heads, seed=seed + 1, device=device)
    capacity = layers.mla_cache.shape[1] * layers.mla_cache.shape[2]
    live = min(capacity, num_tokens) if live is None else live
    slots = torch.full((num_tokens,), -1)
    slots[:live] = torch.randperm(capacity, generator=generator(seed))[:live]
    batch = {
        "positions": key["positions"],
        "slot_mapping": slots.to(device),
        "latent": torch.cat((key["q_c"], key["kv_c"], key["k_pe"]), 1),
        "query": torch.nn.functional.pad(query["q_pe"], (config.nope_dim, 0)),
        "nope": query["ql_nope"].transpose(0, 1).contiguous(),
    }  # fmt: skip
    if config.has_indexer:
        batch["index"] = torch.cat((key["index_k"], query["index_weights"]), 1)
        batch["index_q"] = query["index_q"]
    return batch


def state(layers: torch.nn.Module) -> dict[str, Tensor]:
    """Copies of everything that a step writes."""
    written = {name: getattr(layers, name) for name in ("topk", "mla_cache", "index_cache")}
    return {name: value.clone() for name, value in written.items() if value is not None}


def assert_same(actual: Any, expected: Any) -> None:
    """Equal bytes, tensor by tensor."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        actual, expected = list(actual.values()), list(expected.values())
    assert len(actual) == len(expected)
    for position, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert testing.same_bytes(a, e), f"tensor {position} of {len(expected)} differs"
