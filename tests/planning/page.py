"""docs/regimes.md, made of the tables of the Hopper planner: `python -m tests.planning.page` writes it."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from paged_attn.kernels import portable
from paged_attn.kernels.hopper import planning
from paged_attn.kernels.hopper.planning import block_kinds, regimes
from paged_attn.kernels.portable import regimes as portable_regimes
from paged_attn.records.plan import Regime, Threshold

PAGE = Path(__file__).parents[2] / "docs" / "regimes.md"
INTRODUCTION = """# Regimes

What decides which launches a call gets, made of the planners' own tables (`kernels/hopper/planning/regimes.py`,
`kernels/portable/regimes.py`) by `python -m tests.planning.page`. A plan follows from what the host knows: shapes,
dtypes, bounds and the device. A call's regime is the first row that has it, and `paged-attn explain` names it. The last
column is the benchmark line that decided, of a suite (`suite: case`) or of `benchmarks/NOTES.md`, shortened. Times are
of one H200 each, unless a line names another card. The file `tests/planning/choices.txt` has the choices for all cases
of all suites.
"""
BLOCKS = """## Kinds of blocks on Hopper

The blocks kernel takes the first row that has a call, too. Two lists choose among the first two rows, other blocks
among the rest.
"""
THRESHOLDS = """## Thresholds

The numbers in those conditions, by the module that asks. To change a number, also run the cases in its last column
(`python -m benchmarks.beside`, two checkouts on one card), and write the table of choices anew.
"""


def page() -> str:
    """The whole page."""
    kinds = [
        (x.name, f"{x.consumers} x {x.rows}", x.reason, x.decided)
        for x in (*block_kinds.KINDS_OF_TWO_LISTS, *block_kinds.KINDS)
    ]
    parts = [INTRODUCTION, "## On Hopper\n", _rows(regimes.REGIMES)]
    parts += [
        "## By the portable kernels\n",
        _rows(portable_regimes.REGIMES),
        BLOCKS,
        _table(("kind", "consumers x rows", "reason", "decided by"), kinds),
        THRESHOLDS,
    ]
    numbers = [
        (f"`{module}.{name}`", f"{_number(value)} {row.unit}", row.reason, row.decided)
        for module, name, value, row in thresholds()
    ]
    return "\n".join([*parts, _table(("threshold", "value", "reason", "decided by"), numbers)])


def thresholds() -> Iterator[tuple[str, str, Any, Threshold]]:
    """(module, name, value, what it says of itself)."""
    modules = [
        (x.name, f"{folder.__name__}.{x.name}")
        for folder in (planning, portable)
        for x in pkgutil.iter_modules(folder.__path__)
    ]
    for short, full in modules:
        module = importlib.import_module(full)
        for name, annotation in inspect.get_annotations(module, eval_str=True).items():
            for said in typing.get_args(annotation)[1:]:
                if isinstance(said, Threshold):
                    yield short, name, getattr(module, name), said


def _rows(table: Sequence[Regime]) -> str:
    rows = [(str(n), x.name, x.calls, x.kernels, x.reason, x.decided) for n, x in enumerate(table, 1)]
    return _table(("", "regime", "calls", "launches", "reason", "decided by"), rows)


def _number(value: Any) -> str:
    return f"{value >> 20} x 2^20" if isinstance(value, int) and value >= 1 << 20 else f"{value}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(x.replace('|', '/') for x in line)} |\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
