"""torch's scaled_dot_product_attention over a contiguous cache: a bound for paged kernels, not a competitor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.peers.cannot import Cannot, allow
from benchmarks.suites import is_uniform
from tests.support.cases import Case


def cudnn(case: Case, inputs: dict[str, Any]) -> Callable[[], Tensor]:
    return _call(case, inputs, SDPBackend.CUDNN_ATTENTION)


def flash(case: Case, inputs: dict[str, Any]) -> Callable[[], Tensor]:
    return _call(case, inputs, SDPBackend.FLASH_ATTENTION)


def _call(case: Case, inputs: dict[str, Any], backend: SDPBackend) -> Callable[[], Tensor]:
    """Return one dense call.  Only whole prefills and single queries fit, because `is_causal` aligns to the first key.

    q is a view [seqs, heads, query_len, head_dim] of the packed queries.  The result has the strides of q, so its
    packed form is a view, too.  A call copies nothing.
    """
    allow(case)
    query_len, seq_len = case.query_lens[0], case.seq_lens[0]
    if not is_uniform(case) or query_len not in (1, seq_len):
        raise Cannot("no ragged lengths, and no causal chunks behind a context")
    q = inputs["q"].unflatten(0, (-1, query_len)).transpose(1, 2)
    k, v = (contiguous(inputs[name], inputs["page_table"], seq_len, case) for name in ("k_cache", "v_cache"))

    def call() -> Tensor:
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=query_len > 1, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    return call


def contiguous(cache: Tensor, page_table: Tensor, seq_len: int, case: Case) -> Tensor:
    """Gather a cache's pages -> contiguous [seqs, kv_heads, seq_len, head_dim]."""
    pages = cache[page_table[:, : -(-seq_len // case.page_size)].long()]  # [seqs, columns, ...]
    pages = pages if case.layout == "HND" else pages.transpose(2, 3)
    return pages.transpose(1, 2).flatten(2, 3)[:, :, :seq_len].contiguous()
