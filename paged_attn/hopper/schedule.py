"""Which item comes next: pieces of blocks of queries, taken from counters by whoever is free.

Blocks of one sequence follow each other, the last (which sees the most keys) first, the KV heads of a block side by
side: their keys lie in the same pages, and stay in L2 while the sequence lasts.

Sequences of many queries keep the tensor cores busy and those of few the memory, so the two are lists of their own, and
the device works through both at the same rate.
"""

from typing import Any, NamedTuple

from ..kernels.args import Batch, Block
from ..kernels.schedule import block_of, first_tile, tile_of, tiles_before, total_work, visible_range, work
from . import plan
from .args import Item
from .pieces import piece_size
from .shim import gl, gluon

TAKEN = gl.constexpr(plan.TAKEN)
PIECES = gl.constexpr(plan.PIECES)
LANES = gl.constexpr(32)  # sequences that the scheduling warp looks at together


class Cursor(NamedTuple):
    """How far one program has read a list of sequences; items only grow, so it never goes back."""

    seq: Any
    blocks: Any  # before seq
    units: Any  # likewise: their pieces, and blocks that are not cut
    slots: Any  # likewise: pieces of blocks that are cut


class Lists(NamedTuple):
    """The items of sequences of many and of few queries, and how large a piece is."""

    many: Any  # items; where batches are not mixed all are here, uncounted, and the number is past any
    few: Any
    slots: Any  # states that the first list may use
    size: Any  # tiles of a piece, about
    uncut: Any  # blocks of a KV head before those that may be cut into such pieces; 0 in mixed batches


class Taken(NamedTuple):
    """A program's places in both lists."""

    many: Any  # the number of its item, or of the one after its last
    few: Any
    many_cursor: Any
    few_cursor: Any


@gluon.jit
def part_of(batch, MANY: gl.constexpr, S: gl.constexpr):
    """The sequences of more than 64 rows, or the others."""
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
    )


@gluon.jit
def _pieces(tiles, size, S: gl.constexpr):
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
        pieces = _pieces(tiles, size, S)
        items += gl.sum(blocks * pieces, axis=0)
        slots += gl.sum(gl.where(pieces > 1, blocks * pieces, 0), axis=0)
    return items * S.KV_HEADS, slots * S.KV_HEADS


@gluon.jit
def make_lists(batch, lane, mods, S: gl.constexpr, P: gl.constexpr):
    """All items; in mixed batches a piece has about so many tiles that every program gets a few, or batch.least."""
    size = 1 << 30
    uncut = batch.num_seqs * 0
    if S.SPLIT and P.MIXED:
        pieces = gl.num_programs(0) * PIECES
        total = total_work(batch, lane, mods, S).to(gl.int64) * S.KV_HEADS  # of half a million queries, beyond 32 bits
        size = gl.maximum(batch.least, ((total + pieces - 1) // pieces).to(gl.int32))
    elif S.SPLIT:
        size, uncut = piece_size(batch, lane, gl.num_programs(0), mods, PIECES, S)
    if P.MIXED:
        many, slots = count_items(part_of(batch, True, S), lane, size, mods, S)
        few, _ = count_items(part_of(batch, False, S), lane, size, mods, S)
        return Lists(many, few, slots, size, uncut)
    else:
        none = batch.num_seqs * 0
        return Lists(none + (1 << 30), none, none, size, uncut)


@gluon.jit
def first_of_many(program, lists):
    """How many of the programs before this one begin with the first list, so that both lists begin in proportion.

    In whole numbers: from one program to the next it grows by 1 at most, or an item would have nobody.
    """
    return program - gl.cdiv(program * lists.few, gl.maximum(lists.many + lists.few, 1))


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _uncut(blocks, before, lists, S: gl.constexpr, P: gl.constexpr):
    """Blocks of sequences that stay uncut, where there are so many before these."""
    if S.SPLIT and not P.MIXED:
        return gl.minimum(gl.maximum(lists.uncut - before, 0), blocks)
    else:
        return blocks * 0


@gluon.jit
def find(batch, cursor, unit, lists, mods, S: gl.constexpr, P: gl.constexpr):
    """(cursor, a cursor at the sequence that holds a unit) of a list; that sequence is num_seqs after the last unit."""
    found = Cursor(batch.num_seqs, 0, 0, 0)
    searching = cursor.seq < batch.num_seqs
    while searching:
        at = cursor.seq + gl.arange(0, LANES, layout=gl.BlockedLayout([1], [32], [1], [0]))
        blocks, tiles = work(batch, at, at < batch.num_seqs, mods, S)
        pieces = _pieces(tiles, lists.size, S)
        ends_blocks = cursor.blocks + gl.associative_scan(blocks, 0, _add)
        cut = blocks - _uncut(blocks, ends_blocks - blocks, lists, S, P)
        ends = cursor.units + gl.associative_scan(blocks + cut * (pieces - 1), 0, _add)
        ends_used = cursor.slots + gl.associative_scan(gl.where(pieces > 1, cut * pieces, 0), 0, _add)
        last = gl.max(ends, axis=0)
        if unit < last:
            passed = ends <= unit
            found = Cursor(
                cursor.seq + gl.sum(passed.to(gl.int32), axis=0),
                gl.maximum(cursor.blocks, gl.max(gl.where(passed, ends_blocks, 0), axis=0)),
                gl.maximum(cursor.units, gl.max(gl.where(passed, ends, 0), axis=0)),
                gl.maximum(cursor.slots, gl.max(gl.where(passed, ends_used, 0), axis=0)),
            )
            searching = False
        else:
            cursor = Cursor(cursor.seq + LANES, gl.max(ends_blocks, axis=0), last, gl.max(ends_used, axis=0))
            searching = cursor.seq < batch.num_seqs
    return cursor, found


@gluon.jit
def item_of(batch, cursor, index, slots_before, lists, mods, S: gl.constexpr, P: gl.constexpr):
    """(cursor, item) of a number; kv_head is -1 after the last."""
    unit = index // S.KV_HEADS
    cursor, found = find(batch, cursor, unit, lists, mods, S, P)
    if found.seq < batch.num_seqs:
        blocks, tiles = work(batch, found.seq, True, mods, S)
        uncut = _uncut(blocks, found.blocks, lists, S, P)
        behind = unit - found.units - uncut  # below 0 in an uncut block, whose slot nobody reads
        pieces = gl.where(behind < 0, 1, _pieces(tiles, lists.size, S))
        number = behind // pieces
        piece = behind % pieces
        block = block_of(batch, found.seq, uncut + number, S)
        span = visible_range(block, mods, S.BLOCK_Q)
        context_len = block.seq_len - block.query_len
        begin = tile_of(span.lo, context_len, S)
        end = tiles_before(span.hi, context_len, S)
        if S.SPLIT:
            from_tile = first_tile(context_len, mods, S)
            begin = gl.maximum(begin, from_tile + piece * tiles // pieces)
            end = gl.minimum(end, from_tile + (piece + 1) * tiles // pieces)
        kv_head = index % S.KV_HEADS
        slot = slots_before + (found.slots + number * pieces) * S.KV_HEADS + kv_head * pieces
        first = gl.where(piece == 0, 1, 0)
        item = Item(
            block, kv_head, begin, gl.maximum(begin, end), first, pieces, pieces, slot * S.ROWS,
            (slot + piece) * S.ROWS, slot,
        )  # fmt: skip
    else:
        item = Item(Block(0, 0, 0, 0, 0), index * 0 - 1, 0, 0, 1, 1, 1, 0, 0, 0)
    return cursor, item


# ---- two lists, worked through at the same rate ----------------------------------------------------


@gluon.jit
def begin_lists(lists):
    """(a program's places in both lists, whether it begins with the first)."""
    program = gl.program_id(0)
    many = first_of_many(program, lists)
    return Taken(many, program - many, Cursor(0, 0, 0, 0), Cursor(0, 0, 0, 0)), first_of_many(program + 1, lists) > many


@gluon.jit
def ask(counters, taken, lists, P: gl.constexpr):
    """(whether the next item is of the first list, what its counter said): of whichever list is behind."""
    if not P.MIXED:
        return taken.many >= 0, gl.atomic_add(counters, 1, sem="relaxed")
    behind = taken.many.to(gl.float32) * lists.few <= taken.few.to(gl.float32) * lists.many
    from_many = (taken.many < lists.many) & (behind | (taken.few >= lists.few))
    return from_many, gl.atomic_add(counters + gl.where(from_many, 0, 1), 1, sem="relaxed")


@gluon.jit
def settle(counters, taken, from_many, answer, next_many, lists, P: gl.constexpr):
    """(places, whether the next item is of the first list) by an answer; at the end of one list, of the other."""
    if not P.MIXED:
        return Taken(answer + next_many, taken.few, taken.many_cursor, taken.few_cursor), from_many
    next_few = gl.num_programs(0) - next_many
    many = gl.where(from_many, answer + next_many, taken.many)
    few = gl.where(from_many, taken.few, answer + next_few)
    if from_many & (many >= lists.many):
        from_many = few < 0
        few = gl.atomic_add(counters + 1, 1, sem="relaxed") + next_few
    elif (not from_many) & (few >= lists.few) & (many < lists.many):
        from_many = few >= 0
        many = gl.atomic_add(counters, 1, sem="relaxed") + next_many
    return Taken(many, few, taken.many_cursor, taken.few_cursor), from_many


@gluon.jit
def item_from(batch, taken, from_many, lists, mods, S: gl.constexpr, P: gl.constexpr):
    """(places, the item at a program's place in one list)."""
    many_cursor, few_cursor = taken.many_cursor, taken.few_cursor
    if P.MIXED:
        if from_many:
            many_cursor, item = item_of(part_of(batch, True, S), many_cursor, taken.many, 0, lists, mods, S, P)
        else:
            few = part_of(batch, False, S)
            few_cursor, item = item_of(few, few_cursor, taken.few, lists.slots, lists, mods, S, P)
    else:
        many_cursor, item = item_of(batch, many_cursor, taken.many, 0, lists, mods, S, P)
    return Taken(taken.many, taken.few, many_cursor, few_cursor), item


@gluon.jit
def leave_lists(counters):
    """The last program leaves the counters as it found them."""
    if gl.atomic_add(counters + 2, 1, sem="relaxed") == gl.num_programs(0) - 1:
        gl.store(counters, 0)
        gl.store(counters + 1, 0)
        gl.store(counters + 2, 0)
