"""Bounds of the keys that one row, and the rows of a block, see: causal, windows, chunks, spans and prefixes.

A row sees the keys between two bounds and, if prefixes are given, its sequence's prefix.  As long as positions are
places, neither bound moves back from one token to the next.  A block's bounds therefore follow from its first and last
token, and from the heads that see the fewest and the most keys.  Masks between the bounds are in scores.py.

Bounds are computed as positions.  For a shard, the results are then converted to numbers of the rank's own keys.

With windows by query head, head_windows has the bounds.  The modifier `left` only says that left bounds exist.  The
modifier `right` limits all heads, and with BY_HEAD_TO_THE_RIGHT heads may have smaller right bounds.
"""

import triton
import triton.language as tl

from .numerics import load_clamped, load_int
from .records import RowTile, Span
from .shards import own_before

LEFT, RIGHT = tl.constexpr(0), tl.constexpr(1)
# Farther than any key; a position plus this number still fits 32 bits.  Equal to `ways.FAR`.
FAR_KEYS = tl.constexpr(1 << 30)


@triton.jit
def load_side(head, SIDE: tl.constexpr, mods):
    """Number of keys that a query head sees to SIDE, uint32; -1 (all keys) becomes 2^32 - 1.  head: a scalar or [N]."""
    if mods.head_windows_stride is None:
        at = mods.head_windows + (2 * head + SIDE)
    else:
        at = mods.head_windows + tl.cast(head, tl.int64) * mods.head_windows_stride + SIDE
    return load_int(at).to(tl.uint32, bitcast=True)


@triton.jit
def bounded(keys):
    """A uint32 number of keys as int32, at most FAR_KEYS."""
    return tl.minimum(keys, FAR_KEYS).to(tl.int32, bitcast=True)


@triton.jit
def side_of_rows(number, kv_head, member, SIDE: tl.constexpr, mods, S: tl.constexpr):
    """Number of keys that rows see to SIDE: `number`; with windows by head, [R], the number of each row's head."""
    if mods.head_windows is None:
        return number
    else:
        return bounded(load_side(kv_head * S.GROUP + member, SIDE, mods))


@triton.jit
def side_of_block(number, kv_head, SIDE: tl.constexpr, mods, S: tl.constexpr):
    """(fewest, most) keys that the query heads of a KV head see to SIDE; kv_head None: bounds for any KV head."""
    if mods.head_windows is None:
        return number, number
    elif kv_head is None:
        return 0, FAR_KEYS
    else:
        least = load_side(kv_head * S.GROUP, SIDE, mods)
        most = least
        for i in range(1, S.GROUP):
            keys = load_side(kv_head * S.GROUP + i, SIDE, mods)
            least, most = tl.minimum(least, keys), tl.maximum(most, keys)
        return bounded(least), bounded(most)


@triton.jit
def chunk_of(pos, mods):
    """Number of the chunk that holds a position.

    If a sequence has more queries than keys, positions of its first queries, and so their chunks, are negative.
    """
    return tl.where(pos < 0, pos + 1 - mods.chunk, pos) // mods.chunk


@triton.jit
def first_key_of(pos, left, mods):
    """First key, inclusive, that a query at `pos` sees: pos - left, but not before its chunk's first key or 0."""
    first = pos - left
    if mods.chunk is not None:
        first = tl.maximum(first, chunk_of(pos, mods) * mods.chunk)
    return tl.maximum(first, 0)


@triton.jit
def span_around(slot, seq, inside, mods):
    """[begin, end) of the union of a sequence's spans that hold `slot`; [slot, slot + 1) if none does."""
    begin, end = slot, slot + 1
    for i in range(mods.spans_count):
        at = mods.spans + tl.cast(seq, tl.int64) * mods.spans_stride + i * mods.spans_step
        first, past = load_clamped(at, inside), load_clamped(at + 1, inside)
        holds = (first <= slot) & (slot < past)
        begin = tl.where(holds, tl.minimum(begin, first), begin)
        end = tl.where(holds, tl.maximum(end, past), end)
    return begin, end


@triton.jit
def before_window(first, begin, mods):
    """First key, inclusive, that a row sees: the lesser of `first` (its window's) and `begin` (its span's), at least 0.

    With CLIP_SPANS, a span shows no key before the window.
    """
    if mods.CLIP_SPANS is None:
        first = tl.maximum(tl.minimum(first, begin), 0)
    return first


@triton.jit
def behind_query(end, past, slot, seq_len, right, mods):
    """End, exclusive, of the keys that a row sees: the greater of `end` (without spans) and `past` (its span's end).

    The sequence's end limits `past`.  With CLIP_SPANS, the row's right window and its chunk limit `past`, too.
    """
    if mods.spans_right is not None:
        past = tl.minimum(past, slot + right + 1)
    if mods.CLIP_SPANS is not None:
        past = end_within(past, slot, mods)
    return tl.maximum(end, tl.minimum(past, seq_len))


@triton.jit
def right_of(seq, mods):
    """Number of places after its own that a query sees: `right`, or 0 in sequences that `causal` marks."""
    if mods.causal is None:
        return mods.right
    else:
        return tl.where(tl.load(mods.causal + seq).to(tl.int32) > 0, 0, mods.right)


@triton.jit
def end_within(end, pos, mods):
    """`end`, exclusive, limited to the end of the chunk of a query at `pos`.

    With query_positions there is no such limit, because `end` counts places.  Then `shows_position` masks the call's
    own keys.
    """
    if mods.chunk is not None and mods.query_positions is None:
        end = tl.minimum(end, (chunk_of(pos, mods) + 1) * mods.chunk)
    return end


@triton.jit
def shows_position(pos, row_pos, left, mods):
    """Whether queries at row_pos [R] see keys at pos [N], by `left` and the chunk: [R, N].

    Only for query_positions, by which the call's own keys have positions that may differ from their places.  Some of
    the keys may be cached; their positions are their places.
    """
    seen = pos[None, :] >= (row_pos - left)[:, None]
    if mods.chunk is not None:
        seen &= chunk_of(pos, mods)[None, :] == chunk_of(row_pos, mods)[:, None]
    return seen


@triton.jit
def prefix_of(seq, inside, seq_len, mods):
    """Length of the prefix that all queries of a sequence see, at least 0 and at most seq_len; one sequence or [N]."""
    return tl.maximum(tl.minimum(load_clamped(mods.prefix_lens + seq, inside), seq_len), 0)


@triton.jit
def row_tile(block, row, mods, TOKENS: tl.constexpr, S: tl.constexpr, BLIND: tl.constexpr = True):
    """RowTile of up to TOKENS query tokens from block.first on; row [R]: token * GROUP + head of the group.

    BLIND: rows without a query token see at most a prefix.  Without BLIND, they see what later tokens would see.
    Hopper's consumers whose products have queries as rows set BLIND to False.  Rows that see no key would have no
    maximum after the first tile, and then the next tile's weights would have to be computed twice.
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
        first_key = first_key_of(pos, side_of_rows(mods.left, block.kv_head, row % S.GROUP, LEFT, mods, S), mods)
    if mods.right is not None:
        right = right_of(block.seq, mods)
        if mods.BY_HEAD_TO_THE_RIGHT is not None:
            right = tl.minimum(right, side_of_rows(right, block.kv_head, row % S.GROUP, RIGHT, mods, S))
        last_key = tl.minimum(slot + right, last_key)
    last_key = end_within(last_key + 1, pos, mods) - 1
    span_begin, span_end, prefix = slot, slot, context_len  # placeholders: Triton 3.6 cannot return a None in a record
    if mods.spans is not None:
        span_begin, span_end = span_around(slot, block.seq, None, mods)
        first_key = before_window(first_key, span_begin, mods)
        spans_right = 0
        if mods.spans_right is not None:
            spans_right = side_of_rows(mods.spans_right, block.kv_head, row % S.GROUP, RIGHT, mods, S)
        last_key = behind_query(last_key + 1, span_end, slot, block.seq_len, spans_right, mods) - 1
    if mods.prefix_lens is not None:
        prefix = prefix_of(block.seq, None, block.seq_len, mods)
        if mods.left is None:
            last_key = tl.maximum(last_key, prefix - 1)
    if mods.shard_rank is not None:
        first_key, last_key = own_before(first_key, mods, S), own_before(last_key + 1, mods, S) - 1
        prefix = own_before(prefix, mods, S)
    if BLIND:
        last_key = tl.where(valid, last_key, -1)
    token = tl.cast(block.first_token + block.first, tl.int64)
    return RowTile(
        token, block.kv_head, index, row % S.GROUP, slot, pos, first_key, last_key, valid, context_len,
        block.first_token, block.query_len, span_begin, span_end, prefix, block.seq,
    )  # fmt: skip


@triton.jit
def first_seen(rows, mods):
    """First key, inclusive, that each row sees: [R]."""
    if mods.prefix_lens is None:
        return rows.first_key
    else:
        return tl.where(rows.prefix > 0, 0, rows.first_key)


@triton.jit
def visible_range(block, mods, TOKENS: tl.constexpr, S: tl.constexpr = None):
    """Span of the keys that up to TOKENS queries from block.first on see, within the sequence.

    With query_positions, a position is at least context_len and at most the query's place.  So lo follows from
    context_len, and full_lo from the last query's place.
    """
    context_len = block.seq_len - block.query_len
    first_pos = context_len + block.first
    last_pos = context_len + tl.minimum(block.first + TOKENS, block.query_len) - 1
    lo = 0
    full_lo = 0
    hi = block.seq_len
    full_hi = block.seq_len
    if mods.left is not None:
        least_left, most_left = side_of_block(mods.left, block.kv_head, LEFT, mods, S)
        if mods.query_positions is None:
            lo = first_key_of(first_pos, most_left, mods)
        else:
            lo = first_key_of(context_len, most_left, mods)
        full_lo = first_key_of(last_pos, least_left, mods)
    if mods.right is not None:
        right = right_of(block.seq, mods)
        least_right, most_right = right, right
        if mods.BY_HEAD_TO_THE_RIGHT is not None:
            least, most = side_of_block(right, block.kv_head, RIGHT, mods, S)
            least_right, most_right = tl.minimum(right, least), tl.minimum(right, most)
        hi = tl.minimum(last_pos + most_right + 1, hi)
        full_hi = tl.minimum(first_pos + least_right + 1, full_hi)
    hi = end_within(hi, last_pos, mods)
    full_hi = end_within(full_hi, first_pos, mods)
    if mods.spans is not None:
        least_right, most_right = 0, 0
        if mods.spans_right is not None:
            least_right, most_right = side_of_block(mods.spans_right, block.kv_head, RIGHT, mods, S)
        begin, end = span_around(first_pos, block.seq, None, mods)
        lo = before_window(lo, begin, mods)
        full_hi = behind_query(full_hi, end, first_pos, block.seq_len, least_right, mods)
        begin, end = span_around(last_pos, block.seq, None, mods)
        full_lo = before_window(full_lo, begin, mods)
        hi = behind_query(hi, end, last_pos, block.seq_len, most_right, mods)
    prefix, resume = lo, lo  # placeholders, as in `row_tile`
    if mods.prefix_lens is not None:
        prefix = prefix_of(block.seq, None, block.seq_len, mods)
        hi = tl.maximum(hi, prefix)
        if mods.left is None:
            full_hi = tl.maximum(full_hi, prefix)
        else:
            lo = tl.where(prefix > 0, 0, lo)
            full_hi = tl.where(prefix >= full_lo, tl.maximum(full_hi, prefix), full_hi)
            full_lo = tl.where(prefix >= full_lo, 0, full_lo)
    if mods.shard_rank is not None:
        lo, hi, resume = own_before(lo, mods, S), own_before(hi, mods, S), own_before(resume, mods, S)
        full_lo, full_hi, prefix = (
            own_before(full_lo, mods, S),
            own_before(full_hi, mods, S),
            own_before(prefix, mods, S),
        )
    return Span(lo, hi, full_lo, full_hi, prefix, resume)
