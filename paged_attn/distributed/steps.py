"""Launches of an exchange, with their arguments: two around a collective, or a single one between Peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.common.exchange import Exchange, exchange_kernel, pack_kernel, unpack_kernel
from ..kernels.shared_steps import JOINS_ALIKE, heads_of
from ..launching.launch import Launches, Step
from ..launching.template import arguments_for
from ..records import layout
from ..records.formats import cdiv
from .packing import MAX_PROGRAMS, Sizes, fours_of, packed_shape

ELEMENTS = 512  # float32 numbers that a program handles at a time: 16 bytes for each of its 128 threads
WARPS = 4


class Way(NamedTuple):
    """What the launches of one rank must know of Peers."""

    addresses: Sequence[int]  # of all ranks' memory, in the order of the ranks
    rank: int
    room: int  # rows that a block has memory for
    word: int  # address of the pinned int32 in which a kernel names an absent rank to the host
    timeout: int  # nanoseconds


def _compiled(sizes: Sizes, **more: Any) -> Exchange:
    block = max(1, ELEMENTS // heads_of(1, sizes.dims).VALUE_PADDED)
    return Exchange(RANKS=sizes.world, HEADS=sizes.heads, OWN_HEADS=sizes.given, BLOCK=block, **more)


def pack(sent: Any, out: Any, lse: Any, sizes: Sizes) -> Step:
    """Step that packs this rank's out [tokens, heads, dims] and lse [tokens, heads] into a block for each owner."""
    exchange = _compiled(sizes)
    grid = (sizes.heads // sizes.given * cdiv(sizes.tokens * sizes.given, exchange.BLOCK),)
    args = (sent, fours_of(sizes), layout.rows(out), lse, sizes.tokens, exchange, heads_of(sizes.heads, sizes.dims))
    return Step(pack_kernel, grid, args, JOINS_ALIKE | {"num_warps": WARPS})


def unpack(into: Any, merged: Any, came: Any, sinks: Any, sizes: Sizes, rank: int) -> Step:
    """Step that joins the ranks' blocks `came`.

    Results go to `into` [tokens, given, dims], and log-sum-exps to `merged` [tokens, given] unless it is None.
    """
    exchange = _compiled(sizes)
    shape = heads_of(sizes.given, sizes.dims)
    args = (layout.rows(into), merged, came, fours_of(sizes), sinks, sizes.tokens, rank, exchange, shape)
    grid = (cdiv(sizes.tokens * sizes.given, exchange.BLOCK),)
    return Step(unpack_kernel, grid, args, JOINS_ALIKE | {"num_warps": WARPS})


def to_peers(tensors: Sequence[Any], way: Way, sizes: Sizes, **more: Any) -> Step:
    """Step that exchanges and joins in one launch, between Peers.

    tensors: joined results, joined log-sum-exps or None, this rank's results, its log-sum-exps, sinks or None, and
        Peers._turns.  Peers._turns has the turn of each program, then FAILED, which is 1 once a rank did not answer.
    """
    into, merged, out, lse, sinks, turns = tensors
    exchange = _compiled(sizes, ROOM=way.room, PROGRAMS=MAX_PROGRAMS, THREADS=32 * WARPS, **more)
    peers = (*way.addresses[way.rank + 1 :], *way.addresses[: way.rank + 1])
    args = (
        layout.rows(into), merged, layout.rows(out), lse, sinks, peers, turns, way.word, sizes.tokens, way.rank,
        way.timeout, exchange, heads_of(sizes.given, sizes.dims),
    )  # fmt: skip
    grid = (min(MAX_PROGRAMS, cdiv(sizes.tokens * sizes.given, exchange.BLOCK)),)
    options = JOINS_ALIKE | {"num_warps": WARPS} | ({"launch_pdl": True} if exchange.DEPENDENT else {})
    return Step(exchange_kernel, grid, args, options)


def launches_of(tensors: Sequence[Any], device: torch.device, way: Way, sizes: Sizes, more: dict[str, Any]) -> Launches:
    """Return the single launch of a merge between Peers.  tensors: as in `to_peers`.  more: fields of Exchange."""
    with arguments_for(tensors) as held:
        return Launches([to_peers(held, way, sizes, **more)], device)


# ---- halves of a merge by a collective ---------------------------------------------------------------------------


def packed(out: Tensor, lse: Tensor, sizes: Sizes) -> Tensor:
    """Pack out [tokens, heads, dims] and lse [tokens, heads] -> packed_shape(sizes) float32, a block for each owner."""
    sent = torch.empty(packed_shape(sizes), dtype=torch.float32, device=out.device)
    _launch([sent, out, lse], lambda sent, out, lse: pack(sent, out, lse, sizes))
    return sent


def unpacked(into: Tensor, merged: Tensor | None, came: Tensor, sinks: Tensor | None, sizes: Sizes, rank: int) -> None:
    """Join the ranks' blocks `came`.

    Results go to `into` [tokens, given, dims], and log-sum-exps to `merged` [tokens, given] unless it is None.
    """
    tensors = [into, merged, came, sinks]
    _launch(tensors, lambda into, merged, came, sinks: unpack(into, merged, came, sinks, sizes, rank))


def _launch(tensors: list[Any], made: Callable[..., Step]) -> None:
    """Launch the step that `made` returns for these tensors, of which some may be None."""
    with arguments_for(tensors) as held:
        launches = Launches([made(*held)], tensors[0].device)
    launches.first(tuple([x for x in tensors if x is not None]))
