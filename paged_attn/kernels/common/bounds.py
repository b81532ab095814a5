"""Bounds of the keys that rows see: causal, windows, chunks, spans and prefixes, of one row and of a block's.

A row sees the keys between two bounds, and neither moves back from a token to the next: those of a block are those of
its first token and its last, by the heads that see least and most.  What a mask cuts out between the bounds is in
scores.py.
"""

import triton
import triton.language as tl

from .head_windows import LEFT, RIGHT, side_of_block, side_of_rows
from .numerics import load_clamped
from .records import RowTile, Span


@triton.jit
def chunk_of(pos, mods):
    """The number of the chunk that holds a position; before key 0, where queries of too few keys stand, below 0."""
    return tl.where(pos < 0, pos + 1 - mods.chunk, pos) // mods.chunk


@triton.jit
def first_key_of(pos, left, mods):
    """The first key that a query at pos sees, where `left` bounds what is before it."""
    first = pos - left
    if mods.chunk is not None:
        first = tl.maximum(first, chunk_of(pos, mods) * mods.chunk)
    return tl.maximum(first, 0)


@triton.jit
def span_around(slot, seq, inside, mods):
    """[begin, end) of the spans of a sequence that hold a slot; the slot alone where none does."""
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
    """`first`, or where a span begins if that is before, and the window does not clip it."""
    if mods.CLIP_SPANS is None:
        first = tl.maximum(tl.minimum(first, begin), 0)
    return first


@triton.jit
def behind_query(end, past, slot, seq_len, right, mods):
    """`end`, or where a span does if that is behind, as far as the window does not clip it, to the right by `right`."""
    if mods.spans_right is not None:
        past = tl.minimum(past, slot + right + 1)
    if mods.CLIP_SPANS is not None:
        past = end_within(past, slot, mods)
    return tl.maximum(end, tl.minimum(past, seq_len))


@triton.jit
def right_of(seq, mods):
    """How many slots behind its own a query of a sequence sees, where there is a bound."""
    if mods.causal is None:
        return mods.right
    else:
        return tl.where(tl.load(mods.causal + seq).to(tl.int32) > 0, 0, mods.right)


@triton.jit
def end_within(end, pos, mods):
    """`end`, but no later than what ends the keys of a query at pos whatever `right` says: that of its chunk.

    Where positions are no slots this bounds no slots, and `shows_position` is asked of the call's own keys.
    """
    if mods.chunk is not None and mods.query_positions is None:
        end = tl.minimum(end, (chunk_of(pos, mods) + 1) * mods.chunk)
    return end


@triton.jit
def shows_position(pos, row_pos, left, mods):
    """Whether queries at row_pos [R] see keys at pos [N], as far as the bounds of `first_key_of` and `end_within` say.

    Of call's own keys, whose slots do not tell it; comes with `left`.
    """
    seen = pos[None, :] >= (row_pos - left)[:, None]
    if mods.chunk is not None:
        seen &= chunk_of(pos, mods)[None, :] == chunk_of(row_pos, mods)[:, None]
    return seen


@triton.jit
def prefix_of(seq, inside, seq_len, mods):
    """Keys of a sequence, of one or of [N], that all of its queries see: 0 or more, so bounds can be moved by them."""
    return tl.maximum(tl.minimum(load_clamped(mods.prefix_lens + seq, inside), seq_len), 0)


@triton.jit
def row_tile(block, row, mods, TOKENS: tl.constexpr, S: tl.constexpr, BLIND: tl.constexpr = True):
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
        first_key = first_key_of(pos, side_of_rows(mods.left, block.kv_head, row % S.GROUP, LEFT, mods, S), mods)
    if mods.right is not None:
        right = right_of(block.seq, mods)
        if mods.BY_HEAD_TO_THE_RIGHT is not None:
            right = tl.minimum(right, side_of_rows(right, block.kv_head, row % S.GROUP, RIGHT, mods, S))
        last_key = tl.minimum(slot + right, last_key)
    last_key = end_within(last_key + 1, pos, mods) - 1
    span_begin, span_end, prefix = slot, slot, context_len  # of nothing: Triton 3.6 returns no record with a None
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
    if BLIND:
        last_key = tl.where(valid, last_key, -1)
    token = tl.cast(block.first_token + block.first, tl.int64)
    return RowTile(
        token, block.kv_head, index, row % S.GROUP, slot, pos, first_key, last_key, valid, context_len,
        block.first_token, block.query_len, span_begin, span_end, prefix, block.seq,
    )  # fmt: skip


@triton.jit
def first_seen(rows, mods):
    """The first key that each row sees [R]."""
    if mods.prefix_lens is None:
        return rows.first_key
    else:
        return tl.where(rows.prefix > 0, 0, rows.first_key)


@triton.jit
def visible_range(block, mods, TOKENS: tl.constexpr, S: tl.constexpr = None):
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
    prefix, resume = lo, lo  # of nothing, as in `row_tile`
    if mods.prefix_lens is not None:
        prefix = prefix_of(block.seq, None, block.seq_len, mods)
        hi = tl.maximum(hi, prefix)
        if mods.left is None:
            full_hi = tl.maximum(full_hi, prefix)
        else:
            lo = tl.where(prefix > 0, 0, lo)
            full_hi = tl.where(prefix >= full_lo, tl.maximum(full_hi, prefix), full_hi)
            full_lo = tl.where(prefix >= full_lo, 0, full_lo)
    return Span(lo, hi, full_lo, full_hi, prefix, resume)
