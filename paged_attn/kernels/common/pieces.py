"""Sizes of the pieces into which the keys of blocks are cut; blocks stay whole unless cutting ends the launch sooner.

Three ways are compared.  In the first two, each lane tries one size of pieces:

- All blocks are cut.
- Only blocks behind whole rounds of programs are cut.  With 132 programs and 8 KV heads, these are each KV head's last
  8 of 24 blocks.
- Programs have even shares of all blocks, laid end to end.  With 132 programs, 8 KV heads and 12 blocks of each, a
  share is 8/11 of a block.

This file is plain Triton, so that the interpreter can run it.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .schedule import QUOTIENT_TOLERANCE, work

# Keys that take as long to process as the state of one piece takes to be written, read and joined.
KEYS_WORTH_A_CUT = tl.constexpr(640)
# Each number of pieces of the longest block up to this one is tried.  Beyond it, numbers double.
MAX_PIECES = tl.constexpr(8)
# Keys that take as long to process as joining one piece beyond MAX_PIECES; one program joins all pieces of a block.
KEYS_WORTH_A_JOIN = tl.constexpr(64)
# How many further numbers of pieces are tried: those that give a program about 1/4, 1/2, 1 and 2 items.
NUM_DOUBLINGS = tl.constexpr(4)
MAX_NUMBERS_TRIED = tl.constexpr(16)  # lanes that try cuts of all blocks; as many others try cuts behind whole rounds
INFINITE_TIME = tl.constexpr(3e38)  # in tiles; time of a cut that is not tried
CUTS_PER_EVEN_SHARE = tl.constexpr(1.8)  # time that the pieces of an even share cost, in units of KEYS_WORTH_A_CUT
PIECES_PER_PROGRAM = 4  # states of cut blocks in scratch, for each program
# With at least this many keys for each query of a sequence, the sequence's blocks count as equally long.
MIN_KEYS_PER_QUERY = tl.constexpr(8)


class PieceSizes(NamedTuple):
    """Cuts of the blocks of a batch."""

    size: Any  # tiles of a piece, approximately; tiles of the longest block if none is cut
    least: Any  # fewest tiles of a piece, so that scratch has room for all states
    uncut: Any  # number of a KV head's first blocks, which stay whole
    sharers: Any  # programs with even shares of all tiles instead; 0: there are none
    total: Any  # tiles of all KV heads


@triton.jit
def survey(batch, lane, mods, S: tl.constexpr):
    """(tiles, blocks, most tiles of a block, most blocks of a sequence), over all sequences, for one KV head."""
    total = 0
    blocks = 0
    most = 1
    several = 0
    for first in range(0, batch.num_seqs, S.SCAN):
        seq = first + lane
        count, tiles = work(batch, seq, seq < batch.num_seqs, mods, S)
        total += tl.sum(count * tiles, 0)
        blocks += tl.sum(count, 0)
        most = tl.maximum(most, tl.max(tl.where(count > 0, tiles, 0), 0))
        several = tl.maximum(several, tl.max(count, 0))
    return total, blocks, most, several


@triton.jit
def time_of(size, items, total, cut, programs):
    """Time, in tiles, of `items` items on all programs; total: tiles of all items.

    An item has up to `size` tiles, and takes the time of `cut` further tiles.  The time is the smaller one of two upper
    bounds: rounds of largest items, and an even share plus one item.
    """
    rounds = tl.ceil(items / programs - QUOTIENT_TOLERANCE) * (size + cut)
    return tl.minimum(rounds, total / programs * (1 + cut / tl.maximum(size, 1.0)) + size + cut)


@triton.jit
def pieces_tried(number, filling):
    """Pieces of the longest block in trial `number`: 1 to MAX_PIECES, then NUM_DOUBLINGS further numbers.

    The further numbers give a program about 1/4, 1/2, 1 and 2 items.
    filling: pieces of the longest block that give each program about one item.
    """
    doubled = (filling * (1 << tl.maximum(number - MAX_PIECES, 0)) * 0.25 + QUOTIENT_TOLERANCE).to(tl.int32)
    return tl.where(number < MAX_PIECES, number + 1, tl.maximum(doubled, 1))


@triton.jit
def sharers_of(tiles, blocks, most, several, num_programs, S: tl.constexpr):
    """Number of programs that could have even shares; 0 if blocks do not suit, or if there are enough for all programs.

    Blocks of one sequence read the same keys, and find them in L2 if they read at the same time.  So if sequences have
    several blocks, each block gets equally many programs, and all blocks must be equally long.  Blocks do not suit if
    sequences have few keys for each query.
    """
    each = (num_programs.to(tl.float32) / tl.maximum(blocks, 1) + QUOTIENT_TOLERANCE).to(tl.int32)
    number = tl.where(several == 1, num_programs, each * blocks)
    fits = (several == 1) | (tiles == blocks * most)
    fits &= several * S.BLOCK_Q * MIN_KEYS_PER_QUERY <= most * S.TILE
    fits &= blocks * S.KV_HEADS < num_programs
    fits &= tiles * 1.0 * S.KV_HEADS * num_programs < 2147483648.0  # `lists.share_begin` multiplies in 32 bits
    return tl.where(fits, number, 0)


@triton.jit
def piece_size(batch, lane, num_programs, mods, PIECES: tl.constexpr, S: tl.constexpr, ALIKE: tl.constexpr = False):
    """Return PieceSizes with at most PIECES pieces for a program.  lane: [SCAN], 0 ... SCAN - 1.

    ALIKE: cut all blocks by one rule.  Otherwise, two more ways are compared: cutting only blocks behind whole rounds,
    as if all blocks were equally long, and even shares.
    """
    tiles, blocks, most, several = survey(batch, lane, mods, S)
    sharers = sharers_of(tiles, blocks, most, several, num_programs, S)
    total, blocks, most = tiles * 1.0 * S.KV_HEADS, blocks * S.KV_HEADS, most * 1.0
    programs = num_programs.to(tl.float32)
    least = tl.maximum(batch.least.to(tl.float32), tl.ceil(total / (num_programs * PIECES)))
    cut: tl.constexpr = 1.0 * KEYS_WORTH_A_CUT / S.TILE
    join: tl.constexpr = 1.0 * KEYS_WORTH_A_JOIN / S.TILE

    rounds = blocks // num_programs
    front = rounds * num_programs // S.KV_HEADS
    behind = lane >= MAX_NUMBERS_TRIED
    count = tl.where(behind, blocks - front * S.KV_HEADS, blocks) * 1.0
    share = count / tl.maximum(blocks * 1.0, 1.0)
    time_before = tl.where(behind, tl.minimum(rounds * most, total * (1 - share) / programs + most), 0.0)

    number = lane % MAX_NUMBERS_TRIED
    pieces = pieces_tried(number, programs * most / tl.maximum(total, 1.0))
    size = tl.maximum(tl.cdiv(most.to(tl.int32), pieces).to(tl.float32), least)
    each = (most / size + (0.5 + QUOTIENT_TOLERANCE)).to(tl.int32).to(tl.float32)  # pieces of the longest block
    items = tl.maximum(count, total * share / most * each)
    time = time_before + time_of(size, items, total * share, cut, programs)
    time += join * tl.maximum(most / size - MAX_PIECES, 0.0)
    tried = (number < MAX_PIECES + NUM_DOUBLINGS) & (size < most)
    tried &= (lane < MAX_NUMBERS_TRIED) | ((front > 0) & (lane < 2 * MAX_NUMBERS_TRIED) & (not ALIKE))
    time = tl.where(tried, time, INFINITE_TIME)
    time_whole = time_of(most, blocks * 1.0, total, 0.0, programs)
    best = tl.min(time, 0)
    winner = tl.min(tl.where(time == best, lane, lane + S.SCAN), 0)
    chosen = tl.max(tl.where(lane == winner, size, 0.0), 0)
    share = total / tl.maximum(sharers, 1)
    time_even = share + CUTS_PER_EVEN_SHARE * cut + join * tl.maximum(most / tl.maximum(share, 1.0) - MAX_PIECES, 0.0)
    even = (sharers > 0) & (not ALIKE) & (share >= batch.least) & (time_even < best) & (time_even < time_whole)
    cuts = best < time_whole
    return PieceSizes(
        tl.where(cuts, chosen, most).to(tl.int32),
        least.to(tl.int32),
        tl.where(cuts & (winner >= MAX_NUMBERS_TRIED), front, 0),
        tl.where(even, sharers, 0),
        tiles * S.KV_HEADS,
    )
