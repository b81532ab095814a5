"""Tables at fixed addresses, for CUDA graphs of decodes and of drafts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .tables import PageTable, Slots, Tables
from .verified_drafts import Drafts, drafts_of, mask_words


class Captured:
    """Tables for up to `most` sequences and `tokens` tokens."""

    def __init__(self, slots: Slots, most: int, tokens: int) -> None:
        keys, device = slots.rows.shape[1], slots.rows.device
        wide = slots.window_pool is not None
        self.slots, self.most = slots, most
        self.pages = torch.zeros(most, -(-keys // slots.page_size), dtype=torch.int32, device=device)
        self.starts = torch.zeros(most + 1, dtype=torch.int32, device=device)  # of rows, where `pages` is one list
        self.window = torch.zeros(most, keys, dtype=torch.int32, device=device) if wide else None
        self.window_slots = torch.zeros(max(most, tokens), dtype=torch.int64, device=device) if wide else None
        self.lens = torch.zeros(most, dtype=torch.int32, device=device)
        self.drafts: dict[int, tuple[Tensor, Tensor]] = {}  # drafts of a sequence -> starts of queries, mask words

    def fill(self, batch: Any) -> Tables:
        """Copy a batch's tables; called before a graph is captured, and before each replay."""
        mode, drafts = batch.forward_mode, Drafts(0)
        if mode.is_target_verify():
            drafts = drafts_of(batch)
        elif not mode.is_decode() or batch.spec_info is not None:
            raise NotImplementedError(f"paged_attn has graphs of SGLang's decodes and drafts only, not of {mode.name}")
        seqs, bound = batch.batch_size, self.slots.bound(batch, drafts.each)
        requests = batch.req_pool_indices[:seqs]
        lens = batch.seq_lens[:seqs] + drafts.each
        self.lens[:seqs].copy_(lens)
        table: PageTable = self.pages[:seqs]
        if self.slots.page_size > 1:
            found = self.slots.pages(requests, bound)
            self.pages[:seqs, : found.shape[1]].copy_(found)
        else:
            table = self.starts[: seqs + 1], self.pages.flatten()
            self.slots.ragged(requests, lens, bound, *table)
        window = slots = None
        if self.window is not None and self.window_slots is not None:
            self.window[:seqs, :bound].copy_(self.slots.window(requests, bound))  # type: ignore[arg-type]
            slots = self.window_slots[: seqs * max(drafts.each, 1)]
            if (new := self.slots.window_slots(batch)) is not None:
                self.window_slots[: len(new)].copy_(new)
            window = self.window[:seqs]
        of = Tables(table, window, slots, self.lens[:seqs], None, 1, self.slots.rows.shape[1])
        if not drafts.each:
            return of
        starts, words = self._of(drafts.each)
        of = of._replace(cu_seqlens_q=starts[: seqs + 1], max_seqlen_q=drafts.each)
        if drafts.seen is None:
            return of
        mask = words[: seqs * drafts.each]
        mask.copy_(mask_words(drafts.seen, seqs, drafts.each))
        return of._replace(qq_mask=mask, query_positions=batch.positions)

    def _of(self, count: int) -> tuple[Tensor, Tensor]:
        if count not in self.drafts:
            starts = torch.arange(0, (self.most + 1) * count, count, dtype=torch.int32, device=self.lens.device)
            nothing = torch.zeros(self.most * count * count, dtype=torch.bool, device=self.lens.device)
            self.drafts[count] = starts, mask_words(nothing, self.most, count)
        return self.drafts[count]
