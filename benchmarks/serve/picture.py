"""The picture of a replay: throughput and latencies of the same engine over each backend, side by side."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.plots import GRID, INK, OUR_COLOUR
from benchmarks.serve.backends import OURS

PEER = "#71717a"


def title(report: Mapping[str, Any]) -> str:
    """Describe the run in one line."""
    return (
        f"{report['model']['name']} ({report['dtype']}, random weights) on {report['device']}: "
        f"{report['trace_seconds']:g} s of {report['trace']}, {report['rate']:g} times as fast"
    )


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Draw new tokens per second, and median and 99th percentile of the times to first tokens and between tokens."""
    engines = report["engines"]
    colours = [OUR_COLOUR if name == OURS else PEER for name in engines]
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    speed, first, between = figure.subplots(1, 3)
    figure.suptitle(title(report), fontsize=10)
    places = list(range(len(engines)))
    values = [got["new_tokens_per_second"] for got in engines.values()]
    speed.bar(places, values, color=colours, width=0.62)
    _say(speed, places, values, (0, 3), "center")
    speed.set_title("new tokens per second", fontsize=9)
    for axes, which, text in (
        (first, "first_token", "ms to the first token"),
        (between, "between_tokens", "ms between tokens"),
    ):
        middle, most = ([1e3 * got[which][share] for got in engines.values()] for share in ("p50", "p99"))
        axes.vlines(places, middle, most, color=colours, linewidth=2)
        axes.scatter(places, middle, color=colours, s=55, zorder=3)
        axes.scatter(places, most, facecolor="white", edgecolor=colours, linewidth=2, s=55, zorder=3)
        _say(axes, places, middle, (9, -3), "left")
        _say(axes, places, most, (9, -3), "left")
        axes.set_yscale("log")
        axes.margins(x=0.25, y=0.12)
        axes.set_title(f"{text}: median, and p99 hollow", fontsize=9)
    for axes in (speed, first, between):
        axes.set_xticks(places, list(engines), fontsize=8, color=INK)
        axes.grid(axis="y", color=GRID, linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)


def _say(axes: Any, places: list[int], values: list[float], aside: tuple[int, int], align: str) -> None:
    """Write each value beside its mark: three significant digits below 100, else an integer."""
    for place, value in zip(places, values):
        text = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
        axes.annotate(text, (place, value), xytext=aside, textcoords="offset points", ha=align, fontsize=8)
