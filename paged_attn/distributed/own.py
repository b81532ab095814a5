"""A rank's own part of a step's integers: lengths, positions, slots and page tables.

All of it is plain torch without a host sync, as in `paged_attn.step`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks.options import integer, refused
from ..checks.options import shard as check_shard
from ..records.key_bounds import KeyBounds
from ..step import IntOrTensor, Table
from ..step import slots as slots_of

Shard = tuple[int, int, int]


def own_lens(lengths: IntOrTensor, shard: Shard) -> IntOrTensor:
    """How many of a sequence's first keys are a rank's own.

    Args:
        lengths: an int, or a tensor of integers of any shape.  0 or less: none.
        shard: (rank, world, stripe), as in paged_attention.

    Returns: an int for an int, a tensor of the same shape and dtype for a tensor.  `pages_needed` of it is the number
        of pages that the rank keeps.
    """
    check_shard("shard", shard)
    found: IntOrTensor = KeyBounds(shard=shard).own_before(lengths)
    return found


def own_positions(positions: Tensor, shard: Shard) -> Tensor:
    """The number of the key at each position among a rank's own keys of its sequence; -1 where it is another rank's.

    Args:
        positions: [tokens] int32 | int64, as `paged_attn.positions` gives them; negative = padding.
        shard: (rank, world, stripe), as in paged_attention.

    Returns: [tokens], dtype of positions.  -1 for padding.
    """
    check_shard("shard", shard)
    rank, world, stripe = shard
    is_own = (positions >= 0) & (positions // stripe % world == rank)
    return torch.where(is_own, own_lens(positions, shard), -1)


def slots(
    page_table: Table, positions: Tensor, page_size: int, shard: Shard, cu_seqlens_q: Tensor | None = None
) -> Tensor:
    """The slot_mapping of write_kv on a rank: every rank gets all of a step's keys, and writes its own.

    Args:
        page_table: of this rank, as in paged_attention.
        positions: [tokens] int32 | int64, positions in whole sequences, as `paged_attn.positions` gives them.
        page_size: tokens in a page.
        shard: (rank, world, stripe), as in paged_attention.
        cu_seqlens_q: [seqs + 1] int32 | int64, which tokens are whose.  None: one token per sequence, tokens = seqs.

    Returns: [tokens] int64: page * page_size + slot; -1, which write_kv skips, for other ranks' keys and padding.
    """
    return slots_of(page_table, own_positions(positions, shard), page_size, cu_seqlens_q)


def page_table(whole: Tensor, page_size: int, shard: Shard) -> Tensor:
    """A rank's page table from one of whole sequences, where stripes are whole pages.

    Args:
        whole: [seqs, max_pages] int32 | int64; entry p of a row is the page with positions p * page_size ... .
        page_size: tokens in a page, of which a stripe is a multiple.
        shard: (rank, world, stripe), as in paged_attention.

    Returns: [seqs, own pages], dtype of whole; the columns whose pages are the rank's own, in order.
    """
    check_shard("shard", shard)
    integer("page_size", page_size, 1, "an int")
    rank, world, stripe = shard
    if stripe % page_size:
        raise refused("shard[2]", f"a multiple of page_size = {page_size}", stripe)
    pages = stripe // page_size  # of a stripe
    number = torch.arange(own_lens(whole.shape[1], (rank, world, pages)), device=whole.device)
    return whole[:, (number // pages * world + rank) * pages + number % pages]
