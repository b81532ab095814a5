"""Peers of the library: a peer takes a case and its inputs and returns a call, or raises `Cannot` with the reason.

The call returns its result as [tokens, heads, head_dim].  A peer makes its copies, plans and graphs before it returns
the call, because only the call is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from benchmarks.peers import cudnn, flashinfer, flashmla, ours, sdpa, vllm
from tests.support.cases import Case

Call = Callable[[], Tensor]
Peer = Callable[[Case, dict[str, Any]], Call]

OURS = "paged-attn"
PEERS: dict[str, Peer] = {
    OURS: ours.call,
    "default mode": ours.default,
    "sdpa cudnn": sdpa.cudnn,
    "sdpa flash": sdpa.flash,
    "cudnn paged": cudnn.call,
    "flashinfer fa2": flashinfer.fa2,
    "flashinfer fa3": flashinfer.fa3,
    "vllm triton": vllm.call,
    "flashmla": flashmla.call,
}
BOUNDS = {"sdpa cudnn", "sdpa flash"}  # over contiguous caches: bounds for paged kernels, not competitors
