"""What a call must do at least, counted from its lengths, and what a device does at best; all else is overhead."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..records.key_bounds import CAUSAL, KeyBounds


class Ceilings(NamedTuple):
    """What a device reaches when it does nothing else."""

    bytes_per_s: float  # a stream that is only read
    flops_per_s: float  # a large product of 16-bit matrices


def visible_keys(query_len: int, seq_len: int, bounds: KeyBounds = CAUSAL) -> int:
    """Keys that some query of a sequence sees; its queries are at its end, the last of them sees the last key."""
    if query_len <= 0 or seq_len <= 0:
        return 0
    return seq_len - bounds.first_key(seq_len - query_len)


def visible_pairs(query_len: int, seq_len: int, bounds: KeyBounds = CAUSAL) -> int:
    """(query, key) pairs; positions are taken to be slots."""
    if query_len <= 0 or seq_len <= 0:
        return 0
    if query_len == 1:  # most are, and a tensor costs more than they do
        return max(0, bounds.end_of_keys(seq_len - 1, seq_len) - bounds.first_key(seq_len - 1))
    pos = torch.arange(seq_len - query_len, seq_len, device="cpu")
    return int((bounds.end_of_keys(pos, seq_len) - bounds.first_key(pos)).clamp(min=0).sum())


def page_ids(query_len: int, seq_len: int, page_size: int, bounds: KeyBounds = CAUSAL) -> int:
    """Entries of the page table that lead to visible keys."""
    keys = visible_keys(query_len, seq_len, bounds)
    return -(-seq_len // page_size) - (seq_len - keys) // page_size if keys else 0
