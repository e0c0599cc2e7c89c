"""Tables and progress, with rich where it is installed."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

RICH_HINT = "for tables with colours and a progress bar: pip install 'dsv32_ops[bench]'"
# Without a terminal a line per step would flood a log.
_LOG_SECONDS = 10.0


def has_rich() -> bool:
    """Whether the extra ``bench`` is there."""
    return importlib.util.find_spec("rich") is not None


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    styles: Sequence[str | None] | None = None,
) -> None:
    """Print rows to stdout; the first column is left-aligned, and so are others that hold words."""
    left = [i == 0 or any(row[i][:1].isalpha() for row in rows) for i in range(len(columns))]
    if not has_rich():
        _print_plain(title, columns, rows, left)
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    for name, is_left in zip(columns, left, strict=True):
        table.add_column(name, justify="left" if is_left else "right")
    for i, row in enumerate(rows):
        table.add_row(*row, style=styles[i] if styles else None)
    console = Console()
    if not console.is_terminal:
        # A pipe has no width; 80 columns would cut numbers off.
        console = Console(width=200)
    console.print(table)


def _print_plain(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[bool]
) -> None:
    lines = [columns, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    print(title)
    for line in lines:
        cells = zip(line, widths, left, strict=True)
        print("  ".join(c.ljust(w) if is_left else c.rjust(w) for c, w, is_left in cells).rstrip())


class Steps:
    """Counts steps on stderr: a bar on a terminal with rich, else a line now and then."""

    def __init__(self, total: int, bar: Any = None) -> None:
        self.total, self.bar = total, bar
        self.done, self._said = 0, float("-inf")
        self._task = bar.add_task("", total=total) if bar else None

    def __call__(self, label: str) -> None:
        """Begin the step ``label``."""
        if self.bar:
            self.bar.update(self._task, completed=self.done, description=label)
        elif time.monotonic() - self._said >= _LOG_SECONDS:
            print(f"[{self.done + 1}/{self.total}] {label}", file=sys.stderr, flush=True)
            self._said = time.monotonic()
        self.done += 1


@contextmanager
def progress(total: int) -> Iterator[Steps]:
    """Progress over ``total`` steps, gone from the terminal when the block ends."""
    if not (has_rich() and sys.stderr.isatty()):
        yield Steps(total)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield Steps(total, bar)


def microseconds(us: float | None) -> str:
    """Three significant digits from a microsecond to seconds."""
    if us is None:
        return "-"
    if us < 999.95:
        return f"{us:.1f} us" if us >= 10 else f"{us:.2f} us"
    if us < 999.95e3:
        return f"{us / 1e3:.4g} ms"
    return f"{us / 1e6:.3g} s"
