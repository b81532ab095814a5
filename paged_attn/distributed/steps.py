"""Launches of an exchange, with their arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..kernels.common.exchange import Exchange, exchange_kernel, pack_kernel, unpack_kernel
from ..kernels.shared_arguments import JOINS_ALIKE, heads_of
from ..launching.launch import Step
from ..records import layout
from ..records.rounding import cdiv

GIVES = ("heads", "all")
ELEMENTS = 512  # of a rank's rows that a program handles at a time: 16 bytes of each thread
WARPS = 4
MAX_PROGRAMS = 128  # programs that wait for peers run side by side
MAX_RANKS = 32 * WARPS  # peers: a thread for each


class Sizes(NamedTuple):
    """What decides the launches of a merge, alike on all ranks."""

    tokens: int
    heads: int  # of each rank's results
    given: int  # of a rank's joined rows
    dims: int
    world: int


class Way(NamedTuple):
    """Where rows go that are stored with peers."""

    addresses: Sequence[int]  # of every rank's memory
    rank: int
    room: int  # rows of a block
    word: int  # address of what the host looks at
    timeout: int  # nanoseconds


def _compiled(sizes: Sizes, **more: Any) -> Exchange:
    block = max(1, ELEMENTS // heads_of(1, sizes.dims).VALUE_PADDED)
    return Exchange(RANKS=sizes.world, HEADS=sizes.heads, OWN_HEADS=sizes.given, BLOCK=block, **more)


def fours_of(sizes: Sizes) -> int:
    """Rows of a block, by four: the next block begins on 16 bytes."""
    return cdiv(sizes.tokens * sizes.given, 4)


def packed_shape(sizes: Sizes) -> tuple[int, int]:
    """A block for each owner."""
    return sizes.heads // sizes.given, 4 * fours_of(sizes) * (sizes.dims + 1)


def pack(sent: Any, out: Any, lse: Any, sizes: Sizes) -> Step:
    """This rank's states into blocks for their owners."""
    exchange = _compiled(sizes)
    grid = (sizes.heads // sizes.given * cdiv(sizes.tokens * sizes.given, exchange.BLOCK),)
    args = (sent, fours_of(sizes), layout.rows(out), lse, sizes.tokens, exchange, heads_of(sizes.heads, sizes.dims))
    return Step(pack_kernel, grid, args, JOINS_ALIKE | {"num_warps": WARPS})


def unpack(into: Any, merged: Any, came: Any, sinks: Any, sizes: Sizes, rank: int) -> Step:
    """The blocks of all ranks joined."""
    exchange = _compiled(sizes)
    shape = heads_of(sizes.given, sizes.dims)
    args = (layout.rows(into), merged, came, fours_of(sizes), sinks, sizes.tokens, rank, exchange, shape)
    grid = (cdiv(sizes.tokens * sizes.given, exchange.BLOCK),)
    return Step(unpack_kernel, grid, args, JOINS_ALIKE | {"num_warps": WARPS})


def to_peers(tensors: Sequence[Any], way: Way, sizes: Sizes, **more: Any) -> Step:
    """Both in one launch; tensors: joined results and log-sum-exps, this rank's, sinks, turns."""
    into, merged, out, lse, sinks, turns = tensors
    exchange = _compiled(sizes, ROOM=way.room, FLAGS=MAX_PROGRAMS, THREADS=MAX_RANKS, **more)
    peers = (*way.addresses[way.rank + 1 :], *way.addresses[: way.rank + 1])
    args = (
        layout.rows(into), merged, layout.rows(out), lse, sinks, peers, turns, way.word, sizes.tokens, way.rank,
        way.timeout, exchange, heads_of(sizes.given, sizes.dims),
    )  # fmt: skip
    grid = (min(MAX_PROGRAMS, cdiv(sizes.tokens * sizes.given, exchange.BLOCK)),)
    options = JOINS_ALIKE | {"num_warps": WARPS} | ({"launch_pdl": True} if exchange.DEPENDENT else {})
    return Step(exchange_kernel, grid, args, options)
