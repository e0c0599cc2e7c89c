"""What programmatic dependent launch is worth between a model's GEMMs.

    python benchmarks/neighbours.py [--tokens 1 8 64 512]

One layer's projections around both ops in a CUDA graph, 20 layers long, with and without the launch
attribute. Each setting runs in a process of its own, since it is read once.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

import torch
from rich.console import Console
from rich.table import Table

from dsv32_ops import fused_norm_rope, fused_q, models, testing
from dsv32_ops.bench import timing

HIDDEN, HEADS = 7168, 16


def layer_us(num_tokens: int) -> float:
    """Microseconds of GEMM, fused_norm_rope, GEMM, fused_q, GEMM."""
    config, device = models.PRESETS["deepseek-v3.2"], torch.device("cuda")
    latents = testing.norm_rope_inputs(config, num_tokens, device=device)
    query = testing.q_inputs(config, num_tokens, HEADS, device=device)
    dq, dkv, rope = config.q_lora_rank, config.kv_lora_rank, config.rope_dim
    width = config.nope_dim + rope

    def weight(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, dtype=torch.bfloat16, device=device) / rows**0.5

    down, up = weight(HIDDEN, dq + dkv + rope), weight(dq, HEADS * width)
    out = weight(HEADS * (dkv + rope), HIDDEN)
    hidden = torch.randn(num_tokens, HIDDEN, dtype=torch.bfloat16, device=device)

    def layer() -> torch.Tensor:
        latent = hidden @ down
        q_c, kv_c, k_pe = latent.split((dq, dkv, rope), dim=-1)
        q = fused_norm_rope(**{**latents, "q_c": q_c, "kv_c": kv_c, "k_pe": k_pe}) @ up
        q_pe = q.view(num_tokens, HEADS, width)[..., config.nope_dim :]
        _, _, mqa_q = fused_q(**{**query, "q_pe": q_pe})
        # Stands for attention's output: bytes of the packed query as bf16.
        packed = mqa_q.view(torch.bfloat16).view(num_tokens, -1)
        return torch.cat((packed, packed), dim=-1) @ out

    return timing.device_time([layer], min(num_tokens, timing.SAME_BUFFERS_MAX), device).us


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 64, 512])
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps([layer_us(num_tokens) for num_tokens in options.tokens]))
        return
    command = [sys.executable, __file__, "--child", "--tokens", *map(str, options.tokens)]
    table = Table(title="us per layer: GEMM, fused_norm_rope, GEMM, fused_q, GEMM", box=None)
    for heading in ("dependent launch", *(f"{n:,}" for n in options.tokens)):
        table.add_column(heading, justify="right")
    for setting, name in (("1", "on"), ("0", "off")):
        environment = {**os.environ, "DSV32_OPS_PDL": setting}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        table.add_row(name, *(f"{us:.2f}" for us in json.loads(done.stdout)))
    Console().print(table)


if __name__ == "__main__":
    main()
