"""Prefills over small pages: the cost and the gain of copying keys and values into whole pages.

    python -m benchmarks.copies [ROUNDS]

Each case is timed four times: over pages of 16 tokens, over small pages by the portable kernels, over small pages with
a copy, and as the copy alone.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import paged_attn
from benchmarks import measure
from benchmarks.inputs import inputs_of
from paged_attn.calls import call_cache, launched
from paged_attn.kernels.hopper.planning import coverage
from paged_attn.planning import planner
from tests.support.cases import Case

SIZES: dict[str, Any] = dict(heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16, bounds=True, lse=False)
LENGTHS = {  # (sequences, queries of each, keys of each)
    "2 x 2048": (2, 2048, 2048),
    "1 x 512": (1, 512, 512),
    "1 x 1024": (1, 1024, 1024),
    "8 x 256": (8, 256, 256),
    "1 x 8192": (1, 8192, 8192),
    "4 x 128 at 8192": (4, 128, 8192),
    "4 x 256 at 8192": (4, 256, 8192),
    "1 x 512 at 32768": (1, 512, 32768),
}


@contextlib.contextmanager
def planned(worth: bool, first: bool = False) -> Iterator[None]:
    """Plan every call with a copy (`worth`) or without.  With `first`, a call makes only its first launch, the copy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coverage, "_is_worth_a_copy", lambda p: worth)
        if first:
            steps = launched.steps_of
            patch.setattr(launched, "steps_of", lambda made, call: steps(made, call)[:1])
        planner.plan.cache_clear()
        call_cache.clear()
        yield
    planner.plan.cache_clear()
    call_cache.clear()


def graph(call: Callable[[], object], **how: Any) -> torch.cuda.CUDAGraph:
    """Capture a call, planned as `planned(**how)` says, in a CUDA graph."""
    with planned(**how):
        return measure.capture(call)


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    for name, (seqs, queries, keys) in LENGTHS.items():
        case = Case(name, (queries,) * seqs, (keys,) * seqs, **SIZES)
        for page in (4, 1) if name == "2 x 2048" else (4,):
            whole, small = (inputs_of(replace(case, page_size=size), "cuda") for size in (16, page))
            calls = {16: whole, page: small}
            run = {size: lambda given=given: paged_attn.paged_attention(**given) for size, given in calls.items()}
            graphs = {
                "page 16": graph(run[16], worth=False),
                "portable": graph(run[page], worth=False),
                "copied": graph(run[page], worth=True),
                "copy alone": graph(run[page], worth=True, first=True),
            }
            seconds = measure.replay(graphs, rounds)
            print(f"{name}, page {page}:", ", ".join(f"{x} {1e6 * s:.1f}" for x, s in seconds.items()), flush=True)


if __name__ == "__main__":
    main()
