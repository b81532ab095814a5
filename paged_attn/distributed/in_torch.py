"""Halves of a merge by a collective in plain torch, as `steps` has them in kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from ..planning.dialects import torch_dialect
from .sizes import Sizes


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
