"""The library itself; for `batch_invariant` cases its default mode is a peer, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

import paged_attn
from benchmarks.peers.cannot import Cannot
from tests.support.cases import Case


def call(case: Case, inputs: dict[str, Any]) -> Callable[[], Tensor]:
    """Return `paged_attention` on the case's own inputs."""
    if case.lse:
        return lambda: paged_attn.paged_attention(**inputs)[0]
    return lambda: paged_attn.paged_attention(**inputs)  # type: ignore[return-value]


def default(case: Case, inputs: dict[str, Any]) -> Callable[[], Tensor]:
    """Return `paged_attention` without batch_invariant."""
    if not case.batch_invariant:
        raise Cannot("the case is of the default mode itself")
    return call(case, {**inputs, "batch_invariant": False})
