"""The command line: ``python -m dsv32_ops [command]``, also installed as ``dsv32-ops``."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from dsv32_ops.version import __version__

DESCRIPTION = "Fused operators in front of DeepSeek-V3.2's sparse attention."
EPILOG = """examples:
  python -m dsv32_ops                                  check both ops here, on a GPU or a CPU
  python -m dsv32_ops --heads 128 --tokens 1,65536     all heads, two token counts
  python -m dsv32_ops verify --preset glm-5 --json
  python -m dsv32_ops verify --config path/to/config.json --mode fp8_ds_mla
  python -m dsv32_ops bench --quick                    times and fractions of the memory floor
  python -m dsv32_ops bench --compare old.json         what became slower?
  python -m dsv32_ops targets --targets sm_90          registers, spills and access widths
  python -m dsv32_ops layout fp8_ds_mla                where every byte of an entry lies

Without a command, verify runs. Each command has its own --help.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, or 1 when a check fails; 2 is a usage error."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] not in (*COMMANDS, "-h", "--help", "--version"):
        arguments.insert(0, "verify")
    options = build_parser(arguments[0]).parse_args(arguments)
    try:
        return options.run(options)
    except (ValueError, OSError) as error:
        print(f"dsv32-ops {options.command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def build_parser(chosen: str) -> argparse.ArgumentParser:
    """A parser that knows all commands, and the options of the chosen one."""
    parser = argparse.ArgumentParser(
        "dsv32-ops",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"dsv32_ops {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, command in COMMANDS.items():
        description = command.summary[0].upper() + command.summary[1:] + "."
        sub = commands.add_parser(name, help=command.summary, description=description)
        if name == chosen:
            command.add_options(sub)
            sub.set_defaults(run=command.run)
    return parser


class Command(NamedTuple):
    """What a command is for, what it takes, and what it does; ``run`` returns the exit code."""

    summary: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def _in_module(summary: str, module: str) -> Command:
    """A command whose module holds ``add_options`` and ``run``, imported when it is chosen."""
    return Command(
        summary,
        lambda parser: importlib.import_module(module).add_options(parser),
        lambda options: importlib.import_module(module).run(options),
    )


def _layout_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", nargs="?", help="an mla_kv_cache_dtype, indexer or indexer-shuffled (default: all)"
    )


def _layout(options: argparse.Namespace) -> int:
    from dsv32_ops import layouts

    maps = {
        mode: layouts.mla_layout(mode).describe()
        for mode in ("auto", "fp8", "fp8_ds_mla", "nvfp4_ds_mla")
    }
    maps["indexer"] = layouts.IndexerCache().describe()
    maps["indexer-shuffled"] = layouts.IndexerCache(shuffled=True).describe()
    for mode in layouts.MLA_MODES:
        if options.name == mode:
            maps.setdefault(mode, layouts.mla_layout(mode).describe())
    if options.name is None:
        print("\n\n".join(f"{name}\n{text}" for name, text in maps.items()))
        return 0
    if options.name not in maps:
        known = ", ".join((*layouts.MLA_MODES, "indexer", "indexer-shuffled"))
        raise ValueError(f"layout: expected one of {known}, got {options.name!r}")
    print(maps[options.name])
    return 0


COMMANDS = {
    "verify": _in_module(
        "run both ops around 65,536 tokens and compare", "dsv32_ops.verify.command"
    ),
    "bench": _in_module(
        "measure time, traffic and the fraction of the memory floor", "dsv32_ops.bench.command"
    ),
    "targets": _in_module("compile every kernel for every supported GPU", "dsv32_ops.targets"),
    "overhead": _in_module("break down the host time of an eager call", "dsv32_ops.overhead"),
    "layout": Command("print where every byte of a cache entry lies", _layout_options, _layout),
}


if __name__ == "__main__":
    sys.exit(main())
