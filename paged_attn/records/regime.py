"""What a planner's tables say for themselves: rows for kinds of calls, and numbers that tell these apart.

`docs/regimes.md` is made of them, and `explain` names the row of a call.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from .plan import Launch
from .problem import Problem


class Threshold(NamedTuple):
    """Beside a number, as `Annotated[int, Threshold(...)]`: a number of what, why there is one, what decided it."""

    unit: str
    reason: str
    decided: str  # the line of a suite or of benchmarks/NOTES.md, shortened: case, figures


class Regime(NamedTuple):
    """A row: the first whose condition holds has the call."""

    name: str
    calls: str  # that it is for, beyond those of the rows before
    kernels: str  # kernel, tile, warps, who cuts keys
    reason: str
    decided: str  # as of a threshold
    when: Callable[[Problem], bool]
    launches: Callable[[Problem], tuple[Launch, ...]]


def row_of(table: Sequence[Regime], p: Problem) -> Regime:
    """The row that has a call."""
    return next(row for row in table if row.when(p))
