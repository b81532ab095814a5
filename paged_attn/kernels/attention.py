"""The attention kernel: one block of query tokens x one KV head x one segment of the keys."""

import triton
import triton.language as tl

from .args import Source, State
from .cache import load_ids, load_kv, locate
from .numerics import LOG2E, dot, scale_of
from .output import clear_padding, load_query, store_partial, store_rows
from .schedule import find_block, row_tile, segment_range, unflatten, visible_range
from .scores import mask, modify
from .softmax import finish, log_sum_exp, start, update


@triton.jit
def step(state, q, rows, kv, source, ids, tile, span, mods, S: tl.constexpr, FULL: tl.constexpr):
    """Fold the keys of one tile into the state; FULL: every row sees all of them."""
    pos = tile + tl.arange(0, S.TILE)
    page, slot = locate(source, ids, tile, S)
    k = load_kv(kv.key, page, slot, rows.kv_head, None, S)
    # 0 * NaN is NaN: a weight of zero does not remove a value that may be garbage
    live = None if FULL else (pos >= source.first) & (pos < source.end)
    v = load_kv(kv.value, page, slot, rows.kv_head, live, S)
    scores = dot(q, k.T, tl.full([S.ROWS, S.TILE], 0.0, tl.float32), S)
    unit = source.scale * LOG2E
    if S.SCALE_FIRST:
        scores = modify(scores * source.scale, rows, tile, mods, S)
        unit = LOG2E
    if not FULL:
        if S.PEEL:  # noqa: SIM114 (one is decided at compile time)
            scores = mask(scores, rows, pos, source.end, mods)
        elif (tile < span.full_lo) | (tile + S.TILE > tl.minimum(span.full_hi, source.end)):
            scores = mask(scores, rows, pos, source.end, mods)
    return update(state, scores, unit, v, S, FULL and mods.qq_bias is None)


@triton.jit
def attend_tiles(state, q, rows, kv, source, begin, end, span, mods, S: tl.constexpr, FULL: tl.constexpr):
    """Fold the tiles of [begin, end) into the state, page ids one tile ahead of the keys."""
    ids = load_ids(source, begin, S)
    for tile in tl.range(begin, end, S.TILE, num_stages=S.STAGES):
        ahead = load_ids(source, tile + S.TILE, S)
        state = step(state, q, rows, kv, source, ids, tile, span, mods, S, FULL)
        ids = ahead
    return state


@triton.jit
def attend(state, q, rows, kv, source, begin, span, mods, S: tl.constexpr):
    """Fold the keys of one source from position begin on into the state."""
    # begin was rounded down to a tile: a source without a visible key may have a dead one in that tile
    end = tl.where(source.first < source.end, source.end, begin)
    if S.PEEL:
        full = begin
        if mods.left is not None:
            full += tl.cdiv(tl.maximum(span.full_lo - begin, 0), S.TILE) * S.TILE
            full = tl.minimum(full, tl.maximum(begin, end))
            state = attend_tiles(state, q, rows, kv, source, begin, full, span, mods, S, False)
        rest = full + tl.maximum(tl.minimum(span.full_hi, end) - full, 0) // S.TILE * S.TILE
        state = attend_tiles(state, q, rows, kv, source, full, rest, span, mods, S, True)
        return attend_tiles(state, q, rows, kv, source, rest, end, span, mods, S, False)
    else:
        return attend_tiles(state, q, rows, kv, source, begin, end, span, mods, S, False)


@triton.jit
def attention_kernel(out, lse, partial, query, cache, new, batch, mods, scales, S: tl.constexpr):
    """One block of query tokens x one KV head x one segment of the keys."""
    index, kv_head, segment = unflatten(batch, S)
    if S.CLEAR:
        clear_padding(out, lse, batch, S)
    block = find_block(batch, index, S)
    if block.query_len > 0:
        rows = row_tile(block, kv_head, mods, S)
        span = visible_range(block, mods, S)
        begin, end = segment_range(span, segment, batch.segments, S)
        q = load_query(query, rows, S)
        state = start(mods.sinks, rows, segment == 0, S)

        scale = scales.softmax * scale_of(scales.query, scales.query_memory, kv_head)
        cache_end = block.seq_len if new is None else tl.minimum(rows.context_len, block.seq_len)
        cache_scale = scale * scale_of(scales.key, scales.key_memory, kv_head)
        pages = batch.page_table + block.seq.to(tl.int64) * batch.page_table_stride
        source = Source(pages, 0, span.lo, tl.minimum(cache_end, end), cache_scale)
        state = attend(state, q, rows, cache, source, begin, span, mods, S)
        # nothing else is in acc yet: a sink has value 0, and new values are not scaled
        state = State(state.acc * scale_of(scales.value, scales.value_memory, kv_head), state.max, state.sum)
        if new is not None:
            source = Source(None, block.first_token - rows.context_len, span.lo, end, scale)
            state = attend(state, q, rows, new, source, tl.maximum(begin, rows.context_len), span, mods, S)

        if S.SPLIT:
            store_partial(partial, rows, state, segment, batch.segments, S)
        else:
            store_rows(out, rows, finish(state.acc, state.sum[:, None]), scales, S)
            if lse is not None:
                at = rows.token * (S.KV_HEADS * S.GROUP) + rows.head
                tl.store(lse + at, log_sum_exp(state.max, state.sum), mask=rows.valid)
