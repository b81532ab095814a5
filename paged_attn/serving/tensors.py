"""Tensors of the demo, in the form that the library takes: the arguments of a step, and the caches of a layer.

Every slot without a token of a sequence holds NaN, so that wrong reads show.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paged_attn.serving.scheduler import StepPart

NO_PAGE = 2**31 - 1  # id in a row of the page table after the sequence's last page; no cache has this page
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class StepBatch:
    """Arguments that write_kv and paged_attention take in one step."""

    page_table: Tensor  # [seqs, max_pages] int32
    seq_lens: Tensor  # [seqs] int32
    cu_seqlens_q: Tensor  # [seqs + 1] int32
    slot_mapping: Tensor  # [tokens] int64, slots of new keys and values
    max_seqlen_q: int
    max_seqlen_k: int


def batch_of(
    parts: Sequence[StepPart],
    page_size: int,
    device: torch.device,
    bucket: int = 1,
    first_pages: Sequence[int] | None = None,
) -> StepBatch:
    """Return the batch of these parts: sequence i is part i, and tokens are in the order of the parts.

    max_seqlen_k, and with it the width of the page table, is rounded up to a multiple of `bucket`, so that most steps
    repeat a kept call.  If given, `first_pages` has a number for each part, which is added to its page ids.
    """
    longest = rounded_up(max(part.seq_len for part in parts), bucket)
    width = max(-(-longest // page_size), *[len(part.sequence.pages) for part in parts])
    table, slots, offsets = [], [], [0]
    for part, first in zip(parts, first_pages or [0] * len(parts)):
        pages = [first + page for page in part.sequence.pages] if first else part.sequence.pages
        table.append(pages + [NO_PAGE] * (width - len(pages)))
        slots += [pages[p // page_size] * page_size + p % page_size for p in range(part.context_len, part.seq_len)]
        offsets.append(offsets[-1] + part.query_len)
    return StepBatch(
        page_table=torch.tensor(table, dtype=torch.int32, device=device),
        seq_lens=torch.tensor([part.seq_len for part in parts], dtype=torch.int32, device=device),
        cu_seqlens_q=torch.tensor(offsets, dtype=torch.int32, device=device),
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
        max_seqlen_q=max(part.query_len for part in parts),
        max_seqlen_k=longest,
    )


def rounded_up(tokens: int, bucket: int) -> int:
    """Round up to a multiple of a bucket."""
    return -(-tokens // bucket) * bucket


def sample(
    parts: Sequence[StepPart], rng: random.Random, sequences: int, tokens: int
) -> tuple[list[StepPart], list[int]]:
    """Pick up to `sequences` parts, and a run of up to `tokens` queries from each; return the runs and their rows.

    If there are decodes and prefills, one of each is among the parts, even if `sequences` is 1.  Runs are parts, too:
    because attention is causal, a run inside a chunk is attention of fewer queries over fewer keys.  Rows are indices
    of query tokens in the batch.
    """
    starts, row = {}, 0
    for part in parts:
        starts[id(part)] = row
        row += part.query_len
    decodes = [part for part in parts if part.decode]
    prefills = [part for part in parts if not part.decode]
    picked = [rng.choice(kind) for kind in (decodes, prefills) if kind]
    others = [part for part in parts if all(part is not p for p in picked)]
    picked += rng.sample(others, min(len(others), max(0, sequences - len(picked))))

    runs: list[StepPart] = []
    rows: list[int] = []
    for part in picked:
        length = min(tokens, part.query_len)
        skip = rng.randint(0, part.query_len - length)
        runs.append(replace(part, context_len=part.context_len + skip, query_len=length))
        first = starts[id(part)] + skip
        rows += range(first, first + length)
    return runs, rows


@dataclass(frozen=True)
class Caches:
    """Caches of one layer in one of the library's layouts."""

    k: Tensor
    v: Tensor
    kv_layout: str  # the library's argument, which it ignores for x-packed caches, because their k has 5 axes

    @staticmethod
    def allocate(
        layout: str, pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> Caches:
        """Make caches in which every slot holds NaN.  layout: NHD, HND or x-packed."""
        if layout == "x-packed":
            x = 16 // dtype.itemsize  # dims in 16 bytes
            if head_dim % x:
                raise ValueError(f"x-packed {dtype} wants a head_dim divisible by {x}, got {head_dim}")
            k_shape: tuple[int, ...] = (pages, kv_heads, head_dim // x, page_size, x)
            v_shape: tuple[int, ...] = (pages, kv_heads, head_dim, page_size)
        elif layout == "HND":
            k_shape = v_shape = (pages, kv_heads, page_size, head_dim)
        else:
            k_shape = v_shape = (pages, page_size, kv_heads, head_dim)
        k = torch.empty(k_shape, dtype=dtype, device=device)
        caches = Caches(k, torch.empty(v_shape, dtype=dtype, device=device), "HND" if layout == "HND" else "NHD")
        caches.poison(slice(None))
        return caches

    def poison(self, pages: list[int] | slice) -> None:
        """Fill pages with NaN.  NaN is written as an integer, because not every device can index fp8 tensors."""
        if pages == []:
            return
        bits = _BITS[self.k.element_size()]
        nan = torch.tensor(torch.nan).to(self.k.dtype).view(bits).item()
        index = torch.tensor(pages, device=self.k.device) if isinstance(pages, list) else pages
        self.k.view(bits)[index] = nan
        self.v.view(bits)[index] = nan
