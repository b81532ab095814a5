"""The attention kernel: blocks of query tokens x one KV head, whole or in pieces."""

import triton
import triton.language as tl

from ..common.blocking import block_of, find_block, pages_of
from ..common.bounds import first_seen, row_tile, visible_range
from ..common.head_programs import heads_at_once, programs_by_work, seqs_at_once, share_by_work
from ..common.merge import cuts_of, join_if_last, partial_of, tell_cut
from ..common.numerics import first_of, in_parts, scale_of, scaled, sum_of, together
from ..common.output import clear_padding, store_partial, store_rows, tokens_of
from ..common.records import Batch, KeyValues, Query, Source, State, SummedQuery, Walk
from ..common.schedule import (
    find_share,
    first_tile,
    next_seq,
    next_unit,
    pieces_of,
    place_on_line,
    room_of,
    share_of,
    slot_of,
    unflatten,
    work,
)
from ..common.scores import scale_by_token
from ..common.softmax import merge, start
from .loads import load_queries
from .tiles import attend_keys

MAX_UNITS_AT_ONCE = tl.constexpr(256)  # KV heads x sequences whose work is counted at a time


@triton.jit
def attend_block(block, rows, q, begin, end, first, cache, boxes, new, batch, mods, scales, S: tl.constexpr):
    """Return the state of a block's rows over its keys at positions [begin, end); begin is a multiple of TILE.

    first, scalar or [R]: whether sinks count in this state.  q: a Query with as many parts as the keys have.

    cache: KeyValues.  boxes: KeyValues of TMA descriptors, or None.  new: KeyValues of new keys, or None.
    """
    span = visible_range(block, mods, S.BLOCK_Q, S)
    begin = tl.maximum(begin, span.lo // S.TILE * S.TILE)
    end = tl.minimum(end, span.hi)
    row_max, row_sum = start(mods.sinks, rows, first, S)
    acc = in_parts(tl.full([S.ROWS, S.VALUE_PADDED], 0.0, tl.float32), cache.value.PARTS)
    if cache.value.SCALED:
        acc = acc + (tl.full([], 2.0**-126, tl.float32),)
    state = State(acc, row_max, row_sum)

    q = Query(q.parts, scale_by_token(q.unit, scales, rows))
    if cache.key.PARTS == 4:
        q = SummedQuery(q.parts, q.unit, sum_of(q.parts))
    head = rows.kv_head
    scale = scales.softmax * scale_of(
        scales.query, scales.query_ptr, scales.query_stride, head, scales.query_stride_seq, block
    )
    cache_scale = scale * scale_of(scales.key, scales.key_ptr, scales.key_stride, head, scales.key_stride_seq, block)
    cache_end = end if new is None else tl.minimum(rows.context_len, end)
    first_key, prefix = span.lo, None
    if mods.prefix_lens is not None and mods.left is not None:
        first_key, prefix = span.resume, span.prefix
    pages = pages_of(batch, block.seq)
    source = Source(pages, 0, first_key, cache_end, cache_scale, batch.page_starts, prefix)
    state = attend_keys(state, q, rows, cache, boxes, source, begin, span, mods, S)
    # acc has only cached values so far, because a sink has the value 0.  New values, which have no scale, follow below.
    value_scale = scale_of(scales.value, scales.value_ptr, scales.value_stride, head, scales.value_stride_seq, block)
    acc = state.acc
    if cache.value.SCALED:
        value_scale = acc[cache.value.PARTS]
        acc = first_of(acc, cache.value.PARTS)
    state = State(scaled(acc, value_scale), state.max, state.sum)
    if new is not None:
        if cache.key.PARTS > 1:  # new keys and values are not read in parts
            q, state = Query((together(q.parts),), q.unit), State((together(state.acc),), state.max, state.sum)
        source = Source(None, block.first_token - rows.context_len, first_key, end, scale, None, prefix)
        state = attend_keys(state, q, rows, new, None, source, tl.maximum(begin, rows.context_len), span, mods, S)
    return State(together(state.acc), state.max, state.sum)


@triton.jit
def keep(partial, share, slots, slot, ahead, rows, state, S: tl.constexpr):
    """Store the state of one piece in slot `slot` of share `share`."""
    row = tl.arange(0, S.ROWS)
    at = slot_of(share, slots, slot, rows.kv_head, ahead, S) * S.LIVE + row
    store_partial(partial, at, rows.valid & (row < S.LIVE), tl.arange(0, S.VALUE_PADDED), state, S)


@triton.jit
def attend_pieces(
    block, rows, q, begin, end, cut, share, slot, ahead, cache, boxes, new, batch, mods, scales, partial,
    S: tl.constexpr,
):  # fmt: skip
    """Fold the states of pieces [begin, end) in order.  cut: also store each state, from slot `slot` of `share` on.

    Keys are cut at multiples of PIECE in every batch, so a row's result has the same bits in every batch.  Pieces that
    only other rows of the block see change no bits of the row's result.
    """
    row_max, row_sum = start(None, rows, False, S)
    state = State(tl.full([S.ROWS, S.VALUE_PADDED], 0.0, tl.float32), row_max, row_sum)
    for piece in range(begin, end):
        # a row's sink counts in the piece of the row's own first key
        first = first_seen(rows, mods) // S.PIECE == piece
        keys = piece * S.PIECE
        part = attend_block(
            block, rows, q, keys, keys + S.PIECE, first, cache, boxes, new, batch, mods, scales, S
        )  # fmt: skip
        if S.SPLIT:  # noqa: SIM102 (one is decided at compile time)
            if cut:
                keep(partial, share, batch.slots, slot + piece - begin, ahead, rows, part, S)
        state = merge(state, part.acc, part.max, part.sum)
    return state


@triton.jit
def share_of_heads(batch, mods, S: tl.constexpr):
    """(share, KV head, shares of this KV head, programs of the KV heads before it) of this program, by work."""
    HEADS: tl.constexpr = heads_at_once(S.KV_HEADS)
    head, seq = tl.arange(0, HEADS), tl.arange(0, seqs_at_once(HEADS, S.SCAN, MAX_UNITS_AT_ONCE))
    return share_by_work(programs_by_work(batch, head, seq, mods, S), head, S)


@triton.jit
def attend_share(out, lse, scratch, query, cache, boxes, new, batch, mods, scales, S: tl.constexpr):
    """Compute all blocks, and pieces of blocks, in this program's share of the work, for one KV head."""
    index, kv_head = unflatten(S)
    lane = tl.arange(0, S.SCAN)
    row = tl.arange(0, S.ROWS)
    all_shares = tl.num_programs(0) // S.KV_HEADS
    num_shares, ahead = all_shares, None
    if S.BY_HEAD:
        index, kv_head, num_shares, ahead = share_of_heads(batch, mods, S)
    first_work = work(batch, lane, lane < batch.num_seqs, mods, S, kv_head)
    share, seq, before = find_share(batch, first_work, index, num_shares, lane, mods, S, kv_head)
    states = all_shares * batch.slots * S.KV_HEADS * S.LIVE
    partial, cuts = partial_of(scratch, states), cuts_of(scratch, states, S)
    walk = Walk(share.begin, seq, before, kv_head)
    while walk.unit < share.end:
        blocks, tiles = room_of(batch, share, walk, mods, S)
        seq_end = walk.before + blocks * tiles
        if walk.unit >= seq_end:
            walk = next_seq(walk, walk.seq + 1, seq_end)
        else:
            block = block_of(batch, walk.seq, (walk.unit - walk.before) // tiles, kv_head, S)
            rows = row_tile(block, row, mods, S.BLOCK_Q, S)
            tile = (walk.unit - walk.before) % tiles
            count = tl.minimum(tiles - tile, share.end - walk.unit)
            if mods.prefix_lens is not None and mods.left is not None:
                first = place_on_line(0, block, mods, S)
            else:
                first = first_tile(block.seq, None, block.seq_len - block.query_len, mods, S, kv_head)
            q = load_queries(query, rows, cache.key.PARTS, S)
            if S.PIECE is None:
                begin = (first + tile) * S.TILE
                end = begin + count * S.TILE
                if mods.prefix_lens is not None and mods.left is not None:
                    begin = place_on_line(tile, block, mods, S) * S.TILE
                    end = (place_on_line(tile + count - 1, block, mods, S) + 1) * S.TILE
                if S.MERGE == 0 and tile == 0:
                    past = share_of(walk.unit + tiles - 1, share) + 1
                    tell_cut(cuts, block, past - index, slot_of(index, 2, 1, kv_head, ahead, S) * S.LIVE, S)
                state = attend_block(
                    block, rows, q, begin, end, tile == 0, cache, boxes, new, batch, mods, scales, S
                )  # fmt: skip
                whole = count == tiles
            else:
                whole_begin, whole_end = pieces_of(first, 0, tiles, S)
                begin, end = pieces_of(first, tile, count, S)
                # keys beyond the bound max_seqlen_k have no scratch
                pieces = tl.minimum(whole_end - whole_begin, batch.slots)
                end = tl.minimum(end, whole_begin + pieces)
                whole = end - begin == pieces
                if S.MERGE == 0 and tile == 0:
                    row_at = slot_of(index, batch.slots, 0, kv_head, ahead, S) * S.LIVE
                    tell_cut(cuts, block, tl.where(whole, 1, pieces), row_at, S)
                holder = share_of(walk.unit - tile, share)
                state = attend_pieces(
                    block, rows, q, begin, end, not whole, holder, begin - whole_begin, ahead, cache, boxes, new,
                    batch, mods, scales, partial, S,
                )  # fmt: skip
            if whole:
                store_rows(out, lse, rows, tl.arange(0, S.VALUE_PADDED), state, scales, S)
            else:
                token = block.first_token + block.first
                tokens = tl.minimum(block.query_len - block.first, S.BLOCK_Q)
                from_share = share_of(walk.unit - tile, share)
                if S.PIECE is None:
                    keep(partial, index, 2, tl.where(tile == 0, 1, 0), ahead, rows, state, S)
                    pieces = share_of(walk.unit - tile + tiles - 1, share) - from_share + 1
                    if S.MERGE > 0:
                        join_if_last(
                            out, lse, partial, scratch.counters, from_share, pieces, pieces, token, tokens, kv_head,
                            ahead, 2, scales, S,
                        )  # fmt: skip
                elif S.MERGE > 0:
                    last = tl.maximum((whole_begin + pieces - 1) * (S.PIECE // S.TILE) - first, 0)
                    holders = share_of(walk.unit - tile + last, share) - from_share + 1
                    # shares behind the one in which the last piece begins hold no piece of the block
                    if (holders > 1) & (index < from_share + holders):
                        join_if_last(
                            out, lse, partial, scratch.counters, from_share, holders, pieces, token, tokens, kv_head,
                            ahead, batch.slots, scales, S,
                        )  # fmt: skip
            walk = next_unit(walk, walk.unit + count)


@triton.jit(
    do_not_specialize=["num_seqs", "num_tokens", "page_table_stride", "least", "slots"],
)
def attention_kernel(
    out, lse, scratch, query, cache, key_box, value_box, new, query_starts, seq_lens, page_table,
    page_table_stride, num_seqs, num_tokens, shortest, longest, least, slots, page_starts, mods, scales,
    S: tl.constexpr,
):  # fmt: skip
    """Attention of one block of query tokens, or of one share of the batch's work, x one KV head.

    shortest, longest: query tokens of the sequences that this launch serves, inclusive.
    """
    batch = Batch(
        query_starts, seq_lens, page_table, page_table_stride, num_seqs, num_tokens, shortest, longest, least, slots,
        page_starts,
    )  # fmt: skip
    if S.LEADS:
        tl.extra.cuda.gdc_launch_dependents()
    boxes = None
    if key_box is not None:
        boxes = KeyValues(key_box, value_box)
    if S.CLEAR:
        clear_padding(out, lse, batch, tokens_of(batch), tl.arange(0, S.VALUE_PADDED), S)
    if S.SPLIT:
        attend_share(out, lse, scratch, query, cache, boxes, new, batch, mods, scales, S)
    else:
        index, kv_head = unflatten(S)
        block = find_block(batch, index, kv_head, S)
        if block.query_len > 0:
            rows = row_tile(block, tl.arange(0, S.ROWS), mods, S.BLOCK_Q, S)
            q = load_queries(query, rows, cache.key.PARTS, S)
            if S.PIECE is None:
                state = attend_block(
                    block, rows, q, 0, block.seq_len, True, cache, boxes, new, batch, mods, scales, S
                )  # fmt: skip
            else:
                span = visible_range(block, mods, S.BLOCK_Q, S)
                begin = span.lo // S.PIECE
                # at least one piece, because sinks count in a piece
                end = tl.maximum(tl.cdiv(span.hi, S.PIECE), begin + 1)
                state = attend_pieces(
                    block, rows, q, begin, end, False, 0, 0, None, cache, boxes, new, batch, mods, scales, None, S
                )  # fmt: skip
            store_rows(out, lse, rows, tl.arange(0, S.VALUE_PADDED), state, scales, S)
