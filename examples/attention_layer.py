"""DeepSeek-V3.2's attention layer around the ops of this package, checked against plain fp32.

    python examples/attention_layer.py
    python examples/attention_layer.py --size real --mode fp8_ds_mla

`SparseAttention` serves one sequence from paged caches: `fused_norm_rope` writes them, `fused_q`
makes the queries, and PyTorch does in the open what kernels do in a serving engine: indexer scores,
top-k, attention over the chosen keys. A prompt goes in by chunks, then tokens one by one. `dense`
is the same layer without caches and without quantization, in fp32; the two have to agree.

DeepSeek's code also multiplies the indexer's queries and keys by one orthogonal (Hadamard) matrix.
That leaves their products as they are, and is left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dsv32_ops import fused_norm_rope, fused_q, platform
from dsv32_ops.layouts import FP8_MODES, MLA_MODES, IndexerCache, mla_layout
from dsv32_ops.models import PRESETS, ModelConfig
from dsv32_ops.rope import cos_sin_table
from dsv32_ops.testing import poison

REAL = PRESETS["deepseek-v3.2"]
SMALL = replace(
    REAL, name="small", hidden_size=256, q_lora_rank=96, num_heads=4, nope_dim=32,
    index_heads=8, index_topk=32,
)  # fmt: skip
BLOCK_SIZE = 64
# Attention kernels take fp8 queries where the rotated keys are fp8, bf16 queries elsewhere.
FP8_QUERY_MODES = (*FP8_MODES, "nvfp4_ds_mla")


def softmax_scale(config: ModelConfig) -> float:
    """1 / sqrt(head dim), times the square of YaRN's m: queries and keys are both scaled by m."""
    scaling = config.rope_scaling or {}
    m = 1 + 0.1 * scaling.get("mscale_all_dim", 0) * math.log(scaling.get("factor", 1))
    return m * m / math.sqrt(config.nope_dim + config.rope_dim)


class SparseAttention(nn.Module):
    """One layer with random bf16 weights. `start` makes empty caches, `forward` appends tokens.

    Heads' values are as wide as the unrotated part of their keys, as in all DeepSeek models.
    """

    def __init__(self, config: ModelConfig, positions: int, device: str = "cpu") -> None:
        super().__init__()
        self.config, self.device, self.positions = config, torch.device(device), positions
        self.scale = softmax_scale(config)
        c, heads, latent = config, config.num_heads, config.kv_lora_rank
        self.qkv_a = self.weight(c.q_lora_rank + latent + c.rope_dim, c.hidden_size)
        self.index_kw = self.weight(c.index_dim + c.index_heads, c.hidden_size)
        self.q_b = self.weight(heads * (c.nope_dim + c.rope_dim), c.q_lora_rank)
        self.index_q_b = self.weight(c.index_heads * c.index_dim, c.q_lora_rank)
        self.k_b = self.weight(heads, c.nope_dim, latent)
        self.v_b = self.weight(heads, c.nope_dim, latent)
        self.out = self.weight(c.hidden_size, heads * c.nope_dim)
        self.q_norm, self.kv_norm = self.norm_weight(c.q_lora_rank), self.norm_weight(latent)
        self.index_norm = self.norm_weight(c.index_dim, dtype=torch.float32)
        self.index_bias = self.norm_weight(c.index_dim, mean=0.0, dtype=torch.float32)
        table = cos_sin_table(positions, c.rope_dim, theta=c.rope_theta, scaling=c.rope_scaling)
        self.cos_sin = table.to(device)

    def weight(self, *shape: int) -> nn.Parameter:
        # Unit variance in, unit variance out: softmax then prefers some keys clearly, and an error
        # in one key shows.
        values = torch.randn(shape, device=self.device) * shape[-1] ** -0.5
        return nn.Parameter(values.bfloat16(), requires_grad=False)

    def norm_weight(
        self, size: int, mean: float = 1.0, dtype: torch.dtype = torch.bfloat16
    ) -> nn.Parameter:
        values = mean + 0.25 * torch.randn(size, device=self.device)
        return nn.Parameter(values.to(dtype), requires_grad=False)

    def start(self, mode: str, topk: int) -> None:
        """Poisoned caches for `mode`, and a top-k buffer as wide as `topk`."""
        c, device = self.config, self.device
        fp8_dtype = platform.fp8_dtype(device.type, device.index)
        num_blocks = -(-self.positions // BLOCK_SIZE)
        self.mode, self.quantize_q = mode, mode in FP8_QUERY_MODES
        self.mla_layout = mla_layout(
            mode, kv_dim=c.kv_lora_rank, rope_dim=c.rope_dim, fp8_dtype=fp8_dtype
        )
        self.mla_cache = poison(self.mla_layout.empty(num_blocks, BLOCK_SIZE, device))
        self.index_layout = IndexerCache(c.index_dim, fp8_dtype=fp8_dtype)
        self.index_cache = poison(self.index_layout.empty(num_blocks, BLOCK_SIZE, device))
        # No powers of two, so that a factor lost or applied twice shows.
        self.q_scale = torch.tensor([0.037], device=device)
        self.k_scale = torch.tensor([0.021], device=device)
        self.topk = poison(torch.empty(self.positions, topk, dtype=torch.int32, device=device))
        # The blocks of a sequence lie anywhere in a cache.
        block_table = torch.randperm(num_blocks, device=device)
        offset = torch.arange(BLOCK_SIZE, device=device)
        self.slots = (block_table[:, None] * BLOCK_SIZE + offset).flatten()

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """hidden [n, hidden_size], the tokens at `positions`, which follow those already cached."""
        c, n = self.config, len(hidden)
        latents = F.linear(hidden, self.qkv_a)
        q_c, kv_c, k_pe = latents.split((c.q_lora_rank, c.kv_lora_rank, c.rope_dim), -1)
        index_kw = F.linear(hidden, self.index_kw)
        index_k, index_weights = index_kw.split((c.index_dim, c.index_heads), -1)
        q_c = fused_norm_rope(
            positions,
            q_c, self.q_norm, c.rms_norm_eps,
            kv_c, self.kv_norm, c.rms_norm_eps,
            k_pe, self.cos_sin,
            index_k, self.index_norm, self.index_bias, 1e-6, self.cos_sin,
            self.topk,
            slot_mapping=self.slots[positions],
            indexer_k_cache=self.index_cache,
            mla_kv_cache=self.mla_cache,
            mla_kv_cache_dtype=self.mode,
            mla_k_scale=self.k_scale,
            index_rope_interleave=c.index_rope_interleave,
        )  # fmt: skip

        query = F.linear(q_c, self.q_b).view(n, c.num_heads, c.nope_dim + c.rope_dim)
        q_nope, q_pe = query.split((c.nope_dim, c.rope_dim), -1)
        # k_b goes to the query's side, once per token: the keys stay latents.
        ql_nope = torch.bmm(q_nope.transpose(0, 1), self.k_b).transpose(0, 1)
        index_q = F.linear(q_c, self.index_q_b).view(n, c.index_heads, c.index_dim)
        index_q, index_weights, mqa_q = fused_q(
            positions, q_pe, self.cos_sin, index_q, self.cos_sin, ql_nope, self.q_scale,
            index_weights, c.index_dim**-0.5, c.index_heads**-0.5,
            index_rope_interleave=c.index_rope_interleave,
            quantize_mqa=self.quantize_q,
        )  # fmt: skip
        if self.quantize_q:
            mqa_q = mqa_q.float() * self.q_scale
        else:
            mqa_q = torch.cat((ql_nope, mqa_q), -1).float()

        self.select(index_q.float(), index_weights, positions)
        attended = self.attend(mqa_q, positions).to(hidden.dtype)
        values = torch.bmm(attended.transpose(0, 1), self.v_b.mT).transpose(0, 1)
        return F.linear(values.flatten(1), self.out)

    def select(self, index_q: Tensor, index_weights: Tensor, positions: Tensor) -> None:
        """Put the positions of each row's best keys into the top-k buffer, -1 where keys end."""
        context = int(positions[-1]) + 1
        keys = self.index_layout.decode(self.index_cache, self.slots[:context])
        # The query's scale is part of index_weights, the key's was applied by decode.
        scores = torch.einsum("nh,nhs->ns", index_weights, (index_q @ keys.T).relu())
        future = torch.arange(context, device=self.device) > positions[:, None]
        best = scores.masked_fill(future, -math.inf).topk(min(self.topk.shape[1], context))
        # fused_norm_rope filled the buffer: columns beyond the context are -1 already.
        chosen = best.indices.masked_fill(best.values == -math.inf, -1)
        self.topk[: len(positions), : chosen.shape[1]] = chosen

    def attend(self, query: Tensor, positions: Tensor) -> Tensor:
        """Attention of each row over its own chosen keys; all heads share them. [n, H, Dkv]."""
        kv, k_pe = self.mla_layout.decode(
            self.mla_cache, self.slots[: int(positions[-1]) + 1], self.k_scale
        )
        keys, output = torch.cat((kv, k_pe), -1), []
        rows = max(1, 2**26 // (self.topk.shape[1] * keys.shape[1]))
        chosen = self.topk[: len(positions)].long()
        for q, index in zip(query.split(rows), chosen.split(rows), strict=True):
            own = keys[index.clamp(min=0)]
            scores = (q @ own.mT * self.scale).masked_fill((index == -1)[:, None], -math.inf)
            output.append(scores.softmax(-1) @ own[..., : kv.shape[1]])
        return torch.cat(output)


def run(
    layer: SparseAttention, mode: str, topk: int, hidden: Tensor, prompt: int, chunk: int
) -> tuple[Tensor, Tensor]:
    """The prompt in chunks, then decode steps: ([n, hidden_size], chosen keys as a mask [n, n])."""
    layer.start(mode, topk)
    starts = [*range(0, prompt, chunk), *range(prompt, len(hidden) + 1)]
    outputs, chosen = [], torch.zeros(len(hidden), len(hidden) + 1, dtype=torch.bool)
    chosen = chosen.to(hidden.device)
    for begin, end in pairwise(starts):
        positions = torch.arange(begin, end, device=hidden.device)
        outputs.append(layer(hidden[begin:end], positions))
        # -1 marks the last column, which is dropped.
        chosen[begin:end].scatter_(1, layer.topk[: end - begin].long() % (len(hidden) + 1), True)
    return torch.cat(outputs).float(), chosen[:, :-1]


class Steps(NamedTuple):
    """Where the layer rounds: activations, both parts of a cached key, query, indexer."""

    activation: Callable[[Tensor], Tensor]
    kv: Callable[[Tensor], Tensor]
    k_pe: Callable[[Tensor], Tensor]
    query: Callable[[Tensor], Tensor]
    indexer: Callable[[Tensor], Tensor]


class Format(NamedTuple):
    mantissa_bits: int
    lowest_exponent: int
    largest: float


BF16, FP16 = Format(7, -126, 3.38e38), Format(10, -14, 65504.0)
E4M3, E2M1 = Format(3, -6, 448.0), Format(1, 0, 6.0)
EXACT = Steps(*[lambda x: x] * 5)


def rounded(x: Tensor, fmt: Format, scale: Tensor | float = 1.0) -> Tensor:
    """x / scale to the nearest number of the format, ties to even; times scale."""
    x = x / scale
    exponent = (torch.frexp(x).exponent - 1).clamp(min=fmt.lowest_exponent)
    step = torch.ldexp(torch.ones_like(x), exponent - fmt.mantissa_bits)
    return ((x / step).round() * step).clamp(-fmt.largest, fmt.largest) * scale


def rounded_blocks(x: Tensor, size: int, fmt: Format) -> Tensor:
    """Blocks of `size` with a scale each: a power of two for e4m3, an e4m3 number for e2m1."""
    blocks = x.unflatten(-1, (-1, size))
    ratio = blocks.abs().amax(-1, keepdim=True) / fmt.largest
    scale = ratio.log2().ceil().exp2() if fmt is E4M3 else rounded(ratio, E4M3)
    return rounded(blocks, fmt, scale).flatten(-2)


def emulation(layer: SparseAttention) -> Steps:
    """The layer's rounding in fp32 arithmetic that shares no code with the ops."""
    bf16, fp16, fp8 = (partial(rounded, fmt=fmt) for fmt in (BF16, FP16, E4M3))
    scaled_fp8 = partial(fp8, scale=layer.k_scale)
    kv, k_pe = {
        "float16": (fp16, fp16),
        "fp8": (scaled_fp8, scaled_fp8),
        "fp8_e4m3": (scaled_fp8, scaled_fp8),
        "fp8_ds_mla": (partial(rounded_blocks, size=128, fmt=E4M3), bf16),
        "nvfp4_ds_mla": (partial(rounded_blocks, size=16, fmt=E2M1), fp8),
    }.get(layer.mode, (bf16, bf16))
    query = partial(fp8, scale=layer.q_scale) if layer.quantize_q else bf16
    indexer = partial(rounded_blocks, size=layer.config.index_dim, fmt=E4M3)
    return Steps(bf16, kv, k_pe, query, indexer)


def rotate(x: Tensor, cos_sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first columns of x [n, ..., D] as complex numbers."""
    half = cos_sin.shape[-1] // 2
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    pairs = turned.unflatten(-1, (half, 2) if interleaved else (2, half))
    real, imaginary = pairs.unbind(-1 if interleaved else -2)
    turn = torch.complex(*cos_sin.view(len(x), *[1] * (x.dim() - 2), 2 * half).chunk(2, -1))
    product = torch.complex(real, imaginary) * turn
    pairs = torch.stack((product.real, product.imag), -1 if interleaved else -2)
    return torch.cat((pairs.flatten(-2), rest), -1)


def dense(
    layer: SparseAttention, hidden: Tensor, steps: Steps, chosen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The layer in fp32: attention of every token over `chosen` keys, by default all before it.

    Returns its output, and the indexer's scores [n, n]. With EXACT keys and values are multiplied
    out for each head. With the rounding of a layer the products go in the layer's order, because
    it rounds the query and the output as latents.
    """
    c, n, table = layer.config, len(hidden), layer.cos_sin[: len(hidden)]
    hidden, act, exact = hidden.float(), steps.activation, steps is EXACT
    past = torch.ones(n, n, dtype=torch.bool, device=hidden.device).tril()

    def linear(x: Tensor, weight: Tensor) -> Tensor:
        return act(x @ weight.float().T)

    latents = linear(hidden, layer.qkv_a)
    q_c, kv, k_pe = latents.split((c.q_lora_rank, c.kv_lora_rank, c.rope_dim), -1)
    q_c = act(F.rms_norm(q_c, q_c.shape[1:], layer.q_norm.float(), c.rms_norm_eps))
    kv = steps.kv(F.rms_norm(kv, kv.shape[1:], layer.kv_norm.float(), c.rms_norm_eps))
    k_pe = steps.k_pe(rotate(k_pe, table, True))

    index_k, weights = linear(hidden, layer.index_kw).split((c.index_dim, c.index_heads), -1)
    index_k = F.layer_norm(index_k, index_k.shape[1:], layer.index_norm, layer.index_bias, 1e-6)
    index_k = steps.indexer(rotate(index_k, table, c.index_rope_interleave))
    index_q = linear(q_c, layer.index_q_b).view(n, c.index_heads, c.index_dim)
    index_q = steps.indexer(rotate(index_q, table, c.index_rope_interleave))
    index_scores = torch.zeros(n, n, device=hidden.device)
    for head in range(c.index_heads):
        index_scores += weights[:, head, None] * (index_q[:, head] @ index_k.T).relu()

    query = linear(q_c, layer.q_b).view(n, c.num_heads, c.nope_dim + c.rope_dim)
    q_nope, q_pe = query.split((c.nope_dim, c.rope_dim), -1)
    q_pe = steps.query(rotate(q_pe, table, True))
    values = []
    for head in range(c.num_heads):
        k_b, v_b = layer.k_b[head].float(), layer.v_b[head].float()
        if exact:
            scores = q_nope[:, head] @ (kv @ k_b.T).T
        else:
            scores = steps.query(act(q_nope[:, head] @ k_b)) @ kv.T
        scores = (scores + q_pe[:, head] @ k_pe.T) * layer.scale
        share = scores.masked_fill(~(past if chosen is None else chosen), -math.inf).softmax(-1)
        values.append(share @ (kv @ v_b.T) if exact else act(act(share @ kv) @ v_b.T))
    return linear(torch.cat(values, -1), layer.out), index_scores.masked_fill(~past, -math.inf)


def errors(actual: Tensor, truth: Tensor) -> Tensor:
    """Largest and RMS error, both relative to the RMS of the truth."""
    error = (actual - truth) / truth.square().mean().sqrt()
    return torch.stack((error.abs().max(), error.square().mean().sqrt()))


def missed(chosen: Tensor, scores: Tensor, topk: int) -> Tensor:
    """Share of the best `topk` keys by `scores` that were not chosen, in rows with more keys."""
    best = torch.zeros_like(chosen).scatter_(1, scores.topk(topk).indices, True)[topk:]
    return (best & ~chosen[topk:]).sum() / best.sum()


class Row(NamedTuple):
    mode: str
    against: str
    measured: Tensor
    allowed: Tensor
    right_keys: bool

    def passes(self) -> bool:
        # A NaN on either side fails.
        return self.right_keys and bool((self.measured <= self.allowed).all())

    def __str__(self) -> str:
        pairs = zip(self.measured.tolist(), self.allowed.tolist(), strict=True)
        cells = [f"{measured:.5f} of {allowed:.5f}".ljust(20) for measured, allowed in pairs]
        verdict = "ok" if self.passes() else "FAIL" if self.right_keys else "FAIL: not its keys"
        return f"{self.mode:14}{self.against:16}{'  '.join(cells):66}{verdict}"


def check_mode(
    layer: SparseAttention, mode: str, hidden: Tensor, args: argparse.Namespace,
    truths: dict[str, Tensor], index_scores: Tensor,
) -> Iterator[Row]:  # fmt: skip
    """Rows of the verdict. `truths` are outputs over all keys.

    Allowed is twice the error that `dense` makes once it rounds what the layer rounds, to the same
    formats but with code of its own. Both then have errors of one distribution; they are not the
    same errors, because fp32 sums in another order round to other bf16 and fp8 neighbours.
    """
    n = len(hidden)
    keys = torch.arange(1, n + 1, device=hidden.device)
    output, chosen = run(layer, mode, n, hidden, args.tokens, args.chunk)
    emulated, emulated_scores = dense(layer, hidden, emulation(layer))
    allowed = 2 * errors(emulated, truths["all keys"])
    past = keys <= keys[:, None]
    for name, truth in truths.items():
        yield Row(mode, name, errors(output, truth), allowed, torch.equal(chosen, past))
    if args.topk >= n:
        return
    output, chosen = run(layer, mode, args.topk, hidden, args.tokens, args.chunk)
    right_keys = (
        torch.equal(chosen.sum(1), keys.clamp(max=args.topk)) and not (chosen & ~past).any()
    )
    truth, _ = dense(layer, hidden, EXACT, chosen)
    emulated, _ = dense(layer, hidden, emulation(layer), chosen)
    best = emulated_scores.topk(args.topk).indices
    emulated_chosen = torch.zeros_like(chosen).scatter_(1, best, True)
    measured = missed(chosen, index_scores, args.topk)
    allowed = missed(emulated_chosen, index_scores, args.topk)
    yield Row(
        mode,
        f"top {args.topk}",
        torch.cat((errors(output, truth), measured[None])),
        2 * torch.cat((errors(emulated, truth), allowed[None])),
        right_keys,
    )


def transformers_output(layer: SparseAttention, hidden: Tensor) -> Tensor:
    """Hidden states of Hugging Face's module with the layer's weights, in fp32 over all keys."""
    from transformers.models.deepseek_v32 import modeling_deepseek_v32 as modeling

    c, n = layer.config, len(hidden)
    config = modeling.DeepseekV32Config(
        hidden_size=c.hidden_size, num_attention_heads=c.num_heads, num_key_value_heads=c.num_heads,
        q_lora_rank=c.q_lora_rank, kv_lora_rank=c.kv_lora_rank, qk_rope_head_dim=c.rope_dim,
        qk_nope_head_dim=c.nope_dim, v_head_dim=c.nope_dim, index_n_heads=c.index_heads,
        index_head_dim=c.index_dim, index_topk=n, max_position_embeddings=c.max_positions,
        rope_parameters={"rope_theta": c.rope_theta, "rope_type": "yarn", **(c.rope_scaling or {})},
        attn_implementation="eager",
    )  # fmt: skip
    q_a, kv_a = layer.qkv_a.split((c.q_lora_rank, c.kv_lora_rank + c.rope_dim))
    wk, weights_proj = layer.index_kw.split((c.index_dim, c.index_heads))
    module = modeling.DeepseekV32Attention(config, layer_idx=0).to(hidden.device)
    module.load_state_dict({
        "q_a_proj.weight": q_a,
        "q_a_layernorm.weight": layer.q_norm,
        "q_b_proj.weight": layer.q_b,
        "kv_a_proj_with_mqa.weight": kv_a,
        "kv_a_layernorm.weight": layer.kv_norm,
        "kv_b_proj.weight": torch.cat((layer.k_b, layer.v_b), 1).flatten(0, 1),
        "o_proj.weight": layer.out,
        "indexer.wq_b.weight": layer.index_q_b,
        "indexer.wk.weight": wk,
        "indexer.k_norm.weight": layer.index_norm,
        "indexer.k_norm.bias": layer.index_bias,
        "indexer.weights_proj.weight": weights_proj,
    })  # fmt: skip
    states = hidden[None].float()
    positions = torch.arange(n, device=hidden.device)[None]
    rotary = modeling.DeepseekV32RotaryEmbedding(config).to(hidden.device)
    mask = torch.full((1, 1, n, n), -math.inf, device=hidden.device).triu(1)
    return module(states, rotary(states, positions), mask)[0][0]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="DeepSeek-V3.2's attention layer around dsv32_ops, compared with plain fp32.",
        epilog="Exits with 1 if an error is larger than allowed. Errors are relative to the RMS of "
        "the output. More tokens than --topk make the layer choose among its keys.",
    )
    add = parser.add_argument
    add("--size", choices=("small", "real"), default="small", help="default: small")
    add("--mode", choices=(*MLA_MODES, "all"), default="all", help="MLA cache; default: all")
    add("--tokens", type=int, help="prompt; default: 128, real size 32 on a CPU, 3072 on a GPU")
    add("--chunk", type=int, help="tokens per prefill call; default: 48, real size on a GPU 1024")
    add("--decode", type=int, default=4, help="tokens after the prompt, one a call; default: 4")
    add("--topk", type=int, help="keys per token; default: the model's, 32 or 2048")
    add("--device", help="default: cuda where there is one, else cpu")
    add("--seed", type=int, default=0, help="of weights and hidden states; default: 0")
    add("--transformers", action="store_true", help="also compare with Hugging Face transformers")
    args = parser.parse_args(argv)
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = args.device.startswith("cuda")
    args.config = SMALL if args.size == "small" else REAL
    args.tokens = args.tokens or (128 if args.size == "small" else 3072 if on_gpu else 32)
    args.chunk = args.chunk or (1024 if args.size == "real" and on_gpu else 48)
    args.topk = args.topk or args.config.index_topk
    return args


def has_transformers() -> bool:
    return importlib.util.find_spec("transformers") is not None and (
        importlib.util.find_spec("transformers.models.deepseek_v32") is not None
    )


@torch.no_grad()
def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    torch.manual_seed(args.seed)
    if args.size == "small":
        # Products this small take ten times as long on a busy CPU when threads wait for each other.
        torch.set_num_threads(1)
    n = args.tokens + args.decode
    layer = SparseAttention(args.config, n, args.device)
    hidden = torch.randn(n, args.config.hidden_size, device=args.device).bfloat16()
    print(f"{args.size} size on {args.device}, {args.tokens} + {args.decode} tokens")
    truth, index_scores = dense(layer, hidden, EXACT)
    truths = {"all keys": truth}
    if args.transformers and has_transformers():
        truths["transformers"] = transformers_output(layer, hidden)
    elif args.transformers:
        print("transformers: skipped, no module transformers.models.deepseek_v32 is installed")
    if args.topk >= n:
        print(f"top {args.topk}: skipped, it covers all {n} keys (see --tokens and --topk)")

    titles = f"{'largest error':20}  {'RMS error':20}  {'keys missed':22}"
    print("\nmeasured of allowed; errors relative to the RMS of the output")
    print(f"{'mode':14}{'against':16}{titles}verdict")
    modes = MLA_MODES if args.mode == "all" else (args.mode,)
    passed = True
    for mode in modes:
        for row in check_mode(layer, mode, hidden, args, truths, index_scores):
            print(row, flush=True)
            passed &= row.passes()
    print(f"\nverdict: {'passed' if passed else 'FAILED'}")
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
