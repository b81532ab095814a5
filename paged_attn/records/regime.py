"""Rows and numbers of planners' tables: a row for each kind of calls, and thresholds that separate kinds.

`docs/regimes.md` is generated from the tables, and `explain` names the row of a call.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from .plan import Launch
from .problem import Problem


class Threshold(NamedTuple):
    """Describes a number, as `Annotated[int, Threshold(...)]`: its unit, its reason, and the measurement behind it."""

    unit: str
    reason: str
    decided: str  # the line of a suite or of benchmarks/NOTES.md, shortened: case, figures


class Regime(NamedTuple):
    """A row of a table; the first row whose condition holds takes the call."""

    name: str
    calls: str  # the calls of this row, beyond those of the rows before
    kernels: str  # kernel, tile, warps, who cuts keys
    reason: str
    decided: str  # as in Threshold
    when: Callable[[Problem], bool]
    launches: Callable[[Problem], tuple[Launch, ...]]


def row_of(table: Sequence[Regime], p: Problem) -> Regime:
    """The row that takes a call."""
    return next(row for row in table if row.when(p))
