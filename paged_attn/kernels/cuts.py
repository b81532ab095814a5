"""How a launch cuts a batch whose lengths are known: what the schedules of all dialects do, told by the host.

The planner knows no lengths and needs none of this; `paged-attn explain` shows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..records.key_bounds import CAUSAL, KeyBounds
from ..records.plan import Launch
from .common.schedule import EXTRA_EIGHTHS_IN_STEP, EXTRA_TILES_OF_ONE_BLOCK, EXTRA_TILES_OF_SEVERAL


class KnownBatch(NamedTuple):
    """Lengths of every sequence, and which keys all queries see."""

    query_lens: Sequence[int]
    seq_lens: Sequence[int]
    key_bounds: KeyBounds = CAUSAL


class CountedBlock(NamedTuple):
    """Up to BLOCK_Q query tokens of one sequence, for each KV head."""

    tokens: int
    siblings: int  # blocks of its sequence
    first_tile: int  # of its sequence's line
    tiles: int  # that its sequence's queries see: its length on the line of units, if longer ones give it no room
    visited: int  # that its own queries see


class CutSummary(NamedTuple):
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


def blocks_of(launch: Launch, batch: KnownBatch) -> Iterator[CountedBlock]:
    """The blocks that a launch serves, as they lie on the line of units."""
    shape, bounds = launch.shape, batch.key_bounds
    for query_len, seq_len in zip(batch.query_lens, batch.seq_lens):
        if not max(1, launch.shortest) <= query_len <= launch.longest:
            continue
        context = seq_len - query_len
        gap = -max(context, 0) % shape.TILE if shape.APART else 0  # before new keys, in tiles of their own
        first_tile = _tile_of(bounds.first_key(context), context, gap, shape.TILE)
        tiles = max(1, _tiles_before(seq_len, context, gap, shape.TILE) - first_tile)
        for first in reversed(range(0, query_len, shape.BLOCK_Q)):
            tokens = min(query_len - first, shape.BLOCK_Q)
            begin = bounds.first_key(context if bounds.positions else context + first)
            end = bounds.end_of_keys(context + first + tokens - 1, seq_len)
            visited = _tiles_before(end, context, gap, shape.TILE) - _tile_of(begin, context, gap, shape.TILE)
            yield CountedBlock(tokens, -(-query_len // shape.BLOCK_Q), first_tile, tiles, max(0, visited))


def _tile_of(pos: int, context: int, gap: int, tile: int) -> int:
    return (pos + gap * (pos >= context)) // tile


def _tiles_before(end: int, context: int, gap: int, tile: int) -> int:
    return -(-(end + gap * (end > context)) // tile)


def counted(
    launch: Launch, batch: KnownBatch, blocks: Sequence[CountedBlock], schedule: str, parts: int, least: int, most: int,
    counts: Sequence[tuple[CountedBlock, int]], lines: int = 1,
) -> CutSummary:  # fmt: skip
    """The sums over all blocks of so many pieces each; lines: times that each block is in counts."""
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


def even_shares(
    launch: Launch, line: Sequence[CountedBlock], shares: int, slots: int
) -> tuple[int, int, int, list[tuple[CountedBlock, int]]]:
    """(shares that have work, tiles of the smallest and of the largest, states of each block) of the line of units.

    shares: of a KV head.  slots: states that a share may leave.
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
    later = EXTRA_TILES_OF_ONE_BLOCK.value if parts == 1 else EXTRA_TILES_OF_SEVERAL.value
    if parts >= 1 and max(block.siblings for block in line) > 1:
        later = max(later, even * EXTRA_EIGHTHS_IN_STEP.value // 8)
    return (size, room) if size <= even + later else (0, 0)


def _pieces(
    launch: Launch, blocks: Sequence[CountedBlock], lengths: Sequence[int], size: int, extra: int, slots: int
) -> Iterator[int]:
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
            pieces = min(end - first, slots)
            last = max(0, (first + pieces - 1) * tiles - block.first_tile)
            yield 1 if share_of(unit) == share_of(unit + last) else pieces
        unit += length


def whole(launch: Launch, batch: KnownBatch, blocks: Sequence[CountedBlock]) -> CutSummary:
    """A program for each block."""
    least, most = (f((block.visited for block in blocks), default=0) for f in (min, max))
    return counted(launch, batch, blocks, "blocks", len(blocks), least, most, [(block, 1) for block in blocks])
