"""Which program does what: blocks of queries, the keys they may see, even shares of all that work.

Work is counted in tiles.  A sequence has cdiv(query_len, BLOCK_Q) blocks, each as many tiles as the whole sequence's
queries see; laid end to end, sequence by sequence, they are one line of units.  With Shape.WHOLE, where all are about
as long, each gets the same room, and shares begin with blocks or cut all alike.
"""

import triton
import triton.language as tl

from .records import Block, RowTile, Share, Span

# Tiles by which shares that begin with blocks may be larger than even ones: shares of one block each, and others.
EXTRA_TILES_OF_ONE_BLOCK, EXTRA_TILES_OF_SEVERAL = tl.constexpr(4), tl.constexpr(2)
# Eighths of an even share by which they may be larger where a sequence has several blocks: shares of these that begin
# alike read its keys in step, and all but the first find them in L2.
EXTRA_EIGHTHS_IN_STEP = tl.constexpr(3)


@triton.jit
def unflatten(S: tl.constexpr):
    """(block or share, KV head) of this program.

    The heads of a token lie in one page, so where memory decides they run side by side; where arithmetic decides, the
    blocks of one head do, since they share its keys.
    """
    pid = tl.program_id(0)
    if S.ONE_BLOCK or S.SPLIT:
        return pid // S.KV_HEADS, pid % S.KV_HEADS
    else:
        num_blocks = tl.num_programs(0) // S.KV_HEADS
        return pid % num_blocks, pid // num_blocks


# ---- one block a program -------------------------------------------------------------------------


@triton.jit
def load_int(ptr, mask=None):
    """Numbers of the batch, int32 whatever the tensor holds: registers and schedules count in 32 bits."""
    if mask is None:
        return tl.load(ptr).to(tl.int32)
    else:
        return tl.load(ptr, mask=mask, other=0).to(tl.int32)


@triton.jit
def last_at_most(query_starts, num_seqs, value, BLOCK_Q: tl.constexpr):
    """Last sequence i with query_starts[i] // BLOCK_Q + i <= value, by bisection."""
    left = 0
    right = num_seqs
    while left < right:
        middle = (left + right) // 2
        if load_int(query_starts + middle) // BLOCK_Q + middle <= value:
            left = middle + 1
        else:
            right = middle
    return left - 1


@triton.jit
def block_of(batch, seq, index, S: tl.constexpr):
    """Block number index of a sequence; query_len is 0 where there is none or it belongs to another launch."""
    if batch.query_starts is None:
        return Block(seq, seq, 1, load_int(batch.seq_lens + seq), 0)
    else:
        first_token = load_int(batch.query_starts + seq)
        query_len = load_int(batch.query_starts + seq + 1) - first_token
        num_blocks = tl.cdiv(query_len, S.BLOCK_Q)
        served = (query_len >= batch.shortest) & (query_len <= batch.longest) & (index < num_blocks)
        # the last block of a causal sequence sees the most keys: it goes first
        first = (num_blocks - 1 - index) * S.BLOCK_Q
        return Block(seq, first_token, tl.where(served, query_len, 0), load_int(batch.seq_lens + seq), first)


@triton.jit
def find_block(batch, block, S: tl.constexpr):
    """The block that a number means when every sequence counts."""
    if S.ONE_BLOCK:
        return block_of(batch, block, 0, S)
    else:
        # sequence i has at most cdiv(query_len, BLOCK_Q) blocks from query_starts[i] // BLOCK_Q + i on
        seq = last_at_most(batch.query_starts, batch.num_seqs, block, S.BLOCK_Q)
        return block_of(batch, seq, block - (load_int(batch.query_starts + seq) // S.BLOCK_Q + seq), S)


# ---- the page table ------------------------------------------------------------------------------


@triton.jit
def pages_of(batch, seq):
    """Where a sequence's page ids begin."""
    if batch.page_starts is None:
        return batch.page_table + tl.cast(seq, tl.int64) * batch.page_table_stride
    else:
        first = tl.load(batch.page_starts.starts + tl.cast(seq, tl.int64) * batch.page_starts.stride)
        return batch.page_table + tl.cast(first, tl.int64) * batch.page_starts.step


@triton.jit
def page_at(pages, column, page_starts):
    """Where the id of a sequence's page of this number lies, or ids of some pages."""
    if page_starts is None:
        return pages + column
    else:
        return pages + tl.cast(column, tl.int64) * page_starts.step


# ---- even shares of all blocks -------------------------------------------------------------------


@triton.jit
def work(batch, seq, inside, mods, S: tl.constexpr):
    """(blocks, tiles of each) of one or [N] sequences; no blocks where not inside or where another launch serves."""
    seq_len = load_int(batch.seq_lens + seq, inside)
    if batch.query_starts is None:
        query_len = tl.where(inside, 1, 0)
    else:
        query_len = load_int(batch.query_starts + seq + 1, inside)
        query_len -= load_int(batch.query_starts + seq, inside)
    served = (query_len >= tl.maximum(batch.shortest, 1)) & (query_len <= batch.longest)
    context_len = seq_len - query_len
    tiles = tiles_before(seq_len, context_len, S)
    if mods.prefix_lens is not None and mods.left is not None:
        head, resume = line_around_gap(seq, inside, seq_len, context_len, mods, S)
        tiles -= resume - head
    else:
        tiles -= first_tile(seq, inside, context_len, mods, S)
    blocks = tl.cdiv(query_len, S.BLOCK_Q)
    # a sequence that sees nothing still has its zeros to write
    return tl.where(served, blocks, 0), tl.maximum(tiles, 1)


@triton.jit
def room_of(batch, share, seq, mods, S: tl.constexpr):
    """(blocks of a sequence, units that each has on the line)."""
    blocks, tiles = work(batch, seq, True, mods, S)
    return blocks, tl.maximum(tiles, share.tiles)


@triton.jit
def first_tile(seq, inside, context_len, mods, S: tl.constexpr):
    """The first tile that a sequence's queries, which begin at position context_len, may see; of one or of [N]."""
    if mods.left is None:
        return 0
    else:
        first = first_key_of(context_len, mods)
        if mods.spans is not None:
            begin, _ = span_around(context_len, seq, inside, mods)
            first = before_window(first, begin, mods)
        return tile_of(first, context_len, S)


# A prefix that stays visible behind a window leaves a gap, of keys that nobody sees: a sequence's line has the tiles of
# the prefix and then, whatever lies between, those from the window of its first query on.


@triton.jit
def prefix_of(seq, inside, seq_len, mods):
    """Keys of a sequence, of one or of [N], that all of its queries see."""
    return tl.minimum(load_int(mods.prefix_lens + seq, inside), seq_len)


@triton.jit
def line_around_gap(seq, inside, seq_len, context_len, mods, S: tl.constexpr):
    """(tiles of the prefix, with which a sequence's line begins, the tile with which it goes on).

    Pieces of a fixed size are told by their place: their line has the gap's tiles, too, which find nothing to do.
    """
    prefix = prefix_of(seq, inside, seq_len, mods)
    resume = first_tile(seq, inside, context_len, mods, S)
    if S.PIECE is None:
        head = tl.cdiv(tl.maximum(prefix, 0), S.TILE)
        return head, tl.maximum(resume, head)
    else:
        return resume * 0, tl.where(prefix > 0, 0, resume)


@triton.jit
def place_on_line(unit, block, mods, S: tl.constexpr):
    """The tile that a unit of a block's line is, where there may be a gap."""
    context_len = block.seq_len - block.query_len
    head, resume = line_around_gap(block.seq, None, block.seq_len, context_len, mods, S)
    return unit + tl.where(unit < head, 0, resume - head)


@triton.jit
def units_of(batch, seq, mods, S: tl.constexpr):
    """Units of each of some sequences [N], 0 past the last."""
    blocks, tiles = work(batch, seq, seq < batch.num_seqs, mods, S)
    return blocks * tiles


@triton.jit
def total_work(batch, lane, mods, S: tl.constexpr):
    """Units of the whole batch; lane [SCAN] counts from 0."""
    total = 0
    for first in range(0, batch.num_seqs, S.SCAN):
        total += tl.sum(units_of(batch, first + lane, mods, S), 0)
    return total


@triton.jit
def passed_by(ends, unit):
    """(sequences that end before a unit, units of theirs)."""
    return tl.sum((ends <= unit).to(tl.int32), 0), tl.max(tl.where(ends <= unit, ends, 0), 0)


@triton.jit
def find_work(batch, unit, lane, mods, S: tl.constexpr):
    """(sequence that holds a unit, units before that sequence)."""
    found = 0
    before = 0
    last = 0
    for first in range(0, batch.num_seqs, S.SCAN):
        ends = last + tl.cumsum(units_of(batch, first + lane, mods, S), 0)
        sequences, units = passed_by(ends, unit)
        found += sequences
        before = tl.maximum(before, units)
        last = tl.max(ends, 0)
    return found, before


@triton.jit
def find_share(batch, first, index, num_shares, lane, mods, S: tl.constexpr):
    """(a share, the sequence that holds its first unit, units before that sequence).

    first: work of the first SCAN sequences, read ahead where these are all.
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
        share = even_share(batch, index, num_shares, total_work(batch, lane, mods, S))
        seq, before = find_work(batch, share.begin, lane, mods, S)
    return share, seq, before


@triton.jit
def whole_share(batch, blocks, tiles, index, num_shares):
    """A share that begins with a block, or with an equal part of one, if these are not much larger than even ones."""
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
    """(size of shares that begin with blocks, room for each block), in tiles; 0 where even ones are that much smaller.

    A share has so many blocks, or an equal part of one.  To join pieces, and to begin a second block, takes as long as
    some tiles, and even shares of blocks of one length have more of both.
    """
    count = tl.sum(blocks, 0)
    longest = tl.max(tl.where(blocks > 0, tiles, 0), 0)
    even = tl.maximum(tl.cdiv(total, num_shares), least)
    parts = num_shares // tl.maximum(count, 1)  # of each block
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
    """Of total units so many as all others, none fewer than batch.least; the first `extra` shares have one more."""
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
    """The number of the share that holds a unit."""
    larger = unit < share.extra * (share.size + 1)
    # one division, which is 350 bytes of machine code
    return (unit - tl.where(larger, 0, share.extra)) // (share.size + tl.where(larger, 1, 0))


@triton.jit
def pieces_of(first, tile, count, S: tl.constexpr):
    """Pieces [begin, end) that begin in `count` tiles from `tile` on of a block whose keys begin in tile `first`."""
    PIECE: tl.constexpr = S.PIECE // S.TILE
    begin = tl.where(tile == 0, first // PIECE, tl.cdiv(first + tile, PIECE))
    return begin, tl.cdiv(first + tile + count, PIECE)


# ---- tiles and positions -------------------------------------------------------------------------

# Where new keys are APART a sequence's tiles are two runs: of the cache, and of the call's own keys.  The cache ends
# somewhere in the last tile of the first run, and new keys begin with the next: what is left of that tile is the gap.


@triton.jit
def in_cache(tile, context_len, S: tl.constexpr):
    """Whether a tile is of the first run."""
    return tile * S.TILE < context_len


@triton.jit
def gap(context_len, S: tl.constexpr):
    """Slots between the last key of the cache and the first new one; fewer keys than queries are a negative context."""
    cached = tl.maximum(context_len, 0)
    return tl.cdiv(cached, S.TILE) * S.TILE - cached


@triton.jit
def tile_of(pos, context_len, S: tl.constexpr):
    """The tile that holds a position."""
    if S.APART:
        pos += tl.where(pos >= context_len, gap(context_len, S), 0)
    return pos // S.TILE


@triton.jit
def tiles_before(end, context_len, S: tl.constexpr):
    """Tiles of the positions before `end`."""
    if S.APART:
        end += tl.where(end > context_len, gap(context_len, S), 0)
    return tl.cdiv(end, S.TILE)


@triton.jit
def gap_before(tile, context_len, S: tl.constexpr):
    """Slots of earlier tiles that hold no key: slot i of this one is position tile * TILE + i, less these."""
    if S.APART:
        return tl.where(in_cache(tile, context_len, S), 0, gap(context_len, S))
    else:
        return 0


@triton.jit
def end_in(tile, end, context_len, S: tl.constexpr):
    """`end`, or the cache's where a tile's keys end with it."""
    if S.APART:
        return tl.where(in_cache(tile, context_len, S), tl.minimum(end, context_len), end)
    else:
        return end


# ---- what a block sees ---------------------------------------------------------------------------

# A row sees the keys between two bounds, and neither moves back from a row to the next: those of a block are those of
# its first row and its last.


@triton.jit
def chunk_of(pos, mods):
    """The number of the chunk that holds a position; before key 0, where queries of too few keys stand, below 0."""
    return tl.where(pos < 0, pos + 1 - mods.chunk, pos) // mods.chunk


@triton.jit
def first_key_of(pos, mods):
    """The first key that a query at pos sees, where there is a bound to the left."""
    first = pos - mods.left
    if mods.chunk is not None:
        first = tl.maximum(first, chunk_of(pos, mods) * mods.chunk)
    return tl.maximum(first, 0)


@triton.jit
def span_around(slot, seq, inside, mods):
    """[begin, end) of the spans of a sequence that hold a slot; the slot alone where none does."""
    begin, end = slot, slot + 1
    for i in range(mods.spans_count):
        at = mods.spans + tl.cast(seq, tl.int64) * mods.spans_stride + i * mods.spans_step
        first, past = load_int(at, inside), load_int(at + 1, inside)
        holds = (first <= slot) & (slot < past)
        begin = tl.where(holds, tl.minimum(begin, first), begin)
        end = tl.where(holds, tl.maximum(end, past), end)
    return begin, end


@triton.jit
def before_window(first, begin, mods):
    """`first`, or where a span begins if that is before, and the window does not clip it."""
    if mods.CLIP_SPANS is None:
        first = tl.maximum(tl.minimum(first, begin), 0)
    return first


@triton.jit
def behind_query(end, past, slot, seq_len, mods):
    """`end`, or where a span does if that is behind, as far as the window does not clip it."""
    if mods.spans_right is not None:
        past = tl.minimum(past, slot + mods.spans_right + 1)
    if mods.CLIP_SPANS is not None:
        past = within_chunk(past, slot, mods)
    return tl.maximum(end, tl.minimum(past, seq_len))


@triton.jit
def right_of(seq, mods):
    """How many slots behind its own a query of a sequence sees, where there is a bound."""
    if mods.causal is None:
        return mods.right
    else:
        return tl.where(tl.load(mods.causal + seq).to(tl.int32) > 0, 0, mods.right)


@triton.jit
def within_chunk(end, pos, mods):
    """`end`, but no later than that of a position's chunk; where positions are no slots, `cut_own` looks for it."""
    if mods.chunk is not None and mods.query_positions is None:
        end = tl.minimum(end, (chunk_of(pos, mods) + 1) * mods.chunk)
    return end


@triton.jit
def row_tile(block, kv_head, row, mods, TOKENS: tl.constexpr, S: tl.constexpr, BLIND: tl.constexpr = True):
    """Rows [R] of up to TOKENS tokens from block.first on: token-major, the group's heads side by side.

    Those that are not valid see nothing or, if not BLIND, what rows behind the last would: Hopper's blocks weigh a row
    that has seen nothing in its first tile twice in the next.
    """
    index = row // S.GROUP
    valid = (block.first + index < block.query_len) & (row < TOKENS * S.GROUP)
    context_len = block.seq_len - block.query_len
    slot = context_len + block.first + index
    pos = slot
    if mods.query_positions is not None:
        own = tl.load(mods.query_positions + block.first_token + block.first + index, mask=valid, other=0)
        pos = tl.where(valid, own.to(tl.int32), slot)
    first_key = slot * 0
    last_key = first_key + (block.seq_len - 1)
    if mods.left is not None:
        first_key = first_key_of(pos, mods)
    if mods.right is not None:
        last_key = tl.minimum(slot + right_of(block.seq, mods), last_key)
    if mods.chunk is not None:
        last_key = within_chunk(last_key + 1, pos, mods) - 1
    span_begin, span_end = None, None
    if mods.spans is not None:
        span_begin, span_end = span_around(slot, block.seq, None, mods)
        first_key = before_window(first_key, span_begin, mods)
        last_key = behind_query(last_key + 1, span_end, slot, block.seq_len, mods) - 1
    prefix = None
    if mods.prefix_lens is not None:
        prefix = prefix_of(block.seq, None, block.seq_len, mods)
        if mods.left is None:
            last_key = tl.maximum(last_key, prefix - 1)
    if BLIND:
        last_key = tl.where(valid, last_key, -1)
    token = tl.cast(block.first_token + block.first, tl.int64)
    return RowTile(
        token, kv_head, index, row % S.GROUP, slot, pos, first_key, last_key, valid, context_len, block.first_token,
        block.query_len, span_begin, span_end, prefix, block.seq,
    )  # fmt: skip


@triton.jit
def first_seen(rows):
    """The first key that each row sees [R]."""
    if rows.prefix is None:
        return rows.first_key
    else:
        return tl.where(rows.prefix > 0, 0, rows.first_key)


@triton.jit
def visible_range(block, mods, TOKENS: tl.constexpr):
    """Which keys up to TOKENS queries from block.first on see, bounded by the sequence.

    A position of its own is at least context_len and at most its slot: what some row may see begins by the former, what
    every row sees by the latter.
    """
    context_len = block.seq_len - block.query_len
    first_pos = context_len + block.first
    last_pos = context_len + tl.minimum(block.first + TOKENS, block.query_len) - 1
    lo = 0
    full_lo = 0
    hi = block.seq_len
    full_hi = block.seq_len
    if mods.left is not None:
        if mods.query_positions is None:
            lo = first_key_of(first_pos, mods)
        else:
            lo = first_key_of(context_len, mods)
        full_lo = first_key_of(last_pos, mods)
    if mods.right is not None:
        right = right_of(block.seq, mods)
        hi = tl.minimum(last_pos + right + 1, hi)
        full_hi = tl.minimum(first_pos + right + 1, full_hi)
    hi = within_chunk(hi, last_pos, mods)
    full_hi = within_chunk(full_hi, first_pos, mods)
    if mods.spans is not None:
        begin, end = span_around(first_pos, block.seq, None, mods)
        lo = before_window(lo, begin, mods)
        full_hi = behind_query(full_hi, end, first_pos, block.seq_len, mods)
        begin, end = span_around(last_pos, block.seq, None, mods)
        full_lo = before_window(full_lo, begin, mods)
        hi = behind_query(hi, end, last_pos, block.seq_len, mods)
    prefix, resume = None, None
    if mods.prefix_lens is not None:
        prefix = prefix_of(block.seq, None, block.seq_len, mods)
        hi = tl.maximum(hi, prefix)
        if mods.left is None:
            full_hi = tl.maximum(full_hi, prefix)
            prefix = None
        else:
            resume = lo
            lo = tl.where(prefix > 0, 0, lo)
            full_hi = tl.where(prefix >= full_lo, tl.maximum(full_hi, prefix), full_hi)
            full_lo = tl.where(prefix >= full_lo, 0, full_lo)
    return Span(lo, hi, full_lo, full_hi, prefix, resume)
