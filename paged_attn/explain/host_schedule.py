"""How a launch cuts a batch with known lengths: the device's schedules, mirrored on the host.

The planner knows no lengths and does not use this file.  Tests compare it with the device's schedules.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..kernels.common.pieces import (
    CUTS_PER_EVEN_SHARE,
    KEYS_WORTH_A_CUT,
    KEYS_WORTH_A_JOIN,
    MAX_PIECES,
    MIN_KEYS_PER_QUERY,
    NUM_DOUBLINGS,
    PIECES_PER_PROGRAM,
    PieceSizes,
)
from ..kernels.common.schedule import (
    EXTRA_EIGHTHS_IN_STEP,
    EXTRA_TILES_OF_ONE_BLOCK,
    EXTRA_TILES_OF_SEVERAL,
    QUOTIENT_TOLERANCE,
)
from ..records.key_bounds import CAUSAL, KeyBounds
from ..records.plan import Launch


class KnownBatch(NamedTuple):
    """Lengths of every sequence, and the bounds on the keys that a query sees."""

    query_lens: Sequence[int]
    seq_lens: Sequence[int]
    key_bounds: KeyBounds = CAUSAL


class CountedBlock(NamedTuple):
    """Up to BLOCK_Q query tokens of one sequence, for each KV head."""

    tokens: int
    siblings: int  # number of blocks of its sequence
    first_tile: int  # first tile that the sequence's queries see
    # tiles that the sequence's queries see; also the block's length on the line, unless `_whole_size` makes it longer
    tiles: int
    visited: int  # tiles that the block's own queries see


class CutSummary(NamedTuple):
    """A launch's work for one KV head.  With schedule "line" or "counter", `parts` counts shares or items of all heads.

    Along a line of all heads, a block's cuts may differ between heads.  Then `cut`, `pieces` and `rows` are averages,
    rounded up.
    """

    sequences: int
    blocks: int
    tiles: int  # visited
    schedule: str  # "blocks": a program per block; "shares", "line": even shares of one or all heads; "counter": items
    parts: int  # blocks, shares that have work, or items
    least: int  # tiles of the smallest share or block; 0 for items
    most: int  # tiles of the largest share, block or item
    cut: int  # blocks that are cut
    pieces: int  # pieces of these blocks
    rows: int  # rows of the states that the pieces leave


NO_BLOCK_IS_CUT = PieceSizes(1 << 30, 1 << 30, 0, 0, 0)


def cut(launch: Launch, batch: KnownBatch) -> CutSummary:
    """Summarise how a launch's programs divide the work of a batch."""
    pipe, blocks = launch.pipe, list(blocks_of(launch, batch))
    if pipe is not None and not pipe.SHARES:
        return _items(launch, batch, blocks)
    if not launch.shape.SPLIT:
        return _whole(launch, batch, blocks)
    shares, slots = launch.programs, launch.slots  # shares of a KV head, states of a share
    if pipe is not None:
        shares, slots = shares // launch.shape.KV_HEADS, slots // launch.programs
    return _counted(launch, batch, blocks, "shares", *_even_shares(launch, blocks, shares, slots))


def blocks_of(launch: Launch, batch: KnownBatch) -> Iterator[CountedBlock]:
    """Yield the blocks that a launch serves, in the order of the line of tiles."""
    shape, bounds = launch.shape, batch.key_bounds
    # with a shard, numbers of own keys take the place of positions; there are no new keys then, so `gap` is 0
    own = bounds.own_before
    for query_len, seq_len in zip(batch.query_lens, batch.seq_lens):
        if not max(1, launch.shortest) <= query_len <= launch.longest:
            continue
        context = seq_len - query_len
        gap = -max(context, 0) % shape.TILE if shape.APART else 0  # unused rest of the last cached tile
        first_tile = _tile_of(own(bounds.first_key(context)), context, gap, shape.TILE)
        tiles = max(1, _tiles_before(own(seq_len), context, gap, shape.TILE) - first_tile)
        for first in reversed(range(0, query_len, shape.BLOCK_Q)):
            tokens = min(query_len - first, shape.BLOCK_Q)
            begin = bounds.first_key(context if bounds.positions else context + first)
            end = bounds.end_of_keys(context + first + tokens - 1, seq_len)
            visited = _tiles_before(own(end), context, gap, shape.TILE) - _tile_of(own(begin), context, gap, shape.TILE)
            yield CountedBlock(tokens, -(-query_len // shape.BLOCK_Q), first_tile, tiles, max(0, visited))


def _tile_of(pos: int, context: int, gap: int, tile: int) -> int:
    return (pos + gap * (pos >= context)) // tile


def _tiles_before(end: int, context: int, gap: int, tile: int) -> int:
    return -(-(end + gap * (end > context)) // tile)


def _counted(
    launch: Launch, batch: KnownBatch, blocks: Sequence[CountedBlock], schedule: str, parts: int, least: int, most: int,
    counts: Sequence[tuple[CountedBlock, int]], lines: int = 1,
) -> CutSummary:  # fmt: skip
    """Make the CutSummary of a launch's blocks.

    parts, least, most: as in CutSummary.  counts: (block, number of its pieces).  Each block has `lines` entries: one,
    or one for each KV head.
    """
    cuts = [(block, count) for block, count in counts if count > 1]
    return CutSummary(
        sequences=sum(max(1, launch.shortest) <= length <= launch.longest for length in batch.query_lens),
        blocks=len(blocks),
        tiles=sum(block.visited for block in blocks),
        schedule=schedule,
        parts=parts,
        least=least,
        most=most,
        cut=-(-len(cuts) // lines),
        pieces=-(-sum(count for _, count in cuts) // lines),
        rows=-(-sum(count * block.tokens for block, count in cuts) * launch.shape.GROUP // lines),
    )


def _even_shares(
    launch: Launch, line: Sequence[CountedBlock], shares: int, slots: int
) -> tuple[int, int, int, list[tuple[CountedBlock, int]]]:
    """Cut the line of tiles: (shares that have work, tiles of the smallest, tiles of the largest, [(block, pieces)]).

    shares: shares of a KV head.  slots: states of a share in scratch.
    """
    lengths = [block.tiles for block in line]
    size, room = _whole_size(launch, line, shares)
    if size:
        extra, lengths = 0, [room] * len(line)
    else:
        size, extra = divmod(sum(lengths), shares)
        if size < launch.least:
            size, extra = launch.least, 0
    total = sum(lengths)
    pieces = _pieces(launch, line, lengths, size, extra, slots)
    return (
        min(shares, -(-total // size)),
        min(size if extra else total % size or size, total),
        min(total, size + (extra > 0)),
        list(zip(line, pieces, strict=True)),
    )


def _whole_size(launch: Launch, line: Sequence[CountedBlock], shares: int) -> tuple[int, int]:
    """Mirror of schedule.whole_size: (tiles of a share, tiles of a block on the line).

    (0, 0): a share may begin anywhere in a block.
    """
    if not line or not launch.shape.WHOLE:
        return 0, 0
    lengths = [block.tiles for block in line]
    longest, parts, even = max(lengths), shares // len(lengths), max(-(-sum(lengths) // shares), launch.least)
    if parts > 1:
        size = max(-(-longest // parts), launch.least)
        room = -(-longest // size) * size
    else:
        size, room = -(-len(lengths) // shares) * longest, longest
    later = EXTRA_TILES_OF_ONE_BLOCK.value if parts == 1 else EXTRA_TILES_OF_SEVERAL.value
    if parts >= 1 and max(block.siblings for block in line) > 1:
        later = max(later, even * EXTRA_EIGHTHS_IN_STEP.value // 8)
    return (size, room) if size <= even + later else (0, 0)


def _pieces(
    launch: Launch, blocks: Sequence[CountedBlock], lengths: Sequence[int], size: int, extra: int, slots: int
) -> Iterator[int]:
    """Yield the number of pieces of each block; shares have `size` tiles, the first `extra` shares one tile more."""

    def share_of(unit: int) -> int:
        larger = extra * (size + 1)
        return unit // (size + 1) if unit < larger else extra + (unit - larger) // size

    unit = 0
    for block, length in zip(blocks, lengths, strict=True):
        if launch.shape.PIECE is None:
            yield share_of(unit + length - 1) - share_of(unit) + 1
        else:
            # a piece belongs to the share in which it begins, and each piece of a cut block leaves a state
            tiles = launch.shape.PIECE // launch.shape.TILE
            first, end = block.first_tile // tiles, -(-(block.first_tile + block.tiles) // tiles)
            pieces = min(end - first, slots)
            last = max(0, (first + pieces - 1) * tiles - block.first_tile)
            yield 1 if share_of(unit) == share_of(unit + last) else pieces
        unit += length


def _whole(launch: Launch, batch: KnownBatch, blocks: Sequence[CountedBlock]) -> CutSummary:
    """Summarise a launch with a program for each block."""
    least, most = (f((block.visited for block in blocks), default=0) for f in (min, max))
    return _counted(launch, batch, blocks, "blocks", len(blocks), least, most, [(block, 1) for block in blocks])


def _items(launch: Launch, batch: KnownBatch, blocks: Sequence[CountedBlock]) -> CutSummary:
    """Summarise a launch whose programs take blocks or pieces from a counter, or have even shares of all KV heads."""
    shape = launch.shape
    chosen = piece_size(blocks, launch) if shape.SPLIT else NO_BLOCK_IS_CUT
    if chosen.sharers:
        return _counted(launch, batch, blocks, "line", *_line(launch, blocks, chosen), lines=shape.KV_HEADS)
    counts = [(block, 1) for block in blocks[: chosen.uncut]]
    counts += [(block, _pieces_of(block, _size_of(block, launch, chosen))) for block in blocks[chosen.uncut :]]
    items = sum(count for _, count in counts) * shape.KV_HEADS
    most = max((-(-block.tiles // count) for block, count in counts), default=0)
    return _counted(launch, batch, blocks, "counter", items, 0, most, counts)


def piece_size(blocks: Sequence[CountedBlock], launch: Launch) -> PieceSizes:
    """Choose how blocks are cut in a launch without fixed shares; mirror of pieces.piece_size."""
    heads, programs = launch.shape.KV_HEADS, launch.programs
    total = sum(block.tiles for block in blocks) * heads
    alike = launch.pipe.MIXED
    longest = max((block.tiles for block in blocks), default=1)
    least = max(launch.least, math.ceil(total / (programs * PIECES_PER_PROGRAM)))
    items = len(blocks) * heads
    times = {(longest, 0): _time(longest, items, total, 0, programs)}
    filling = [
        int(0.25 * 2**i * programs * longest / max(total, 1) + QUOTIENT_TOLERANCE.value)
        for i in range(NUM_DOUBLINGS.value)
    ]
    rounds = items // programs
    for uncut in sorted({0, 0 if alike else rounds * programs // heads}):
        share = 1 - uncut * heads / max(items, 1)
        before = min(rounds * longest, total * (1 - share) / programs + longest) if uncut else 0
        for pieces in (*range(2, MAX_PIECES.value + 1), *filling):
            size = max(-(-longest // max(pieces, 1)), least)
            if size < longest:
                each = math.floor(longest / size + 0.5 + QUOTIENT_TOLERANCE.value)
                cut = max(items - uncut * heads, total * share / longest * each)
                time = before + _time(size, cut, total * share, KEYS_WORTH_A_CUT.value / launch.shape.TILE, programs)
                time += KEYS_WORTH_A_JOIN.value / launch.shape.TILE * max(longest / size - MAX_PIECES.value, 0)
                times.setdefault((size, uncut), time)
    size, uncut = min(times, key=times.__getitem__)
    sharers = 0 if alike else _sharers(blocks, launch, longest)
    if sharers:
        share = total / sharers
        time = share + CUTS_PER_EVEN_SHARE.value * KEYS_WORTH_A_CUT.value / launch.shape.TILE
        time += KEYS_WORTH_A_JOIN.value / launch.shape.TILE * max(longest / max(share, 1) - MAX_PIECES.value, 0)
        if share < launch.least or time >= times[size, uncut]:
            sharers = 0
    return PieceSizes(size, least, uncut, sharers, total)


def _sharers(blocks: Sequence[CountedBlock], launch: Launch, longest: int) -> int:
    """Mirror of pieces.sharers_of."""
    shape, programs = launch.shape, launch.programs
    several, lines = max((block.siblings for block in blocks), default=0), len(blocks) * shape.KV_HEADS
    alike = all(block.tiles == longest for block in blocks)
    if not (several == 1 or alike) or several * shape.BLOCK_Q * MIN_KEYS_PER_QUERY.value > longest * shape.TILE:
        return 0
    if lines >= programs or lines * longest * programs >= 2**31:
        return 0
    return programs if several == 1 else programs // max(len(blocks), 1) * len(blocks)


def _time(size: int, items: float, total: float, cut: float, programs: int) -> float:
    """Mirror of pieces.time_of."""
    return min(
        math.ceil(items / programs - QUOTIENT_TOLERANCE.value) * (size + cut),
        total / programs * (1 + cut / size) + size + cut,
    )


def _size_of(block: CountedBlock, launch: Launch, chosen: PieceSizes) -> int:
    """Approximate number of tiles in a piece of a block.

    A launch with MIXED has a list of its own for blocks of few rows, and cuts them into the smallest pieces.
    """
    few = launch.pipe.MIXED and block.siblings == 1 and block.tokens <= 64 // launch.shape.GROUP
    return chosen.least if few else chosen.size


def _pieces_of(block: CountedBlock, size: int) -> int:
    """Mirror of lists.count_pieces."""
    return max((2 * block.tiles + size) // (2 * size), 1)


def _line(
    launch: Launch, blocks: Sequence[CountedBlock], chosen: PieceSizes
) -> tuple[int, int, int, list[tuple[CountedBlock, int]]]:
    """Like `_even_shares`, for the line of all KV heads, with an entry for each block and head."""
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
