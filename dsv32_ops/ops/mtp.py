"""The speculative-decoding and embedding norms: `fused_eh_norm`, `fused_embed_norm` and both."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.library import wrap_triton

from csrc_free_ops.mtp import eh_norm_kernel, embed_norm_kernel

from .. import checks, launch, platform, reference
from ..geometry import Grid
from ..registration import register_traced, register_with_out

EH_ARGUMENTS = """Tensor positions, Tensor inputs_embeds, Tensor previous_hidden,
    Tensor enorm_weight, Tensor hnorm_weight, float eps"""
EMBED_ARGUMENTS = "Tensor input_ids, Tensor embed_table, Tensor norm_weight, float eps"
EMBED_EH_ARGUMENTS = """Tensor positions, Tensor input_ids, Tensor embed_table,
    Tensor previous_hidden, Tensor enorm_weight, Tensor hnorm_weight, float eps"""


def _eh_output(previous_hidden: Tensor) -> Tensor:
    num_tokens, hidden = previous_hidden.shape
    return previous_hidden.new_empty((num_tokens, 2 * hidden))


def _embed_outputs(input_ids: Tensor, embed_table: Tensor) -> tuple[Tensor, Tensor]:
    shape = (input_ids.numel(), embed_table.shape[1])
    return embed_table.new_empty(shape), embed_table.new_empty(shape)


def prepare_eh(
    positions: Tensor, input_ids: Tensor | None, embeds: Tensor, previous_hidden: Tensor,
    enorm_weight: Tensor, hnorm_weight: Tensor, eps: float, *, out: Tensor, pdl: bool,
) -> tuple[Grid, tuple[Any, ...], dict[str, Any], int]:  # fmt: skip
    """Launch of both eh ops; without ids the embeddings are per token."""
    num_tokens, hidden = previous_hidden.shape
    args = (
        positions, input_ids,
        embeds, embeds.stride(0), None if input_ids is None else embeds.shape[0],
        previous_hidden, previous_hidden.stride(0), enorm_weight, hnorm_weight, eps,
        out, out.stride(0),
    )  # fmt: skip
    # A trace may have a symbolic size here; the kernel is compiled for one.
    constants = {"DIM": int(hidden), "PDL": pdl}
    return Grid(num_tokens, 2), args, constants, launch.norm_warps(constants["DIM"])


def prepare_embed(
    input_ids: Tensor, embed_table: Tensor, norm_weight: Tensor, eps: float,
    residual: Tensor, normed: Tensor, *, pdl: bool,
) -> tuple[Grid, tuple[Any, ...], dict[str, Any], int]:  # fmt: skip
    rows, hidden = embed_table.shape
    args = (
        input_ids, embed_table, embed_table.stride(0), rows, norm_weight, eps,
        residual, residual.stride(0), normed, normed.stride(0),
    )  # fmt: skip
    constants = {"DIM": int(hidden), "PDL": pdl}
    return Grid(input_ids.shape[0], 1), args, constants, launch.norm_warps(constants["DIM"])


def _per_token(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """`prepare_eh`'s inputs from `fused_eh_norm`'s arguments."""
    return args[0], None, *args[1:]


def _gathered(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """`prepare_eh`'s inputs from `fused_embed_eh_norm`'s arguments."""
    return args[0], _flat(args[1]), *args[2:]


def _flat(ids: Tensor) -> Tensor:
    # A shortcut remembers arguments, not views of them.
    return ids if ids.dim() == 1 else ids.reshape(-1)


def _first_eh(args: tuple[Any, ...], outs: tuple[Tensor, ...]) -> launch.Call:
    checks.eh_norm(*args, out=outs[0] if outs else None)
    return _call_eh(_per_token(args), outs)


def _first_embed_eh(args: tuple[Any, ...], outs: tuple[Tensor, ...]) -> launch.Call:
    checks.embed_eh_norm(*args, out=outs[0] if outs else None)
    inputs = _gathered(args)
    _, ids, embed_table, *_ = inputs
    if platform.check_device_data():
        checks.ids_in_range(ids, "input_ids", embed_table.shape[0])
    return _call_eh(inputs, outs)


def _call_eh(inputs: tuple[Any, ...], outs: tuple[Tensor, ...]) -> launch.Call:
    previous_hidden = inputs[3]
    out = outs[0] if outs else _eh_output(previous_hidden)
    device = out.device
    grid, kernel_args, constants, num_warps = prepare_eh(
        *inputs, out=out, pdl=launch.use_pdl(device)
    )
    return launch.Call(
        eh_norm_kernel, grid, kernel_args, constants, num_warps, device, () if outs else (out,)
    )


def _first_embed(args: tuple[Any, ...], outs: tuple[Tensor, ...]) -> launch.Call:
    residual_out, normed_out = outs or (None, None)
    checks.embed_norm(*args, residual_out=residual_out, normed_out=normed_out)
    input_ids, embed_table, norm_weight, eps = args
    input_ids = _flat(input_ids)
    if platform.check_device_data():
        checks.ids_in_range(input_ids, "input_ids", embed_table.shape[0])
    residual, normed = outs or _embed_outputs(input_ids, embed_table)
    device = embed_table.device
    grid, kernel_args, constants, num_warps = prepare_embed(
        input_ids, embed_table, norm_weight, eps, residual, normed, pdl=launch.use_pdl(device)
    )
    new = () if outs else (residual, normed)
    return launch.Call(embed_norm_kernel, grid, kernel_args, constants, num_warps, device, new)


def _cuda_eh(*args: Any, out: Tensor | None = None) -> Tensor:
    return launch.run("fused_eh_norm", args, () if out is None else (out,), _first_eh)[0]


def _cuda_embed_eh(*args: Any, out: Tensor | None = None) -> Tensor:
    outs = () if out is None else (out,)
    return launch.run("fused_embed_eh_norm", args, outs, _first_embed_eh)[0]


def _cuda_embed(
    *args: Any, residual_out: Tensor | None = None, normed_out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    outs = () if residual_out is None or normed_out is None else (residual_out, normed_out)
    residual, normed = launch.run("fused_embed_norm", args, outs, _first_embed)
    return residual, normed


def _cpu_eh(*args: Any, out: Tensor | None = None) -> Tensor:
    checks.eh_norm(*args, out=out)
    return reference.fused_eh_norm(*args, out=out)


def _cpu_embed_eh(*args: Any, out: Tensor | None = None) -> Tensor:
    checks.embed_eh_norm(*args, out=out)
    checks.ids_in_range(args[1].reshape(-1), "input_ids", args[2].shape[0])
    return reference.fused_embed_eh_norm(*args, out=out)


def _cpu_embed(
    *args: Any, residual_out: Tensor | None = None, normed_out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    checks.embed_norm(*args, residual_out=residual_out, normed_out=normed_out)
    checks.ids_in_range(args[0].reshape(-1), "input_ids", args[1].shape[0])
    return reference.fused_embed_norm(*args, residual_out=residual_out, normed_out=normed_out)


def _fake_eh(*args: Any, out: Tensor | None = None) -> Tensor:
    checks.eh_norm(*args, out=out)
    return _eh_output(args[2])


def _fake_embed_eh(*args: Any, out: Tensor | None = None) -> Tensor:
    checks.embed_eh_norm(*args, out=out)
    return _eh_output(args[3])


def _fake_embed(
    *args: Any, residual_out: Tensor | None = None, normed_out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    checks.embed_norm(*args, residual_out=residual_out, normed_out=normed_out)
    return _embed_outputs(args[0], args[1])


register_with_out(
    "fused_eh_norm", EH_ARGUMENTS, "Tensor", (), ("out",),
    cuda=_cuda_eh, cpu=_cpu_eh, fake=_fake_eh,
)  # fmt: skip
register_with_out(
    "fused_embed_norm", EMBED_ARGUMENTS, "(Tensor, Tensor)", (), ("residual_out", "normed_out"),
    cuda=_cuda_embed, cpu=_cpu_embed, fake=_fake_embed,
)  # fmt: skip
register_with_out(
    "fused_embed_eh_norm", EMBED_EH_ARGUMENTS, "Tensor", (), ("out",),
    cuda=_cuda_embed_eh, cpu=_cpu_embed_eh, fake=_fake_embed_eh,
)  # fmt: skip


# Each spells wrap_triton out: torch's AOT cache looks for kernels in the op's own body only.
def _traced_eh(*args: Any) -> Tensor:
    checks.eh_norm(*args)
    inputs = _per_token(args)
    out = _eh_output(inputs[3])
    grid, kernel_args, constants, num_warps = prepare_eh(*inputs, out=out, pdl=False)
    wrap_triton(eh_norm_kernel)[grid.launch()](*kernel_args, **constants, num_warps=num_warps)
    return out


def _traced_embed_eh(*args: Any) -> Tensor:
    checks.embed_eh_norm(*args)
    inputs = _gathered(args)
    out = _eh_output(inputs[3])
    grid, kernel_args, constants, num_warps = prepare_eh(*inputs, out=out, pdl=False)
    wrap_triton(eh_norm_kernel)[grid.launch()](*kernel_args, **constants, num_warps=num_warps)
    return out


def _traced_embed(
    input_ids: Tensor, embed_table: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    checks.embed_norm(input_ids, embed_table, norm_weight, eps)
    residual, normed = _embed_outputs(input_ids, embed_table)
    grid, kernel_args, constants, num_warps = prepare_embed(
        _flat(input_ids), embed_table, norm_weight, eps, residual, normed, pdl=False
    )
    wrap_triton(embed_norm_kernel)[grid.launch()](*kernel_args, **constants, num_warps=num_warps)
    return residual, normed


register_traced("fused_eh_norm", checks.eh_norm, Tensor, (), traced=_traced_eh, cpu=_cpu_eh)
register_traced(
    "fused_embed_norm", checks.embed_norm, tuple[Tensor, Tensor], (),
    traced=_traced_embed, cpu=_cpu_embed,
)  # fmt: skip
register_traced(
    "fused_embed_eh_norm", checks.embed_eh_norm, Tensor, (),
    traced=_traced_embed_eh, cpu=_cpu_embed_eh,
)  # fmt: skip
