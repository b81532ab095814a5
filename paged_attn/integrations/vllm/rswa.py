"""R-SWA in vLLM: the window of a model and the prompt lengths of a batch, added to a batch's metadata."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from paged_attn.integrations.flash_attn.rswa import split

ALL = 2**31 - 1  # a prefix that hides nothing, for captures, in which vLLM gives no prompt lengths


class Prompts:
    """The window of a model, and the prompt lengths of a batch, at an address that stays fixed for graphs."""

    def __init__(self, window: int, seqs: int, device: Any) -> None:
        self.window = window
        self.lens = torch.full((seqs,), ALL, dtype=torch.int32, device=device)

    def tell(self, lens: Tensor | None, seqs: int) -> Tensor:
        """Copy prompt lengths and return them, [seqs] int32; vLLM may leave out padding, whose lengths become 0."""
        mine = self.lens[:seqs]
        if lens is None:
            return mine.fill_(ALL)
        told = lens[:seqs]
        mine[: len(told)].copy_(told)
        mine[len(told) :].zero_()
        return mine

    def applied(self, metadata: Any, lens: Tensor | None) -> Any:
        """The batch with prefixes; a sequence of several tokens becomes two: tokens in the prompt, and behind it."""
        m = metadata
        prompts = self.tell(lens, len(m.seq_lens))
        if m.max_query_len == 1:  # no key of a prefix lies behind a single query
            return dataclasses.replace(m, window=self.window, prefix_lens=prompts)
        table, lens, starts, prefixes, positions = split(
            prompts, m.block_table, m.seq_lens, m.query_start_loc, m.num_actual_tokens
        )
        return dataclasses.replace(
            m, window=self.window, prefix_lens=prefixes, query_positions=positions, query_start_loc=starts,
            seq_lens=lens, block_table=table, split=True,
        )  # fmt: skip


def prompts_of(vllm_config: Any, device: Any) -> Prompts | None:
    """A model's Prompts; None for models without R-SWA, which are all but one."""
    window = getattr(vllm_config.model_config, "rswa_window", None)
    return None if window is None else Prompts(window, vllm_config.scheduler_config.max_num_seqs, device)
