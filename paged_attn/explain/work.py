"""The least work of a call, counted from its lengths, and the limits of a device."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..records.key_bounds import CAUSAL, KeyBounds


class Ceilings(NamedTuple):
    """Limits of a device, each measured alone."""

    bytes_per_s: float  # of a read-only stream
    flops_per_s: float  # of a large product of 16-bit matrices


def visible_keys(query_len: int, seq_len: int, bounds: KeyBounds = CAUSAL) -> int:
    """Number of keys that some query of a sequence sees, with a shard only keys of the rank.

    Queries are the last tokens and see keys up to the last.
    """
    if query_len <= 0 or seq_len <= 0:
        return 0
    return bounds.own_before(seq_len) - bounds.own_before(bounds.first_key(seq_len - query_len))


def visible_pairs(query_len: int, seq_len: int, bounds: KeyBounds = CAUSAL) -> int:
    """Number of visible (query, key) pairs, with positions taken to be slots."""
    if query_len <= 0 or seq_len <= 0:
        return 0
    if query_len == 1:  # the most frequent case, for which a tensor would cost more than the arithmetic
        end, first = bounds.end_of_keys(seq_len - 1, seq_len), bounds.first_key(seq_len - 1)
        return max(0, bounds.own_before(end) - bounds.own_before(first))
    pos = torch.arange(seq_len - query_len, seq_len, device="cpu")
    ends, firsts = bounds.own_before(bounds.end_of_keys(pos, seq_len)), bounds.own_before(bounds.first_key(pos))
    return int((ends - firsts).clamp(min=0).sum())


def page_ids(query_len: int, seq_len: int, page_size: int, bounds: KeyBounds = CAUSAL) -> int:
    """Number of page table entries that lead to visible keys."""
    keys, last = visible_keys(query_len, seq_len, bounds), bounds.own_before(seq_len)
    return -(-last // page_size) - (last - keys) // page_size if keys else 0
