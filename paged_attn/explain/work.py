"""What a call must do at least, counted from its lengths, and what a device does at best; all else is overhead."""

from __future__ import annotations

from typing import NamedTuple


class Ceilings(NamedTuple):
    """What a device reaches when it does nothing else."""

    bytes_per_s: float  # a stream that is only read
    flops_per_s: float  # a large product of 16-bit matrices


def visible_keys(query_len: int, seq_len: int, left: int = -1, chunk: int | None = None) -> int:
    """Keys that some query of a sequence sees; its queries are at its end, the last of them sees the last key."""
    if query_len <= 0 or seq_len <= 0:
        return 0
    if chunk is not None:
        seq_len -= max(seq_len - query_len, 0) // chunk * chunk
    return seq_len if left < 0 else min(seq_len, query_len + left)


def visible_pairs(query_len: int, seq_len: int, left: int = -1, right: int = 0, chunk: int | None = None) -> int:
    """(query, key) pairs: a query at position p sees the keys p - left ... p + right, or all on a side that is -1."""
    if query_len <= 0 or seq_len <= 0:
        return 0
    if chunk is not None:  # each is a sequence of its own
        first, pairs = seq_len - query_len, 0
        for begin in range(max(first, 0) // chunk * chunk, seq_len, chunk):
            end = min(begin + chunk, seq_len)
            pairs += visible_pairs(end - max(begin, first), end - begin, left, right)
        return pairs
    first, after = seq_len - query_len, 1 + (seq_len + query_len if right < 0 else right)
    ends = _sum_to(seq_len + after, seq_len) - _sum_to(first + after, seq_len)
    begins = 0 if left < 0 else _sum_to(seq_len - left, seq_len) - _sum_to(first - left, seq_len)
    return ends - begins


def page_ids(query_len: int, seq_len: int, page_size: int, left: int = -1, chunk: int | None = None) -> int:
    """Entries of the page table that lead to visible keys."""
    keys = visible_keys(query_len, seq_len, left, chunk)
    return -(-seq_len // page_size) - (seq_len - keys) // page_size if keys else 0


def _sum_to(end: int, most: int) -> int:
    """Sum over x < end of x, but no less than 0 and no more than `most`."""
    small = min(max(end, 0), most + 1)
    return small * (small - 1) // 2 + (max(end, 0) - small) * most
