"""The benchmark's command line.  It imports nothing heavy, so --help and error messages appear at once."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

# The names in suites.SUITES and peers.PEERS, which need torch.  A test asserts that they are equal.
SUITES = (
    "decode", "features", "prefill", "mixed", "ragged", "spec", "single", "fp8", "formats", "window", "models",
    "layouts", "invariant", "wide", "mla", "masks", "layers",
)  # fmt: skip
PEERS = (
    "paged-attn", "default mode", "sdpa cudnn", "sdpa flash", "cudnn paged", "flashinfer fa2", "flashinfer fa3",
    "vllm triton", "flashmla",
)  # fmt: skip
ALL = (*SUITES, "trace", "writes")
ABOUT = """Every case of a suite with every peer that can do it: a table, JSON and pictures.  Needs a GPU.

`python -m benchmarks`, `make bench` and, from a checkout, `paged-attn bench` are this.
"""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; an unknown suite or peer ends the process."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] == ["serve"]:  # not a suite of cases: an engine with its own options
        return argparse.Namespace(serve=words[1:])
    after = "`bench serve` replays a trace through an engine: see its --help"
    parser = argparse.ArgumentParser(prog="bench", description=ABOUT, epilog=after)
    parser.set_defaults(serve=None)
    parser.add_argument(
        "suites", nargs="*", metavar="SUITE", help=f"of {', '.join(ALL)}, cliffs; all but cliffs if none is named"
    )
    parser.add_argument("--cliffs", action="store_true", help="the cliff map, too; it alone if no suite is named")
    parser.add_argument("--peers", type=_peers, default=list(PEERS), help=f"some of {', '.join(PEERS)}, by commas")
    parser.add_argument("--rounds", type=_positive, help="timings of each call: the median counts  [30, quick 5]")
    parser.add_argument("--quick", action="store_true", help="few cases, few rounds: does it all run?")
    parser.add_argument("--processes", type=_positive, help="that compile beforehand; 1: none  [one a core]")
    parser.add_argument("--trace", type=_file, help="Azure CSV or Mooncake JSON lines for `trace`  [synthetic]")
    parser.add_argument("--output", type=Path, help="folder of the JSON and pictures  [benchmarks/results/<gpu>]")
    parser.add_argument("--redraw", metavar="GPU", help="only draw the pictures of a folder's JSON; needs no GPU")
    parser.add_argument("--headline", metavar="GPU", help="only print the README's tables and draw its bars: no GPU")
    parser.add_argument("--json", action="store_true", help="print the suites' JSON, and nothing else, on stdout")
    options = parser.parse_args(words)
    options.suites += ["cliffs"] * (options.cliffs and "cliffs" not in options.suites)
    options.suites = options.suites or list(ALL)
    for suite in options.suites:
        if suite not in (*ALL, "cliffs"):
            parser.error(f"there is no suite {suite!r}, only {', '.join(ALL)}, cliffs")
    return options


def _peers(words: str) -> list[str]:
    """Return the library and the peers whose names begin with one of the words."""
    wanted = [word.strip() for word in words.split(",") if word.strip()]
    for word in wanted:
        if not any(name.startswith(word) for name in PEERS):
            raise argparse.ArgumentTypeError(f"no peer {word!r}, only {', '.join(PEERS)}")
    return [name for name in PEERS if name == PEERS[0] or name.startswith(tuple(wanted))]


def _positive(text: str) -> int:
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return int(text)


def _file(text: str) -> Path:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text!r}")
    return Path(text)
