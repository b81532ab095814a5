"""Replay the requests of a trace through an engine at their arrival times, and record when each token is ready."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.serve.engine import Engine
from paged_attn.serving.scheduler import Pages, Scheduler
from paged_attn.serving.trace import Request

IN_FLIGHT = 2  # upper bound of launched steps: one runs and one waits


@dataclass
class Record:
    """Record of a run; times are seconds since the start, and times[i] has one for each token of request i."""

    arrivals: list[float]
    times: list[list[float]]
    wanted: list[int]  # tokens that each request asks for
    seconds: float = 0.0  # until the last token
    steps: int = 0
    prompt_tokens: int = 0  # computed in prefills; those of preempted sequences count again
    preemptions: int = 0


class Clock:
    """Seconds since the start.  On a GPU a mark is a CUDA event, so the host does not wait for a step to time it."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        if self.cuda:
            torch.cuda.synchronize()
            self.first = torch.cuda.Event(enable_timing=True)
            self.first.record()
            self.first.synchronize()
        self.began = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self.began

    def mark(self) -> Any:
        """Return a mark after everything that has been launched."""
        if not self.cuda:
            return self.now()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def at(self, mark: Any) -> float:
        """Return the time of a mark, once the mark is reached."""
        if not self.cuda:
            return mark
        mark.synchronize()
        return self.first.elapsed_time(mark) / 1e3


def replay(engine: Engine, requests: Sequence[Request], limit: float) -> Record:
    """Serve requests as they arrive; stop when all are done or `limit` seconds have passed."""
    limits = engine.limits
    scheduler = Scheduler(Pages(limits.pages), limits.page_size, limits.budget, limits.max_seqs)
    record = Record([r.arrival for r in requests], [[] for _ in requests], [r.output for r in requests])
    numbers = {id(request): number for number, request in enumerate(requests)}
    running: deque[tuple[Any, list[int]]] = deque()
    clock, submitted = Clock(engine.model.device), 0

    def finish_one() -> None:
        mark, got = running.popleft()
        record.seconds = clock.at(mark)
        for number in got:
            record.times[number].append(record.seconds)

    while clock.now() < limit:
        while submitted < len(requests) and requests[submitted].arrival <= clock.now():
            scheduler.submit(requests[submitted])
            submitted += 1
        if scheduler.idle:
            if running:
                finish_one()
            elif submitted == len(requests):
                break
            else:
                time.sleep(max(0.0, min(requests[submitted].arrival - clock.now(), limit)))
            continue
        parts, _ = scheduler.plan()
        rows = [numbers[id(part.sequence.request)] for part in parts]
        ends = [part.seq_len == part.sequence.known for part in parts]
        engine.launch(parts, rows, ends)
        running.append((clock.mark(), [row for row, end in zip(rows, ends) if end]))
        scheduler.complete(parts)
        record.steps += 1
        record.prompt_tokens += sum(part.query_len for part in parts if not part.decode)
        while len(running) >= IN_FLIGHT:
            finish_one()
    while running:
        finish_one()
    record.preemptions = scheduler.preemptions
    return record


def figures(record: Record) -> dict[str, Any]:
    """Return throughput and latencies.

    A request that arrived before the end and got no token counts as if its first token had come at the end.
    """
    firsts, gaps, waiting = [], [], 0
    for arrival, times in zip(record.arrivals, record.times):
        if times:
            firsts.append(times[0] - arrival)
            gaps += [after - before for before, after in itertools.pairwise(times)]
        elif arrival < record.seconds:
            firsts.append(record.seconds - arrival)
            waiting += 1
    made = sum(map(len, record.times))
    return {
        "seconds": record.seconds,
        "requests": len(record.times),
        "finished": sum(len(times) == wanted for times, wanted in zip(record.times, record.wanted)),
        "without_a_token": waiting,
        "new_tokens": made,
        "prompt_tokens": record.prompt_tokens,
        "new_tokens_per_second": made / record.seconds if record.seconds else 0.0,
        "tokens_per_second": (made + record.prompt_tokens) / record.seconds if record.seconds else 0.0,
        "first_token": {"p50": percentile(firsts, 50), "p99": percentile(firsts, 99)},
        "between_tokens": {"p50": percentile(gaps, 50), "p99": percentile(gaps, 99)},
        "steps": record.steps,
        "preemptions": record.preemptions,
    }


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that `share` percent of the values do not exceed; 0 without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * share / 100) - 1)] if ordered else 0.0
