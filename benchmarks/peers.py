"""Who is measured beside the library: a peer takes a case and returns a call, or None if it cannot do the case."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import paged_attn
from benchmarks.suites import is_uniform, plain
from tests.cases import Case, build

Call = Callable[[], object]


def ours(case: Case) -> Call:
    """paged_attention on the case's own inputs."""
    inputs = build(case, "cuda") | {"return_lse": False}
    inputs["out"] = torch.empty_like(inputs["q"])
    return lambda: paged_attn.paged_attention(**inputs)


def sdpa(case: Case, backend: SDPBackend) -> Call | None:
    """torch's scaled_dot_product_attention on a contiguous, not paged, cache: a bound for paged code."""
    query_len, seq_len = case.query_lens[0], case.seq_lens[0]
    if not is_uniform(case) or not plain(case) or case.dtype_of_cache != case.dtype or query_len not in (1, seq_len):
        return None
    seqs, device = len(case.seq_lens), "cuda"
    q = torch.randn(seqs, case.heads, query_len, case.head_dim, dtype=case.dtype, device=device)
    k, v = torch.randn(2, seqs, case.kv_heads, seq_len, case.head_dim, dtype=case.dtype, device=device)

    def call() -> object:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=query_len > 1, enable_gqa=True)

    return call


PEERS: dict[str, Callable[[Case], Call | None]] = {
    "paged-attn": ours,
    "sdpa cudnn": lambda case: sdpa(case, SDPBackend.CUDNN_ATTENTION),
    "sdpa flash": lambda case: sdpa(case, SDPBackend.FLASH_ATTENTION),
}
