"""What a case must do at least: bytes that move, operations of both products.  Everything else is overhead."""

from __future__ import annotations

from tests.cases import Case


def traffic(case: Case) -> int:
    """Bytes that must move: every visible key and value once, queries in, results out."""
    left = case.window_size[0]
    keys = 0
    for query_len, seq_len in zip(case.query_lens, case.seq_lens, strict=True):
        visible = seq_len if left < 0 else min(seq_len, query_len + left)
        keys += visible if query_len else 0
    row = case.heads * case.head_dim * (case.dtype.itemsize + case.dtype_of_out.itemsize)
    return keys * 2 * case.kv_heads * case.head_dim * case.dtype_of_cache.itemsize + case.tokens * row


def operations(case: Case) -> int:
    """Multiplications and additions of both products over the visible (query, key) pairs of a causal case.

    A draft tree counts as causal: what its bias hides is multiplied all the same.
    """
    left = case.window_size[0]
    pairs = 0
    for query_len, seq_len in zip(case.query_lens, case.seq_lens, strict=True):
        pairs += _up_to(seq_len, left) - _up_to(seq_len - query_len, left)
    return 4 * case.head_dim * case.heads * pairs


def _up_to(position: int, left: int) -> int:
    """Pairs of the queries at 0 ... position - 1: query i sees i + 1 keys, at most left + 1."""
    full = position if left < 0 else min(position, left + 1)
    return full * (full + 1) // 2 + (position - full) * (left + 1)
