"""Calls whose keys are copied into whole pages first, because a better dialect reads only such."""

from ..records.copies import Copies, over
from ..records.problem import Problem
from .dialects import DIALECTS, dialect


def in_whole_pages(problem: Problem) -> tuple[Problem, Copies | None]:
    """The call as launches have it, and the copies that are made for these, if any."""
    for name in DIALECTS[:-1]:
        found = dialect(name)
        if found.why_not_on(problem.device) is None:
            if not found.uncovered(problem):
                break
            copies = found.copies(problem)
            if copies is not None and not found.uncovered(whole := over(problem, copies)):
                return whole, copies
    return problem, None
