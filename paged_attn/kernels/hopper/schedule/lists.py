"""Lists of items: their number, for long and for short queries, and the size of a piece.

Long queries keep the tensor cores busy, and short queries keep memory busy.  So each kind may have a list of its own,
and programs work through both lists at the same rate.  Blocks that are too few for all programs form one line instead,
of which each program has an even share.
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
    """Number of items of both lists, and sizes of pieces."""

    many: Any  # items of the first list; with one list not counted, and larger than any number of items
    few: Any  # items of the second list
    slots: Any  # states that the first list may use
    size: Any  # tiles of a piece, approximately
    few_size: Any  # tiles of a piece of few rows, approximately; smaller, since states of few rows are small
    uncut: Any  # blocks of a KV head that stay whole, before those that are cut; 0 with two lists
    sharers: Any  # programs with an even share of all tiles, which use no counter; 0: programs use the counter
    total: Any  # tiles of all KV heads, with sharers


@gluon.jit
def part_of(batch, MANY: gl.constexpr, S: gl.constexpr):
    """Batch of the sequences with more than 64 rows (MANY), or of the others; never used to find pages.

    Page starts are a placeholder, because Triton 3.6 returns no record with a None.
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
    """Pieces of a block, of about `size` tiles each, rounded: a short last piece would cost a join, too."""
    if S.SPLIT:
        return gl.maximum((2 * tiles + size) // (2 * size), 1)
    else:
        return tiles * 0 + 1


@gluon.jit
def count_items(batch, lane, size, mods, S: gl.constexpr):
    """(items, states of cut blocks) of all sequences and KV heads of a batch."""
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
    """Count the items of all sequences; lane: [SCAN] numbers of sequences that are read together.

    A piece of few rows has so many tiles that every program gets a few pieces, and at least batch.least.
    """
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
    """Return the lists that one warp made, with values that ptxas knows to be equal in all lanes.

    Otherwise ptxas sees branches on them as divergent, and with them the code of all partitions.  Code would then use
    no uniform registers, and send each box in a loop.
    """
    return Lists(
        same(lists.many), same(lists.few), same(lists.slots), same(lists.size), same(lists.few_size),
        same(lists.uncut), same(lists.sharers), same(lists.total),
    )  # fmt: skip


@gluon.jit
def of_few(lists):
    """The lists with the size of pieces of few rows."""
    return Lists(
        lists.many, lists.few, lists.slots, lists.few_size, lists.few_size, lists.uncut, lists.sharers, lists.total
    )


@triton.constexpr_function
def may_share(S, P):
    """Whether programs may get even shares of all tiles, at run time."""
    return S.SPLIT and not P.MIXED


@gluon.jit
def share_begin(number, lists):
    """First tile of even share `number`, on the line."""
    return number * lists.total // lists.sharers


@gluon.jit
def share_with(tile, lists):
    """Number of the even share that holds a tile of the line."""
    return ((tile + 1) * lists.sharers - 1) // lists.total


@gluon.jit
def first_of_many(program, lists):
    """Programs before `program` that begin with the first list; both lists begin in proportion to their items.

    Whole numbers are exact: the result grows by at most 1 from program to program, so every item has a program.
    """
    return program - gl.cdiv(program * lists.few, gl.maximum(lists.many + lists.few, 1))
