"""`python -m benchmarks`; its options are in options.py."""

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

    from benchmarks import headline, plots, report
except ModuleNotFoundError as missing:
    if missing.name is None or missing.name.split(".")[0] not in ("rich", "matplotlib"):
        raise
    raise SystemExit(f"the benchmark needs {missing.name}: pip install rich matplotlib") from None

from benchmarks import cliffs, measure, options, runner, traces, warm, writes
from benchmarks.peers import OURS, PEERS
from benchmarks.suites import SUITES
from tests.support.cases import Case

QUICK_CASES, QUICK_ROUNDS = 3, 5


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the command line asks for; exit status 1 if the library failed a case."""
    run(options.parse(arguments))


def run(asked: argparse.Namespace) -> None:
    """Run what was asked for."""
    if asked.serve is not None:
        from benchmarks.serve import command

        command.main(asked.serve)
        return
    wide = None if sys.stdout.isatty() else 200  # a file has no width, and tables should not break there
    console = Console(width=wide, highlight=False, stderr=asked.json)
    if asked.redraw:
        _draw(asked.output or runner.folder(asked.redraw), console)
        return
    if asked.headline:
        _headline(runner.folder(asked.headline), asked.output or runner.ROOT / "docs" / "images", console)
        return
    runner.device()
    output = asked.output or runner.folder(runner.device_name())
    rounds = asked.rounds or (QUICK_ROUNDS if asked.quick else 30)
    failed = 0
    processes = warm.processes() if asked.processes is None else asked.processes
    if processes > 1 and not asked.quick:
        with console.status("compiling"):
            warm.warm(asked.suites, processes)
    everything = []
    peers = {name: PEERS[name] for name in asked.peers if name in PEERS}
    for suite, cases, about in _suites(asked):
        done = runner.run(
            suite,
            cases,
            peers,
            rounds,
            output,
            shown=lambda line: console.print(line, markup=False),
            **about,
        )
        everything.append(done)
        _print(done, console)
        failed += sum(OURS in result["skipped"] for result in done["results"])
    if "writes" in asked.suites:
        everything.append(writes.run(rounds, output, asked.quick, lambda line: console.print(line, markup=False)))
        _print(everything[-1], console)
        failed += sum(OURS in result["skipped"] for result in everything[-1]["results"])
    if "cliffs" in asked.suites:
        everything.append(_cliffs(asked.quick, rounds, output, console))
    _draw(output, console)
    if asked.json:
        print(json.dumps(everything, indent=1))
    if failed:
        raise SystemExit(f"{OURS} failed {failed} cases")


def _suites(asked: argparse.Namespace) -> Iterator[tuple[str, Sequence[Case], dict[str, Any]]]:
    """Yield (name, cases, further facts to record) of each suite; `trace` is one suite for each budget."""
    for suite in asked.suites:
        if suite == "trace":
            for cut in traces.cuts(asked.trace, *((200, 2) if asked.quick else ())):
                about = dict(trace=traces.source(asked.trace), steps=cut.steps, dropped_requests=cut.dropped)
                yield cut.suite, cut.cases, about
        elif suite not in ("cliffs", "writes"):
            cases = SUITES[suite]
            yield suite, cases[:: -(-len(cases) // QUICK_CASES)] if asked.quick else cases, {}


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


def _cliffs(quick: bool, rounds: int, output: Path, console: Console) -> dict[str, Any]:
    """Measure the cliff map, write it and return its JSON."""
    limits = measure.ceilings()
    axes = cliffs.QUICK if quick else cliffs.AXES
    seconds, left_out = cliffs.measure_map(axes, limits, rounds)
    done = {"suite": "cliffs", **runner.versions(), "ceilings": limits, "rounds": rounds}
    done |= cliffs.report_of(seconds, axes, limits, left_out)
    runner.write(done, output)
    console.print(report.heading(done))
    for line in report.cliff_lines(done, cliffs.cliffs(done)):
        console.print(line, markup=False)
    return done


def _draw(output: Path, console: Console) -> None:
    """Draw the pictures of all JSON in a folder, also of earlier runs."""
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
    """Print the tables of README and of the page of performance, and draw the picture, from a folder's JSON."""
    for table in (headline.beside_peers, headline.portable_beside_vllm, headline.table):
        for line in (*table(folder), ""):
            console.print(line, markup=False, soft_wrap=True)
    title = "Time on an H200, as a multiple of paged-attn's (shorter is faster)"
    plots.bars(headline.factors(folder), title, output / "speed.svg")
    console.print(f"bars: {output / 'speed.svg'}")


if __name__ == "__main__":
    main()
