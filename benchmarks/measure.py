"""Times of GPU work: CUDA-graph replays with a cold L2, variants interleaved in random order, medians."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

import torch

Name = TypeVar("Name", bound=Hashable)
FLUSH_BYTES = 256 << 20  # several times the largest L2
# Seconds to wait after captures, which free cached memory.  For some milliseconds afterwards kernels may run 12%
# slower, as if the freed memory were being cleared.
SETTLED = 0.1
MODES_APART = 1.06  # least ratio of the medians of two modes


def capture(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Capture one call in a CUDA graph; an eager call before the capture compiles its kernels."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def capture_many(calls: Mapping[Name, Callable[[], object]]) -> dict[Name, torch.cuda.CUDAGraph]:
    """Capture a CUDA graph of each of many small calls that have run before; all graphs share one memory pool.

    Sharing is safe because the graphs replay one after another.  torch.cuda.graph would collect garbage and empty the
    allocator's cache for each graph, which takes tens of milliseconds.
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
    """Return the median seconds of each graph."""
    return {name: statistics.median(times) for name, times in samples(graphs, rounds, seed).items()}


def samples(graphs: Mapping[Name, torch.cuda.CUDAGraph], rounds: int, seed: int = 0) -> dict[Name, list[float]]:
    """Return the seconds of each replay of each graph.

    The card throttles, so only figures from one call of this function can be compared.
    """
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
            flush.sum()  # a read: dirty lines of a write would be evicted inside the measurement
            start.record()
            graphs[name].replay()
            end.record()
        torch.cuda.synchronize()
        if i >= warm_up:
            for name, (start, end) in events.items():
                seconds[name].append(start.elapsed_time(end) / 1e3)
    return seconds


def spread(times: Sequence[float]) -> dict[str, float]:
    """Return what a median hides: least time, both quartiles, ninth decile, and the number of modes (1 or 2)."""
    quartiles, deciles = (statistics.quantiles(times, n=n, method="inclusive") for n in (4, 10))
    named = {"min": min(times), "q1": quartiles[0], "q3": quartiles[2], "p90": deciles[8]}
    return {**named, "modes": 2 if has_two_modes(times) else 1}


def has_two_modes(times: Sequence[float]) -> bool:
    """Whether times form two groups with medians 6% or more apart, each with at least a twentieth of the times.

    The cut between the groups minimises the sum of squared deviations.  Less than a twentieth of the times may lie in
    the middle third between the two medians.  Uniformly spread times, a single mode, have a sixth there.  If a
    twentieth of the times is less than 2, it counts as 2.
    """
    ordered = sorted(times)
    few = max(2, len(ordered) // 20)
    cuts = range(few, len(ordered) - few + 1)
    if not cuts:
        return False
    cut = min(cuts, key=lambda i: _deviations(ordered[:i]) + _deviations(ordered[i:]))
    low, high = statistics.median(ordered[:cut]), statistics.median(ordered[cut:])
    third = (high - low) / 3
    between = sum(low + third < x < high - third for x in ordered)
    return high >= MODES_APART * low and between < few


def _deviations(times: Sequence[float]) -> float:
    """Return the sum of squared deviations from the mean."""
    mean = sum(times) / len(times)
    return sum((x - mean) ** 2 for x in times)


def measure(calls: Mapping[str, Callable[[], object]], rounds: int = 40, seed: int = 0) -> dict[str, float]:
    """Capture each call and return its median seconds."""
    return replay({name: capture(call) for name, call in calls.items()}, rounds, seed)


def ceilings() -> dict[str, float]:
    """Measure this card's rates now: bytes/s of a read-only stream, operations/s of a bfloat16 matrix product."""
    data = torch.ones(1 << 30, dtype=torch.float32, device="cuda")
    a, b = torch.randn(2, 8192, 8192, device="cuda").bfloat16()
    out = torch.empty_like(a)
    seconds = measure({"read": lambda: data.sum(), "matmul": lambda: torch.mm(a, b, out=out)}, rounds=10)
    return {"bytes_per_second": data.nbytes / seconds["read"], "operations_per_second": 2 * 8192**3 / seconds["matmul"]}
