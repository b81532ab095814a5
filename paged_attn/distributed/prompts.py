"""Prompts over ranks: each computes some query tokens over all keys, which every rank has gathered.

What an all-gather of keys brings is a paged cache as it lies.  A rank's queries are two chunks of a prompt, one from
its beginning and one from its end, so all ranks have as much to do.  The chunks are two rows of a batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..checks.options import integer, refused


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
