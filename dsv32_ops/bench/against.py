"""Other people's functions as baselines: ``[op=]module:function``, with the ops' arguments."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dsv32_ops.bench.calls import bind
from dsv32_ops.bench.cases import OPS


@dataclass(frozen=True)
class Against:
    """A function to time beside an op.

    It is called with the op's required arguments by position, and by name with those optional ones
    that a row sets.
    """

    op: str
    name: str
    function: Callable[..., Any]

    def missing(self, arguments: Mapping[str, Any]) -> list[str]:
        """Settings of a row that the function has no argument for: it cannot do that row."""
        try:
            known = inspect.signature(self.function).parameters
        except ValueError:
            return []
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
            return []
        return [name for name in bind(self.op, arguments)[1] if name not in known]


def parse(text: str) -> Against:
    """``op=module:function``; the op may be left out when the function is named like it."""
    op, _, target = text.rpartition("=")
    module, _, name = target.partition(":")
    if not module or not name:
        raise ValueError(f"--against: expected [op=]module:function, got {text!r}")
    op = op or name
    if op not in OPS:
        raise ValueError(f"--against: expected an op among {', '.join(OPS)}, got {op!r}")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--against {text}: {error}") from error
    return Against(op, target, function)
