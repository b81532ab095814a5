"""What the portable planner takes a call for, by the launches that it makes of it."""

from ...records.problem import Problem
from .plan import launches

REASONS = {
    "one block a sequence": "a block has all rows of a sequence, so its keys are read once, at the memory's speed",
    "blocks": "sequences have more rows than a block, or no others are asked for",
    "blocks and few queries": "few rows would leave rows of blocks empty, so they have a launch of their own",
}


def regime(p: Problem) -> tuple[str, str]:
    """Name and reason."""
    found = launches(p)
    name = "blocks and few queries" if len(found) > 1 else "one block a sequence"
    if len(found) == 1 and not found[0].shape.ONE_BLOCK:
        name = "blocks"
    return name, REASONS[name]
