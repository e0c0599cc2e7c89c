"""What the main job verifies, the tensors it does it with, and what it reports."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dsv32_ops import layouts, platform, testing
from dsv32_ops.models import ModelConfig
from dsv32_ops.verify import exact

# The last count that a 65,535-block grid axis takes, and the first ones that it does not.
TOKENS = (1, 512, 65_535, 65_536, 65_537)
BLOCK_SIZE = 64
# Layers share an allocation in a server: blocks of one layer do not touch.
BLOCK_GAP = 256
PADDING = 0.03
SAMPLE_ROWS = 256


@dataclass
class Result:
    """One line of the table. Errors are relative (``exact.scaled_error``)."""

    op: str
    num_tokens: int
    grid: str
    verdict: str
    largest_error: float
    allowed_error: float
    code_steps: int
    fraction_equal: float
    us: float
    gb_s: float
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Job:
    """A layer of ``config`` on one rank: ``num_heads`` local heads."""

    config: ModelConfig
    num_heads: int
    device: torch.device
    mode: str = "auto"
    quantize_mqa: bool = True
    seed: int = 0

    def norm_rope_inputs(self, num_tokens: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Arguments; and, for each cache by name, the poisoned bytes that it is a view of."""
        inputs = testing.norm_rope_inputs(
            self.config,
            num_tokens,
            device=self.device,
            mode=self.mode,
            block_size=BLOCK_SIZE,
            padding=PADDING,
            seed=self.seed,
        )
        buffers = self.fresh_caches(inputs)
        return inputs, buffers

    def fresh_caches(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """Put poisoned caches with gaps into ``inputs``; return the bytes they are views of."""
        sizes: dict[str, Any] = {
            "kv_dim": self.config.kv_lora_rank,
            "rope_dim": self.config.rope_dim,
        }
        caches: dict[str, Any] = {"mla_kv_cache": layouts.mla_layout(self.mode, **sizes)}
        if self.config.has_indexer:
            caches["indexer_k_cache"] = layouts.IndexerCache(self.config.index_dim)
        buffers = {}
        for name, layout in caches.items():
            inputs[name], buffers[name] = testing.canary_cache(
                layout,
                inputs[name].shape[0],
                BLOCK_SIZE,
                block_gap=BLOCK_GAP,
                device=self.device,
            )
        return buffers

    def q_inputs(self, num_tokens: int) -> dict[str, Any]:
        """Arguments of ``fused_q``."""
        return testing.q_inputs(
            self.config,
            num_tokens,
            self.num_heads,
            device=self.device,
            seed=self.seed,
            quantize_mqa=self.quantize_mqa,
        )

    def sample(self, num_tokens: int) -> Tensor:
        """Row numbers: the first, the last and random ones."""
        generator = torch.Generator().manual_seed(self.seed + num_tokens)
        rows = torch.randint(0, num_tokens, (SAMPLE_ROWS,), generator=generator)
        rows[0], rows[-1] = 0, num_tokens - 1
        return rows.unique().to(self.device)

    @cached_property
    def allowed(self) -> dict[str, float]:
        """Twice the error against float64 of the same formulas in fp32, rounded to the output."""
        small = replace(self, device=torch.device("cpu"), seed=self.seed + 1)
        rows = torch.arange(SAMPLE_ROWS)
        limits = {}
        for inputs, formulas in (
            (small.norm_rope_inputs(SAMPLE_ROWS)[0], exact.norm_rope_rows),
            (small.q_inputs(SAMPLE_ROWS), exact.q_rows),
        ):
            narrow = formulas(inputs, rows, torch.float32)
            for name, truth in formulas(inputs, rows, torch.float64).items():
                out = narrow[name]
                if name != "index_weights_out":
                    out = out.to(torch.bfloat16)
                limits[name] = 2 * float(exact.scaled_error(out, truth).amax())
        return limits

    @property
    def fp8_dtype(self) -> torch.dtype:
        """The e4m3 flavour of uint8 caches and of new tensors on the device."""
        return platform.fp8_dtype(self.device.type, self.device.index)
