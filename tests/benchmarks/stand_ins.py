"""Cases, peers and results that need no GPU: a peer is right or wrong, cannot, is absent, or breaks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import spread
from benchmarks.peers import OURS, Call
from benchmarks.peers.cannot import Cannot
from paged_attn import reference
from tests.support.cases import Case

SMALL = Case("small", (3, 1), (20, 33), heads=2, kv_heads=1, head_dim=16, lse=False)
EVEN = Case("even", (5, 5), (5, 5), heads=4, kv_heads=2, head_dim=16, dtype=torch.bfloat16, lse=False)
CEILINGS = {"bytes_per_second": 4.4e12, "operations_per_second": 750e12}


def truth(case: Case, inputs: dict[str, Any]) -> Call:
    """A peer that is right."""

    def call() -> Tensor:
        out = reference.paged_attention(**inputs | {"out": None})
        assert isinstance(out, Tensor)
        return out

    return call


def wrong(case: Case, inputs: dict[str, Any]) -> Call:
    return lambda: 1.05 * truth(case, inputs)()


def nan(case: Case, inputs: dict[str, Any]) -> Call:
    return lambda: torch.nan * truth(case, inputs)()


def modest(case: Case, inputs: dict[str, Any]) -> Call:
    raise Cannot("no Tuesdays")


def absent(case: Case, inputs: dict[str, Any]) -> Call:
    import a_package_that_does_not_exist  # noqa: F401

    return truth(case, inputs)


def broken(case: Case, inputs: dict[str, Any]) -> Call:
    raise RuntimeError("first line\nsecond line")


def results() -> list[dict[str, Any]]:
    """Three cases: won, lost to one, and not run by it."""
    times = [{OURS: 10e-6, "sdpa cudnn": 8e-6, "a": 12e-6, "b": 15e-6}, {OURS: 20e-6, "a": 16e-6}, {OURS: 30e-6}]
    return [
        {
            "case": f"case {i}", "bytes": 10**7, "operations": 10**9, "seconds": one, "errors": {}, "skipped": {},
            "spread": {name: spread([x, x, x, 2 * x, 2 * x]) for name, x in one.items()},
        }
        for i, one in enumerate(times)
    ]  # fmt: skip
