"""Lists of items of long and of short queries: numbers of their items, and sizes of their pieces.

Long queries keep the tensor cores busy, and short queries keep memory busy.  So each kind may have a list of its own,
and programs work through both lists at the same rate.  Blocks that are too few for all programs may form a line
instead, of which programs have even shares.
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
    """Numbers of items of both lists, and sizes of pieces."""

    many: Any  # number of items of the first list; with one list, a number larger than any number of items
    few: Any  # number of items of the second list
    slots: Any  # number of states that the first list may store in scratch
    size: Any  # tiles of a piece of the first list, approximately
    few_size: Any  # tiles of a piece of the second list, about; may be few, because states of few rows are small
    uncut: Any  # number of a KV head's blocks that stay whole; later blocks are cut; 0 with two lists
    sharers: Any  # number of programs that have an even share of all tiles; 0: programs take items from the counter
    total: Any  # tiles of all blocks and KV heads, if there are sharers


@gluon.jit
def part_of(batch, MANY: gl.constexpr, S: gl.constexpr):
    """Return the Batch of the sequences with more than 64 rows for a KV head (MANY), or of the others.

    page_starts is a placeholder, because Triton 3.6 returns no record with a None.  So nothing may look up pages in the
    returned Batch.
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
    """Number of pieces of a block of `tiles` tiles, about `size` tiles each.

    The number is rounded to the nearest, because a short last piece would cost a join, too.  Without SPLIT it is 1.
    """
    if S.SPLIT:
        return gl.maximum((2 * tiles + size) // (2 * size), 1)
    else:
        return tiles * 0 + 1


@gluon.jit
def count_items(batch, lane, size, mods, S: gl.constexpr):
    """(number of items, number of states of cut blocks) of all sequences and KV heads of a batch."""
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
    """Return the Lists of a batch; lane [SCAN]: 0 ... SCAN - 1, for sequences that are read together.

    `few_size` is at least batch.least, and large enough that a program gets about PIECES_PER_PROGRAM pieces at most.
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

    Otherwise ptxas assumes that lanes diverge at branches on these values, and so in the code of all partitions.  The
    code would then use no uniform registers, and start each box in a loop.
    """
    return Lists(
        same(lists.many), same(lists.few), same(lists.slots), same(lists.size), same(lists.few_size),
        same(lists.uncut), same(lists.sharers), same(lists.total),
    )  # fmt: skip


@gluon.jit
def of_few(lists):
    """Return the lists with the second list's piece size as `size`."""
    return Lists(
        lists.many, lists.few, lists.slots, lists.few_size, lists.few_size, lists.uncut, lists.sharers, lists.total
    )


@triton.constexpr_function
def may_share(S, P):
    """Whether programs may get even shares of all tiles, which is decided at run time."""
    return S.SPLIT and not P.MIXED


@gluon.jit
def share_begin(number, lists):
    """First tile, on the line, of even share `number`."""
    return number * lists.total // lists.sharers


@gluon.jit
def share_with(tile, lists):
    """Number of the even share that holds tile `tile` of the line."""
    return ((tile + 1) * lists.sharers - 1) // lists.total


@gluon.jit
def first_of_many(program, lists):
    """Number of programs before `program` that begin with the first list, in proportion to the items of both lists.

    Integers are exact: the result grows by 0 or 1 from program to program, so programs begin with items 0, 1, 2, ... of
    each list.
    """
    return program - gl.cdiv(program * lists.few, gl.maximum(lists.many + lists.few, 1))
