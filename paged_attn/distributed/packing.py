"""States of rows packed for an exchange: the sizes, alike on all ranks, and packing and joining in plain torch.

`steps.packed` and `steps.unpacked` do the same by kernels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..planning.dialects import torch_dialect
from ..records.formats import cdiv

GIVES = ("heads", "all")
MAX_PROGRAMS = 128  # programs that wait for peers run side by side
MAX_RANKS = 128  # peers: a thread of a program for each


class Sizes(NamedTuple):
    """What decides the launches of a merge, alike on all ranks."""

    tokens: int
    heads: int  # of each rank's results
    given: int  # of a rank's joined rows
    dims: int
    world: int


def fours_of(sizes: Sizes) -> int:
    """Rows of a block, by four: the next block begins on 16 bytes."""
    return cdiv(sizes.tokens * sizes.given, 4)


def packed_shape(sizes: Sizes) -> tuple[int, int]:
    """A block for each owner."""
    return sizes.heads // sizes.given, 4 * fours_of(sizes) * (sizes.dims + 1)


def packed(out: Tensor, lse: Tensor, sizes: Sizes) -> Tensor:
    """Return this rank's states in a block for each owner: results, then their log-sum-exps."""
    blocks = [x.float().unflatten(1, (-1, sizes.given)).transpose(0, 1).flatten(1) for x in (out, lse)]
    return torch.cat(blocks, 1)


def unpacked(into: Tensor, merged: Tensor | None, came: Tensor, sinks: Tensor | None, sizes: Sizes, rank: int) -> None:
    """Join the blocks of all ranks."""
    rows = sizes.tokens * sizes.given
    outs = came[:, : rows * sizes.dims].reshape(-1, sizes.tokens, sizes.given, sizes.dims)
    lses = came[:, rows * sizes.dims :].reshape(-1, sizes.tokens, sizes.given)
    if sinks is not None and sizes.given < sizes.heads:
        sinks = sinks[rank * sizes.given : (rank + 1) * sizes.given]
    lse = torch.empty_like(lses[0]) if merged is None else merged
    torch_dialect().merge_states(into, lse, outs, lses, sinks)
