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
    """What was run, in a line."""
    return (
        f"{report['model']['name']} ({report['dtype']}, random weights) on {report['device']}: "
        f"{report['trace_seconds']:g} s of {report['trace']}, {report['rate']:g} times as fast"
    )


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Bars: tokens a second; and, p50 filled and p99 as a line above it, times to the first and between tokens."""
    engines = report["engines"]
    colours = [OUR_COLOUR if name == OURS else PEER for name in engines]
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    speed, first, between = figure.subplots(1, 3)
    figure.suptitle(title(report), fontsize=10)
    places = list(range(len(engines)))
    values = [got["new_tokens_per_second"] for got in engines.values()]
    speed.bar(places, values, color=colours, width=0.62)
    _say(speed, places, values, "{:.0f}")
    speed.set_title("new tokens per second (more is better)", fontsize=9)
    for axes, which, text in (
        (first, "first_token", "to the first token"),
        (between, "between_tokens", "between tokens"),
    ):
        halves = [1e3 * got[which]["p50"] for got in engines.values()]
        most = [1e3 * got[which]["p99"] for got in engines.values()]
        axes.bar(places, most, color=colours, alpha=0.35, width=0.62)
        axes.bar(places, halves, color=colours, width=0.62)
        _say(axes, places, most, "{:.4g}")
        axes.set_yscale("log")
        axes.set_title(f"milliseconds {text}: p50, p99 pale (less is better)", fontsize=9)
    for axes in (speed, first, between):
        axes.set_xticks(places, list(engines), fontsize=8, color=INK)
        axes.grid(axis="y", color=GRID, linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)


def _say(axes: Any, places: list[int], values: list[float], form: str) -> None:
    for place, value in zip(places, values):
        axes.annotate(
            form.format(value), (place, value), xytext=(0, 2), textcoords="offset points", ha="center", fontsize=8
        )
