"""The attention kernel: one block of query tokens x one KV head x one segment of the keys."""

import triton
import triton.language as tl

from .args import Source, State
from .cache import load_ids, load_kv, locate
from .numerics import LOG2E, dot, factor
from .output import clear_padding, load_query, store_partial, store_rows
from .schedule import find_block, row_tile, segment_range, unflatten, visible_range
from .scores import mask, modify
from .softmax import finish, log_sum_exp, start, update


@triton.jit
def step(state, q, rows, source, ids, tile, mods, S: tl.constexpr, MASKED: tl.constexpr):
    """Fold the keys of one tile into the state."""
    pos = tile + tl.arange(0, S.TILE)
    page, slot = locate(source, ids, tile, S)
    k = load_kv(source.key, page, slot, rows.kv_head, None, S)
    # 0 * NaN is NaN: a weight of zero does not remove a value that may be garbage
    live = (pos >= source.first) & (pos < source.end) if MASKED else None
    v = load_kv(source.value, page, slot, rows.kv_head, live, S)
    scores = dot(q, k.T, tl.zeros([S.ROWS, S.TILE], tl.float32))
    unit = source.scale * LOG2E
    if S.SCALE_FIRST:
        scores = modify(scores * source.scale, rows, pos, mods)
        unit = LOG2E
    if MASKED:
        scores = mask(scores, rows, pos, source.end, mods)
    return update(state, scores, unit, v, MASKED or mods.qq_bias is not None)


@triton.jit
def attend_tiles(state, q, rows, source, begin, end, mods, S: tl.constexpr, MASKED: tl.constexpr):
    """Fold the tiles of [begin, end) into the state, page ids one tile ahead of the keys."""
    ids = load_ids(source, begin, S)
    for tile in tl.range(begin, end, S.TILE, num_stages=S.STAGES):
        ahead = load_ids(source, tile + S.TILE, S)
        state = step(state, q, rows, source, ids, tile, mods, S, MASKED)
        ids = ahead
    return state


@triton.jit
def attend(state, q, rows, source, begin, end, span, mods, S: tl.constexpr):
    """Fold the keys of one source at positions [begin, end) into the state."""
    end = tl.minimum(end, source.end)
    if S.PEEL:
        full = begin
        if mods.left is not None:
            full = tl.minimum(begin + tl.cdiv(tl.maximum(span.full_lo - begin, 0), S.TILE) * S.TILE, tl.maximum(begin, end))
            state = attend_tiles(state, q, rows, source, begin, full, mods, S, True)
        rest = full + tl.maximum(tl.minimum(span.full_hi, end) - full, 0) // S.TILE * S.TILE
        state = attend_tiles(state, q, rows, source, full, rest, mods, S, False)
        return attend_tiles(state, q, rows, source, rest, end, mods, S, True)
    else:
        return attend_tiles(state, q, rows, source, begin, end, mods, S, True)


@triton.jit
def scaled(state, scale, kv_head):
    """The state after all its values were multiplied by a scale."""
    if scale is None:
        return state
    else:
        return State(state.acc * factor(scale, kv_head), state.max, state.sum)


@triton.jit
def score_scale(scales, kv_head):
    """Softmax scale and query scale in one."""
    if scales.query is None:
        return scales.softmax
    else:
        return scales.softmax * factor(scales.query, kv_head)


@triton.jit
def attention_kernel(out, lse, partial, query, key, value, new_key, new_value, batch, mods, scales, S: tl.constexpr):
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

        scale = score_scale(scales, kv_head)
        cache_end = block.seq_len if new_key is None else tl.minimum(rows.context_len, block.seq_len)
        cache_scale = scale if scales.key is None else scale * factor(scales.key, kv_head)
        pages = batch.page_table + block.seq.to(tl.int64) * batch.page_table_stride
        cache = Source(key, value, pages, 0, span.lo, tl.minimum(cache_end, span.hi), cache_scale)
        state = scaled(attend(state, q, rows, cache, begin, end, span, mods, S), scales.value, kv_head)
        if new_key is not None:
            shift = block.first_token - rows.context_len
            new = Source(new_key, new_value, None, shift, span.lo, span.hi, scale)
            state = attend(state, q, rows, new, tl.maximum(begin, rows.context_len), end, span, mods, S)

        if S.SPLIT:
            store_partial(partial, rows, state, segment, batch.segments, S)
        else:
            store_rows(out, rows, finish(state.acc, state.sum[:, None]), scales.out, S)
            if lse is not None:
                at = rows.token * (S.KV_HEADS * S.GROUP) + rows.head
                tl.store(lse + at, log_sum_exp(state.max, state.sum), mask=rows.valid)
