"""Sizes of an exchange, which every rank knows alike, whatever way its states go."""

from __future__ import annotations

from typing import NamedTuple

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
