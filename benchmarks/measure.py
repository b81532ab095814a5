"""Times of GPU work: CUDA-graph replays with a cold L2, variants interleaved in random order, medians."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch

Name = TypeVar("Name", bound=Hashable)
FLUSH_BYTES = 256 << 20  # several times the largest L2
# Seconds to wait after captures, which free what is cached: for some milliseconds kernels may run 12% slower, as if
# what was freed were being cleared.
SETTLED = 0.1


def capture(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of one call, after a run outside of it that compiles what needs compiling."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def capture_many(calls: Mapping[Name, Callable[[], object]]) -> dict[Name, torch.cuda.CUDAGraph]:
    """Graphs of many small calls that have run before: one memory pool, because they replay one after another.

    torch.cuda.graph collects garbage and empties the allocator's cache every time: tens of milliseconds for each graph.
    """
    graphs, pool = {}, torch.cuda.graph_pool_handle()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for name, call in calls.items():
            graphs[name] = torch.cuda.CUDAGraph()
            graphs[name].capture_begin(pool=pool)
            try:
                call()
            finally:
                graphs[name].capture_end()
    torch.cuda.synchronize()
    return graphs


def replay(graphs: Mapping[Name, torch.cuda.CUDAGraph], rounds: int, seed: int = 0) -> dict[Name, float]:
    """Median seconds of each graph.  The card throttles: only figures of one call of this function can be compared."""
    flush = torch.ones(FLUSH_BYTES // 4, device="cuda")
    events = {name: [torch.cuda.Event(enable_timing=True) for _ in range(2)] for name in graphs}
    seconds: dict[Name, list[float]] = {name: [] for name in graphs}
    order, shuffle = list(graphs), random.Random(seed).shuffle
    warm_up = 3
    time.sleep(SETTLED)
    for i in range(warm_up + rounds):
        shuffle(order)
        for name in order:
            start, end = events[name]
            flush.sum()  # reading flushes: written lines would have to be evicted inside the measurement
            start.record()
            graphs[name].replay()
            end.record()
        torch.cuda.synchronize()
        if i >= warm_up:
            for name, (start, end) in events.items():
                seconds[name].append(start.elapsed_time(end) / 1e3)
    return {name: statistics.median(times) for name, times in seconds.items()}


def measure(calls: Mapping[str, Callable[[], object]], rounds: int = 40, seed: int = 0) -> dict[str, float]:
    """Median seconds of each call."""
    return replay({name: capture(call) for name, call in calls.items()}, rounds, seed)


def ceilings() -> dict[str, float]:
    """What this card reaches now: bytes/s of a read-only stream, operations/s of a bfloat16 matrix product."""
    data = torch.ones(1 << 30, dtype=torch.float32, device="cuda")
    a, b = torch.randn(2, 8192, 8192, device="cuda").bfloat16()
    out = torch.empty_like(a)
    seconds = measure({"read": lambda: data.sum(), "matmul": lambda: torch.mm(a, b, out=out)}, rounds=10)
    return {"bytes_per_second": data.nbytes / seconds["read"], "operations_per_second": 2 * 8192**3 / seconds["matmul"]}
