"""Every case of a suite with every peer that can do it: a table, JSON and pictures.  Needs a GPU.

`python -m benchmarks`, `make bench` and, from a checkout, `paged-attn bench` are this.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

try:
    from rich.console import Console
    from rich.markup import escape

    from benchmarks import headline, plots, report, tables
except ModuleNotFoundError as missing:
    if missing.name is None or missing.name.split(".")[0] not in ("rich", "matplotlib"):
        raise
    raise SystemExit(f"the benchmark needs {missing.name}: pip install 'paged-attn[bench]'") from None

from benchmarks import cliffs, measure, runner, traces, warm
from benchmarks.peers import OURS, PEERS, Peer
from benchmarks.suites import SUITES
from tests.cases import Case

ALL = (*SUITES, "trace")
QUICK_CASES, QUICK_ROUNDS = 3, 5


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the command line asks for; exit status 1 if the library failed a case."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] == ["serve"]:  # no suite of cases: an engine, with options of its own
        from benchmarks.serve import command

        command.main(words[1:])
        return
    options = _options(words)
    wide = None if sys.stdout.isatty() else 200  # a file has no width, and tables should not break there
    console = Console(width=wide, highlight=False)
    if options.redraw:
        _draw(options.output or runner.folder(options.redraw), console)
        return
    if options.tables:
        path = (options.output or runner.ROOT / "docs") / "tables.md"
        path.write_text(tables.page(runner.ROOT / "benchmarks" / "results"), encoding="utf-8")
        console.print(f"tables: {path}")
        return
    if options.headline:
        _headline(runner.folder(options.headline), options.output or runner.ROOT / "docs" / "images", console)
        return
    runner.device()
    output = options.output or runner.folder(runner.device_name())
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else 30)
    failed = 0
    processes = warm.processes() if options.processes is None else options.processes
    if processes > 1 and not options.quick:
        with console.status("compiling"):
            warm.warm(options.suites, processes)
    for suite, cases, about in _suites(options):
        done = runner.run(
            suite,
            cases,
            options.peers,
            rounds,
            output,
            shown=lambda line: console.print(line, markup=False),
            **about,
        )
        _print(done, console)
        failed += sum(OURS in result["skipped"] for result in done["results"])
    if "cliffs" in options.suites:
        _cliffs(options.quick, rounds, output, console)
    _draw(output, console)
    if failed:
        raise SystemExit(f"{OURS} failed {failed} cases")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench", description=__doc__, epilog="`bench serve` replays a trace through an engine: see its --help"
    )
    parser.add_argument(
        "suites", nargs="*", metavar="SUITE", help=f"of {', '.join(ALL)}, cliffs; all but cliffs if none is named"
    )
    parser.add_argument("--cliffs", action="store_true", help="the cliff map, too; it alone if no suite is named")
    parser.add_argument("--peers", type=_peers, default=dict(PEERS), help=f"some of {', '.join(PEERS)}, by commas")
    parser.add_argument("--rounds", type=int, help="timings of each call, of which the median counts  [30, quick 5]")
    parser.add_argument("--quick", action="store_true", help="few cases, few rounds: does it all run?")
    parser.add_argument("--processes", type=int, help="that compile beforehand; 1: none  [one a core]")
    parser.add_argument("--trace", type=Path, help="Azure CSV or Mooncake JSON lines for `trace`  [synthetic]")
    parser.add_argument("--output", type=Path, help="folder of the JSON and pictures  [benchmarks/results/<gpu>]")
    parser.add_argument("--redraw", metavar="GPU", help="only draw the pictures of a folder's JSON; needs no GPU")
    parser.add_argument("--headline", metavar="GPU", help="only print the README's table and draw its bars: no GPU")
    parser.add_argument(
        "--tables", action="store_true", help="only write docs/tables.md from all committed runs: no GPU"
    )
    options = parser.parse_args(arguments)
    options.suites += ["cliffs"] * (options.cliffs and "cliffs" not in options.suites)
    options.suites = options.suites or list(ALL)
    for suite in options.suites:
        if suite not in (*ALL, "cliffs"):
            parser.error(f"there is no suite {suite!r}, only {', '.join(ALL)}, cliffs")
    return options


def _peers(words: str) -> dict[str, Peer]:
    """The library, and the peers whose names begin with one of the words."""
    wanted = [word.strip() for word in words.split(",") if word.strip()]
    for word in wanted:
        if not any(name.startswith(word) for name in PEERS):
            raise argparse.ArgumentTypeError(f"no peer {word!r}, only {', '.join(PEERS)}")
    return {name: peer for name, peer in PEERS.items() if name == OURS or name.startswith(tuple(wanted))}


def _suites(options: argparse.Namespace) -> Iterator[tuple[str, Sequence[Case], dict[str, Any]]]:
    """(name, cases, what else to record) of each suite; `trace` is one suite per budget."""
    for suite in options.suites:
        if suite == "trace":
            for cut in traces.cuts(options.trace, *((200, 2) if options.quick else ())):
                about = dict(trace=traces.source(options.trace), steps=cut.steps, dropped_requests=cut.dropped)
                yield cut.suite, cut.cases, about
        elif suite != "cliffs":
            cases = SUITES[suite]
            yield suite, cases[:: -(-len(cases) // QUICK_CASES)] if options.quick else cases, {}


def _print(done: dict[str, Any], console: Console) -> None:
    console.print()
    console.print(report.heading(done))
    console.print(report.table(done))
    for line in report.left_out(done["results"]):
        console.print(line, style="dim", markup=False)
    console.print(report.sums(done["results"]))
    for loss in done["losses"]:
        console.print(f"[red]slower than {loss['peer']}[/] by {loss['factor']:.2f}x: {escape(loss['case'])}")
    console.print()


def _cliffs(quick: bool, rounds: int, output: Path, console: Console) -> None:
    """Measure and keep the cliff map."""
    limits = measure.ceilings()
    axes = cliffs.QUICK if quick else cliffs.AXES
    seconds, left_out = cliffs.measure_map(axes, limits, rounds)
    done = {"suite": "cliffs", **runner.versions(), "ceilings": limits, "rounds": rounds}
    done |= cliffs.report_of(seconds, axes, limits, left_out)
    runner.write(done, output)
    console.print(report.heading(done))
    for line in report.cliff_lines(done, cliffs.cliffs(done)):
        console.print(line, markup=False)


def _draw(output: Path, console: Console) -> None:
    """The pictures of all JSON in a folder, also of suites that ran before."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(output.glob("*.json"))]
    suites = [one for one in found if any(result["seconds"] for result in one.get("results", ()))]
    maps = [one for one in found if one.get("cells")]
    if suites:
        plots.roofline(suites, output / "roofline.png")
        console.print(f"roofline: {output / 'roofline.png'}")
    for one in maps:
        plots.cliff_map(one, output / "cliffs.png")
        console.print(f"cliff map: {output / 'cliffs.png'}")
    if not (suites or maps):
        console.print(f"no results in {output}")


def _headline(folder: Path, output: Path, console: Console) -> None:
    """The README's table, and its picture, from a folder's JSON."""
    for line in headline.table(folder):
        console.print(line, markup=False, soft_wrap=True)
    title = "Time on an H200, as a multiple of paged-attn's (shorter is faster)"
    plots.bars(headline.factors(folder), title, output / "speed.svg")
    console.print(f"bars: {output / 'speed.svg'}")


if __name__ == "__main__":
    main()
