"""The ops' math in plain PyTorch, for ``torch.compile``: what one gets without these kernels.

Written for speed under the compiler, not for the last bit: scales come from ``exp2(ceil(log2))``.
Only what the baseline is measured for: MLA cache mode auto, one indexer, all slots live.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsv32_ops.bench.cases import Case


def compiled(case: Case) -> Callable[..., Any] | None:
    """The compiled function for a case, with the op's arguments; None where there is none."""
    if case.config != "deepseek-v3.2" or case.mode not in (None, "auto"):
        return None
    if case.heads not in (None, 16) or case.fill_topk is False:
        return None
    # One graph for all token counts, as a server compiles it.
    return torch.compile(_FUNCTIONS[case.op], dynamic=True)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.float()).to(x.dtype)


def _rope(x: Tensor, table: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    cos, sin = table[positions].float().chunk(2, -1)
    if x.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    head, tail = x[..., : table.shape[1]].float(), x[..., table.shape[1] :].float()
    if interleaved:
        a, b = head[..., 0::2], head[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = head.chunk(2, -1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return torch.cat((turned, tail), -1)


def _quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    amax = x.abs().amax(-1, keepdim=True).clamp(min=1e-4)
    scale = torch.exp2(torch.ceil(torch.log2(amax / 448)))
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def norm_rope(
    positions: Tensor, q_c: Tensor, q_norm_weight: Tensor, q_norm_eps: float, kv_c: Tensor,
    kv_norm_weight: Tensor, kv_norm_eps: float, k_pe: Tensor, rope_cos_sin: Tensor,
    index_k: Tensor, index_k_norm_weight: Tensor, index_k_norm_bias: Tensor,
    index_k_norm_eps: float, index_rope_cos_sin: Tensor, topk_indices_buffer: Tensor,
    slot_mapping: Tensor, indexer_k_cache: Tensor, mla_kv_cache: Tensor,
    index_rope_interleave: bool = False,
) -> Tensor:  # fmt: skip
    """``fused_norm_rope`` as a chain of PyTorch operations."""
    topk_indices_buffer[: positions.shape[0]] = -1
    block, offset = slot_mapping // mla_kv_cache.shape[1], slot_mapping % mla_kv_cache.shape[1]
    kv = _rms_norm(kv_c, kv_norm_weight, kv_norm_eps)
    rotated = _rope(k_pe, rope_cos_sin, positions, True).to(k_pe.dtype)
    mla_kv_cache[block, offset] = torch.cat((kv, rotated), -1)
    dim = index_k.shape[1]
    key = torch.nn.functional.layer_norm(
        index_k.float(), (dim,), index_k_norm_weight, index_k_norm_bias, index_k_norm_eps
    )
    key = _rope(key, index_rope_cos_sin, positions, index_rope_interleave)
    codes, scale = _quantize(key)
    flat, block_size = indexer_k_cache.flatten(1), indexer_k_cache.shape[1]
    flat[:, : block_size * dim].unflatten(1, (block_size, dim))[block, offset] = codes.view(
        torch.uint8
    )
    # Not scale.view(torch.uint8), which Inductor 2.11 refuses: "self.stride(-1) must be 1".
    shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=scale.device)
    flat[:, block_size * dim :].unflatten(1, (block_size, 4))[block, offset] = (
        scale.view(torch.int32) >> shifts
    ).to(torch.uint8)
    return _rms_norm(q_c, q_norm_weight, q_norm_eps)


def query(
    positions: Tensor, q_pe: Tensor, q_pe_cos_sin: Tensor, index_q: Tensor,
    index_q_cos_sin: Tensor, ql_nope: Tensor, q_scale: Tensor, index_weights: Tensor,
    index_weights_softmax_scale: float, index_weights_head_scale: float,
    index_rope_interleave: bool = False, quantize_mqa: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``fused_q`` as a chain of PyTorch operations."""
    rotated = _rope(q_pe, q_pe_cos_sin, positions, True)
    if quantize_mqa:
        wide = torch.cat((ql_nope.float(), rotated), -1) / q_scale
        mqa = wide.clamp(-448, 448).to(torch.float8_e4m3fn)
    else:
        mqa = rotated.to(q_pe.dtype)
    codes, scale = _quantize(_rope(index_q, index_q_cos_sin, positions, index_rope_interleave))
    weights = index_weights.float() * scale.squeeze(-1) * index_weights_softmax_scale
    return codes, weights * index_weights_head_scale, mqa


def eh_norm(
    positions: Tensor, inputs_embeds: Tensor, previous_hidden: Tensor, enorm_weight: Tensor,
    hnorm_weight: Tensor, eps: float,
) -> Tensor:  # fmt: skip
    """``fused_eh_norm`` as a chain of PyTorch operations."""
    embeds = torch.where(positions.unsqueeze(-1) == 0, 0, inputs_embeds)
    left = _rms_norm(embeds, enorm_weight, eps)
    return torch.cat((left, _rms_norm(previous_hidden, hnorm_weight, eps)), -1)


def embed_norm(
    input_ids: Tensor, embed_table: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """``fused_embed_norm`` as a chain of PyTorch operations."""
    residual = embed_table[input_ids]
    return residual, _rms_norm(residual, norm_weight, eps)


def embed_eh_norm(
    positions: Tensor, input_ids: Tensor, embed_table: Tensor, previous_hidden: Tensor,
    enorm_weight: Tensor, hnorm_weight: Tensor, eps: float,
) -> Tensor:  # fmt: skip
    """``fused_embed_eh_norm`` as a chain of PyTorch operations."""
    embeds = embed_table[input_ids]
    return eh_norm(positions, embeds, previous_hidden, enorm_weight, hnorm_weight, eps)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "fused_norm_rope": norm_rope,
    "fused_q": query,
    "fused_eh_norm": eh_norm,
    "fused_embed_norm": embed_norm,
    "fused_embed_eh_norm": embed_eh_norm,
}
