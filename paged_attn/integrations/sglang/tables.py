"""A batch's tables, which all layers share: page tables, lengths, and where the queries of each sequence begin.

SGLang keeps a row of slot numbers for each request.  With pages of one token, the page table is ragged: kv_indptr has
the running sums of lengths, and SGLang's own kernel fills kv_indices.  With larger pages, the page table is dense.  The
slots of a page are then consecutive, and a page's number is its first slot number divided by the page size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import BUCKET

WORD = 32  # a word of paged_attention's qq_mask has a bit for each of 32 drafts
ALGORITHMS = ("EAGLE", "EAGLE3", "STANDALONE", "NEXTN")
# Approximate number of keys whose slots a program of SGLang's kernel copies.
KEYS_OF_A_PROGRAM = 8192

PageTable = Tensor | tuple[Tensor, Tensor]


class Tables(NamedTuple):
    """Arguments of paged_attention, and tables of sliding layers if these have a pool of their own."""

    page_table: PageTable
    window_table: Tensor | None  # [seqs, keys]: slot numbers in the pool of sliding layers
    window_slots: Tensor | None  # [tokens]: slot numbers of new tokens in this pool
    seq_lens: Tensor
    cu_seqlens_q: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    qq_mask: Tensor | None = None  # masks of draft trees
    query_positions: Tensor | None = None


class Slots(NamedTuple):
    """A runner's rows of slot numbers [requests, tokens], the page size, and the pool of sliding layers or None."""

    rows: Tensor
    page_size: int
    window_pool: Any

    def bound(self, batch: Any, drafts: int = 0) -> int:
        """Upper bound on a sequence's keys, drafts included: the length of a row if the CPU does not know lengths.

        drafts: query tokens of each sequence that seq_lens does not count yet.
        """
        longest = self.rows.shape[1] if batch.seq_lens_cpu is None else int(batch.seq_lens_cpu.max()) + drafts
        return min(-(-longest // BUCKET) * BUCKET, self.rows.shape[1])

    def pages(self, requests: Tensor, bound: int) -> Tensor:
        """Dense page table [seqs, pages] of the first `bound` keys, for pages of several tokens."""
        return self.rows[:, : bound : self.page_size].index_select(0, requests) // self.page_size

    def keys(self, batch: Any, bound: int, drafts: int = 0) -> int:
        """Upper bound on the sum of all sequences' keys: sequences * `bound` if the CPU does not know the sum."""
        known = None if batch.seq_lens_sum is None else int(batch.seq_lens_sum) + drafts * batch.batch_size
        most, bucket = batch.batch_size * bound, batch.batch_size * BUCKET
        return most if known is None else min(most, -(-known // bucket) * bucket)

    def ragged(self, requests: Tensor, lens: Tensor, bound: int, indptr: Tensor, indices: Tensor) -> None:
        """Write kv_indptr and kv_indices into the first entries of indptr and indices.

        indptr[0] must be 0 before the call.  bound: upper bound on lens.
        """
        from sglang.kernels.ops.attention.kv_indices import create_flashinfer_kv_indices_triton as copy_rows

        seqs = len(lens)
        torch.cumsum(lens, 0, dtype=indptr.dtype, out=indptr[1 : seqs + 1])
        if seqs:
            grid = seqs, -(-bound // KEYS_OF_A_PROGRAM)
            copy_rows[grid](
                self.rows, requests, lens, indptr, None, indices, self.rows.stride(0), TOKEN_BLOCK_PARALLEL=True
            )

    def window(self, requests: Tensor, bound: int) -> Tensor | None:
        """Slot numbers [seqs, bound] in the pool of sliding layers; arbitrary for keys that no window reaches.

        None: sliding layers have no pool of their own.
        """
        if self.window_pool is None:
            return None
        slots = self.rows[:, :bound].index_select(0, requests)
        return self.window_pool.translate_loc_from_full_to_swa(slots)

    def window_slots(self, batch: Any) -> Tensor | None:
        if self.window_pool is None or batch.out_cache_loc is None:
            return None
        return self.window_pool.translate_loc_from_full_to_swa(batch.out_cache_loc)


def starts_of(counts: Tensor) -> Tensor:
    """[n + 1] int32: where each of n rows begins, and where the last row ends."""
    return torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))


def tables_of(batch: Any, slots: Slots) -> Tables:
    """Tables of an eager step: decodes, drafts, or prompts and chunks of prompts, perhaps with decodes among them."""
    mode = batch.forward_mode
    if batch.encoder_lens is not None:
        raise NotImplementedError("paged_attn does not know attention to an encoder, encoder_lens of a batch")
    requests, lens, starts, longest, drafts = batch.req_pool_indices, batch.seq_lens, None, 1, 0
    mask = positions = None
    if mode.is_target_verify():
        drafts, seen = drafts_of(batch)
        seqs, longest = len(lens), drafts
        lens = lens + drafts
        starts = torch.arange(0, (seqs + 1) * drafts, drafts, dtype=torch.int32, device=lens.device)
        if seen is not None:
            mask, positions = mask_words(seen, seqs, drafts), batch.positions
    elif mode.is_decode():
        if batch.spec_info is not None:
            raise NotImplementedError("paged_attn does not know decodes of SGLang's draft models, spec_info of a batch")
    elif mode.is_mixed() or mode.name == "EXTEND":
        starts = starts_of(batch.extend_seq_lens)
        longest = max(batch.extend_seq_lens_cpu)
    else:
        raise NotImplementedError(f"paged_attn does not know SGLang's {mode.name}")
    bound = slots.bound(batch, drafts)
    return Tables(
        _page_table(batch, slots, lens, bound, drafts),
        slots.window(requests, bound),
        slots.window_slots(batch),
        lens,
        starts,
        longest,
        bound,
        mask,
        positions,
    )


def _page_table(batch: Any, slots: Slots, lens: Tensor, bound: int, drafts: int) -> PageTable:
    """Page table of an eager step: [seqs, pages], or ragged (indptr, indices) for pages of one token."""
    requests = batch.req_pool_indices
    if slots.page_size > 1:
        return slots.pages(requests, bound)
    indptr = torch.zeros(len(lens) + 1, dtype=torch.int32, device=lens.device)
    indices = torch.empty(slots.keys(batch, bound, drafts), dtype=torch.int32, device=lens.device)
    slots.ragged(requests, lens, bound, indptr, indices)
    return indptr, indices


class Captured:
    """Tables at fixed addresses, for CUDA graphs of decodes and drafts: up to `most` sequences and `tokens` tokens."""

    def __init__(self, slots: Slots, most: int, tokens: int) -> None:
        keys, device = slots.rows.shape[1], slots.rows.device
        wide = slots.window_pool is not None
        self.slots, self.most = slots, most
        self.pages = torch.zeros(most, -(-keys // slots.page_size), dtype=torch.int32, device=device)
        self.starts = torch.zeros(most + 1, dtype=torch.int32, device=device)  # kv_indptr, for pages of one token
        self.window = torch.zeros(most, keys, dtype=torch.int32, device=device) if wide else None
        self.window_slots = torch.zeros(max(most, tokens), dtype=torch.int64, device=device) if wide else None
        self.lens = torch.zeros(most, dtype=torch.int32, device=device)
        # number of drafts of each sequence -> (cu_seqlens_q, qq_mask) for `most` sequences
        self.drafts: dict[int, tuple[Tensor, Tensor]] = {}

    def fill(self, batch: Any) -> Tables:
        """Copy a batch's tables to the fixed addresses and return them, before a capture and before each replay."""
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


# ---- drafts that SGLang verifies: the same number for each sequence, in a chain or a tree ---------------------------


class Drafts(NamedTuple):
    """Drafts of a batch, which are query tokens of its sequences."""

    each: int  # drafts of each sequence; 0: none
    seen: Tensor | None = None  # bool [seqs * each * each], which node of a tree sees which; None: chains


def drafts_of(batch: Any) -> Drafts:
    """Drafts of a batch.  Raises NotImplementedError naming a kind of drafts that the backend lacks."""
    from sglang.srt.speculative.spec_info import SpecInputType

    told = batch.spec_info
    kind = getattr(told, "spec_input_type", None)
    if kind is not SpecInputType.EAGLE_VERIFY or told.ragged_verify_layout is not None:
        name = getattr(kind, "name", type(told).__name__)
        raise NotImplementedError(f"paged_attn does not know SGLang's drafts of kind {name}, or of uneven numbers")
    count = int(told.draft_token_num)
    if told.topk == 1 or count == 1:
        return Drafts(count)
    seen, cells = told.custom_mask, batch.batch_size * count * count
    if seen is None or len(seen) < cells:  # no mask while SGLang captures a graph; an idle batch's is empty
        seen = torch.ones(cells, dtype=torch.bool, device=batch.seq_lens.device)
    return Drafts(count, seen)


def mask_words(seen: Tensor, seqs: int, count: int) -> Tensor:
    """Pack the first seqs * count * count entries of a bool mask into a qq_mask [seqs * count, words] int32."""
    words = -(-count // WORD)
    bits = torch.zeros(seqs * count, words * WORD, dtype=torch.int32, device=seen.device)
    bits[:, :count] = seen[: seqs * count * count].view(-1, count)
    places = torch.arange(WORD, dtype=torch.int32, device=seen.device)
    return (bits.view(-1, words, WORD) << places).sum(-1, dtype=torch.int32)


def mask_of(seqs: int, device: Any) -> Any:
    """Return a buffer for masks of draft trees, or None without speculation.

    A mask has a column for each draft, and none for cached keys.
    """
    from sglang.srt.layers.attention.verify_mask import VerifyMask, tree_mask_numel
    from sglang.srt.runtime_context import get_spec
    from sglang.srt.speculative.eagle_utils import TreeMaskMode

    spec = get_spec()
    if spec.speculative_algorithm is None or not spec.speculative_num_draft_tokens:
        return None
    mode = TreeMaskMode.QLEN_ONLY
    cells = tree_mask_numel(mode, seqs, spec.speculative_num_draft_tokens, 0)
    buffer = torch.zeros(cells, dtype=torch.bool, device=device)
    return VerifyMask(buffer=buffer, mode=mode, max_bs=seqs, is_read=spec.speculative_eagle_topk != 1)
