"""Printed report of a run: a table for each suite, peers that were left out and why, and totals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

from benchmarks.cliffs import Cliff
from benchmarks.peers import BOUNDS, OURS
from benchmarks.runner import totals


def heading(report: Mapping[str, Any]) -> str:
    """Return a line with suite, device, commit and the rates that the device reached."""
    limits = report["ceilings"]
    return (
        f"[bold]{report['suite']}[/] on {report['device']}, commit {report['commit']}: "
        f"reads {limits['bytes_per_second'] / 1e12:.2f} TB/s, "
        f"multiplies {limits['operations_per_second'] / 1e12:.0f} TFLOP/s"
    )


def table(report: Mapping[str, Any]) -> Table:
    """Return a table of microseconds of all peers by case, each peer's time also as a multiple of the library's."""
    results, limits = report["results"], report["ceilings"]
    peers = [name for name in _names(r["seconds"] for r in results) if name != OURS]
    rows = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    rows.add_column("case")
    for column in ("us", "min", "quartiles", "p90", "TB/s", "TFLOP/s", "of roof"):
        rows.add_column(column, justify="right", no_wrap=True)
    for name in peers:
        rows.add_column(f"{name}{' (bound)' if name in BOUNDS else ''}", justify="right", no_wrap=True)
    for result in results:
        ours = result["seconds"].get(OURS)
        if ours is None:
            rows.add_row(result["case"], "[bold red]failed[/]")
            continue
        roof = max(result["bytes"] / limits["bytes_per_second"], result["operations"] / limits["operations_per_second"])
        rows.add_row(
            result["case"],
            f"[bold]{ours * 1e6:.1f}[/]",
            *_spread(result["spread"][OURS]),
            f"{result['bytes'] / ours / 1e12:.2f}",
            f"{result['operations'] / ours / 1e12:.1f}",
            f"{roof / ours:.0%}",
            *(_beside(result["seconds"].get(name), ours) for name in peers),
        )
    return rows


def sums(results: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of each peer's summed times, and the library's sum over the same cases."""
    rows = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("sum over", "cases", "ms", f"{OURS} ms", "factor"):
        rows.add_column(column, justify="left" if column == "sum over" else "right")
    for name, row in totals(results).items():
        colour = "" if name in BOUNDS | {OURS} else "green" if row["factor"] > 1 else "red"
        factor = f"[{colour}]{row['factor']:.2f}x[/]" if colour else f"{row['factor']:.2f}x"
        cases = f"{row['cases']:.0f} of {len(results)}"
        rows.add_row(name, cases, f"{row['seconds'] * 1e3:.3f}", f"{row['ours'] * 1e3:.3f}", factor)
    return rows


def left_out(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each peer and reason, with the cases that the reason holds for."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for result in results:
        for name, reason in result["skipped"].items():
            reasons.setdefault((name, reason), []).append(result["case"])
    lines = []
    for (name, reason), cases in reasons.items():
        where = "every case" if len(cases) == len(results) else "; ".join(cases[:3])
        more = f"; and {len(cases) - 3} more" if len(cases) > 3 and where != "every case" else ""
        lines.append(f"{name} left out: {reason} ({where}{more})")
    return lines


def cliff_lines(report: Mapping[str, Any], found: Sequence[Cliff], most: int = 12) -> list[str]:
    """Return lines: numbers of the map, then its `most` worst cliffs."""
    model, cells = report["model"], len(report["cells"])
    lines = [
        f"{cells} cells, {report.get('left_out', 0)} left out for want of time; "
        f"floor {model['launch_seconds'] * 1e6:.1f} us; {len(found)} cliffs above {model['allowed']}x"
    ]
    return lines + [f"  {cliff}" for cliff in found[:most]] + ["  ..."] * (len(found) > most)


def _spread(spread: Mapping[str, float]) -> tuple[str, str, str]:
    """Return the columns of least time, quartiles and ninth decile; two modes are flagged."""
    least, low, high, most = (f"{spread[name] * 1e6:.1f}" for name in ("min", "q1", "q3", "p90"))
    return least, f"{low} {high}", most if spread["modes"] == 1 else f"[red]{most} two modes[/]"


def _beside(seconds: float | None, ours: float) -> str:
    if seconds is None:
        return "-"
    colour = "green" if seconds >= ours else "red"
    return f"{seconds * 1e6:.1f} [{colour}]{seconds / ours:.2f}x[/]"


def _names(groups: Iterable[Iterable[str]]) -> list[str]:
    """Return every name once, in order of appearance."""
    return list(dict.fromkeys(name for group in groups for name in group))
