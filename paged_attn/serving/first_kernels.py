"""Compile the kernels of the demo's steps before the first step, and no other kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from paged_attn.preparation.model import Lengths, Model
from paged_attn.preparation.prepare import Summary, compile_for
from paged_attn.serving.demo import Sizes
from paged_attn.serving.tensors import rounded_up
from paged_attn.serving.trace import Request


def prepare(requests: Sequence[Request], sizes: Sizes, device: torch.device, processes: int | None) -> Summary:
    """Compile the kernels in parallel processes.  Nothing happens if calls are interpreted or run in plain torch.

    processes: None stands for one process for each processor.
    """
    return compile_for(model_of(sizes), batches(requests, sizes), device, processes)


def batches(requests: Sequence[Request], sizes: Sizes) -> Iterator[Lengths]:
    """Yield the lengths of each step.  Steps do not depend on results of attention, so they are known beforehand."""
    for step in sizes.planned(requests):
        queries = [part.query_len for part in step.parts]
        keys = [part.seq_len for part in step.parts]
        yield Lengths(True, len(queries), sum(queries), max(queries), rounded_up(max(keys), sizes.bucket))
        step.scheduler.complete(step.parts)


def model_of(sizes: Sizes) -> Model:
    """Return what all calls of the demo have in common."""
    return Model(
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        page_size=sizes.page_size,
        dtype=sizes.dtype,
        cache_dtype=sizes.kv_dtype,
        out_dtype=sizes.dtype,
        kv_layout="x" if sizes.layout == "x-packed" else sizes.layout,
    )
