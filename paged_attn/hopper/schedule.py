"""Who does what where long and short queries may meet.

Sequences of many queries keep the tensor cores busy and those of few the memory.  So some programs begin with even
shares of the short ones, the KV heads in lockstep, while the others take blocks of the long ones from a counter, and
all end there.  Blocks of one sequence follow each other, the last (which sees the most keys) first, the KV heads of a
block side by side: their keys lie in the same pages, and stay in L2 while the sequence lasts.
"""

from typing import Any, NamedTuple

from ..kernels.args import Batch, Block, Share
from ..kernels.schedule import block_of, even_share, find_work, first_tile, total_work, visible_range, work
from . import plan
from .args import Item
from .shim import gl, gluon
from .walk import Walk

TAKEN = gl.constexpr(plan.TAKEN)
PIECES = gl.constexpr(plan.PIECES)
LANES = gl.constexpr(32)  # sequences that the scheduling warp looks at together
WEIGHT = gl.constexpr(2.5)  # what a tile of a block costs, in tiles that two consumers share


class Cursor(NamedTuple):
    """How far one program has read the list of sequences; items only grow, so it never goes back."""

    seq: Any
    units: Any  # before seq: pieces of all blocks
    slots: Any  # of these, pieces of blocks that are cut


class Role(NamedTuple):
    """What a program does, decided by the lengths alone."""

    size: Any  # tiles of a piece of a long sequence's block
    kv_head: Any
    share: Any  # Share of the short sequences; empty where a program begins at the counter
    walk: Any  # Walk


@gluon.jit
def part_of(batch, MANY: gl.constexpr, S: gl.constexpr):
    """The sequences whose queries fill more than one consumer, or the others."""
    FEW: gl.constexpr = 64 // S.GROUP
    shortest = gl.maximum(batch.shortest, FEW + 1) if MANY else batch.shortest
    longest = batch.longest if MANY else gl.minimum(batch.longest, FEW)
    return Batch(batch.query_starts, batch.seq_lens, batch.page_table, batch.page_table_stride, batch.num_seqs, batch.num_tokens, shortest, longest, batch.least, batch.slots)  # fmt: skip


@gluon.jit
def cast_role(batch, lane, mods, S: gl.constexpr, P: gl.constexpr):
    """This program's role; so many groups of programs share the short sequences as their part of the work is."""
    programs = gl.num_programs(0)
    index = gl.program_id(0) // S.KV_HEADS
    kv_head = gl.program_id(0) % S.KV_HEADS
    many = batch
    share = Share(0, 0, 1, 0)
    walk = Walk(0, 0, 0)
    if P.MIXED:
        many, few = part_of(batch, True, S), part_of(batch, False, S)
        most = programs // S.KV_HEADS
        little = total_work(few, lane, mods, S).to(gl.float32)
        much = total_work(many, lane, mods, S).to(gl.float32)
        groups = (most * little / gl.maximum(little + WEIGHT * much, 1.0) + 0.5).to(gl.int32)
        groups = gl.minimum(gl.maximum(groups, gl.where(little > 0, 1, 0)), most)
        if index < groups:
            share = even_share(few, index, groups, lane, mods, S)
            seq, before = find_work(few, share.begin, lane, mods, S)
            walk = Walk(share.begin, seq, before)
    size = 1 << 30
    if S.SPLIT:
        pieces = programs * PIECES
        size = gl.maximum(batch.least, (total_work(many, lane, mods, S) * S.KV_HEADS + pieces - 1) // pieces)
    return Role(size, kv_head, share, walk)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _pieces(tiles, size, S: gl.constexpr):
    if S.SPLIT:
        return (tiles + size - 1) // size
    else:
        return tiles * 0 + 1


@gluon.jit
def find(batch, cursor, unit, size, mods, S: gl.constexpr):
    """(cursor, sequence, units and slots before it) for a unit; the sequence is num_seqs after the last unit."""
    found = batch.num_seqs
    units = 0
    slots = 0
    searching = cursor.seq < batch.num_seqs
    seq, before, used = cursor.seq, cursor.units, cursor.slots
    while searching:
        at = seq + gl.arange(0, LANES, layout=gl.BlockedLayout([1], [32], [1], [0]))
        blocks, tiles = work(batch, at, at < batch.num_seqs, mods, S)
        pieces = _pieces(tiles, size, S)
        ends = before + gl.associative_scan(blocks * pieces, 0, _add)
        ends_used = used + gl.associative_scan(gl.where(pieces > 1, blocks * pieces, 0), 0, _add)
        last = gl.max(ends, axis=0)
        if unit < last:
            passed = ends <= unit
            found = seq + gl.sum(passed.to(gl.int32), axis=0)
            units = gl.maximum(before, gl.max(gl.where(passed, ends, 0), axis=0))
            slots = gl.maximum(used, gl.max(gl.where(passed, ends_used, 0), axis=0))
            searching = False
        else:
            seq += LANES
            before = last
            used = gl.max(ends_used, axis=0)
            searching = seq < batch.num_seqs
    return Cursor(seq, before, used), found, units, slots


@gluon.jit
def item_of(batch, cursor, index, size, mods, S: gl.constexpr):
    """(cursor, item) of a number; kv_head is -1 after the last."""
    unit = index // S.KV_HEADS
    cursor, seq, units, slots = find(batch, cursor, unit, size, mods, S)
    if seq < batch.num_seqs:
        _, tiles = work(batch, seq, True, mods, S)
        pieces = _pieces(tiles, size, S)
        number = (unit - units) // pieces
        piece = (unit - units) % pieces
        block = block_of(batch, seq, number, S)
        span = visible_range(block, mods, S.BLOCK_Q)
        begin = span.lo // S.TILE
        end = (span.hi + S.TILE - 1) // S.TILE
        if S.SPLIT:
            from_tile = first_tile(block.seq_len - block.query_len, mods, S) + piece * size
            begin = gl.maximum(begin, from_tile)
            end = gl.minimum(end, from_tile + gl.minimum(size, tiles))
        kv_head = index % S.KV_HEADS
        # behind what the shares of short sequences use
        counter = gl.num_programs(0) + (slots + number * pieces) * S.KV_HEADS + kv_head * pieces
        row = (gl.num_programs(0) + counter) * S.ROWS
        first = gl.where(piece == 0, 1, 0)
        item = Item(block, kv_head, begin, gl.maximum(begin, end), first, pieces, row, row + piece * S.ROWS, S.ROWS, S.ROWS, counter, 0)  # fmt: skip
    else:
        item = Item(Block(0, 0, 0, 0, 0), index * 0 - 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0)
    return cursor, item
