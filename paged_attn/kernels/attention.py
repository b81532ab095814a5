"""The attention kernel: blocks of query tokens x one KV head, whole or in pieces."""

import triton
import triton.language as tl

from .args import Batch, KeyValues, Source, State
from .cache import load_box, load_ids, load_kv, locate
from .merge import join_if_last, partial_of
from .numerics import LOG2E, dot, scale_of
from .output import clear_padding, load_query, store_partial, store_rows
from .schedule import (
    block_of,
    even_share,
    find_block,
    find_work,
    first_tile,
    row_tile,
    share_of,
    unflatten,
    visible_range,
    work,
)
from .scores import mask, modify
from .softmax import start, update


@triton.jit
def step(state, q, rows, kv, boxes, source, ids, tile, span, mods, S: tl.constexpr, FULL: tl.constexpr):
    """Fold the keys of one tile into the state; FULL: every row sees all of them."""
    page, slot = locate(source, ids, tile, S)
    if boxes is not None:
        k = load_box(boxes.key, ids, tile % S.PAGE, rows.kv_head, S)
    else:
        k = load_kv(kv.key, page, slot, rows.kv_head, None, S)
    if FULL and boxes is not None:
        v = load_box(boxes.value, ids, tile % S.PAGE, rows.kv_head, S)
    else:
        # 0 * NaN is NaN: a weight of zero does not remove a value that may be garbage
        pos = tile + tl.arange(0, S.TILE)
        live = None if FULL else (pos >= source.first) & (pos < source.end)
        v = load_kv(kv.value, page, slot, rows.kv_head, live, S)
    scores = dot(q, k.T, tl.full([S.ROWS, S.TILE], 0.0, tl.float32), S)
    unit = source.scale * LOG2E
    if S.SCALE_FIRST:
        scores = modify(scores * source.scale, rows, tile, mods, S)
        unit = LOG2E
    if not FULL:
        if S.PEEL:  # noqa: SIM114 (one is decided at compile time)
            scores = mask(scores, rows, tile, source.end, mods, S)
        elif (tile < span.full_lo) | (tile + S.TILE > tl.minimum(span.full_hi, source.end)):
            scores = mask(scores, rows, tile, source.end, mods, S)
    return update(state, scores, unit, v, S, FULL and mods.qq_bias is None)


@triton.jit
def attend_tiles(state, q, rows, kv, boxes, source, begin, end, span, mods, S: tl.constexpr, FULL: tl.constexpr):
    """Fold the tiles of [begin, end) into the state, page ids one tile ahead of the keys."""
    ids = load_ids(source, begin, S)
    for tile in tl.range(begin, end, S.TILE, num_stages=S.STAGES):
        ahead = load_ids(source, tile + S.TILE, S)
        state = step(state, q, rows, kv, boxes, source, ids, tile, span, mods, S, FULL)
        ids = ahead
    return state


@triton.jit
def attend(state, q, rows, kv, boxes, source, begin, span, mods, S: tl.constexpr):
    """Fold the keys of one source from position begin on into the state."""
    # begin was rounded down to a tile: a source without a visible key may have a dead one in that tile
    end = tl.where(source.first < source.end, source.end, begin)
    if S.PEEL:
        full = begin
        if mods.left is not None:
            full += tl.cdiv(tl.maximum(span.full_lo - begin, 0), S.TILE) * S.TILE
            full = tl.minimum(full, tl.maximum(begin, end))
            state = attend_tiles(state, q, rows, kv, boxes, source, begin, full, span, mods, S, False)
        rest = full + tl.maximum(tl.minimum(span.full_hi, end) - full, 0) // S.TILE * S.TILE
        state = attend_tiles(state, q, rows, kv, boxes, source, full, rest, span, mods, S, True)
        return attend_tiles(state, q, rows, kv, boxes, source, rest, end, span, mods, S, False)
    else:
        return attend_tiles(state, q, rows, kv, boxes, source, begin, end, span, mods, S, False)


@triton.jit
def attend_block(block, rows, begin, end, first, query, cache, boxes, new, batch, mods, scales, S: tl.constexpr):
    """The state of a block's rows over its keys in [begin, end), begin on a tile; first: sinks count here."""
    span = visible_range(block, mods, S)
    begin = tl.maximum(begin, span.lo // S.TILE * S.TILE)
    end = tl.minimum(end, span.hi)
    q = load_query(query, rows, S)
    state = start(mods.sinks, rows, first, S)

    scale = scales.softmax * scale_of(scales.query, scales.query_ptr, scales.query_stride, rows.kv_head)
    cache_scale = scale * scale_of(scales.key, scales.key_ptr, scales.key_stride, rows.kv_head)
    cache_end = end if new is None else tl.minimum(rows.context_len, end)
    pages = batch.page_table + tl.cast(block.seq, tl.int64) * batch.page_table_stride
    state = attend(
        state, q, rows, cache, boxes, Source(pages, 0, span.lo, cache_end, cache_scale), begin, span, mods, S
    )
    # nothing else is in acc yet: a sink has value 0, and new values are not scaled
    state = State(
        state.acc * scale_of(scales.value, scales.value_ptr, scales.value_stride, rows.kv_head), state.max, state.sum
    )
    if new is not None:
        source = Source(None, block.first_token - rows.context_len, span.lo, end, scale)
        state = attend(state, q, rows, new, None, source, tl.maximum(begin, rows.context_len), span, mods, S)
    return state


@triton.jit
def attend_share(out, lse, scratch, query, cache, boxes, new, batch, mods, scales, S: tl.constexpr):
    """All blocks, and pieces of blocks, in this program's share of the work, for one KV head."""
    index, kv_head = unflatten(S)
    num_shares = tl.num_programs(0) // S.KV_HEADS
    share = even_share(batch, index, num_shares, mods, S)
    partial = partial_of(scratch, num_shares, S)
    unit = share.begin
    seq, before = find_work(batch, unit, mods, S)
    cut = -1
    cut_token = 0
    cut_tokens = 0
    while unit < share.end:
        blocks, tiles = work(batch, seq, True, mods, S)
        if unit >= before + blocks * tiles:
            before += blocks * tiles
            seq += 1
        else:
            block = block_of(batch, seq, (unit - before) // tiles, S)
            rows = row_tile(block, kv_head, mods, S)
            tile = (unit - before) % tiles
            count = tl.minimum(tiles - tile, share.end - unit)
            begin = first_tile(block.seq_len - block.query_len, mods, S) + tile
            state = attend_block(
                block,
                rows,
                begin * S.TILE,
                (begin + count) * S.TILE,
                tile == 0,
                query,
                cache,
                boxes,
                new,
                batch,
                mods,
                scales,
                S,
            )
            if count == tiles:
                store_rows(out, lse, rows, state, scales, S)
            else:
                store_partial(partial, 2 * index + tl.where(tile == 0, 1, 0), rows, state, S)
                first = share_of(unit - tile, share)
                last = share_of(unit - tile + tiles - 1, share)
                token = block.first_token + block.first
                tokens = tl.minimum(block.query_len - block.first, S.BLOCK_Q)
                if S.MERGE > 0:
                    join_if_last(out, lse, partial, scratch.counters, first, last, token, tokens, kv_head, scales, S)
                elif tile == 0:
                    cut = last
                    cut_token = token
                    cut_tokens = tokens
            unit += count
    if S.MERGE == 0 and kv_head == 0:
        tl.store(scratch.cuts + 3 * index, cut)
        tl.store(scratch.cuts + 3 * index + 1, cut_token)
        tl.store(scratch.cuts + 3 * index + 2, cut_tokens)


@triton.jit(
    do_not_specialize=["num_seqs", "num_tokens", "page_table_stride"],
)
def attention_kernel(
    out, lse, scratch, query, cache, key_box, value_box, new, query_starts, seq_lens, page_table,
    page_table_stride, num_seqs, num_tokens, shortest, longest, least, mods, scales, S: tl.constexpr,
):  # fmt: skip
    """One block of query tokens, or one share of the batch's work, x one KV head."""
    batch = Batch(query_starts, seq_lens, page_table, page_table_stride, num_seqs, num_tokens, shortest, longest, least)
    boxes = None
    if key_box is not None:
        boxes = KeyValues(key_box, value_box)
    if S.CLEAR:
        clear_padding(out, lse, batch, S)
    if S.SPLIT:
        attend_share(out, lse, scratch, query, cache, boxes, new, batch, mods, scales, S)
    else:
        index, kv_head = unflatten(S)
        block = find_block(batch, index, S)
        if block.query_len > 0:
            rows = row_tile(block, kv_head, mods, S)
            state = attend_block(block, rows, 0, block.seq_len, True, query, cache, boxes, new, batch, mods, scales, S)
            store_rows(out, lse, rows, state, scales, S)
