"""The cliff map: latency over (batch, q_len, keys), and its cliffs: steps that a model of the work does not explain.

A step goes from a cell c1 of the grid to its neighbour c2 along one axis, in either direction.  With the measured times
t1 and t2 of these cells, the step is a cliff if

    t2 / t1 > ALLOWED * max(1, model(c2) / model(c1)), where

    model(c) = launch_seconds + max(bytes / bytes_per_second, operations / operations_per_second).

The rates are measured in the same run.  launch_seconds is the time of the map's fastest cell.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from time import monotonic
from typing import Any, NamedTuple

import torch

from benchmarks.measure import capture_many, replay
from benchmarks.suites import SIZES, uniform
from benchmarks.work import operations, traffic

ALLOWED = 1.3
AXES: dict[str, tuple[int, ...]] = {
    "batch": (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128),
    "q_len": (1, 2, 4, 8, 16, 32, 64, 128),
    "keys": (256, 512, 1024, 2048, 4096, 8192, 16384),
}
QUICK: dict[str, tuple[int, ...]] = {"batch": (1, 4, 16), "q_len": (1, 8), "keys": (256, 4096)}
LONGEST = 300e-6  # upper bound of a cell's seconds by the model: cliffs matter in small calls
PREPARING = 75.0  # seconds for the first calls, which compile; cells whose turn comes later are left out


class Cell(NamedTuple):
    batch: int
    q_len: int
    keys: int

    def __str__(self) -> str:
        return f"b{self.batch} q{self.q_len} x {self.keys}"


class Cliff(NamedTuple):
    """A step to a cell that takes `ratio` times as long.  The model explains a factor of `explained`."""

    before: Cell
    after: Cell
    ratio: float
    explained: float

    def __str__(self) -> str:
        return f"{self.before} -> {self.after}: {self.ratio:.2f}x, explained {self.explained:.2f}x"


def work(cell: Cell) -> tuple[int, int]:
    """Return (bytes, operations) of a cell's call."""
    case = uniform(str(cell), cell.batch, cell.q_len, cell.keys)
    return traffic(case), operations(case)


def least(moved: int, computed: int, constants: Mapping[str, float]) -> float:
    """Return the model's seconds for `moved` bytes and `computed` operations."""
    roof = max(moved / constants["bytes_per_second"], computed / constants["operations_per_second"])
    return constants.get("launch_seconds", 0.0) + roof


def grid(axes: Mapping[str, tuple[int, ...]], constants: Mapping[str, float]) -> list[Cell]:
    """Return the cells to measure, in order of q_len, on which the compiled kernels depend."""
    cells = (Cell(b, q, k) for q in axes["q_len"] for b in axes["batch"] for k in axes["keys"])
    return [cell for cell in cells if cell.q_len <= cell.keys and least(*work(cell), constants) <= LONGEST]


def neighbours(axes: Mapping[str, Any], cells: Mapping[Cell, Any]) -> Iterator[tuple[Cell, Cell]]:
    """Yield pairs of measured cells that are one step apart along one axis, each pair in both orders."""
    for cell in cells:
        for axis in Cell._fields:
            values = list(axes[axis])
            index = values.index(getattr(cell, axis)) + 1
            if index < len(values):
                after = cell._replace(**{axis: values[index]})
                if after in cells:
                    yield cell, after
                    yield after, cell


def cliffs(report: Mapping[str, Any]) -> list[Cliff]:
    """Return the cliffs of a map (from `report_of`, or read from its JSON), worst first."""
    cells = {Cell(c["batch"], c["q_len"], c["keys"]): c for c in report["cells"]}
    constants, found = report["model"], []
    for before, after in neighbours(report["axes"], cells):
        one, two = cells[before], cells[after]
        times = [least(c["bytes"], c["operations"], constants) for c in (one, two)]
        explained = max(1.0, times[1] / times[0])
        ratio = two["seconds"] / one["seconds"]
        if not ratio <= constants["allowed"] * explained:  # NaN is a cliff
            found.append(Cliff(before, after, ratio, explained))
    return sorted(found, key=lambda cliff: cliff.ratio / cliff.explained, reverse=True)


def report_of(
    seconds: Mapping[Cell, float], axes: Mapping[str, Any], ceilings: Mapping[str, float], left_out: int = 0
) -> dict[str, Any]:
    """Return the map as JSON: axes, the model's constants, cells with seconds, bytes and operations."""
    model = {**ceilings, "launch_seconds": min(seconds.values(), default=0.0), "allowed": ALLOWED}
    cells = []
    for cell in sorted(seconds):
        moved, computed = work(cell)
        cells.append(cell._asdict() | {"seconds": seconds[cell], "bytes": moved, "operations": computed})
    return {"axes": {name: list(values) for name, values in axes.items()}, "model": model, "cells": cells} | (
        {"left_out": left_out} if left_out else {}
    )


def measure_map(
    axes: Mapping[str, tuple[int, ...]], ceilings: Mapping[str, float], rounds: int
) -> tuple[dict[Cell, float], int]:
    """Return (seconds of every cell, number of cells left out because compiling took too long).

    All cells are captured first and then replayed round by round in random order, so that the card's temperature
    affects all cells alike.  All cells share one cache, one q and one out.
    """
    cells = grid(axes, ceilings)
    call_of = shared(cells)
    calls: dict[Cell, Callable[[], object]] = {}
    started = monotonic()
    for cell in cells:
        if monotonic() - started > PREPARING:
            break
        calls[cell] = call_of(cell)
        calls[cell]()  # compiles
    return replay(capture_many(calls), rounds), len(cells) - len(calls)


def shared(cells: list[Cell], device: str = "cuda") -> Callable[[Cell], Callable[[], object]]:
    """Return a function from a cell to its call; every call uses the leading part of the same tensors."""
    import paged_attn

    page, heads, kv_heads, head_dim = (SIZES[name] for name in ("page_size", "heads", "kv_heads", "head_dim"))
    dtype = SIZES["dtype"]
    pages = max(cell.batch * math.ceil(cell.keys / page) for cell in cells)
    rows = max(cell.batch * cell.q_len for cell in cells)
    k, v = torch.empty(2, pages, page, kv_heads, head_dim, dtype=dtype, device=device).normal_()
    q = torch.empty(rows, heads, head_dim, dtype=dtype, device=device).normal_()
    out = torch.empty_like(q)
    placed = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).to(device, torch.int32)

    def call_of(cell: Cell) -> Callable[[], object]:
        batch, q_len, keys = cell
        columns, tokens = math.ceil(keys / page), batch * q_len
        table = placed[: batch * columns].view(batch, columns)
        seq_lens = torch.full((batch,), keys, dtype=torch.int32, device=device)
        starts = None
        if q_len > 1:
            starts = torch.arange(0, tokens + 1, q_len, dtype=torch.int32, device=device)
        return lambda: paged_attn.paged_attention(
            q[:tokens], k, v, table, seq_lens, starts, max_seqlen_q=q_len, max_seqlen_k=keys, out=out[:tokens]
        )

    return call_of
