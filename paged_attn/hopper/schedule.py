"""Which item comes next: pieces of blocks of queries, taken from one counter by whoever is free.

Blocks of one sequence follow each other, the last (which sees the most keys) first, the KV heads of a block side by
side: their keys lie in the same pages, and stay in L2 while the sequence lasts.
"""

from typing import Any, NamedTuple

from ..kernels.args import Block
from ..kernels.schedule import block_of, first_tile, total_work, visible_range, work
from . import plan
from .args import Item
from .shim import gl, gluon

TAKEN = gl.constexpr(plan.TAKEN)
PIECES = gl.constexpr(plan.PIECES)
LANES = gl.constexpr(32)  # sequences that the scheduling warp looks at together


class Cursor(NamedTuple):
    """How far one program has read the list of sequences; items only grow, so it never goes back."""

    seq: Any
    units: Any  # before seq: pieces of all blocks
    slots: Any  # of these, pieces of blocks that are cut


@gluon.jit
def piece_size(batch, lane, mods, S: gl.constexpr):
    """Tiles of a piece: so many that all programs have a few, and no fewer than batch.least; all where none is cut."""
    size = 1 << 30
    if S.SPLIT:
        pieces = gl.num_programs(0) * PIECES
        size = gl.maximum(batch.least, (total_work(batch, lane, mods, S) * S.KV_HEADS + pieces - 1) // pieces)
    return size


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
        slot = (slots + number * pieces) * S.KV_HEADS + kv_head * pieces
        first = gl.where(piece == 0, 1, 0)
        item = Item(block, kv_head, begin, gl.maximum(begin, end), first, pieces, slot * S.ROWS, (slot + piece) * S.ROWS, slot)  # fmt: skip
    else:
        item = Item(Block(0, 0, 0, 0, 0), index * 0 - 1, 0, 0, 1, 1, 0, 0, 0)
    return cursor, item
