"""Indices of a rank: lengths, positions, slots and page tables of its own keys, and its query tokens of a prompt.

All functions are plain torch without a host sync, as in `paged_attn.step`.

For keys that lie over ranks: `own_lens`, `own_positions`, `slots` and `page_table`.

For prompts over ranks: `zigzag` and `gathered_table`.  Every rank gathers all keys, which are then a paged cache
without a copy, and computes two chunks of query tokens, one from the prompt's beginning and one from its end.  All
ranks thus have equal work.  The two chunks are two sequences of a batch.
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


# ---- prompts over ranks ---------------------------------------------------------------------------------------------


class Chunks(NamedTuple):
    """A rank's query tokens of a prompt, and what paged_attention is told of them."""

    tokens: Tensor  # [tokens of this rank] int64, in the prompt
    seq_lens: Tensor  # [2] int32: keys up to the end of each chunk
    cu_seqlens_q: Tensor  # [3] int32


def zigzag(tokens: int, rank: int, world: int, device: torch.device | str | None = None) -> Chunks:
    """Chunks `rank` and `2 * world - 1 - rank` of a prompt's 2 * world, of the same number of tokens.

    Args:
        tokens: of the prompt, a multiple of 2 * world.
        rank, world: which rank of how many.
        device: of the tensors.

    Returns: Chunks.  Together the two see as many keys on every rank.
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
    """The page table of a prompt whose keys lie as an all-gather of every rank's `zigzag` chunks leaves them.

    The gathered [tokens, kv_heads, head_dim] are pages as they lie: `.view(-1, page_size, kv_heads, head_dim)`.

    Args:
        tokens: of the prompt.
        page_size: of which a chunk, tokens // (2 * world), is a multiple.
        world: ranks.
        device: of the tensor.

    Returns: [2, tokens // page_size] int32, a row for each of a rank's two chunks.
    """
    pages = tokens // (2 * world * page_size)
    if pages * 2 * world * page_size != tokens:
        raise refused("tokens", f"a multiple of 2 * world * page_size = {2 * world * page_size}", tokens)
    chunk = torch.arange(2 * world, dtype=torch.int32)
    place = torch.where(chunk < world, 2 * chunk, 2 * (2 * world - 1 - chunk) + 1)  # of a chunk among those gathered
    table = place[:, None] * pages + torch.arange(pages, dtype=torch.int32)[None, :]
    return table.flatten().expand(2, -1).contiguous().to(device)
