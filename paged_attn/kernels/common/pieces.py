"""Into how many pieces the keys of blocks are cut: into none, unless all programs would be done earlier.

Cut are all blocks, or those that are left of whole rounds of programs: of 24 blocks of 8 KV heads, for 132 programs,
the last 8.  Each lane of a warp tries one way.  Or they are laid end to end, and every program has an even share of
that line: of 12 blocks of 8 KV heads 8/11 of a block each.  Plain Triton, for the interpreter's sake.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .schedule import QUOTIENT_TOLERANCE, work

# Keys whose tiles would take as long as what a piece costs beside its own: its state is written, read and joined.
KEYS_WORTH_A_CUT = tl.constexpr(640)
# Pieces of the longest block; more where blocks are so few that even these leave programs idle.
MAX_PIECES = tl.constexpr(8)
# Keys whose tiles would take as long as joining one piece beyond MAX_PIECES, for one program joins all of a block.
KEYS_WORTH_A_JOIN = tl.constexpr(64)
# Numbers of these that are tried: for an item for a quarter of the programs, for half of them, one each, two each.
NUM_DOUBLINGS = tl.constexpr(4)
MAX_NUMBERS_TRIED = tl.constexpr(16)  # numbers of pieces, with room; twice, the second time behind whole rounds
INFINITE_TIME = tl.constexpr(3e38)  # tiles, of a way that is not tried
CUTS_PER_EVEN_SHARE = tl.constexpr(1.8)  # times KEYS_WORTH_A_CUT: what the pieces of an even share cost
PIECES_PER_PROGRAM = 4  # states of cut blocks for which a program has room
# Keys of a sequence for each of its queries from which on its blocks are about equally long.
MIN_KEYS_PER_QUERY = tl.constexpr(8)


class PieceSizes(NamedTuple):
    """How the blocks of a batch are cut."""

    size: Any  # tiles of a piece, about; as many as the longest block has: none is cut
    least: Any  # that a piece may have, with no more of these for a program than there is room for
    uncut: Any  # blocks of a KV head, from the first on, that stay uncut
    sharers: Any  # programs that have even shares of all tiles instead; 0: nobody has
    total: Any  # tiles of all KV heads


@triton.jit
def survey(batch, lane, mods, S: tl.constexpr):
    """(tiles, blocks of all sequences, of one KV head; the most tiles of a block, the most blocks of a sequence)."""
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
    """Tiles that a program sees pass while all work through items of up to `size`, each at the cost of `cut` more.

    No more than rounds of the largest, and no more than an even share and one item.
    """
    rounds = tl.ceil(items / programs - QUOTIENT_TOLERANCE) * (size + cut)
    return tl.minimum(rounds, total / programs * (1 + cut / tl.maximum(size, 1.0)) + size + cut)


@triton.jit
def pieces_tried(number, filling):
    """Pieces of the longest block: 1 to MAX_PIECES, then as many as there have to be for an item a program, about."""
    doubled = (filling * (1 << tl.maximum(number - MAX_PIECES, 0)) * 0.25 + QUOTIENT_TOLERANCE).to(tl.int32)
    return tl.where(number < MAX_PIECES, number + 1, tl.maximum(doubled, 1))


@triton.jit
def sharers_of(tiles, blocks, most, several, num_programs, S: tl.constexpr):
    """How many programs could have even shares; 0 where blocks are not for that, or are enough for all programs.

    Where memory decides, the KV heads of a block had better be read side by side than evenly by all.  Blocks of one
    sequence read the same keys, and find them in L2 where they do it at the same time: so where sequences have several,
    each block of all KV heads gets as many programs.  Then all must be equally long.
    """
    each = (num_programs.to(tl.float32) / tl.maximum(blocks, 1) + QUOTIENT_TOLERANCE).to(tl.int32)
    number = tl.where(several == 1, num_programs, each * blocks)
    fits = (several == 1) | (tiles == blocks * most)
    fits &= several * S.BLOCK_Q * MIN_KEYS_PER_QUERY <= most * S.TILE
    fits &= blocks * S.KV_HEADS < num_programs
    fits &= tiles * 1.0 * S.KV_HEADS * num_programs < 2147483648.0  # as schedule.even_share multiplies
    return tl.where(fits, number, 0)


@triton.jit
def piece_size(batch, lane, num_programs, mods, PIECES: tl.constexpr, S: tl.constexpr, ALIKE: tl.constexpr = False):
    """PieceSizes, of up to PIECES for a program.  lane [SCAN] counts from 0.  ALIKE: by one rule, first ones or last.

    The blocks that are left behind whole rounds are taken to be as long as the others.
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
    each = (most / size + (0.5 + QUOTIENT_TOLERANCE)).to(tl.int32).to(tl.float32)  # of the longest
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
