"""Bytes and operations that a step's attention needs, counted from lengths, and measured limits of the GPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from paged_attn.launching.gpus import Ceilings
from paged_attn.records.key_bounds import page_ids, visible_pairs
from paged_attn.serving.scheduler import StepPart


@dataclass(frozen=True)
class Work:
    """Bytes that attention must at least move, and its floating point operations."""

    bytes: int
    flops: int

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.flops + other.flops)

    def __mul__(self, times: int) -> Work:
        return Work(self.bytes * times, self.flops * times)


def work_of(
    parts: Iterable[StepPart], heads: int, kv_heads: int, head_dim: int, page_size: int, q_bytes: int, kv_bytes: int
) -> Work:
    """Work of one causal call.

    Bytes count cached keys and values, page ids, queries and outputs once.  There are 4 flops for each visible pair of
    a query and a key, each query head and each dim.
    """
    keys = queries = ids = pairs = 0
    for part in parts:
        keys += part.seq_len
        queries += part.query_len
        ids += page_ids(part.query_len, part.seq_len, page_size)
        pairs += visible_pairs(part.query_len, part.seq_len)
    moved = 2 * keys * kv_heads * head_dim * kv_bytes + 2 * queries * heads * head_dim * q_bytes + 4 * ids
    return Work(moved, 4 * pairs * heads * head_dim)


def measured_ceilings(device: torch.device) -> Ceilings:
    """Bytes/s of a sum over 2 GiB and flop/s of an 8192^3 bfloat16 product, measured now in torch."""
    data = torch.zeros(2**30, dtype=torch.bfloat16, device=device)
    stream = _median_seconds(data.sum)
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = _median_seconds(lambda: a @ b)
    return Ceilings(data.numel() * data.element_size() / stream, 2 * 8192**3 / product)


class Stopwatch:
    """Measures GPU seconds of a function, without the time in which the CPU prepares launches.

    The function should have run before, so that nothing is compiled.  A matrix product, launched first, keeps the GPU
    busy while the CPU prepares the function's launches.
    """

    def __init__(self, device: torch.device) -> None:
        self._busy = torch.zeros(8192, 8192, device=device, dtype=torch.bfloat16)

    def seconds(self, run: Callable[[], object]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._busy @ self._busy
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000


def _median_seconds(run: Callable[[], object]) -> float:
    """Median of 20 GPU timings, after 3 warm-up runs."""
    times = []
    for _ in range(23):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return statistics.median(times[3:])
