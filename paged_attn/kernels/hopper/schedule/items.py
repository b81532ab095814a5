"""The next item of a persistent program: a block of queries, or a piece of one, taken from a counter.

If blocks are too few for all programs, programs may have even shares of a line of blocks instead.

Items are numbered by sequence, then by block and piece, then by KV head.  A sequence's last block, which sees the most
keys, comes first.  Neighbouring items are KV heads of one block: their keys and values lie in the same pages, and stay
in L2 while programs work on the sequence.  If a sequence has so many KV heads that their keys and values exceed the L2,
all blocks of a few heads come before those of the next heads (Pipe.HEADS_ABREAST).
"""

from typing import Any, NamedTuple

from ...common.blocking import block_of, tile_of, tiles_before
from ...common.bounds import visible_range
from ...common.schedule import first_tile, work
from ..args import Item
from ..asm.instructions import bring_line
from ..layouts import line_layout
from ..planning import coverage
from ..shim import gl, gluon
from .lists import count_pieces, first_of_many, may_share, of_few, part_of, share_begin, share_with
from .mail import no_item

COUNTERS_PER_LAUNCH = gl.constexpr(coverage.COUNTERS_PER_LAUNCH)
SEQS_PER_LOOK = gl.constexpr(32)  # sequences that the scheduling warp looks at together


class Cursor(NamedTuple):
    """Sequence up to which a program has read a list, and numbers of earlier sequences' blocks, units and states.

    The numbers are those of one KV head.  A program's item numbers only grow, so the program never reads earlier
    sequences again.
    """

    seq: Any  # first sequence that is not passed
    blocks: Any  # blocks of earlier sequences
    units: Any  # items of earlier sequences: whole blocks, and pieces of cut blocks; with even shares, tiles
    slots: Any  # states of earlier sequences: one for each piece of a cut block


class Taken(NamedTuple):
    """A program's position in both lists or, with an even share, on the line."""

    many: Any  # number of the program's item in the first list; even share: the next item's first tile on the line
    few: Any  # number of the program's item in the second list; even share: the share's end on the line, exclusive
    many_cursor: Any  # Cursor
    few_cursor: Any


@gluon.jit
def bring_lengths(batch, P: gl.constexpr):
    """Let the L2 fetch lengths of sequences, one for each thread, while barriers are made."""
    thread = gl.arange(0, 2 * P.ROWS, layout=line_layout(P.ROWS // 16))
    there = thread < batch.num_seqs
    bring_line((batch.seq_lens + thread).to(gl.int64), there)
    if batch.query_starts is not None:  # sequences may have several queries
        bring_line((batch.query_starts + thread).to(gl.int64), there)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _uncut(blocks, before, lists, S: gl.constexpr, P: gl.constexpr):
    """Number of a sequence's `blocks` blocks that stay whole; before: blocks of earlier sequences."""
    if S.SPLIT and not P.MIXED:
        return gl.minimum(gl.maximum(lists.uncut - before, 0), blocks)
    else:
        return blocks * 0


@gluon.jit
def find(batch, cursor, unit, lists, mods, S: gl.constexpr, P: gl.constexpr):
    """(cursor for the next search, cursor at the sequence that holds `unit`) of a list.

    If `unit` lies behind the last unit, the second cursor's seq equals num_seqs.

    unit: number of an item among those of one KV head; with even shares, number of a tile.
    """
    found = Cursor(batch.num_seqs, 0, 0, 0)
    searching = cursor.seq < batch.num_seqs
    while searching:
        at = cursor.seq + gl.arange(0, SEQS_PER_LOOK, layout=line_layout(1))
        blocks, tiles = work(batch, at, at < batch.num_seqs, mods, S)
        pieces = count_pieces(tiles, lists.size, S)
        ends_blocks = cursor.blocks + gl.associative_scan(blocks, 0, _add)
        cut = blocks - _uncut(blocks, ends_blocks - blocks, lists, S, P)
        units = blocks + cut * (pieces - 1)
        if may_share(S, P):
            units = gl.where(lists.sharers > 0, blocks * tiles, units)
        ends = cursor.units + gl.associative_scan(units, 0, _add)
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
            cursor = Cursor(cursor.seq + SEQS_PER_LOOK, gl.max(ends_blocks, axis=0), last, gl.max(ends_used, axis=0))
            searching = cursor.seq < batch.num_seqs
    return cursor, found


@gluon.jit
def unit_and_head(index, found, blocks, S: gl.constexpr, P: gl.constexpr):
    """(unit, KV head) of item `index`, if all blocks of HEADS_ABREAST heads come before those of the next heads."""
    gl.static_assert(not S.SPLIT)  # a sequence must have as many units as blocks
    within = index - found.units * S.KV_HEADS
    items = blocks * P.HEADS_ABREAST
    head = within // items * P.HEADS_ABREAST + within % P.HEADS_ABREAST
    return found.units + within % items // P.HEADS_ABREAST, head


@gluon.jit
def piece_of(found, blocks, tiles, index, slots_before, lists, S: gl.constexpr, P: gl.constexpr):
    """(block, KV head, first tile, end tile, pieces of the block, block's first slot, item's slot) of item `index`.

    The block is numbered within its sequence.  Tiles are counted from the sequence's first tile; the end is exclusive.
    Slots are numbers of states in scratch.  slots_before: slots of the other list.
    """
    if P.HEADS_ABREAST > 0:
        unit, kv_head = unit_and_head(index, found, blocks, S, P)
    else:
        unit = index // S.KV_HEADS
    uncut = _uncut(blocks, found.blocks, lists, S, P)
    behind = unit - found.units - uncut  # below 0 for a block that stays whole, which has no slot
    pieces = gl.where(behind < 0, 1, count_pieces(tiles, lists.size, S))
    number = behind // pieces
    piece = behind % pieces
    if P.HEADS_ABREAST == 0:
        kv_head = index % S.KV_HEADS
    slot = slots_before + (found.slots + number * pieces) * S.KV_HEADS + kv_head * pieces
    return uncut + number, kv_head, piece * tiles // pieces, (piece + 1) * tiles // pieces, pieces, slot, slot + piece


@gluon.jit
def part_of_share(found, tiles, at, end, lists, S: gl.constexpr):
    """Do `piece_of` for tile `at` of the line, up to the end of the block or of the program's share (`end`, exclusive).

    On the line, each block has `tiles` tiles for each KV head.  From each piece to the next, the share's number, the
    block's number on the line, or both grow by 1.  So the sum of both numbers is a slot that no other piece has,
    and a block's slots are in order.
    """
    within = at - found.units * S.KV_HEADS
    line, tile = within // tiles, within % tiles
    begin = at - tile
    count = gl.minimum(tiles - tile, end - at)
    first_share = share_with(begin, lists)
    pieces = share_with(begin + tiles - 1, lists) - first_share + 1
    before = found.blocks * S.KV_HEADS + line
    slot = before + gl.program_id(0)
    return line // S.KV_HEADS, line % S.KV_HEADS, tile, tile + count, pieces, before + first_share, slot


@gluon.jit
def item_of(batch, cursor, index, end, slots_before, lists, mods, S: gl.constexpr, P: gl.constexpr):
    """(cursor, item `index`, index of the next item of an even share); the item's kv_head is -1 behind the last item.

    With even shares, `index` is the item's first tile on the line, and `end` the share's end there, exclusive.
    slots_before: slots of the other list.
    """
    cursor, found = find(batch, cursor, index // S.KV_HEADS, lists, mods, S, P)
    following = index
    if found.seq < batch.num_seqs:
        blocks, tiles = work(batch, found.seq, True, mods, S)
        shared = lists.sharers > 0 if may_share(S, P) else False
        if shared:
            number, kv_head, from_tile, to_tile, pieces, first_slot, slot = part_of_share(
                found, tiles, index, end, lists, S
            )
            following += to_tile - from_tile
        else:
            number, kv_head, from_tile, to_tile, pieces, first_slot, slot = piece_of(
                found, blocks, tiles, index, slots_before, lists, S, P
            )
        block = block_of(batch, found.seq, number, kv_head, S)
        span = visible_range(block, mods, S.BLOCK_Q, S)
        context_len = block.seq_len - block.query_len
        begin = tile_of(span.lo, context_len, S)
        past = tiles_before(span.hi, context_len, S)
        if S.SPLIT:
            before = first_tile(block.seq, None, context_len, mods, S)
            begin = gl.maximum(begin, before + from_tile)
            past = gl.minimum(past, before + to_tile)
        first = gl.where(from_tile == 0, 1, 0)
        item = Item(
            block, begin, gl.maximum(begin, past), first, pieces, pieces, first_slot * S.ROWS, slot * S.ROWS,
            first_slot,
        )  # fmt: skip
    else:
        item = no_item(index)
    return cursor, item, following


# ---- two lists, taken from at the same rate ---------------------------------------------------------


@gluon.jit
def begin_lists(lists, S: gl.constexpr, P: gl.constexpr):
    """(Taken at a program's start, whether the program's first item is of the first list)."""
    program = gl.program_id(0)
    many = first_of_many(program, lists)
    from_many = first_of_many(program + 1, lists) > many
    few = program - many
    shared = lists.sharers > 0 if may_share(S, P) else False
    if shared:
        many, few = share_begin(program, lists), share_begin(program + 1, lists)
        many = gl.where(program < lists.sharers, many, lists.total)
    return Taken(many, few, Cursor(0, 0, 0, 0), Cursor(0, 0, 0, 0)), from_many


@gluon.jit
def ask(counters, taken, lists, P: gl.constexpr):
    """Take an item of the list of which a smaller fraction is taken; return (whether it is the first list, answer).

    answer: the counter's value before this item was taken.  With one list, the item is of that list; a program with an
    even share takes none.
    """
    if not P.MIXED:
        return taken.many >= 0, gl.atomic_add(counters, 1, mask=lists.sharers == 0, sem="relaxed")
    behind = taken.many.to(gl.float32) * lists.few <= taken.few.to(gl.float32) * lists.many
    from_many = (taken.many < lists.many) & (behind | (taken.few >= lists.few))
    return from_many, gl.atomic_add(counters + gl.where(from_many, 0, 1), 1, sem="relaxed")


@gluon.jit
def settle(counters, taken, from_many, answer, next_many, lists, P: gl.constexpr):
    """(Taken, whether the next item is of the first list) after a counter's answer.

    If the answer is behind the last item of the list that was asked, an item of the other list is taken.

    next_many: number of the first list's first item that no program begins with.
    """
    if not P.MIXED:
        many = gl.where(lists.sharers > 0, taken.many, answer + next_many)
        return Taken(many, taken.few, taken.many_cursor, taken.few_cursor), from_many
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
    """(Taken, the item at a program's position in one list); in an even share, the position moves behind the item."""
    many, many_cursor, few_cursor = taken.many, taken.many_cursor, taken.few_cursor
    if P.MIXED:
        if from_many:
            many_cursor, item, _ = item_of(part_of(batch, True, S), many_cursor, many, many, 0, lists, mods, S, P)
        else:
            few = part_of(batch, False, S)
            few_cursor, item, _ = item_of(
                few, few_cursor, taken.few, many, lists.slots, of_few(lists), mods, S, P
            )  # fmt: skip
    else:
        many_cursor, item, following = item_of(batch, many_cursor, many, taken.few, 0, lists, mods, S, P)
        if may_share(S, P):
            many = gl.where((lists.sharers > 0) & (following >= taken.few), lists.total, following)
    return Taken(many, taken.few, many_cursor, few_cursor), item


@gluon.jit
def leave_lists(counters):
    """Count a program that has ended; the last one sets the counters to 0 for the next launch."""
    if gl.atomic_add(counters + 2, 1, sem="relaxed") == gl.num_programs(0) - 1:
        gl.store(counters, 0)
        gl.store(counters + 1, 0)
        gl.store(counters + 2, 0)
