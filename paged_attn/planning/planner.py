"""The plan of a call, which follows from the call's Problem alone, and the steps of the plan.

Plans are cached, so layers with equal problems share a plan.  Nothing is read from the device.  A plan made during
capture of a CUDA graph is therefore right for every replay.
"""

import functools

from ..kernels.shared_steps import copied, merge_blocks
from ..launching.launch import Step
from ..records.copies import Copies, over
from ..records.layout import Call
from ..records.plan import Plan
from ..records.problem import Problem
from .dialects import DIALECTS, chosen, dialect


def in_whole_pages(problem: Problem) -> tuple[Problem, Copies | None]:
    """Return (problem for which launches are chosen, copies of keys and values in whole pages or None).

    If a dialect covers the call only over copies, the result is the problem of the copies, and all launches read them.
    Otherwise the problem is unchanged, and only launches with `copied` read the copies, if there are any.
    """
    for name in DIALECTS[:-1]:
        found = dialect(name)
        if found.why_not_on(problem.device) is None:
            if not found.uncovered(problem):
                return problem, found.copies(problem)
            copies = found.copies(problem)
            if copies is None or copies.shortest > (1 if problem.only is None else 2):  # some sequences have no copy
                continue
            if not found.uncovered(whole := over(problem, copies)):
                return whole, copies
    return problem, None


@functools.lru_cache(maxsize=4096)
def plan(problem: Problem) -> Plan:
    """The plan of the first dialect that covers the call, perhaps over copies of keys and values in whole pages."""
    if problem.only == "prefill" and not problem.ragged:
        return Plan(())
    whole, copies = in_whole_pages(problem)
    launches = chosen(whole).launches(whole)
    if whole is not problem:
        launches = tuple([launch._replace(copied=True) for launch in launches])
    return Plan(launches, copies)


def steps_of(plan: Plan, call: Call) -> list[Step]:
    """The steps of a plan, in order: the copy of keys and values if any, then each launch and its merge.

    If a launch leads (Shape.LEADS), the next launch need not wait for its end, and comes before the leader's merge.
    """
    steps: list[Step] = []
    over_copies = call
    if plan.copies is not None:
        first, over_copies = copied(plan.copies, call)
        steps.append(first)
    led: list[Step] = []
    for launch in plan.launches:
        read = over_copies if launch.copied else call
        step = dialect(launch.dialect).step(launch, read)
        merges = [] if launch.merge is None else [merge_blocks(launch, read, step)]
        if launch.shape.LEADS:
            steps, led = [*steps, step], merges
        else:
            steps, led = [*steps, step, *merges, *led], []
    return steps
