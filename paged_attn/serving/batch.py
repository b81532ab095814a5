"""A step as tensors: what the scheduler decided, in the form that the library takes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paged_attn.serving.scheduler import Share

NO_PAGE = 2**31 - 1  # fills the page table past a sequence's last page: whoever follows it leaves the cache


@dataclass(frozen=True)
class StepBatch:
    """The arguments of one call; `slot_mapping` says where the call's own keys go."""

    page_table: Tensor  # [seqs, max_pages] int32
    seq_lens: Tensor  # [seqs] int32
    cu_seqlens_q: Tensor  # [seqs + 1] int32
    slot_mapping: Tensor  # [tokens] int64
    max_seqlen_q: int
    max_seqlen_k: int


def batch_of(shares: Sequence[Share], page_size: int, device: torch.device) -> StepBatch:
    """The batch whose sequence i is share i; its tokens follow one another in that order."""
    width = max(len(share.sequence.pages) for share in shares)
    table, slots, offsets = [], [], [0]
    for share in shares:
        pages = share.sequence.pages
        table.append(pages + [NO_PAGE] * (width - len(pages)))
        slots += [pages[p // page_size] * page_size + p % page_size for p in range(share.context_len, share.seq_len)]
        offsets.append(offsets[-1] + share.query_len)
    return StepBatch(
        page_table=torch.tensor(table, dtype=torch.int32, device=device),
        seq_lens=torch.tensor([share.seq_len for share in shares], dtype=torch.int32, device=device),
        cu_seqlens_q=torch.tensor(offsets, dtype=torch.int32, device=device),
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
        max_seqlen_q=max(share.query_len for share in shares),
        max_seqlen_k=max(share.seq_len for share in shares),
    )


def sample(shares: Sequence[Share], rng: random.Random, sequences: int, tokens: int) -> tuple[list[Share], list[int]]:
    """Pick up to `sequences` shares, a decode and a prefill among them if there are any, and of each a run of up to
    `tokens` queries; return those runs, as shares, and the rows of the batch that they are.

    A run inside a chunk is attention of fewer queries over fewer keys, because attention is causal.
    """
    starts, row = {}, 0
    for share in shares:
        starts[id(share)] = row
        row += share.query_len
    decodes = [share for share in shares if share.decode]
    prefills = [share for share in shares if not share.decode]
    picked = [rng.choice(kind) for kind in (decodes, prefills) if kind]
    others = [share for share in shares if all(share is not p for p in picked)]
    picked += rng.sample(others, min(len(others), max(0, sequences - len(picked))))

    runs: list[Share] = []
    rows: list[int] = []
    for share in picked:
        length = min(tokens, share.query_len)
        skip = rng.randint(0, share.query_len - length)
        runs.append(replace(share, context_len=share.context_len + skip, query_len=length))
        first = starts[id(share)] + skip
        rows += range(first, first + length)
    return runs, rows
