"""A continuous-batching loop over paged caches: compiled prefill, captured decode, both checked.

    python examples/decode_loop.py
    python examples/decode_loop.py --mode auto --requests 100 --steps 200

Requests wait for cache blocks, bring a prompt, end after some more tokens and give their blocks
back. Prompts go in by chunks of up to `--prefill` tokens, of several requests if they fit, through
`torch.compile`: one graph for every chunk length. Decoding replays CUDA graphs that were captured
at batch sizes 1, 2, 4, ...; a batch in between is padded with rows at slot -1. On a CPU the decode
path runs as it is.

A layer is what stands in front of the attention: projections, `fused_norm_rope`, `fused_q`. There
is no attention behind it, so every layer reads the embeddings, and the tokens of a request are
drawn beforehand. After each step all entries of all caches must be what `dsv32_ops.reference` makes
of the same step, those that no live row may touch included.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dsv32_ops import fused_embed_norm, fused_norm_rope, fused_q, platform, reference
from dsv32_ops.layouts import MLA_MODES, IndexerCache, mla_layout
from dsv32_ops.models import PRESETS, ModelConfig
from dsv32_ops.rope import cos_sin_table
from dsv32_ops.testing import poison

BLOCK_SIZE = 64
# Between kernel and reference a sum's order may turn one rounding: one code of a row's largest.
CODE_STEP = {"fp8": 1 / 8, "fp8_e4m3": 1 / 8, "fp8_ds_mla": 1 / 8, "nvfp4_ds_mla": 1 / 2}
FLOAT_STEP = 1 / 128
# And it rarely does.
DIFFERENT = 1e-3


class Rows(NamedTuple):
    """The tokens of one step: ids, positions in their sequences, cache slots."""

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor


class Layer(nn.Module):
    """What precedes one layer's attention, with random weights and caches of its own."""

    mla_cache: Tensor
    index_cache: Tensor
    scale: Tensor

    def __init__(self, config: ModelConfig, mode: str, num_blocks: int, device: str) -> None:
        super().__init__()
        self.config, self.mode, self.device = config, mode, device
        c, heads = config, config.num_heads
        self.qkv_a = self.weight(c.q_lora_rank + c.kv_lora_rank + c.rope_dim, c.hidden_size)
        self.index_kw = self.weight(c.index_dim + c.index_heads, c.hidden_size)
        self.q_b = self.weight(heads * (c.nope_dim + c.rope_dim), c.q_lora_rank)
        self.index_q_b = self.weight(c.index_heads * c.index_dim, c.q_lora_rank)
        self.k_b = self.weight(heads, c.nope_dim, c.kv_lora_rank)
        self.q_norm, self.kv_norm = self.weight(c.q_lora_rank), self.weight(c.kv_lora_rank)
        self.index_norm, self.index_bias = self.weight(c.index_dim), self.weight(c.index_dim)
        self.fp8_dtype = platform.fp8_dtype(torch.device(device).type, torch.device(device).index)
        self.mla_layout = mla_layout(
            mode, kv_dim=c.kv_lora_rank, rope_dim=c.rope_dim, fp8_dtype=self.fp8_dtype
        )
        self.index_layout = IndexerCache(c.index_dim, fp8_dtype=self.fp8_dtype)
        size = (num_blocks, BLOCK_SIZE, device)
        self.register_buffer("mla_cache", poison(self.mla_layout.empty(*size)))
        self.register_buffer("index_cache", poison(self.index_layout.empty(*size)))
        self.register_buffer("scale", torch.tensor([0.021], device=device))

    def weight(self, *shape: int) -> nn.Parameter:
        values = torch.randn(shape, device=self.device) * shape[-1] ** -0.5
        return nn.Parameter(values.bfloat16(), requires_grad=False)

    def forward(
        self, hidden: Tensor, rows: Rows, cos_sin: Tensor, topk: Tensor
    ) -> tuple[Tensor, ...]:
        """Write the caches; return the queries, and in front of them what the caches came from."""
        c, n = self.config, hidden.shape[0]
        latents, index_kw = F.linear(hidden, self.qkv_a), F.linear(hidden, self.index_kw)
        caches = (self.mla_cache, self.index_cache, topk)
        q_c = fused_norm_rope(**self.arguments(latents, index_kw, rows, cos_sin, *caches))
        query = F.linear(q_c, self.q_b).view(n, c.num_heads, c.nope_dim + c.rope_dim)
        q_nope, q_pe = query.split((c.nope_dim, c.rope_dim), -1)
        ql_nope = torch.bmm(q_nope.transpose(0, 1), self.k_b).transpose(0, 1)
        index_q = F.linear(q_c, self.index_q_b).view(n, c.index_heads, c.index_dim)
        queries = fused_q(
            rows.positions, q_pe, cos_sin, index_q, cos_sin, ql_nope, self.scale,
            index_kw[:, c.index_dim :], c.index_dim**-0.5, c.index_heads**-0.5,
            index_rope_interleave=c.index_rope_interleave,
        )  # fmt: skip
        return latents, index_kw, *queries

    def arguments(
        self, latents: Tensor, index_kw: Tensor, rows: Rows, cos_sin: Tensor,
        mla_cache: Tensor, index_cache: Tensor, topk: Tensor,
    ) -> dict[str, Any]:  # fmt: skip
        """Of `fused_norm_rope`, and so of the reference."""
        c = self.config
        q_c, kv_c, k_pe = latents.split((c.q_lora_rank, c.kv_lora_rank, c.rope_dim), -1)
        return dict(
            positions=rows.positions,
            q_c=q_c, q_norm_weight=self.q_norm, q_norm_eps=c.rms_norm_eps,
            kv_c=kv_c, kv_norm_weight=self.kv_norm, kv_norm_eps=c.rms_norm_eps,
            k_pe=k_pe, rope_cos_sin=cos_sin,
            index_k=index_kw[:, : c.index_dim],
            index_k_norm_weight=self.index_norm, index_k_norm_bias=self.index_bias,
            index_k_norm_eps=1e-6, index_rope_cos_sin=cos_sin,
            topk_indices_buffer=topk,
            slot_mapping=rows.slot_mapping,
            indexer_k_cache=index_cache,
            mla_kv_cache=mla_cache, mla_kv_cache_dtype=self.mode, mla_k_scale=self.scale,
            index_rope_interleave=c.index_rope_interleave, fp8_dtype=self.fp8_dtype,
        )  # fmt: skip


class Model(nn.Module):
    """Embedding and layers. The layers share one top-k buffer, as they do in vLLM."""

    cos_sin: Tensor
    topk: Tensor

    def __init__(self, args: argparse.Namespace, num_blocks: int, max_tokens: int) -> None:
        super().__init__()
        c, device = args.config, args.device
        self.eps = c.rms_norm_eps
        layers = [Layer(c, args.mode, num_blocks, device) for _ in range(args.layers)]
        self.layers = nn.ModuleList(layers)
        self.embedding = layers[0].weight(c.vocab_size, c.hidden_size)
        self.norm = layers[0].weight(c.hidden_size)
        table = cos_sin_table(max_tokens, c.rope_dim, theta=c.rope_theta, scaling=c.rope_scaling)
        self.register_buffer("cos_sin", table.to(device))
        topk = torch.empty(args.prefill, c.index_topk, dtype=torch.int32, device=device)
        self.register_buffer("topk", poison(topk))

    def forward(self, rows: Rows) -> list[tuple[Tensor, ...]]:
        _, hidden = fused_embed_norm(rows.input_ids, self.embedding, self.norm, self.eps)
        return [layer(hidden, rows, self.cos_sin, self.topk) for layer in self.layers]


class Decoder:
    """The model at padded batch sizes: as graphs on a GPU, as it is on a CPU."""

    def __init__(self, model: Model, max_batch: int, device: str) -> None:
        self.model = model
        ids, positions = torch.zeros(2, max_batch, dtype=torch.int64, device=device)
        self.static = Rows(ids, positions, torch.full_like(ids, -1))
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, list[tuple[Tensor, ...]]]] = {}
        if not device.startswith("cuda"):
            return
        # The largest first: the others find their memory in its pool.
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(batch_sizes(max_batch)):
            rows = Rows(*(tensor[:size] for tensor in self.static))
            model(rows)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                outputs = model(rows)
            self.graphs[size] = graph, outputs

    def __call__(self, rows: Rows) -> tuple[Rows, list[tuple[Tensor, ...]]]:
        """The padded rows that were run, and the model's outputs, valid until the next call."""
        n = len(rows.input_ids)
        for static, values in zip(self.static, rows, strict=True):
            static[:n] = values
        self.static.slot_mapping[n:] = -1
        size = padded_size(n)
        rows = Rows(*(tensor[:size] for tensor in self.static))
        if size not in self.graphs:
            return rows, self.model(rows)
        graph, outputs = self.graphs[size]
        graph.replay()
        return rows, outputs


def padded_size(n: int) -> int:
    return 1 << (n - 1).bit_length()


def batch_sizes(max_batch: int) -> list[int]:
    return [1 << i for i in range(max_batch.bit_length())]


@dataclass(eq=False)
class Request:
    tokens: Tensor
    prompt: int
    done: int = 0
    blocks: Tensor | None = None

    def slots(self, positions: Tensor) -> Tensor:
        assert self.blocks is not None
        return self.blocks[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE


Span = tuple[Request, int, int]


class Scheduler:
    """Who runs next. A request starts when there are blocks for all tokens it will ever have."""

    def __init__(self, requests: list[Request], num_blocks: int, max_batch: int) -> None:
        self.waiting, self.running = deque(requests), list[Request]()
        self.free = random.sample(range(num_blocks), num_blocks)
        self.max_batch = max_batch

    def admit(self) -> None:
        while self.waiting and len(self.running) < self.max_batch:
            need = -(-len(self.waiting[0].tokens) // BLOCK_SIZE)
            if need > len(self.free):
                return
            request = self.waiting.popleft()
            request.blocks = torch.tensor([self.free.pop() for _ in range(need)])
            self.running.append(request)

    def prefill(self, chunk: int) -> list[Span]:
        """Up to `chunk` tokens of prompts that are not in the caches yet."""
        spans: list[Span] = []
        for request in self.running:
            count = min(request.prompt - request.done, chunk)
            if count > 0:
                spans.append((request, request.done, request.done + count))
                chunk -= count
        return spans

    def decode(self) -> list[Span]:
        return [(request, request.done, request.done + 1) for request in self.running]

    def finish(self, spans: list[Span]) -> None:
        for request, _, stop in spans:
            request.done = stop
            if stop == len(request.tokens):
                assert request.blocks is not None
                self.free += request.blocks.tolist()
                self.running.remove(request)


def rows_of(spans: list[Span], device: str) -> Rows:
    positions = [torch.arange(start, stop) for _, start, stop in spans]
    requests = [request for request, _, _ in spans]
    ids = [r.tokens[p] for r, p in zip(requests, positions, strict=True)]
    slots = [r.slots(p) for r, p in zip(requests, positions, strict=True)]
    return Rows(*(torch.cat(parts).to(device) for parts in (ids, positions, slots)))


class Checker:
    """Repeats each step in plain PyTorch on copies of the caches, and compares all entries."""

    def __init__(self, model: Model) -> None:
        self.model, self.values, self.different = model, 0, 0
        self.layers: list[Any] = list(model.layers)
        self.copies: list[tuple[Tensor, Tensor]] = []

    def before(self) -> None:
        self.copies = [
            (layer.mla_cache.clone(), layer.index_cache.clone()) for layer in self.layers
        ]

    def after(self, rows: Rows, outputs: list[tuple[Tensor, ...]]) -> None:
        topk = self.model.topk[: len(rows.input_ids)]
        if not torch.all(topk == -1):
            raise SystemExit("FAILED: rows of the top-k buffer were not reset")
        for layer, copies, made in zip(self.layers, self.copies, outputs, strict=True):
            mla, index = copies
            reference.fused_norm_rope(
                **layer.arguments(*made[:2], rows, self.model.cos_sin, mla, index, topk)
            )
            slots = torch.arange(mla.shape[0] * BLOCK_SIZE, device=mla.device)
            step = CODE_STEP.get(layer.mode, FLOAT_STEP)
            pairs = zip(
                layer.mla_layout.decode(layer.mla_cache, slots, layer.scale),
                layer.mla_layout.decode(mla, slots, layer.scale),
                strict=True,
            )
            for actual, expected in pairs:
                self.compare(actual, expected, step)
            decode = layer.index_layout.decode
            self.compare(decode(layer.index_cache, slots), decode(index, slots), 1 / 8)

    def compare(self, actual: Tensor, expected: Tensor, step: float) -> None:
        same = (actual == expected) | (actual.isnan() & expected.isnan())
        largest = expected.nan_to_num(0).abs().amax(-1, keepdim=True)
        different = int((~same).sum())
        self.values += same.numel()
        self.different += different
        # Written so that a NaN fails.
        if not torch.all(same | ((actual - expected).abs() <= step * largest)):
            raise SystemExit("FAILED: a cache differs from the reference by more than one code")
        if different > DIFFERENT * same.numel():
            raise SystemExit(f"FAILED: {different} of {same.numel()} cached values differ")


class Meter:
    """Tokens and seconds of one kind of step."""

    def __init__(self, name: str) -> None:
        self.name, self.steps, self.tokens, self.seconds = name, 0, 0, 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self.steps += 1
        self.tokens += tokens
        self.seconds += seconds

    def __str__(self) -> str:
        rate = self.tokens / self.seconds if self.seconds else 0.0
        return f"{self.name:8}{self.tokens:10,} tokens {self.steps:6,} steps {rate:14,.0f} tokens/s"


def make_requests(args: argparse.Namespace) -> list[Request]:
    """The first has a prompt of one and a half chunks, so that a full chunk is always run."""
    prompts = [args.prefill + args.prefill // 2]
    prompts += [random.randint(1, args.prompt) for _ in range(args.requests - 1)]
    requests = []
    for prompt in prompts:
        total = prompt + random.randint(1, args.new_tokens)
        requests.append(Request(torch.randint(args.config.vocab_size, (total,)), prompt))
    return requests


def compiled_prefill(model: Model, device: str) -> Any:
    """The model in one graph for all token counts from 2, compiled with rows that write nothing."""
    # Without Inductor on a CPU: its C++ compiler would take most of this program's time.
    backend = "inductor" if device.startswith("cuda") else "aot_eager"
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    zeros = torch.zeros(2, dtype=torch.int64, device=device)
    compiled(Rows(zeros, zeros.clone(), zeros - 1))
    return compiled


class Loop:
    def __init__(self, args: argparse.Namespace) -> None:
        requests = make_requests(args)
        longest = max(len(request.tokens) for request in requests)
        # Room for the longest and half a batch of the others: some have to wait for blocks.
        usual = -(-(args.prompt + args.new_tokens) // BLOCK_SIZE)
        num_blocks = -(-longest // BLOCK_SIZE) + usual * (1 + args.max_batch // 2)
        model = Model(args, num_blocks, longest)
        self.args = args
        self.prefill = compiled_prefill(model, args.device)
        self.decode = Decoder(model, args.max_batch, args.device)
        self.scheduler = Scheduler(requests, num_blocks, args.max_batch)
        self.checker = Checker(model)
        self.meters = {"prefill": Meter("prefill"), "decode": Meter("decode")}

    def run(self) -> int:
        """Steps until all requests are served, or until the limit."""
        for step in range(self.args.steps):
            if not self.scheduler.waiting and not self.scheduler.running:
                return step
            self.step()
        return self.args.steps

    def step(self) -> None:
        self.scheduler.admit()
        spans, kind = self.scheduler.prefill(self.args.prefill), "prefill"
        if not spans:
            spans, kind = self.scheduler.decode(), "decode"
        rows = rows_of(spans, self.args.device)
        self.checker.before()
        start = self.clock()
        if kind == "prefill":
            ran, outputs = rows, self.prefill(rows)
        else:
            ran, outputs = self.decode(rows)
        self.meters[kind].add(len(rows.input_ids), self.clock() - start)
        self.checker.after(ran, outputs)
        self.scheduler.finish(spans)

    def clock(self) -> float:
        if self.args.device.startswith("cuda"):
            torch.cuda.synchronize()
        return time.perf_counter()


# A GPU runs the model's own sizes, with the heads of one of 8 tensor-parallel ranks.
SMALL: dict[str, Any] = dict(
    hidden_size=256, q_lora_rank=96, num_heads=4, nope_dim=32, index_heads=8, index_topk=32,
    vocab_size=1000,
)  # fmt: skip
DEFAULTS = {
    "cpu": {"prefill": 256, "requests": 12, "prompt": 80, "new_tokens": 12, "max_batch": 8},
    "cuda": {"prefill": 65536, "requests": 160, "prompt": 2000, "new_tokens": 64, "max_batch": 64},
}


def parse(argv: list[str] | None) -> argparse.Namespace:
    models = [name for name, config in PRESETS.items() if config.has_indexer]
    parser = argparse.ArgumentParser(
        description="A continuous-batching loop over paged caches, checked after every step.",
        epilog="Exits with 1 if a cache differs from the reference. A CPU runs a small model; "
        "two defaults are given as CPU/GPU.",
    )
    add = parser.add_argument
    add("--model", choices=models, default=models[0], help=f"default: {models[0]}")
    add("--mode", choices=MLA_MODES, default="fp8_ds_mla", help="MLA cache; default: fp8_ds_mla")
    add("--layers", type=int, default=2, help="default: 2")
    add("--steps", type=int, default=400, help="stop after so many; default: 400")
    add("--prefill", type=int, help=f"tokens per prefill step; default: {_either('prefill')}")
    add("--requests", type=int, help=f"default: {_either('requests')}")
    add("--prompt", type=int, help=f"longest prompt but the first; default: {_either('prompt')}")
    add("--new-tokens", type=int, help=f"most tokens after a prompt; {_either('new_tokens')}")
    add("--max-batch", type=int, help=f"requests at a time; default: {_either('max_batch')}")
    add("--device", help="default: cuda where there is one, else cpu")
    add("--seed", type=int, default=0, help="of weights, prompts and blocks; default: 0")
    args = parser.parse_args(argv)
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    kind = "cuda" if args.device.startswith("cuda") else "cpu"
    for name, value in DEFAULTS[kind].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    config = PRESETS[args.model]
    args.config = replace(config, num_heads=config.num_heads // 8)
    if kind == "cpu":
        args.config = replace(config, **SMALL)
    if args.prefill < args.max_batch:
        parser.error(f"--prefill: expected at least --max-batch ({args.max_batch})")
    return args


def _either(name: str) -> str:
    return f"{DEFAULTS['cpu'][name]}/{DEFAULTS['cuda'][name]}"


@torch.no_grad()
def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    torch.manual_seed(args.seed)
    random.seed(args.seed)
    loop = Loop(args)
    graphs = "graphs" if loop.decode.graphs else "no graphs, batches"
    sizes = ", ".join(map(str, batch_sizes(args.max_batch)))
    print(f"{args.model}, {args.mode}, {args.layers} layers on {args.device}; {graphs} of {sizes}")
    steps = loop.run()
    for meter in loop.meters.values():
        print(meter)
    checker = loop.checker
    print(f"caches agreed with the reference after each of {steps} steps: "
          f"{checker.different:,} of {checker.values:,} values are one code apart")  # fmt: skip


if __name__ == "__main__":
    main()
