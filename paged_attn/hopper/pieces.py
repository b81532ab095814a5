"""Into how many pieces the keys of long blocks are cut: none, unless all programs would be done earlier.

Plain Triton, for the interpreter's sake.
"""

import triton
import triton.language as tl

from ..kernels.schedule import work

# Keys whose tiles would take as long as what a piece costs beside its own: its state is written, read and joined.
CUT_KEYS = tl.constexpr(1280)
MOST = tl.constexpr(8)  # pieces of the longest block; more where blocks are so few that even these leave programs idle
JOIN_KEYS = tl.constexpr(64)  # as CUT_KEYS: one program joins all pieces of a block, which counts where they are more
# Numbers of these that are tried: for an item for a quarter of the programs, for half of them, one each, two each.
DOUBLED = tl.constexpr(4)
SURE = tl.constexpr(1e-3)  # a quotient that is a whole number may be found a little smaller


@triton.jit
def survey(batch, lane, mods, S: tl.constexpr):
    """(tiles, blocks of all sequences, both of all KV heads; the most tiles of a block)."""
    total = 0
    blocks = 0
    most = 1
    for first in range(0, batch.num_seqs, S.SCAN):
        seq = first + lane
        count, tiles = work(batch, seq, seq < batch.num_seqs, mods, S)
        total += tl.sum(count * tiles, 0)
        blocks += tl.sum(count, 0)
        most = tl.maximum(most, tl.max(tl.where(count > 0, tiles, 0), 0))
    return total * 1.0 * S.KV_HEADS, blocks * 1.0 * S.KV_HEADS, most * 1.0


@triton.jit
def time_of(size, items, total, cut, programs):
    """Tiles that a program sees pass while all work through items of up to `size`, each at the cost of `cut` more.

    No more than rounds of the largest, and no more than an even share and one item.
    """
    rounds = tl.ceil(items / programs) * (size + cut)
    return tl.minimum(rounds, total / programs * (1 + cut / tl.maximum(size, 1.0)) + size + cut)


@triton.jit
def piece_size(batch, lane, num_programs, mods, PIECES: tl.constexpr, S: tl.constexpr):
    """Tiles of a piece, about, so that there are up to PIECES a program; as many as the longest block has: none is cut.

    lane [SCAN] counts from 0.
    """
    total, blocks, most = survey(batch, lane, mods, S)
    programs = num_programs.to(tl.float32)
    least = tl.maximum(batch.least.to(tl.float32), tl.ceil(total / (num_programs * PIECES)))
    cut: tl.constexpr = 1.0 * CUT_KEYS / S.TILE
    join: tl.constexpr = 1.0 * JOIN_KEYS / S.TILE
    best = most
    time = time_of(most, blocks, total, 0.0, programs)
    filling = programs * most / tl.maximum(total, 1.0) * 0.125
    for i in range(2, MOST + 1 + DOUBLED):
        pieces = i + 0
        if i > MOST:
            filling *= 2
            pieces = tl.maximum((filling + SURE).to(tl.int32), 1)
        size = tl.maximum(tl.cdiv(most.to(tl.int32), pieces).to(tl.float32), least)
        other = time_of(size, tl.maximum(blocks, total / size), total, cut, programs)
        other += join * tl.maximum(most / size - MOST, 0.0)
        better = (other < time) & (size < most)
        best = tl.where(better, size, best)
        time = tl.where(better, other, time)
    return best.to(tl.int32)
