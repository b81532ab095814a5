"""The static tile scheduler: even shares of all tiles that a batch's blocks see.

Work is counted in units of one tile.  A sequence has cdiv(query_len, BLOCK_Q) blocks.  Each block has one unit for
every tile that some query of its sequence sees.  Blocks laid end to end, sequence by sequence, are the line of units.
With Shape.WHOLE, if blocks are about equally long, each block gets equally many units, and shares begin with blocks or
with equal parts of blocks.

KV heads have equal lines and equally many programs, unless windows differ by head.  Then each KV head has a line of the
tiles that its heads see and, with Shape.BY_HEAD, programs in proportion (`head_programs.py`).  If one line serves all
KV heads, as for items from a counter, the line has the tiles that any head may see (kv_head None).
"""

import triton
import triton.language as tl

from .blocking import tile_of, tiles_before
from .bounds import LEFT, before_window, first_key_of, prefix_of, side_of_block, span_around
from .numerics import load_int
from .records import Share, Walk
from .shards import own_before

# With Shape.WHOLE, a share may have this many tiles more than an even share.  The first number is for shares of one
# block.  The second is for shares of several blocks, and for blocks of several shares.
EXTRA_TILES_OF_ONE_BLOCK, EXTRA_TILES_OF_SEVERAL = tl.constexpr(4), tl.constexpr(2)
# If a sequence has several blocks, and no share has more than one block, shares of the same part of different blocks
# read the same keys.  They read at the same time, so mostly from L2.  Shares may then exceed even shares by this many
# eighths of an even share, if that is more than the tiles above.
EXTRA_EIGHTHS_IN_STEP = tl.constexpr(3)
QUOTIENT_TOLERANCE = tl.constexpr(1e-3)  # upper bound of the error of a quotient of whole numbers in float32


@triton.jit
def unflatten(S: tl.constexpr):
    """(block or share, KV head) of this program.

    With ONE_BLOCK or SPLIT, memory mostly bounds the launch, and neighbouring programs have the KV heads of one block,
    whose keys lie in the same pages.  Otherwise, arithmetic bounds the launch, and neighbouring programs have the
    blocks of one KV head, which read the same keys.
    """
    pid = tl.program_id(0)
    if S.ONE_BLOCK or S.SPLIT:
        return pid // S.KV_HEADS, pid % S.KV_HEADS
    else:
        num_blocks = tl.num_programs(0) // S.KV_HEADS
        return pid % num_blocks, pid // num_blocks


@triton.jit
def work(batch, seq, inside, mods, S: tl.constexpr, kv_head=None):
    """(blocks, tiles of each block) of one or [N] sequences.

    A sequence that is not `inside`, or that another launch serves, has 0 blocks.
    """
    seq_len = load_int(batch.seq_lens + seq, inside)
    if batch.query_starts is None:
        query_len = tl.where(inside, 1, 0)
    else:
        query_len = load_int(batch.query_starts + seq + 1, inside)
        query_len -= load_int(batch.query_starts + seq, inside)
    served = (query_len >= tl.maximum(batch.shortest, 1)) & (query_len <= batch.longest)
    context_len = seq_len - query_len
    tiles = tiles_before(own_before(seq_len, mods, S), context_len, S)
    if mods.prefix_lens is not None and mods.left is not None:
        head, resume = line_around_gap(seq, inside, seq_len, context_len, mods, S, kv_head)
        tiles -= resume - head
    else:
        tiles -= first_tile(seq, inside, context_len, mods, S, kv_head)
    blocks = tl.cdiv(query_len, S.BLOCK_Q)
    # a sequence that sees nothing still has to write zeros
    return tl.where(served, blocks, 0), tl.maximum(tiles, 1)


@triton.jit
def room_of(batch, share, walk, mods, S: tl.constexpr):
    """(number of blocks of walk.seq, units of each block on the line)."""
    blocks, tiles = work(batch, walk.seq, True, mods, S, walk.kv_head)
    return blocks, tl.maximum(tiles, share.tiles)


# PTX has a label where the operations of a called function begin, and one where they end.  ptxas may order instructions
# differently at a label.  The next two functions compute nothing, so calls of them leave no labels: callers do the
# additions.


@triton.jit
def next_seq(walk, seq, before):
    """Return the walk at `seq`, the sequence behind walk.seq; before: number of units of the sequences before `seq`."""
    return Walk(walk.unit, seq, before, walk.kv_head)


@triton.jit
def next_unit(walk, unit):
    """Return the walk at `unit`, the unit behind the item that begins at walk.unit."""
    return Walk(unit, walk.seq, walk.before, walk.kv_head)


@triton.jit
def first_tile(seq, inside, context_len, mods, S: tl.constexpr, kv_head=None):
    """First tile, inclusive, that a sequence's queries, from position context_len on, may see; one sequence or [N]."""
    if mods.left is None:
        return 0
    else:
        _, left = side_of_block(mods.left, kv_head, LEFT, mods, S)
        first = first_key_of(context_len, left, mods)
        if mods.spans is not None:
            begin, _ = span_around(context_len, seq, inside, mods)
            first = before_window(first, begin, mods)
        return tile_of(own_before(first, mods, S), context_len, S)


# A prefix that stays visible outside a window leaves a gap of keys that no query sees.  A sequence's line has the tiles
# of the prefix, and then the tiles from the window of its first query on.


@triton.jit
def line_around_gap(seq, inside, seq_len, context_len, mods, S: tl.constexpr, kv_head=None):
    """(number of tiles of the prefix, which come first on a sequence's line; tile with which the line continues).

    With pieces of a fixed size the line has the tiles of the gap, too, because a piece's number follows from the
    positions of its keys.  These tiles do no work.
    """
    prefix = own_before(prefix_of(seq, inside, seq_len, mods), mods, S)
    resume = first_tile(seq, inside, context_len, mods, S, kv_head)
    if S.PIECE is None:
        head = tl.cdiv(tl.maximum(prefix, 0), S.TILE)
        return head, tl.maximum(resume, head)
    else:
        return resume * 0, tl.where(prefix > 0, 0, resume)


@triton.jit
def place_on_line(unit, block, mods, S: tl.constexpr):
    """Tile at unit `unit` of a block's line, which may leave out a gap."""
    context_len = block.seq_len - block.query_len
    head, resume = line_around_gap(block.seq, None, block.seq_len, context_len, mods, S, block.kv_head)
    return unit + tl.where(unit < head, 0, resume - head)


@triton.jit
def units_of(batch, seq, mods, S: tl.constexpr, kv_head=None):
    """Units of each of the sequences seq [N]; 0 behind the last sequence."""
    blocks, tiles = work(batch, seq, seq < batch.num_seqs, mods, S, kv_head)
    return blocks * tiles


@triton.jit
def total_work(batch, lane, mods, S: tl.constexpr, kv_head=None):
    """Units of the whole batch; lane: [SCAN], 0 ... SCAN - 1."""
    total = 0
    for first in range(0, batch.num_seqs, S.SCAN):
        total += tl.sum(units_of(batch, first + lane, mods, S, kv_head), 0)
    return total


@triton.jit
def passed_by(ends, unit):
    """(number of sequences that end at or before `unit`, units of these); ends [N]: end of each sequence, exclusive."""
    return tl.sum((ends <= unit).to(tl.int32), 0), tl.max(tl.where(ends <= unit, ends, 0), 0)


@triton.jit
def find_work(batch, unit, lane, mods, S: tl.constexpr, kv_head=None):
    """(sequence that holds a unit, units before that sequence)."""
    found = 0
    before = 0
    last = 0
    for first in range(0, batch.num_seqs, S.SCAN):
        ends = last + tl.cumsum(units_of(batch, first + lane, mods, S, kv_head), 0)
        sequences, units = passed_by(ends, unit)
        found += sequences
        before = tl.maximum(before, units)
        last = tl.max(ends, 0)
    return found, before


@triton.jit
def find_share(batch, first, index, num_shares, lane, mods, S: tl.constexpr, kv_head=None):
    """(Share `index`, the sequence that holds its first unit, units before that sequence).

    first: `work` of the first SCAN sequences, used with ONE_SCAN.
    """
    if S.ONE_SCAN:
        blocks, tiles = first
        if S.WHOLE:
            share = whole_share(batch, blocks, tiles, index, num_shares)
            ends = tl.cumsum(blocks * tl.maximum(tiles, share.tiles), 0)
        else:
            ends = tl.cumsum(blocks * tiles, 0)
            share = even_share(batch, index, num_shares, tl.max(ends, 0))
        seq, before = passed_by(ends, share.begin)
    else:
        share = even_share(batch, index, num_shares, total_work(batch, lane, mods, S, kv_head))
        seq, before = find_work(batch, share.begin, lane, mods, S, kv_head)
    return share, seq, before


@triton.jit
def whole_share(batch, blocks, tiles, index, num_shares):
    """Share that begins with a block or an equal part of one; an even share if `whole_size` finds these too large."""
    total = tl.sum(blocks * tiles, 0)
    size, room = whole_size(blocks, tiles, total, num_shares, batch.least)
    if size > 0:
        end = tl.sum(blocks, 0) * room
        share = Share(index, index * size, tl.minimum(index * size + size, end), size, 0, room)
    else:
        share = even_share(batch, index, num_shares, total)
    return share


@triton.jit
def whole_size(blocks, tiles, total, num_shares, least):
    """(size of shares of whole blocks or of equal parts of a block, units of each block), in tiles; size 0: too large.

    Joining pieces takes as long as a few tiles, and so does beginning a second block in a share.  Even shares do both
    more often, so shares of this kind may be somewhat larger than even shares.

    least: fewest tiles of a share.
    """
    count = tl.sum(blocks, 0)
    longest = tl.max(tl.where(blocks > 0, tiles, 0), 0)
    even = tl.maximum(tl.cdiv(total, num_shares), least)
    parts = num_shares // tl.maximum(count, 1)  # shares for each block
    if parts > 1:
        size = tl.maximum(tl.cdiv(longest, parts), least)
        room = tl.cdiv(longest, size) * size
    else:
        size = tl.cdiv(count, num_shares) * longest
        room = longest
    later = tl.where(parts == 1, EXTRA_TILES_OF_ONE_BLOCK, EXTRA_TILES_OF_SEVERAL)
    if (parts >= 1) & (tl.max(blocks, 0) > 1):
        later = tl.maximum(later, even * EXTRA_EIGHTHS_IN_STEP // 8)
    return tl.where(size <= even + later, size, 0), room


@triton.jit
def even_share(batch, share, num_shares, total):
    """An even share of `total` units, at least batch.least; the first `extra` shares have one unit more."""
    size = total // num_shares
    extra = total - size * num_shares
    if size < batch.least:
        size = batch.least
        extra = 0
    begin = share * size + tl.minimum(share, extra)
    end = tl.minimum(begin + size + tl.where(share < extra, 1, 0), total)
    return Share(share, begin, end, size, extra, 0)


@triton.jit
def share_of(unit, share):
    """Number of the share that holds a unit."""
    larger = unit < share.extra * (share.size + 1)
    # only one division, because a division takes 350 bytes of machine code
    return (unit - tl.where(larger, 0, share.extra)) // (share.size + tl.where(larger, 1, 0))


# If KV heads are cut alike (`ahead` is None), scratch holds share 0 of all KV heads, then share 1 of all, and so on.
# With Shape.BY_HEAD, the shares of one KV head follow each other, and `ahead` is the number of shares of all earlier KV
# heads.


@triton.jit
def place_of(share, kv_head, ahead, S: tl.constexpr):
    """Number of a KV head's share among the shares of all KV heads."""
    if ahead is None:
        return share * S.KV_HEADS + kv_head
    else:
        return ahead + share


@triton.jit
def slot_of(share, slots, slot, kv_head, ahead, S: tl.constexpr):
    """Number of slot `slot` of a KV head's share among all slots; slots: number of slots of a share."""
    if ahead is None:
        return (slots * share + slot) * S.KV_HEADS + kv_head
    else:
        return slots * (ahead + share) + slot


@triton.constexpr_function
def slots_between(kv_heads, alike):
    """Slots from one slot of a KV head's share to the next; alike: KV heads are cut alike."""
    return kv_heads if alike else 1


@triton.jit
def pieces_of(first, tile, count, S: tl.constexpr):
    """Pieces [begin, end) that begin in tiles [first + tile, first + tile + count); first: the block's first tile.

    If `tile` is 0, the piece that holds the block's first tile counts, too, even if the piece begins before that tile.
    """
    PIECE: tl.constexpr = S.PIECE // S.TILE
    begin = tl.where(tile == 0, first // PIECE, tl.cdiv(first + tile, PIECE))
    return begin, tl.cdiv(first + tile + count, PIECE)
