"""The steps of a server: what it asks for at most, and what a trace makes of that."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from paged_attn.preparation.model import Lengths
from paged_attn.serving import trace
from paged_attn.serving.scheduler import Pages, Scheduler, StepPart

SEQS, TOKENS, KEYS = 256, 4096, 32768


def steps(requests: int, seed: int = 0) -> Iterator[list[StepPart]]:
    """Steps of a continuous-batching schedule, a few requests arriving at each."""
    scheduler = Scheduler(Pages(30_000), 16, budget=TOKENS, max_seqs=SEQS)
    waiting = iter(itertools.islice(trace.CONVERSATION.requests(seed), requests))
    while True:
        for request in itertools.islice(waiting, 6):
            scheduler.submit(request)
        if scheduler.idle:
            return
        parts, _ = scheduler.plan()
        yield parts
        scheduler.complete(parts)


def lengths_of(parts: list[StepPart]) -> list[Lengths]:
    """A step as calls with bounds and without, and its decodes alone."""
    queries, keys = [x.query_len for x in parts], [x.seq_len for x in parts]
    seqs, tokens, width = len(parts), sum(queries), -(-max(keys) // 16) * 16
    found = [Lengths(True, seqs, tokens, max(queries), max(keys)), Lengths(True, seqs, tokens, tokens, width)]
    decodes = [x.seq_len for x in parts if x.decode]
    return found + ([Lengths(False, len(decodes), len(decodes), 1, max(decodes))] if decodes else [])
