"""Calls an op, or a function with its arguments, as a model's code does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch


def bind(op: str, arguments: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """What the schema requires by position, and by name what differs from its default."""
    positional, keywords = [], {}
    for argument in getattr(torch.ops.dsv32, op).default._schema.arguments:
        if not argument.has_default_value():
            positional.append(arguments[argument.name])
            continue
        value = arguments.get(argument.name, argument.default_value)
        if isinstance(value, torch.Tensor) or value != argument.default_value:
            keywords[argument.name] = value
    return positional, keywords


def call(
    op: str, function: Callable[..., Any], arguments: Mapping[str, Any]
) -> functools.partial[Any]:
    """``function`` with the arguments of ``op``, ready to be called."""
    positional, keywords = bind(op, arguments)
    return functools.partial(function, *positional, **keywords)
