"""R-SWA: keys of the prompt stay visible behind the window of generated tokens, as Unlimited-OCR has them.

A query sees the keys of its past that lie in the prompt, or fewer than `window` places before it.  prefix_lens of
paged_attention shows a prefix to all queries, also keys behind them, which queries of the prompt must not see.  So
these are made a sequence of their own: its prefix ends before its first query, and all of its queries stand where that
one does, so that a window hides none of them from another.  Causality goes by places, which stay as they are.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

ALL = 2**31 - 1  # a prefix that hides nothing: what vLLM's captures, which tell none, are made with


class Prompts:
    """The window of a model, and the lengths of a batch's prompts, at an address that stays for graphs."""

    def __init__(self, window: int, seqs: int, device: Any) -> None:
        self.window = window
        self.lens = torch.full((seqs,), ALL, dtype=torch.int32, device=device)

    def tell(self, lens: Tensor | None, seqs: int) -> Tensor:
        """[seqs] prompt lengths; vLLM has those of padding or has them not."""
        mine = self.lens[:seqs]
        if lens is None:
            return mine.fill_(ALL)
        told = lens[:seqs]
        mine[: len(told)].copy_(told)
        mine[len(told) :].zero_()
        return mine

    def applied(self, metadata: Any, lens: Tensor | None) -> Any:
        """The batch with its prefixes; sequences of several tokens become two each: in their prompts, and behind."""
        m = metadata
        prompts = self.tell(lens, len(m.seq_lens))
        if m.max_query_len == 1:  # nothing of a prefix lies behind a single query
            return dataclasses.replace(m, window=self.window, prefix_lens=prompts)
        starts = m.query_start_loc
        begin, end = starts[:-1], starts[1:]
        contexts = m.seq_lens - (end - begin)
        within = torch.minimum((prompts - contexts).clamp_min(0), end - begin)  # queries in the prompt
        middle = begin + within
        token = torch.arange(m.num_actual_tokens, dtype=torch.int32, device=starts.device)
        row = torch.searchsorted(end.contiguous(), token, right=True).clamp_max(len(end) - 1)
        stands = contexts[row] + torch.where(token < middle[row], 0, token - begin[row])
        return dataclasses.replace(
            m,
            window=self.window,
            prefix_lens=pairs(contexts, prompts),
            query_positions=stands.int(),
            query_start_loc=torch.cat([pairs(begin, middle), end[-1:]]),
            seq_lens=pairs(torch.where(within > 0, contexts + within, 0), torch.where(middle < end, m.seq_lens, 0)),
            block_table=twice(m.block_table),
            split=True,
        )


def prompts_of(vllm_config: Any, device: Any) -> Prompts | None:
    """None for models without R-SWA: all but one."""
    window = getattr(vllm_config.model_config, "rswa_window", None)
    return None if window is None else Prompts(window, vllm_config.scheduler_config.max_num_seqs, device)


def pairs(first: Tensor, second: Tensor) -> Tensor:
    """[2 n]: of each sequence the first, then the second."""
    return torch.stack([first, second], dim=1).flatten().int()


def twice(block_table: Tensor) -> Tensor:
    return block_table.repeat_interleave(2, dim=0)
