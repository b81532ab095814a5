"""Batches as cases: sequences of equal or of any lengths, with the sizes that most cases have."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.cases import E4M3, Case

SIZES: dict[str, Any] = dict(
    heads=32, kv_heads=8, head_dim=128, page_size=16, dtype=torch.bfloat16, bounds=True, lse=False
)
FP8: dict[str, Any] = dict(cache_dtype=E4M3)


def uniform(name: str, seqs: int, query_len: int, seq_len: int, **changes: Any) -> Case:
    """Return a case of `seqs` sequences of equal lengths; query_len 1 is decode."""
    return ragged(name, (query_len,) * seqs, (seq_len,) * seqs, **changes)


def ragged(name: str, query_lens: tuple[int, ...], seq_lens: tuple[int, ...], **changes: Any) -> Case:
    """Return a case of sequences of any lengths; one query token each is decode."""
    return Case(name, query_lens, seq_lens, **(SIZES | dict(decode_form=set(query_lens) == {1}) | changes))


def log_uniform(low: int, high: int, n: int) -> tuple[int, ...]:
    """Return n lengths, evenly spaced on a logarithmic scale from low to high, always in the same shuffled order."""
    lengths = [round(low * (high / low) ** (i / (n - 1))) for i in range(n)]
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0)).tolist()
    return tuple(lengths[i] for i in order)


def is_uniform(case: Case) -> bool:
    """Whether a dense [batch, ...] call can do the same work."""
    return len(set(case.query_lens)) == 1 and len(set(case.seq_lens)) == 1
