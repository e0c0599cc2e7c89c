"""Launch grids: tokens on axis x, and a guard that refuses what a backend cannot launch.

CUDA takes 2^31 - 1 blocks on grid axis x but only 65,535 on y and on z. A kernel that counts tokens
on y works up to 65,535 tokens and then fails inside the driver with nothing but "invalid argument".
Any kernel can be guarded in one line::

    kernel[check_grid((num_tokens, num_tasks, 1))](...)
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

MAX_GRID_X = 2**31 - 1
MAX_GRID_YZ = 65_535
# Triton's launchers (3.6, 3.7) multiply the axes as 32-bit ints and launch only if the product is
# positive: 2^30 x 2 programs start nothing, without an error.
MAX_PROGRAMS = 2**31 - 1
HIP_MAX_THREADS_X = 2**32 - 1
HIP_MAX_THREADS_PER_BLOCK = 1_024

_PLAIN_AXES = ("x", "y", "z")
_GRID_AXES = ("x (tokens)", "y (tasks)", "z (heads)")
_BACKENDS = ("cuda", "hip")


@dataclass(frozen=True)
class Grid:
    """A launch grid with named axes: ``(x, y, z) = (tokens, tasks, heads)``, in this order always.

    Only ``tokens`` may grow with the batch; ``tasks`` and ``heads`` (usually tiles of heads) are
    fixed by the model, so they fit the 65,535 blocks of axes y and z.

    ``tokens`` may be a ``torch.SymInt``, as inside a traced ``triton_op``. ``tokens == 0`` is
    legal; ask ``empty`` and skip the launch.
    """

    tokens: int
    tasks: int = 1
    heads: int = 1

    @property
    def empty(self) -> bool:
        """True when the grid holds no program, so that there is nothing to launch.

        Reads the sizes: not for symbolic token counts.
        """
        return self.tokens == 0 or self.tasks == 0 or self.heads == 0

    def launch(self, backend: str = "cuda", *, threads: int | None = None) -> tuple[int, int, int]:
        """The launch tuple ``(tokens, tasks, heads)``, after ``check_grid``'s checks.

        Raises ``ValueError`` before the launch, naming axis, request, limit and what to do.
        """
        return _checked(self.tokens, self.tasks, self.heads, backend, threads, _GRID_AXES)


def check_grid(
    grid: Sequence[int], backend: str = "cuda", *, threads: int | None = None
) -> tuple[int, int, int]:
    """Return ``grid`` as a launch tuple ``(x, y, z)``, or raise before the launch.

    =======  ====================================================  =========================
    backend  x                                                     y and z
    =======  ====================================================  =========================
    cuda     2,147,483,647 (2^31 - 1)                              65,535
    hip      the same, and ``x * threads`` below 2^32              65,535
    =======  ====================================================  =========================

    HIP's y and z limits differ between its versions (65,535, 65,536 or more); the smallest is used.
    The product of the axes may not pass 2^31 - 1 either: Triton would launch nothing, silently.

    Args:
        grid: one to three block counts, as Triton takes them; missing axes are 1. Counts may be
            zero. A ``torch.SymInt`` passes unchecked.
        backend: ``"cuda"`` or ``"hip"``.
        threads: threads per program, ``num_warps`` times the warp size (32 on CUDA and on gfx11 and
            gfx12, 64 on gfx9). Only HIP's bound depends on it; left out, HIP's largest block
            (1,024 threads) is assumed.

    Raises:
        ValueError: an axis is negative or over its limit, or their product is (the message names
            axis, request, limit and what to do), an unknown backend, or more than three axes.
        TypeError: a count that is no integer.

    Source: CUDA C++ Programming Guide, technical specifications per compute capability; HIP
    documentation of ``hipModuleLaunchKernel``.
    """
    x, y, z = grid if len(grid) == 3 else _padded(grid)
    return _checked(x, y, z, backend, threads, _PLAIN_AXES)


def max_tokens(backend: str = "cuda", *, threads: int | None = None) -> int:
    """The most blocks that one launch may have on axis x (see ``check_grid``)."""
    if backend == "cuda":
        return MAX_GRID_X
    if backend != "hip":
        raise ValueError(f"backend: expected one of {', '.join(_BACKENDS)}, got {backend!r}")
    if threads is None:
        threads = HIP_MAX_THREADS_PER_BLOCK
    if threads < 1:
        raise ValueError(f"threads: expected at least 1, got {threads}")
    return min(MAX_GRID_X, HIP_MAX_THREADS_X // threads)


def _padded(grid: Sequence[int]) -> tuple[int, int, int]:
    if not 1 <= len(grid) <= 3:
        raise ValueError(f"grid: expected one to three axes, got {len(grid)}")
    x, y, z = (*grid, 1, 1)[:3]
    return x, y, z


def _checked(
    x: int, y: int, z: int, backend: str, threads: int | None, axes: tuple[str, str, str]
) -> tuple[int, int, int]:
    # Written out instead of looped: this runs on every eager launch.
    max_x = MAX_GRID_X if backend == "cuda" else max_tokens(backend, threads=threads)
    if (
        type(x) is int
        and type(y) is int
        and type(z) is int
        and 0 <= x <= max_x
        and 0 <= y <= MAX_GRID_YZ
        and 0 <= z <= MAX_GRID_YZ
        and x * y * z <= MAX_PROGRAMS
    ):
        return x, y, z
    limits = (max_x, MAX_GRID_YZ, MAX_GRID_YZ)
    x, y, z = (_axis(*args, backend) for args in zip(axes, (x, y, z), limits, strict=True))
    if not isinstance(x, torch.SymInt) and x * y * z > MAX_PROGRAMS:
        most = MAX_PROGRAMS // (y * z)
        advice = f"Split the call into chunks of at most {most} along axis {axes[0]}."
        raise ValueError(
            f"grid: {x} x {y} x {z} blocks requested, Triton allows {MAX_PROGRAMS} in all. "
            + (advice if most else "Let one program do several of them.")
        )
    return x, y, z


def _axis(axis: str, count: int, limit: int, backend: str) -> int:
    # A comparison would put a guard on a symbolic size: one more way to recompile or, with a strict
    # dynamic range, to fail. Nothing is lost: 2^31 tokens (2^32 / threads on HIP) do not fit the
    # memory of a GPU, and sizes on y and z are plain integers of the model.
    if isinstance(count, torch.SymInt):
        return count
    count = operator.index(count)
    if not 0 <= count <= limit:
        _refuse(axis, count, limit, backend)
    return count


def _refuse(axis: str, count: int, limit: int, backend: str) -> NoReturn:
    if count < 0:
        advice = "A block count cannot be negative: check the sizes that it was computed from."
    elif axis.startswith("x"):
        advice = f"Split the call into chunks of at most {limit} along this axis"
        advice += ", or use fewer threads per program." if limit < MAX_GRID_X else "."
    else:
        advice = (
            f"Put what grows with the batch on axis x, which takes {MAX_GRID_X} blocks, and keep y "
            "and z for sizes that the model fixes; or let one program do several of them."
        )
    name = backend.upper()
    raise ValueError(
        f"grid axis {axis}: {count} blocks requested, {name} allows 0 to {limit}. {advice}"
    )
