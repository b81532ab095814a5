"""The map's rule finds cliffs and nothing else, and the committed map has none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cliffs
from benchmarks.cliffs import ALLOWED, AXES, Cell

MAP = Path(__file__).parents[2] / "benchmarks" / "results" / "h200" / "cliffs.json"
CEILINGS = {"bytes_per_second": 4.4e12, "operations_per_second": 750e12}
FLOOR = 6e-6
AT = Cell(16, 4, 2048)  # in the middle of the map, so that it has six neighbours


def roofline(cell: Cell) -> float:
    """Seconds of a kernel at 80% of the ceilings behind a launch."""
    return FLOOR + cliffs.least(*cliffs.work(cell), CEILINGS) / 0.8


def a_map(seconds: Callable[[Cell], float]) -> dict[str, Any]:
    return cliffs.report_of({cell: seconds(cell) for cell in cliffs.grid(AXES, CEILINGS)}, AXES, CEILINGS)


def test_a_roofline_has_no_cliffs() -> None:
    assert cliffs.cliffs(a_map(roofline)) == []


def test_the_grid_is_some_hundred_cells_of_bounded_time() -> None:
    cells = cliffs.grid(AXES, CEILINGS)
    assert 300 < len(cells) < 784
    assert {cell.q_len for cell in cells} == set(AXES["q_len"])
    assert max(cliffs.least(*cliffs.work(cell), CEILINGS) for cell in cells) <= cliffs.LONGEST


@pytest.mark.parametrize("axis", list(AXES))
@pytest.mark.parametrize("index", [2, 4])
def test_a_jump_along_any_axis_is_found_at_its_place(axis: str, index: int) -> None:
    """A kernel that takes twice the time from one value of an axis on, as at a switch between two paths."""
    edge = AXES[axis][index]
    found = cliffs.cliffs(a_map(lambda cell: roofline(cell) * (2 if getattr(cell, axis) >= edge else 1)))
    assert found
    for cliff in found:
        assert (getattr(cliff.before, axis), getattr(cliff.after, axis)) == (AXES[axis][index - 1], edge)
        assert cliff.ratio > ALLOWED * cliff.explained


def test_one_slow_cell_is_a_cliff_from_every_side() -> None:
    """Three times the time: more than the double work of a step along keys or queries explains."""
    found = cliffs.cliffs(a_map(lambda cell: roofline(cell) * (3 if cell == AT else 1)))
    assert {cliff.after for cliff in found} == {AT}
    assert len(found) == 6


def test_a_small_case_may_not_cost_more_than_a_larger_one() -> None:
    """A split over keys that starts only at 16 sequences leaves 12 sequences slower than 16."""
    found = cliffs.cliffs(a_map(lambda cell: roofline(cell) * (1.5 if cell.batch < 16 else 1)))
    assert {(cliff.before.batch, cliff.after.batch) for cliff in found} == {(16, 12)}


def test_steps_of_just_the_allowed_cost_pass() -> None:
    """Where nothing is explained, 1.29 passes and 1.31 does not."""

    def step(factor: float) -> Callable[[Cell], float]:
        return lambda cell: FLOOR * (factor if cell.batch >= 8 else 1)

    # times that do not grow with the work leave only the step itself, and only where the work explains none of it
    assert cliffs.cliffs(a_map(step(1.29))) == []
    free = {**CEILINGS, "bytes_per_second": 1e18, "operations_per_second": 1e21}
    cells = {cell: step(1.31)(cell) for cell in cliffs.grid(cliffs.QUICK | {"batch": (6, 8)}, free)}
    axes = cliffs.QUICK | {"batch": (6, 8)}
    assert len(cliffs.cliffs(cliffs.report_of(cells, axes, free))) == 4  # 2 query lengths x 2 lengths of keys


def test_a_time_that_is_not_a_number_is_a_cliff() -> None:
    assert cliffs.cliffs(a_map(lambda cell: float("nan") if cell == AT else roofline(cell)))


def test_a_map_survives_json() -> None:
    made = a_map(lambda cell: roofline(cell) * (2 if cell.batch >= 8 else 1))
    assert cliffs.cliffs(json.loads(json.dumps(made))) == cliffs.cliffs(made)


def test_a_cell_is_a_call_of_its_own_tensors() -> None:
    """Cells share one cache; tables hold distinct pages of it, and lengths are the cell's."""
    cells = [Cell(1, 1, 256), Cell(3, 2, 64)]
    call = cliffs.shared(cells, "cpu")(Cell(3, 2, 64))
    names = call.__code__.co_freevars
    values = dict(zip(names, (cell.cell_contents for cell in call.__closure__ or ()), strict=True))
    assert values["table"].shape == (3, 4)
    assert len(set(values["table"].flatten().tolist())) == 12
    assert values["seq_lens"].tolist() == [64, 64, 64]
    assert values["starts"].tolist() == [0, 2, 4, 6]
    assert len(values["k"]) == 16


@pytest.mark.skipif(not MAP.exists(), reason="no cliff map is committed")
def test_the_committed_map_is_whole() -> None:
    report = json.loads(MAP.read_text(encoding="utf-8"))
    assert len(report["cells"]) > 300, "a map of a quick run"
    assert "left_out" not in report, "a map cut short by compilation: run it again, now that the kernels are cached"


@pytest.mark.skipif(not MAP.exists(), reason="no cliff map is committed")
def test_the_committed_map_has_no_cliffs() -> None:
    found = cliffs.cliffs(json.loads(MAP.read_text(encoding="utf-8")))
    assert not found, f"{len(found)} cliffs:\n" + "\n".join(map(str, found[:20]))
