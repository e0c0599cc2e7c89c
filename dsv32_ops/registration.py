"""How an op enters the dispatcher."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

NAMESPACE = "dsv32"
_library = torch.library.Library(NAMESPACE, "IMPL")


def register(
    name: str,
    schema: str,
    mutates: Sequence[str],
    *,
    cuda: Callable[..., Any],
    cpu: Callable[..., Any],
    fake: Callable[..., Any],
) -> None:
    """Define `dsv32::name` through `torch.library.custom_op`."""
    qualified = f"{NAMESPACE}::{name}"
    op = torch.library.custom_op(
        qualified, cuda, mutates_args=mutates, schema=schema, device_types="cuda"
    )
    op.register_kernel("cpu")(cpu)
    op.register_fake(fake)
    _replace(name, {**_NO_WRAPPERS, "CUDA": cuda, "CPU": cpu})


# custom_op and triton_op put Python under these keys. There, a call that leaves a trailing mutated
# default out raises IndexError on torch 2.11 and costs 160 us on 2.13, where it takes 10 us
# without. The kernels refuse gradients themselves, and no version counter of a cache is bumped:
# nothing differentiable may hold one.
_NO_WRAPPERS = dict.fromkeys(("ADInplaceOrView", "Autograd"), torch.library.fallthrough_kernel)


def _replace(name: str, kernels: Mapping[str, Callable[..., Any]]) -> None:
    """Put kernels under dispatch keys of `dsv32::name` that have one already."""
    with warnings.catch_warnings():
        # torch warns that a kernel is overridden, which is the purpose here.
        warnings.simplefilter("ignore", UserWarning)
        for key, kernel in kernels.items():
            _library.impl(name, kernel, key, allow_override=True)


def argument_names(name: str) -> list[str]:
    """The arguments of a registered op in the order of its schema."""
    op = getattr(getattr(torch.ops, NAMESPACE), name).default
    return [argument.name for argument in op._schema.arguments]


def register_with_out(
    name: str,
    arguments: str,
    returns: str,
    mutates: Sequence[str],
    outs: Sequence[str],
    *,
    cuda: Callable[..., Any],
    cpu: Callable[..., Any],
    fake: Callable[..., Any],
) -> None:
    """`register` the op, and `<name>_out` that leads with the tensors to write, returning nothing.

    The kernels take those as keywords. In the schema they lead since custom_op refuses keyword-only
    tensors and no required argument may stand behind defaults.
    """

    def out_form(kernel: Callable[..., Any]) -> Callable[..., None]:
        def out_kernel(*args: Any, **keywords: Any) -> None:
            written = dict(zip(outs, args[: len(outs)], strict=True))
            kernel(*args[len(outs) :], **written, **keywords)

        return out_kernel

    register(name, f"({arguments}) -> {returns}", mutates, cuda=cuda, cpu=cpu, fake=fake)
    # Alias letters far from those that `arguments` uses.
    written = ", ".join(f"Tensor({chr(ord('z') - i)}!) {out}" for i, out in enumerate(outs))
    register(
        f"{name}_out", f"({written}, {arguments}) -> ()", (*outs, *mutates),
        cuda=out_form(cuda), cpu=out_form(cpu), fake=out_form(fake),
    )  # fmt: skip


def register_traced(
    name: str,
    like: Callable[..., None],
    returns: Any,
    mutates: Sequence[str],
    *,
    traced: Callable[..., Any],
    cpu: Callable[..., Any],
) -> None:
    """Define `dsv32::<name>_triton`, whose body the compiler traces through to the kernel.

    triton_op takes its schema from a Python signature only: the positional arguments of `like`.
    """
    signature = inspect.signature(like, eval_str=True)
    positional = [p for p in signature.parameters.values() if p.kind is not p.KEYWORD_ONLY]
    traced.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=positional, return_annotation=returns
    )
    op: Any = torch.library.triton_op(f"{NAMESPACE}::{name}_triton", traced, mutates_args=mutates)
    op.register_kernel("cpu")(cpu)
    _replace(f"{name}_triton", _NO_WRAPPERS)
