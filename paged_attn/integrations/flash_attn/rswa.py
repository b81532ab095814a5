"""R-SWA: keys of the prompt stay visible behind the window of generated tokens (vLLM has this for Unlimited-OCR).

A query sees earlier keys that lie in the prompt, or less than a window before the query.  The prefix_lens of
paged_attention show a prefix to all queries, also keys behind a query, which queries of the prompt must not see.

Queries in the prompt therefore become a separate sequence.  Its prefix ends before its first query.  All its queries
get the position of the first one, so that the window hides no query's key from another query.  Causal masks go by the
order of keys, which does not change.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Split(NamedTuple):
    """Arguments of paged_attention for two sequences in place of each: its queries in the prompt, and its others."""

    page_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    prefix_lens: Tensor
    query_positions: Tensor


def split(prompts: Tensor, page_table: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor, tokens: int) -> Split:
    """Split sequences at their prompt lengths [seqs] int32; a part without queries is empty.  No host sync."""
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
    """Interleave two tensors [n] -> [2 n] int32: for each sequence the first number, then the second."""
    return torch.stack([first, second], dim=1).flatten().int()


def twice(page_table: Tensor) -> Tensor:
    """Repeat each row of a page table: [seqs, pages] -> [2 seqs, pages]."""
    return page_table.repeat_interleave(2, dim=0)
