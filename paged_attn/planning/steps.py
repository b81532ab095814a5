"""The steps of a call: the launches of its plan with their arguments, in order."""

from ..kernels.page_copies import copied
from ..kernels.shared_arguments import merge_blocks
from ..launching.launch import Step
from ..records.call import Call
from ..records.plan import Plan
from .dialects import dialect


def steps_of(plan: Plan, call: Call) -> list[Step]:
    """The launches of a plan, in order, behind that which copies keys, if any; behind each the merge of its pieces.

    That of a launch that leads comes behind the next one, which would have to wait for it.
    """
    steps: list[Step] = []
    if plan.copies is not None:
        first, call = copied(plan.copies, call)
        steps.append(first)
    led: list[Step] = []
    for launch in plan.launches:
        step = dialect(launch.dialect).step(launch, call)
        merges = [] if launch.merge is None else [merge_blocks(launch, call, step)]
        if launch.shape.LEADS:
            steps, led = [*steps, step], merges
        else:
            steps, led = [*steps, step, *merges, *led], []
    return steps
