"""How a launch cuts a batch whose lengths are known: what the schedules of both dialects do, told by the host.

The planner knows no lengths and needs none of this; `paged-attn explain` shows it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..kernels.common.schedule import IN_STEP, ONE_EACH, OTHERS
from ..kernels.hopper.planning.block_items import PIECES
from ..kernels.hopper.planning.pieces import CONTEXT, CUT_KEYS, DOUBLED, EVEN_CUTS, JOIN_KEYS, MOST, SURE, Cuts
from ..kernels.portable.plan import Launch

WHOLE = Cuts(1 << 30, 1 << 30, 0, 0, 0)  # no block is


class Batch(NamedTuple):
    """Lengths of every sequence, and the window that all have, -1 where it has no end."""

    query_lens: Sequence[int]
    seq_lens: Sequence[int]
    left: int
    right: int
    positions: bool = False  # queries have positions of their own, none before the context's end


class Block(NamedTuple):
    """Up to BLOCK_Q query tokens of one sequence, for each KV head."""

    tokens: int
    siblings: int  # blocks of its sequence
    first_tile: int  # of its sequence's line
    tiles: int  # that its sequence's queries see: its length on the line of units, if longer ones give it no room
    visited: int  # that its own queries see


class Cut(NamedTuple):
    """All of a launch's work; everything is counted once for all KV heads, but for items and shares of a line.

    Along that line, of all heads, a block may be cut otherwise for each: then pieces and rows are an average.
    """

    sequences: int
    blocks: int
    tiles: int  # visited
    schedule: str  # "blocks": a program each | "shares": even ones of each head | "line": of all | "counter": items
    parts: int  # shares that have work, or items
    least: int  # tiles on the line of a share; of an item at most
    most: int
    cut: int  # blocks
    pieces: int  # of these
    rows: int  # states that these pieces leave


def blocks_of(launch: Launch, batch: Batch) -> Iterator[Block]:
    """The blocks that a launch serves, as they lie on the line of units."""
    shape = launch.shape
    for query_len, seq_len in zip(batch.query_lens, batch.seq_lens):
        if not max(1, launch.shortest) <= query_len <= launch.longest:
            continue
        context = seq_len - query_len
        gap = -max(context, 0) % shape.TILE if shape.APART else 0  # before new keys, in tiles of their own
        first_tile = 0 if batch.left < 0 else _tile_of(max(context - batch.left, 0), context, gap, shape.TILE)
        tiles = max(1, _tiles_before(seq_len, context, gap, shape.TILE) - first_tile)
        for first in reversed(range(0, query_len, shape.BLOCK_Q)):
            tokens = min(query_len - first, shape.BLOCK_Q)
            least = context if batch.positions else context + first
            begin = 0 if batch.left < 0 else max(least - batch.left, 0)
            end = seq_len if batch.right < 0 else min(context + first + tokens + batch.right, seq_len)
            visited = _tiles_before(end, context, gap, shape.TILE) - _tile_of(begin, context, gap, shape.TILE)
            yield Block(tokens, -(-query_len // shape.BLOCK_Q), first_tile, tiles, max(0, visited))


def _tile_of(pos: int, context: int, gap: int, tile: int) -> int:
    return (pos + gap * (pos >= context)) // tile


def _tiles_before(end: int, context: int, gap: int, tile: int) -> int:
    return -(-(end + gap * (end > context)) // tile)


def piece_size(blocks: Sequence[Block], launch: Launch) -> Cuts:
    """How blocks are cut where a launch is not of shares of its own: pieces.piece_size."""
    heads, programs = launch.shape.KV_HEADS, launch.programs
    total = sum(block.tiles for block in blocks) * heads
    alike = launch.pipe.MIXED
    longest = max((block.tiles for block in blocks), default=1)
    least = max(launch.least, math.ceil(total / (programs * PIECES)))
    items = len(blocks) * heads
    times = {(longest, 0): _time(longest, items, total, 0, programs)}
    filling = [int(0.25 * 2**i * programs * longest / max(total, 1) + SURE.value) for i in range(DOUBLED.value)]
    rounds = items // programs
    for uncut in sorted({0, 0 if alike else rounds * programs // heads}):
        share = 1 - uncut * heads / max(items, 1)
        before = min(rounds * longest, total * (1 - share) / programs + longest) if uncut else 0
        for pieces in (*range(2, MOST.value + 1), *filling):
            size = max(-(-longest // max(pieces, 1)), least)
            if size < longest:
                each = math.floor(longest / size + 0.5 + SURE.value)
                cut = max(items - uncut * heads, total * share / longest * each)
                time = before + _time(size, cut, total * share, CUT_KEYS.value / launch.shape.TILE, programs)
                time += JOIN_KEYS.value / launch.shape.TILE * max(longest / size - MOST.value, 0)
                times.setdefault((size, uncut), time)
    size, uncut = min(times, key=times.__getitem__)
    sharers = 0 if alike else _sharers(blocks, launch, longest)
    if sharers:
        share = total / sharers
        time = share + EVEN_CUTS.value * CUT_KEYS.value / launch.shape.TILE
        time += JOIN_KEYS.value / launch.shape.TILE * max(longest / max(share, 1) - MOST.value, 0)
        if share < launch.least or time >= times[size, uncut]:
            sharers = 0
    return Cuts(size, least, uncut, sharers, total)


def _sharers(blocks: Sequence[Block], launch: Launch, longest: int) -> int:
    """pieces.sharers_of."""
    shape, programs = launch.shape, launch.programs
    several, lines = max((block.siblings for block in blocks), default=0), len(blocks) * shape.KV_HEADS
    alike = all(block.tiles == longest for block in blocks)
    if not (several == 1 or alike) or several * shape.BLOCK_Q * CONTEXT.value > longest * shape.TILE:
        return 0
    if lines >= programs or lines * longest * programs >= 2**31:
        return 0
    return programs if several == 1 else programs // max(len(blocks), 1) * len(blocks)


def _time(size: int, items: float, total: float, cut: float, programs: int) -> float:
    """pieces.time_of."""
    return min(
        math.ceil(items / programs - SURE.value) * (size + cut), total / programs * (1 + cut / size) + size + cut
    )


def _size_of(block: Block, launch: Launch, chosen: Cuts) -> int:
    """Of a block's pieces, about: those of few queries may be a list of their own."""
    few = launch.pipe.MIXED and block.siblings == 1 and block.tokens <= 64 // launch.shape.GROUP
    return chosen.least if few else chosen.size


def _pieces_of(block: Block, size: int) -> int:
    """schedule._pieces."""
    return max((2 * block.tiles + size) // (2 * size), 1)


def cut(launch: Launch, batch: Batch) -> Cut:
    """What the launch's programs will find to do."""
    shape, pipe = launch.shape, launch.pipe
    blocks = list(blocks_of(launch, batch))
    counted = 1  # times that each block is in counts
    chosen = None if pipe is None or pipe.SHARES else piece_size(blocks, launch) if shape.SPLIT else WHOLE
    if chosen is not None and chosen.sharers:
        schedule, (parts, least, most, counts), counted = "line", _line(launch, blocks, chosen), shape.KV_HEADS
    elif chosen is not None:
        counts = [(block, 1) for block in blocks[: chosen.uncut]]
        counts += [(block, _pieces_of(block, _size_of(block, launch, chosen))) for block in blocks[chosen.uncut :]]
        schedule, parts, least = "counter", sum(count for _, count in counts) * shape.KV_HEADS, 0
        most = max((-(-block.tiles // count) for block, count in counts), default=0)
    elif shape.SPLIT:
        schedule, (parts, least, most, counts) = "shares", _even_shares(launch, blocks)
    else:
        schedule, parts, counts = "blocks", len(blocks), [(block, 1) for block in blocks]
        least, most = (f((block.visited for block in blocks), default=0) for f in (min, max))
    cuts = [(block, count) for block, count in counts if count > 1]
    return Cut(
        sequences=sum(max(1, launch.shortest) <= length <= launch.longest for length in batch.query_lens),
        blocks=len(blocks),
        tiles=sum(block.visited for block in blocks),
        schedule=schedule,
        parts=parts,
        least=least,
        most=most,
        cut=-(-len(cuts) // counted),
        pieces=-(-sum(count for _, count in cuts) // counted),
        rows=-(-sum(count * block.tokens for block, count in cuts) * shape.GROUP // counted),
    )


def _line(launch: Launch, blocks: list[Block], chosen: Cuts) -> tuple[int, int, int, list[tuple[Block, int]]]:
    """As `_even_shares`, of the line of all KV heads; states of each block for each head."""
    sharers, total = chosen.sharers, chosen.total

    def share_with(tile: int) -> int:
        return ((tile + 1) * sharers - 1) // total

    ends = [number * total // sharers for number in range(sharers + 1)]
    sizes = [end - begin for begin, end in itertools.pairwise(ends)]
    counts, unit = [], 0
    for block in blocks:
        for _ in range(launch.shape.KV_HEADS):
            counts.append((block, share_with(unit + block.tiles - 1) - share_with(unit) + 1))
            unit += block.tiles
    return sharers, min(sizes), max(sizes), counts


def _even_shares(launch: Launch, line: list[Block]) -> tuple[int, int, int, list[tuple[Block, int]]]:
    """(shares that have work, tiles of the smallest and of the largest, states of each block) of the line of units."""
    shares = launch.programs if launch.pipe is None else launch.programs // launch.shape.KV_HEADS
    lengths = [block.tiles for block in line]
    size, room = _whole_size(launch, line, shares)
    if size:
        extra, lengths = 0, [room] * len(line)
    else:
        size, extra = divmod(sum(lengths), shares)
        if size < launch.least:
            size, extra = launch.least, 0
    total = sum(lengths)
    pieces = _pieces(launch, line, lengths, size, extra)
    return (
        min(shares, -(-total // size)),
        min(size if extra else total % size or size, total),
        min(total, size + (extra > 0)),
        list(zip(line, pieces, strict=True)),
    )


def _whole_size(launch: Launch, line: list[Block], shares: int) -> tuple[int, int]:
    """schedule.whole_size."""
    if not line or not launch.shape.WHOLE:
        return 0, 0
    lengths = [block.tiles for block in line]
    longest, parts, even = max(lengths), shares // len(lengths), max(-(-sum(lengths) // shares), launch.least)
    if parts > 1:
        size = max(-(-longest // parts), launch.least)
        room = -(-longest // size) * size
    else:
        size, room = -(-len(lengths) // shares) * longest, longest
    later = ONE_EACH.value if parts == 1 else OTHERS.value
    if parts >= 1 and max(block.siblings for block in line) > 1:
        later = max(later, even * IN_STEP.value // 8)
    return (size, room) if size <= even + later else (0, 0)


def _pieces(launch: Launch, blocks: list[Block], lengths: list[int], size: int, extra: int) -> Iterator[int]:
    """How many states each block leaves where shares have `size` units, the first `extra` of them one more."""

    def share_of(unit: int) -> int:
        larger = extra * (size + 1)
        return unit // (size + 1) if unit < larger else extra + (unit - larger) // size

    unit = 0
    for block, length in zip(blocks, lengths, strict=True):
        if launch.shape.PIECE is None:
            yield share_of(unit + length - 1) - share_of(unit) + 1
        else:
            # a piece belongs to the share in which it begins; the pieces of a block that is cut are kept one by one
            tiles = launch.shape.PIECE // launch.shape.TILE
            first, end = block.first_tile // tiles, -(-(block.first_tile + block.tiles) // tiles)
            pieces = min(end - first, launch.slots if launch.pipe is None else launch.slots // launch.programs)
            last = max(0, (first + pieces - 1) * tiles - block.first_tile)
            yield 1 if share_of(unit) == share_of(unit + last) else pieces
        unit += length
