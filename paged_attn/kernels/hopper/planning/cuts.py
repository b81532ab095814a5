"""How the Hopper kernels cut a batch whose lengths are known: what their schedules do, told by the host."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from ....records.plan import Launch
from ...common.pieces import (
    CUTS_PER_EVEN_SHARE,
    KEYS_WORTH_A_CUT,
    KEYS_WORTH_A_JOIN,
    MAX_PIECES,
    MIN_KEYS_PER_QUERY,
    NUM_DOUBLINGS,
    PIECES_PER_PROGRAM,
    PieceSizes,
)
from ...common.schedule import QUOTIENT_TOLERANCE
from ...cuts import CountedBlock, CutSummary, KnownBatch, blocks_of, counted, even_shares, whole

NO_BLOCK_IS_CUT = PieceSizes(1 << 30, 1 << 30, 0, 0, 0)  # no block is


def cut(launch: Launch, batch: KnownBatch) -> CutSummary:
    """What the launch's programs will find to do."""
    shape, pipe = launch.shape, launch.pipe
    blocks = list(blocks_of(launch, batch))
    if pipe.SHARES and not shape.SPLIT:
        return whole(launch, batch, blocks)
    if pipe.SHARES:
        shares, slots = launch.programs // shape.KV_HEADS, launch.slots // launch.programs
        return counted(launch, batch, blocks, "shares", *even_shares(launch, blocks, shares, slots))
    chosen = piece_size(blocks, launch) if shape.SPLIT else NO_BLOCK_IS_CUT
    if chosen.sharers:
        return counted(launch, batch, blocks, "line", *_line(launch, blocks, chosen), lines=shape.KV_HEADS)
    counts = [(block, 1) for block in blocks[: chosen.uncut]]
    counts += [(block, _pieces_of(block, _size_of(block, launch, chosen))) for block in blocks[chosen.uncut :]]
    items = sum(count for _, count in counts) * shape.KV_HEADS
    most = max((-(-block.tiles // count) for block, count in counts), default=0)
    return counted(launch, batch, blocks, "counter", items, 0, most, counts)


def piece_size(blocks: Sequence[CountedBlock], launch: Launch) -> PieceSizes:
    """How blocks are cut where a launch is not of shares of its own: pieces.piece_size."""
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
    """pieces.sharers_of."""
    shape, programs = launch.shape, launch.programs
    several, lines = max((block.siblings for block in blocks), default=0), len(blocks) * shape.KV_HEADS
    alike = all(block.tiles == longest for block in blocks)
    if not (several == 1 or alike) or several * shape.BLOCK_Q * MIN_KEYS_PER_QUERY.value > longest * shape.TILE:
        return 0
    if lines >= programs or lines * longest * programs >= 2**31:
        return 0
    return programs if several == 1 else programs // max(len(blocks), 1) * len(blocks)


def _time(size: int, items: float, total: float, cut: float, programs: int) -> float:
    """pieces.time_of."""
    return min(
        math.ceil(items / programs - QUOTIENT_TOLERANCE.value) * (size + cut),
        total / programs * (1 + cut / size) + size + cut,
    )


def _size_of(block: CountedBlock, launch: Launch, chosen: PieceSizes) -> int:
    """Of a block's pieces, about: those of few queries may be a list of their own."""
    few = launch.pipe.MIXED and block.siblings == 1 and block.tokens <= 64 // launch.shape.GROUP
    return chosen.least if few else chosen.size


def _pieces_of(block: CountedBlock, size: int) -> int:
    """lists.count_pieces."""
    return max((2 * block.tiles + size) // (2 * size), 1)


def _line(
    launch: Launch, blocks: list[CountedBlock], chosen: PieceSizes
) -> tuple[int, int, int, list[tuple[CountedBlock, int]]]:
    """As `even_shares`, of the line of all KV heads; states of each block for each head."""
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
