"""How many items there are: of sequences of many queries and of few, pieces of a size that all lengths decide.

Sequences of many queries keep the tensor cores busy and those of few the memory, so the two are lists of their own, and
the device works through both at the same rate.  Where blocks are too few for all programs, each has an even share of a
line of them instead.
"""

from typing import Any, NamedTuple

import triton

from ...common import pieces
from ...common.pieces import piece_size
from ...common.records import Batch
from ...common.schedule import work
from ..asm.registers import same
from ..shim import gl, gluon

PIECES_PER_PROGRAM = gl.constexpr(pieces.PIECES_PER_PROGRAM)


class Lists(NamedTuple):
    """The items of sequences of many and of few queries, and how large a piece is."""

    many: Any  # items; where batches are not mixed all are here, uncounted, and the number is past any
    few: Any
    slots: Any  # states that the first list may use
    size: Any  # tiles of a piece, about
    few_size: Any  # tiles of a piece of few queries, about; it may be small, since their states are
    uncut: Any  # blocks of a KV head before those that may be cut into such pieces; 0 of two lists
    sharers: Any  # programs that have an even share of all tiles each, and nobody asks a counter; 0: all do
    total: Any  # tiles, where there are sharers


@gluon.jit
def part_of(batch, MANY: gl.constexpr, S: gl.constexpr):
    """The sequences of more than 64 rows, or the others; their pages are found by the batch itself.

    Triton 3.6 returns no record with a None, which the starts of rows of a page table may be.
    """
    FEW: gl.constexpr = 64 // S.GROUP
    shortest = gl.maximum(batch.shortest, FEW + 1) if MANY else batch.shortest
    longest = batch.longest if MANY else gl.minimum(batch.longest, FEW)
    return Batch(
        batch.query_starts,
        batch.seq_lens,
        batch.page_table,
        batch.page_table_stride,
        batch.num_seqs,
        batch.num_tokens,
        shortest,
        longest,
        batch.least,
        batch.slots,
        batch.query_starts,
    )


@gluon.jit
def count_pieces(tiles, size, S: gl.constexpr):
    """Pieces of a block, of about `size` tiles each: a short rest would cost a merge, too."""
    if S.SPLIT:
        return gl.maximum((2 * tiles + size) // (2 * size), 1)
    else:
        return tiles * 0 + 1


@gluon.jit
def count_items(batch, lane, size, mods, S: gl.constexpr):
    """(items, states of cut blocks) of all sequences that a batch serves."""
    items = 0
    slots = 0
    for first in range(0, batch.num_seqs, S.SCAN):
        seq = first + lane
        blocks, tiles = work(batch, seq, seq < batch.num_seqs, mods, S)
        pieces = count_pieces(tiles, size, S)
        items += gl.sum(blocks * pieces, axis=0)
        slots += gl.sum(gl.where(pieces > 1, blocks * pieces, 0), axis=0)
    return items * S.KV_HEADS, slots * S.KV_HEADS


@gluon.jit
def make_lists(batch, lane, mods, S: gl.constexpr, P: gl.constexpr):
    """All items; of few queries a piece has about so many tiles that every program gets a few, or batch.least."""
    size, few_size = 1 << 30, 1 << 30
    none = batch.num_seqs * 0
    uncut, sharers, all_tiles = none, none, none
    if S.SPLIT and P.MIXED:
        cuts = piece_size(batch, lane, gl.num_programs(0), mods, PIECES_PER_PROGRAM, S, ALIKE=True)
        size, few_size = cuts.size, cuts.least
    elif S.SPLIT:
        cuts = piece_size(batch, lane, gl.num_programs(0), mods, PIECES_PER_PROGRAM, S)
        size, uncut, sharers, all_tiles = cuts.size, cuts.uncut, cuts.sharers, cuts.total
    if P.MIXED:
        many, slots = count_items(part_of(batch, True, S), lane, size, mods, S)
        few, _ = count_items(part_of(batch, False, S), lane, few_size, mods, S)
        return Lists(many, few, slots, size, few_size, uncut, sharers, all_tiles)
    else:
        return Lists(none + (1 << 30), none, none, size, size, uncut, sharers, all_tiles)


@gluon.jit
def known_same(lists):
    """The lists that one warp made, as ptxas knows them to be the same in all of its lanes.

    Otherwise what depends on them could diverge, and with it, as ptxas sees it, the code of all partitions: no uniform
    registers, and each box sent in a loop.
    """
    return Lists(
        same(lists.many), same(lists.few), same(lists.slots), same(lists.size), same(lists.few_size),
        same(lists.uncut), same(lists.sharers), same(lists.total),
    )  # fmt: skip


@gluon.jit
def of_few(lists):
    """The lists as the items of few queries are cut."""
    return Lists(
        lists.many, lists.few, lists.slots, lists.few_size, lists.few_size, lists.uncut, lists.sharers, lists.total
    )


@triton.constexpr_function
def may_share(S, P):
    """Whether programs may have even shares of all tiles."""
    return S.SPLIT and not P.MIXED


@gluon.jit
def share_begin(number, lists):
    """The first tile of an even share, on the line."""
    return number * lists.total // lists.sharers


@gluon.jit
def share_with(tile, lists):
    """The number of the share that holds a tile."""
    return ((tile + 1) * lists.sharers - 1) // lists.total


@gluon.jit
def first_of_many(program, lists):
    """How many of the programs before this one begin with the first list, so that both lists begin in proportion.

    In whole numbers: from one program to the next it grows by 1 at most, or an item would have nobody.
    """
    return program - gl.cdiv(program * lists.few, gl.maximum(lists.many + lists.few, 1))
