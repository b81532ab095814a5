"""What a number of the planner says for itself: `docs/regimes.md` is made of it."""

from typing import NamedTuple


class Threshold(NamedTuple):
    """Beside a number, as `Annotated[int, Threshold(...)]`: a number of what, why there is one, what decided it."""

    unit: str
    reason: str
    decided: str  # the line of a suite or of benchmarks/NOTES.md, shortened: case, figures
