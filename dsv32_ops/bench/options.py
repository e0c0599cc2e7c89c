"""Options of ``python -m dsv32_ops bench``."""

from __future__ import annotations

import argparse

EPILOG = """examples:
  bench                                          everything: about 540 rows
  bench --quick                                  five token counts, one preset, mode auto
  bench --ops fused_q --heads 16,128 --tokens 1,64,4096,65536
  bench --against fused_q=vllm.models.deepseek_v32.common.kernels:fused_q
  bench --compare benchmarks/results/OLD.json    measure again; exit code 1 when something is slower
  bench --compare OLD.json NEW.json              compare two files, without measuring
  bench --plot benchmarks/results/FILE.json      draw the plots again

The floor of a row is the time of a kernel that only streams the same bytes, read and written in
the same proportion, measured in the same run by the same method. Up to 512 tokens that method is
20 launches in a CUDA graph on the same buffers, so that data may stay in L2: there the fraction of
the floor says little.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add them; their values are checked by the command."""
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    chosen = parser.add_argument_group("what is measured (default: everything)")
    chosen.add_argument("--ops", type=_names, metavar="OP[,OP...]")
    chosen.add_argument("--presets", type=_names, metavar="NAME[,NAME...]")
    chosen.add_argument(
        "--heads", type=positives, metavar="H[,H...]", help="local heads of fused_q"
    )
    chosen.add_argument("--modes", type=_names, metavar="MODE[,MODE...]", help="MLA cache modes")
    chosen.add_argument("--query", choices=("fp8", "bf16"), help="fused_q's output")
    chosen.add_argument("--fill", choices=("on", "off"), help="fused_norm_rope's top-k fill")
    chosen.add_argument(
        "--tokens", type=positives, metavar="N[,N...]", help="default: 1,2,4..131072"
    )
    chosen.add_argument(
        "--slots",
        choices=("serving", "scattered"),
        default="serving",
        help="serving (default): random order up to 512 tokens, as in decoding, and a prefill's "
        "above: consecutive inside blocks in random order; scattered: random order always",
    )
    chosen.add_argument("--quick", action="store_true", help="a subset of about 20 rows")
    chosen.add_argument("--device", help="torch device (default: cuda if there is one, else cpu)")
    beside = parser.add_argument_group("what it is measured against")
    beside.add_argument(
        "--baseline",
        choices=("compile", "none"),
        default="compile",
        help="compile (default): also plain PyTorch under torch.compile, on a GPU, at 64, 4096 and "
        "65536 tokens, for DeepSeek-V3.2 with 16 heads",
    )
    beside.add_argument(
        "--against",
        action="append",
        default=[],
        metavar="[OP=]MODULE:FUNCTION",
        help="a function with an op's arguments; may be given for each op",
    )
    files = parser.add_argument_group("files")
    files.add_argument(
        "--out",
        default="benchmarks/results",
        metavar="DIR",
        help="folder of the result file and the plots (default: %(default)s)",
    )
    files.add_argument(
        "--append",
        action="store_true",
        help="keep the rows of an existing file of this commit; one that has a baseline is "
        "replaced when its baseline is measured again too",
    )
    files.add_argument("--json", action="store_true", help="print the results as JSON")
    files.add_argument("--plot", metavar="FILE", help="draw the plots of a result file and stop")
    files.add_argument(
        "--compare",
        nargs="+",
        metavar=("OLD", "NEW"),
        help="tell regressions from noise; measures what OLD holds unless NEW is given",
    )


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def positive(text: str) -> int:
    """An argument type: an integer of at least 1, underscores allowed."""
    value = int(text.replace("_", ""))
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


def positives(text: str) -> list[int]:
    """An argument type: such integers, separated by commas."""
    return [positive(part) for part in text.split(",")]
