"""Indices of a rank: lengths, positions, slots and page tables of its own keys, and its query tokens of a prompt.

All functions are plain torch.  Those for keys over ranks have no host sync, as in `paged_attn.step`.  Those for prompts
copy small tensors from the host, and wait for the copies.

For keys that lie over ranks: `own_lens`, `own_positions`, `slots` and `page_table`.

For prompts over ranks: `zigzag` and `gathered_table`.  Every rank gathers all keys and values, and reads them as
paged caches without another copy.  Each rank computes two chunks of query tokens, as two sequences of a batch.  One
chunk is from the first half of the prompt.  The other chunk is as far from the prompt's end as the first chunk is from
its beginning.  All ranks thus have equal work.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..checks.options import integer, refused
from ..checks.options import shard as check_shard
from ..records.key_bounds import KeyBounds
from ..step import IntOrTensor, Table
from ..step import slots as slots_of

Shard = tuple[int, int, int]


def own_lens(lengths: IntOrTensor, shard: Shard) -> IntOrTensor:
    """Number of a rank's own keys among the first `lengths` keys of each sequence.

    Args:
        lengths: an int, or a tensor of integers of any shape.  0 or less gives 0.
        shard: (rank, world, stripe), as in paged_attention.

    Returns: an int for an int, a tensor of the same shape and dtype for a tensor.  `paged_attn.pages_needed` of this
        number is the number of pages that the rank keeps.
    """
    check_shard("shard", shard)
    found: IntOrTensor = KeyBounds(shard=shard).own_before(lengths)
    return found


def own_positions(positions: Tensor, shard: Shard) -> Tensor:
    """Index of each position's key among the rank's own keys of its sequence; -1 for another rank's key.

    Args:
        positions: [tokens] int32 | int64, as `paged_attn.positions` gives them.  Negative: padding.
        shard: (rank, world, stripe), as in paged_attention.

    Returns: [tokens], with the dtype of positions; -1 also for padding.
    """
    check_shard("shard", shard)
    rank, world, stripe = shard
    is_own = (positions >= 0) & (positions // stripe % world == rank)
    return torch.where(is_own, own_lens(positions, shard), -1)


def slots(
    page_table: Table, positions: Tensor, page_size: int, shard: Shard, cu_seqlens_q: Tensor | None = None
) -> Tensor:
    """The slot_mapping of write_kv on a rank.  Every rank gets all new keys of a step, and writes its own keys.

    Args:
        page_table: page table of this rank, as in paged_attention.
        positions: [tokens] int32 | int64, positions in whole sequences, as `paged_attn.positions` gives them.
        page_size: tokens in a page.
        shard: (rank, world, stripe), as in paged_attention.
        cu_seqlens_q: [seqs + 1] int32 | int64; sequence s has tokens cu_seqlens_q[s] to cu_seqlens_q[s + 1], exclusive.
            None: one token per sequence, tokens = seqs.

    Returns: [tokens] int64, page * page_size + slot.  Other ranks' keys and padding have -1, which write_kv skips.
    """
    return slots_of(page_table, own_positions(positions, shard), page_size, cu_seqlens_q)


def page_table(whole: Tensor, page_size: int, shard: Shard) -> Tensor:
    """Select a rank's part of a page table of whole sequences; a stripe must be a whole number of pages.

    Args:
        whole: [seqs, max_pages] int32 | int64; entry p of a row is the page of positions p * page_size to
            (p + 1) * page_size, exclusive.
        page_size: tokens in a page; `stripe` must be a multiple of page_size.
        shard: (rank, world, stripe), as in paged_attention.

    Returns: [seqs, own pages], with the dtype of `whole`: the columns of the rank's own pages, in order.
    """
    check_shard("shard", shard)
    integer("page_size", page_size, 1, "an int")
    rank, world, stripe = shard
    if stripe % page_size:
        raise refused("shard[2]", f"a multiple of page_size = {page_size}", stripe)
    pages = stripe // page_size  # pages of a stripe
    number = torch.arange(own_lens(whole.shape[1], (rank, world, pages)), device=whole.device)
    return whole[:, (number // pages * world + rank) * pages + number % pages]


# ---- prompts over ranks ---------------------------------------------------------------------------------------------


class Chunks(NamedTuple):
    """A rank's query tokens of a prompt, and the lengths that paged_attention takes for them."""

    tokens: Tensor  # [tokens of this rank] int64: index of each token in the prompt
    seq_lens: Tensor  # [2] int32: keys up to the end of each chunk
    cu_seqlens_q: Tensor  # [3] int32


def zigzag(tokens: int, rank: int, world: int, device: torch.device | str | None = None) -> Chunks:
    """Cut a prompt into 2 * world chunks of equal length; return chunks `rank` and `2 * world - 1 - rank`.

    Args:
        tokens: length of the prompt, a multiple of 2 * world.
        rank, world: this rank, and the number of ranks.
        device: device of the tensors.

    Returns: Chunks.  The queries of a rank's two chunks together see equally many keys on every rank.
    """
    integer("world", world, 1, "an int")
    integer("tokens", tokens, 0, "an int")
    if tokens % (2 * world):
        raise refused("tokens", f"a multiple of 2 * world = {2 * world}", tokens)
    size = tokens // (2 * world)
    begins = (rank * size, (2 * world - 1 - rank) * size)
    numbers = torch.cat([torch.arange(begin, begin + size, device=device) for begin in begins])
    ends = torch.tensor([begin + size for begin in begins], dtype=torch.int32, device=device)
    return Chunks(numbers, ends, torch.tensor([0, size, 2 * size], dtype=torch.int32, device=device))


def gathered_table(tokens: int, page_size: int, world: int, device: torch.device | str | None = None) -> Tensor:
    """Page table of a prompt, over keys that an all-gather has put in the order of ranks.

    The two `zigzag` chunks of rank 0 lie first, then those of rank 1, and so on.

    The gathered keys [tokens, kv_heads, head_dim] become a cache by `.view(-1, page_size, kv_heads, head_dim)`, as do
    the values.

    Args:
        tokens: length of the prompt.
        page_size: tokens in a page; a chunk of tokens // (2 * world) tokens must be a multiple of page_size.
        world: number of ranks.
        device: device of the table.

    Returns: [2, tokens // page_size] int32, a row for each of a rank's two chunks.
    """
    pages = tokens // (2 * world * page_size)
    if pages * 2 * world * page_size != tokens:
        raise refused("tokens", f"a multiple of 2 * world * page_size = {2 * world * page_size}", tokens)
    chunk = torch.arange(2 * world, dtype=torch.int32)
    # index of each chunk among the gathered chunks
    place = torch.where(chunk < world, 2 * chunk, 2 * (2 * world - 1 - chunk) + 1)
    table = place[:, None] * pages + torch.arange(pages, dtype=torch.int32)[None, :]
    return table.flatten().expand(2, -1).contiguous().to(device)
