"""Pictures of the JSON: the roofline with all peers, the cliff map, and README's bars."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from benchmarks.cliffs import Cell, cliffs
from benchmarks.peers import OURS

OUR_COLOUR, CLIFF, INK, GRID = "#c2410c", "#e11d48", "#3f3f46", "#e4e4e7"
PEER_COLOURS = {
    "sdpa cudnn": "#71717a",
    "sdpa flash": "#a1a1aa",
    "cudnn paged": "#2563eb",
    "flashinfer fa2": "#0d9488",
    "flashinfer fa3": "#65a30d",
    "vllm triton": "#9333ea",
    "flashmla": "#db2777",
}
MARKERS = "osD^vPX*<>"
COLUMN_COLOURS = {"FlashAttention-3": "#7c3aed", "cuDNN, paged": "#2563eb", "FlashInfer": "#0d9488"}
LONGEST_BAR = 4.5  # in multiples of the library's time; a longer bar is cut off, and its number states the length
# SVG text stays text, and two drawings of the same numbers give the same file.
AS_TEXT: Any = {"svg.fonttype": "none", "svg.hashsalt": "paged-attn", "font.family": "sans-serif"}
DODGE = 1.06  # a peer's marks lie to the right of the previous peer's by this factor, so that no mark hides another


def roofline(reports: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw operations per second over operations per byte, on doubly logarithmic axes, with a colour for each peer."""
    memory = median(r["ceilings"]["bytes_per_second"] for r in reports)
    compute = median(r["ceilings"]["operations_per_second"] for r in reports)
    points: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for report in reports:
        for result in report["results"]:
            for name, seconds in result["seconds"].items():
                intensity = result["operations"] / result["bytes"]
                points.setdefault((name, report["suite"]), []).append((intensity, result["operations"] / seconds))
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    axes = figure.subplots()
    axes.set(xscale="log", yscale="log")
    left, right = _span(x for values in points.values() for x, _ in values)
    turn = min(max(compute / memory, left), right)
    roof = [(x, min(compute, memory * x)) for x in (left, turn, right)]
    axes.plot(*zip(*roof, strict=True), color=INK, linewidth=1.2)
    slope = math.sqrt(left * turn)
    axes.annotate(
        f"{memory / 1e12:.2f} TB/s", (slope, memory * slope), xytext=(-8, 4), textcoords="offset points", ha="right"
    )
    axes.annotate(
        f"{compute / 1e12:.0f} TFLOP/s", (right, compute), xytext=(-4, 6), textcoords="offset points", ha="right"
    )
    suites = list(dict.fromkeys(suite for _, suite in points))
    names = list(dict.fromkeys(name for name, _ in points))
    for (name, suite), values in sorted(points.items(), key=lambda item: item[0][0] == OURS):  # ours on top
        aside = DODGE ** names.index(name)
        axes.scatter(
            [x * aside for x, _ in values],
            [y for _, y in values],
            marker=MARKERS[suites.index(suite) % len(MARKERS)],
            s=34 if name == OURS else 22,
            color=_colour(name),
            alpha=0.95 if name == OURS else 0.7,
            linewidths=0,
            zorder=3 if name == OURS else 2,
        )
    axes.set_xlabel("operations per byte (peers moved to the right, one after another)")
    axes.set_ylabel("operations per second")
    axes.set_title(f"{reports[0]['device']}: achieved, and the measured ceilings", fontsize=11)
    axes.grid(which="major", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    peers = [axes.scatter([], [], color=_colour(name), label=name, s=30) for name in names]
    shapes = [
        axes.scatter([], [], color=INK, marker=MARKERS[i % len(MARKERS)], label=suite, s=24)
        for i, suite in enumerate(suites)
    ]
    axes.add_artist(axes.legend(handles=peers, loc="lower right", frameon=False, fontsize=9))
    axes.legend(handles=shapes, loc="upper left", frameon=False, fontsize=9, ncols=2)
    _save(figure, path)


def cliff_map(report: Mapping[str, Any], path: Path) -> None:
    """Draw latency over (keys, batch), with a panel for each query length.

    A red edge marks a cliff between two cells of a panel.  A red corner marks a cell to which a cliff leads from
    another panel.
    """
    axes, cells = report["axes"], {Cell(c["batch"], c["q_len"], c["keys"]): c["seconds"] for c in report["cells"]}
    batches, lengths, keys = list(axes["batch"]), list(axes["q_len"]), list(axes["keys"])
    columns = min(4, len(lengths))
    rows = math.ceil(len(lengths) / columns)
    size = (1.2 + columns * (0.55 + 0.46 * len(keys)), 1.3 + rows * (0.6 + 0.30 * len(batches)))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    shortest, longest = (1e6 * pick(cells.values()) for pick in (min, max))
    norm = LogNorm(shortest, max(longest, 1.01 * shortest))
    shades = mpl.colormaps["viridis"]
    for panel, q_len in zip(panels.flat, lengths, strict=False):
        for cell, seconds in cells.items():
            if cell.q_len == q_len:
                x, y = keys.index(cell.keys), batches.index(cell.batch)
                shade = norm(1e6 * seconds)
                panel.add_patch(Rectangle((x, y), 1, 1, facecolor=shades(shade), edgecolor="white", linewidth=0.4))
                text = f"{seconds * 1e6:.0f}" if seconds >= 1e-5 else f"{seconds * 1e6:.1f}"
                ink = "white" if shade < 0.62 else "black"
                panel.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=6, color=ink)
        panel.set(xlim=(0, len(keys)), ylim=(0, len(batches)), title=f"{q_len} quer{'y' if q_len == 1 else 'ies'} each")
        panel.title.set_fontsize(9)
        panel.set_xticks([i + 0.5 for i in range(len(keys))], [_short(k) for k in keys], fontsize=7)
        panel.set_yticks([i + 0.5 for i in range(len(batches))], [str(b) for b in batches], fontsize=7)
        panel.tick_params(length=0)
        panel.spines[:].set_visible(False)
    for panel in panels.flat[len(lengths) :]:
        panel.set_visible(False)
    found = cliffs(report)
    for cliff in found:
        panel = panels.flat[lengths.index(cliff.after.q_len)]
        _mark(panel, cliff.before, cliff.after, keys, batches)
    figure.supxlabel("keys", fontsize=9)
    figure.supylabel("sequences", fontsize=9)
    allowed = report["model"]["allowed"]
    figure.suptitle(
        f"{report['device']}: microseconds of one call.  {len(found)} steps cost over {allowed}x what their "
        "work explains: red edges along keys or sequences, red corners along queries",
        fontsize=11,
    )
    scale = mpl.cm.ScalarMappable(norm, shades)
    figure.colorbar(scale, ax=panels, label="microseconds", shrink=0.6, pad=0.01)
    _save(figure, path)


def bars(rows: Sequence[tuple[str, Mapping[str, float]]], title: str, path: Path) -> None:
    """Draw a group of bars for each (case, factors): peers' times as multiples of the library's, which is a line."""
    with mpl.rc_context(AS_TEXT):
        figure = Figure(figsize=(9, 0.9 + 0.2 * sum(len(factors) for _, factors in rows)), layout="constrained")
        axes = figure.subplots()
        y, ticks = 0.0, []
        for name, factors in rows:
            peers = {column: factor for column, factor in factors.items() if column != OURS}
            ticks.append((y + (len(peers) - 1) / 2, name))
            for column, factor in peers.items():
                axes.barh(y, min(factor, LONGEST_BAR), height=0.86, color=COLUMN_COLOURS[column])
                text = f"{factor:.2f}x" if factor <= LONGEST_BAR else f"{factor:.1f}x  \N{RIGHTWARDS ARROW}"
                axes.text(max(min(factor, LONGEST_BAR), 1.0) + 0.04, y, text, va="center", fontsize=8, color=INK)
                y += 1
            y += 0.7
        ours = axes.axvline(1.0, color=OUR_COLOUR, linewidth=2.4)
        axes.set(xlim=(0, LONGEST_BAR + 0.45), ylim=(y - 0.9, -0.7))
        axes.set_yticks([place for place, _ in ticks], [name for _, name in ticks], fontsize=9)
        axes.set_title(title, fontsize=10, loc="left")
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        keys = [ours, *(Rectangle((0, 0), 1, 1, color=colour) for colour in COLUMN_COLOURS.values())]
        axes.legend(keys, (OURS, *COLUMN_COLOURS), loc="upper right", frameon=False, fontsize=9)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})
        lines = path.read_text(encoding="utf-8").splitlines()  # the backend ends lines with blanks
        path.write_text("\n".join(line.rstrip() for line in lines) + "\n", encoding="utf-8")


def _mark(panel: Axes, before: Cell, after: Cell, keys: Sequence[int], batches: Sequence[int]) -> None:
    """Draw a red edge between two cells of a panel, or a red corner in `after` if `before` is on another panel."""
    x, y = keys.index(after.keys), batches.index(after.batch)
    if before.q_len != after.q_len:
        panel.add_patch(Rectangle((x + 0.72, y + 0.62), 0.22, 0.3, facecolor=CLIFF, linewidth=0, zorder=4))
        return
    if before.keys != after.keys:
        edge = max(x, keys.index(before.keys))
        line: tuple[list[float], list[float]] = ([edge, edge], [y + 0.08, y + 0.92])
    else:
        edge = max(y, batches.index(before.batch))
        line = ([x + 0.08, x + 0.92], [edge, edge])
    panel.plot(*line, color=CLIFF, linewidth=2.2, solid_capstyle="butt", zorder=4)


def _colour(name: str) -> str:
    return OUR_COLOUR if name == OURS else PEER_COLOURS.get(name, INK)


def _span(values: Any) -> tuple[float, float]:
    """Return (lower, upper) limits around the values, with a factor of 1.5 to spare."""
    values = list(values)
    return min(values) / 1.5, max(values) * 1.5


def _short(keys: int) -> str:
    return f"{keys // 1024}k" if keys >= 1024 and keys % 1024 == 0 else str(keys)


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
