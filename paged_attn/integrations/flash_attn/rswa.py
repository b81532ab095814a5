"""R-SWA: keys of the prompt stay visible behind the window of generated tokens, as vLLM has them for Unlimited-OCR.

A query sees the keys of its past that lie in the prompt, or fewer than a window's length before it.  prefix_lens of
paged_attention shows a prefix to all queries, also keys behind them, which queries of the prompt must not see.  So
these are made a sequence of their own: its prefix ends before its first query, and all of its queries stand where that
one does, so that a window hides none of them from another.  Causality goes by places, which stay as they are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Split(NamedTuple):
    """Arguments of paged_attention for a batch whose sequences are two each: in their prompts, and behind them."""

    page_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    prefix_lens: Tensor
    query_positions: Tensor


def split(prompts: Tensor, page_table: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor, tokens: int) -> Split:
    """Of prompt lengths [seqs] int32; where a sequence lies on one side, the other one is empty.  No host sync."""
    if not len(seq_lens):  # all tokens are padding
        nowhere = torch.zeros(tokens, dtype=torch.int32, device=seq_lens.device)
        return Split(page_table, seq_lens.int(), cu_seqlens_q.int(), prompts.int(), nowhere)
    begin, end = cu_seqlens_q[:-1], cu_seqlens_q[1:]
    contexts = seq_lens - (end - begin)
    within = torch.minimum((prompts - contexts).clamp_min(0), end - begin)  # queries in the prompt
    middle = begin + within
    token = torch.arange(tokens, dtype=torch.int32, device=begin.device)
    row = torch.searchsorted(end.contiguous(), token, right=True).clamp_max(len(end) - 1)
    stands = contexts[row] + torch.where(token < middle[row], 0, token - begin[row])
    lens = pairs(torch.where(within > 0, contexts + within, 0), torch.where(middle < end, seq_lens, 0))
    starts = torch.cat([pairs(begin, middle), end[-1:].int()])
    return Split(twice(page_table), lens, starts, pairs(contexts, prompts), stands.int())


def pairs(first: Tensor, second: Tensor) -> Tensor:
    """[2 n]: of each sequence the first, then the second."""
    return torch.stack([first, second], dim=1).flatten().int()


def twice(page_table: Tensor) -> Tensor:
    """The pages of each sequence once more."""
    return page_table.repeat_interleave(2, dim=0)
