"""Which kernels a call launches, and how: from shapes, dtypes and device only.

Pure Python and cached by key: every layer of a model reuses one plan, nothing is read back from the device,
and a plan made while a CUDA graph is captured is right for every replay.
"""

import functools

from ..records.plan import Plan
from ..records.problem import Problem
from .copies import in_whole_pages
from .dialects import chosen


@functools.lru_cache(maxsize=4096)
def plan(problem: Problem) -> Plan:
    """The launches of the first dialect that covers the call, or would over copies in whole pages that it asks for."""
    if problem.only == "prefill" and not problem.ragged:
        return Plan(())
    problem, copies = in_whole_pages(problem)
    return Plan(chosen(problem).launches(problem), copies)
