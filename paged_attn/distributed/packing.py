"""Sizes of an exchange, which are equal on all ranks, and packing and joining of states in plain torch.

A state is the result and the log-sum-exp of a row over one rank's keys.  The owner of a row is a rank that returns it.
`steps.packed` and `steps.unpacked` pack and join by kernels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..planning.dialects import torch_dialect
from ..records.formats import cdiv

GIVES = ("heads", "all")
MAX_PROGRAMS = 128  # most programs of an exchange between Peers: all must run at once, as each waits for other ranks
MAX_RANKS = 128  # most ranks of Peers: a program loads the rows of all owners before it stores the first


class Sizes(NamedTuple):
    """Sizes that decide the launches of a merge.  They are equal on all ranks."""

    tokens: int
    heads: int  # heads of a rank's results before the exchange
    given: int  # heads that a rank returns
    dims: int  # width of results
    world: int  # number of ranks


def fours_of(sizes: Sizes) -> int:
    """Return ceil(rows of a block / 4).  Blocks are padded to a multiple of 4 rows, so that each begins on 16 bytes."""
    return cdiv(sizes.tokens * sizes.given, 4)


def packed_shape(sizes: Sizes) -> tuple[int, int]:
    """Return (blocks, float32 numbers in a block).  A row of a block has `dims` + 1 numbers.

    Each owner has a block of its own.  If every rank returns all heads, all owners have equal rows and share one block.
    """
    return sizes.heads // sizes.given, 4 * fours_of(sizes) * (sizes.dims + 1)


def packed(out: Tensor, lse: Tensor, sizes: Sizes) -> Tensor:
    """Pack out [tokens, heads, dims] and lse [tokens, heads] -> [blocks, tokens * given * (dims + 1)] float32.

    A block has the results of an owner's heads, then their log-sum-exps.  Unlike a block of `steps.packed`, it is
    not padded.
    """
    blocks = [x.float().unflatten(1, (-1, sizes.given)).transpose(0, 1).flatten(1) for x in (out, lse)]
    return torch.cat(blocks, 1)


def unpacked(into: Tensor, merged: Tensor | None, came: Tensor, sinks: Tensor | None, sizes: Sizes, rank: int) -> None:
    """Join the ranks' blocks `came` [world, ...] into `into` [tokens, given, dims], and LSEs into `merged` if given."""
    rows = sizes.tokens * sizes.given
    outs = came[:, : rows * sizes.dims].reshape(-1, sizes.tokens, sizes.given, sizes.dims)
    lses = came[:, rows * sizes.dims :].reshape(-1, sizes.tokens, sizes.given)
    if sinks is not None and sizes.given < sizes.heads:
        sinks = sinks[rank * sizes.given : (rank + 1) * sizes.given]
    lse = torch.empty_like(lses[0]) if merged is None else merged
    torch_dialect().merge_states(into, lse, outs, lses, sinks)
