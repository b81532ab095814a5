"""The steps of a traffic: requests arrive in the trace's time, and the scheduler plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paged_attn.serving.pages import Pages
from paged_attn.serving.scheduler import Scheduler, StepPart
from paged_attn.serving.trace import Request


@dataclass(frozen=True)
class Planned:
    """A step that is about to run.  After the run the caller calls `scheduler.complete(parts)`."""

    scheduler: Scheduler
    parts: list[StepPart]
    preempted: list[int]  # pages that preemption freed
    submitted: int  # requests that have arrived

    @property
    def finished(self) -> int:
        """Requests that need no further step."""
        return self.submitted - len(self.scheduler.waiting) - len(self.scheduler.running)


def planned(
    requests: Sequence[Request], *, pages: int, page_size: int, budget: int, max_seqs: int, step_seconds: float
) -> Iterator[Planned]:
    """Every step until all requests are served; a step takes `step_seconds` of the trace's time."""
    scheduler = Scheduler(Pages(pages), page_size, budget, max_seqs)
    arrivals = sorted(requests, key=lambda request: request.arrival)
    submitted, now = 0, 0.0
    while submitted < len(arrivals) or not scheduler.idle:
        if scheduler.idle:
            now = max(now, arrivals[submitted].arrival)
        while submitted < len(arrivals) and arrivals[submitted].arrival <= now:
            scheduler.submit(arrivals[submitted])
            submitted += 1
        parts, preempted = scheduler.plan()
        yield Planned(scheduler, parts, preempted, submitted)
        now += step_seconds
