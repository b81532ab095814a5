"""Times of GPU work: CUDA-graph replays with a cold L2, variants interleaved in random order, medians."""

import random
import statistics
from collections.abc import Callable

import torch

FLUSH_BYTES = 256 << 20  # several times the largest L2


def capture(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of one call, after a run outside of it that compiles what needs compiling."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def measure(calls: dict[str, Callable[[], object]], rounds: int = 40, seed: int = 0) -> dict[str, float]:
    """Median seconds of each call.  The card throttles: only figures of one call of this function can be compared."""
    graphs = {name: capture(call) for name, call in calls.items()}
    flush = torch.ones(FLUSH_BYTES // 4, device="cuda")
    events = {
        name: [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(rounds)] for name in calls
    }
    order, shuffle = list(calls), random.Random(seed).shuffle
    for warm_up in (True, False):
        for i in range(3 if warm_up else rounds):
            shuffle(order)
            for name in order:
                start, end = events[name][i]
                flush.sum()  # reading flushes: written lines would have to be evicted inside the measurement
                start.record()
                graphs[name].replay()
                end.record()
    torch.cuda.synchronize()
    return {name: statistics.median(a.elapsed_time(b) for a, b in pairs) / 1e3 for name, pairs in events.items()}


def ceilings() -> dict[str, float]:
    """What this card reaches now: bytes/s of a read-only stream, operations/s of a bfloat16 matrix product."""
    data = torch.ones(1 << 30, dtype=torch.float32, device="cuda")
    a, b = torch.randn(2, 8192, 8192, device="cuda").bfloat16()
    out = torch.empty_like(a)
    seconds = measure({"read": lambda: data.sum(), "matmul": lambda: torch.mm(a, b, out=out)}, rounds=10)
    return {"bytes_per_second": data.nbytes / seconds["read"], "operations_per_second": 2 * 8192**3 / seconds["matmul"]}
