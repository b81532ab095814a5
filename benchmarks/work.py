"""Least work of a case: bytes that must move, and operations of both products.  Everything else is overhead."""

from __future__ import annotations

from benchmarks.masked import is_masked, keys_and_pairs
from paged_attn.records.key_bounds import key_bounds_of, visible_keys, visible_pairs
from tests.support.cases import INT4, Case


def traffic(case: Case) -> int:
    """Return the bytes that must move: each visible key and value once, queries, gates and results; no scales."""
    if is_masked(case):
        keys, _ = keys_and_pairs(case)
    else:
        lengths = zip(case.query_lens, case.seq_lens, strict=True)
        keys = sum(visible_keys(q, k, key_bounds_of(case)) for q, k in lengths)
    gate = case.value_width * case.dtype.itemsize if case.gate else 0
    row = case.head_dim * case.dtype.itemsize + case.value_width * case.dtype_of_out.itemsize + gate
    key = case.head_dim + case.value_width * (not case.latent)
    stored = key // 2 if case.dtype_of_cache == INT4 else key * case.dtype_of_cache.itemsize
    return keys * case.kv_heads * stored + case.tokens * case.heads * row


def operations(case: Case) -> int:
    """Return the multiplications and additions of both products over the visible (query, key) pairs.

    A tree of drafts counts as causal, because kernels multiply the pairs that its bias hides, too.
    """
    if is_masked(case):
        _, pairs = keys_and_pairs(case)
    else:
        lengths = zip(case.query_lens, case.seq_lens, strict=True)
        pairs = sum(visible_pairs(q, k, key_bounds_of(case)) for q, k in lengths)
    return 2 * (case.head_dim + case.value_width) * case.heads * pairs
