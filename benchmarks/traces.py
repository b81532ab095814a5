"""The suites `trace-256` and `trace-2048`: real steps, cut from a trace by continuous batching on the host.

Requests have the lengths and the order of the trace.  Arrival times are ignored: all requests wait from the start, so
the server is saturated, as it is when speed matters.  For each chunk budget the scheduler runs STEPS steps, or fewer if
the trace ends.  Of these, SAMPLES evenly spaced steps are measured, each as one call of one layer.  The suite's figure
is the sum of these times.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.suites import SIZES
from paged_attn.serving import trace
from paged_attn.serving.scheduler import Pages, Scheduler
from paged_attn.serving.trace import Request
from tests.support.cases import Case

BUDGETS = (256, 2048)  # upper bounds of the tokens in a step: decodes come first, then chunks of prompts
MAX_SEQS = 256
CACHE_TOKENS = 1 << 19  # 2 GiB in a layer; 64 GiB in 32 layers, which an H200 has beside an 8B model
STEPS, SAMPLES = 2000, 24


@dataclass(frozen=True)
class Cut:
    """Steps of one budget to measure, with the numbers of all steps and of dropped requests."""

    budget: int
    cases: tuple[Case, ...]
    steps: int
    dropped: int  # requests too long for the whole cache

    @property
    def suite(self) -> str:
        return f"trace-{self.budget}"


def source(path: Path | None) -> str:
    """Describe the source of the requests, for the report."""
    return path.name if path else "synthetic: lengths as in Azure's conversation trace"


def requests(path: Path | None) -> Iterator[Request]:
    """Return requests of a trace file, or of the synthetic stand-in for Azure's conversation trace."""
    return trace.read(path) if path else trace.CONVERSATION.requests(seed=0)


def cuts(path: Path | None, steps: int = STEPS, samples: int = SAMPLES) -> list[Cut]:
    """Return the steps to measure, for every budget."""
    return [cut(requests(path), budget, steps, samples) for budget in BUDGETS]


def cut(arriving: Iterable[Request], budget: int, steps: int = STEPS, samples: int = SAMPLES) -> Cut:
    """Run the scheduler for `steps` steps or to the trace's end; keep the middle step of each of `samples` equal parts.

    Requests too long for the whole cache are dropped.
    """
    page_size = SIZES["page_size"]
    scheduler = Scheduler(Pages(CACHE_TOKENS // page_size), page_size, budget, min(MAX_SEQS, budget))
    waiting, dropped = iter(arriving), 0
    made: list[list[tuple[int, int]]] = []
    while len(made) < steps:
        for request in itertools.islice(waiting, max(0, MAX_SEQS - len(scheduler.waiting))):
            if request.prompt + request.output - 1 > CACHE_TOKENS:
                dropped += 1
            else:
                scheduler.submit(request)
        if scheduler.idle:
            break
        parts, _ = scheduler.plan()
        made.append([(part.query_len, part.seq_len) for part in parts])
        scheduler.complete(parts)
    picked = sorted({int((i + 0.5) * len(made) / samples) for i in range(samples)}) if made else []
    return Cut(budget, tuple(_case(i, made[i]) for i in picked), len(made), dropped)


def _case(step: int, lengths: list[tuple[int, int]]) -> Case:
    """Return one step as a case, its sequences in the scheduler's order."""
    query_lens, seq_lens = (tuple(column) for column in zip(*lengths, strict=True))
    decodes = sum(n == 1 for n in query_lens)
    chunks = f" + {len(query_lens) - decodes} chunks of {sum(query_lens) - decodes}" if decodes < len(lengths) else ""
    name = f"step {step}: {decodes} decodes{chunks}, {sum(seq_lens)} keys"
    # A step is a ragged call even if all sequences decode, because a server has one path.
    return Case(name, query_lens, seq_lens, **SIZES)
