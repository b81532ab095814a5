"""Work on one tile: start products, modify, mask and weigh scores (`judge`), release the slot (`leave`)."""

from ...common.blocking import end_in, gap_before
from ...common.numerics import LOG2E, scale_of
from ...common.scores import add_qq_bias, call_score_mod, cut_own, hides_between, load_slopes, move_own, softcap
from ...common.shards import added_apart, place_of_key, spread
from ...common.softmax import base_of
from ..args import slots_of_tile
from ..asm.instructions import logistic, tanh
from ..asm.products import multiply_cores
from ..layouts import product_layout, rows_layout
from ..loading.packed import value_tile, zero_values_outside
from ..loading.ring import advance, meet_consumers, release_tile, tile_in, wait_tile, words_of
from ..shim import fence_async_shared, gl, gluon, thread_barrier, warpgroup_mma
from .fragments import as_product, beside, by_thread
from .row_softmax import times, weigh, weigh_at_once


@gluon.jit
def score_scale(scales, block, P: gl.constexpr):
    """Return the scale of a product of a stored query and a stored key: softmax scale * query scale * key scale."""
    head = block.kv_head // P.PARTS  # the cache's head
    scale = scales.softmax * scale_of(
        scales.query, scales.query_ptr, scales.query_stride, head, scales.query_stride_seq, block
    )
    return scale * scale_of(scales.key, scales.key_ptr, scales.key_stride, head, scales.key_stride_seq, block)


@gluon.jit
def value_scale(scales, block, P: gl.constexpr):
    """Return the scale of a sum of weighted stored values."""
    head = block.kv_head // P.PARTS
    return scale_of(scales.value, scales.value_ptr, scales.value_stride, head, scales.value_stride_seq, block)


@gluon.jit
def multiply_keys(q, keys, turn, S: gl.constexpr, P: gl.constexpr, there=None):
    """Start q @ k^T of the next tile; return float32 scores [ROWS, TILE], valid after a wait.

    there: as in `ring.wait_full`.
    """
    scores = gl.full([P.ROWS, S.TILE], 0.0, gl.float32, product_layout(S.TILE, P.FP8_KEYS, P.ROWS))
    wait_tile(keys, turn, P, there)
    if P.PACKED:
        at = keys.at + turn.stage * (S.TILE * S.DIM * 2)
        scores = multiply_cores(q.at, at, scores, keys.slots.dtype, S.DIM)
    else:
        for i in gl.static_range(len(q.parts)):
            k = tile_in(keys, turn, S.DIM, S, i).permute((1, 0))
            scores = warpgroup_mma(q.parts[i], k, scores, use_acc=i > 0, is_async=True)
    return scores


@gluon.jit
def multiply_keys_by_columns(k, q, S: gl.constexpr, P: gl.constexpr):
    """Start k [TILE, DIM] @ q [N, DIM]^T; return float32 [TILE, N], valid after a wait."""
    zero = gl.full([S.TILE, P.COLUMNS], 0.0, gl.float32, product_layout(P.COLUMNS, False, P.ROWS))
    return warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def multiply_values(weights, values, turn, acc, use_acc, S: gl.constexpr, P: gl.constexpr):
    """Start acc [ROWS, VALUE_PADDED] + weights [ROWS, TILE] @ v of the next tile; if not use_acc, weights @ v alone."""
    wait_tile(values, turn, P)
    if P.FP8_PRODUCTS:
        v = values.slots.index(turn.stage).reshape([S.VALUE_PADDED, S.TILE]).permute((1, 0))
    elif P.PACKED:
        v = value_tile(values, turn, S)
    else:
        v = tile_in(values, turn, S.VALUE_PADDED, S)
    return warpgroup_mma(weights, v, acc, use_acc=use_acc, is_async=True)


@gluon.jit
def zero_outside(values, turn, first, first_key, end_key, ROWS: gl.constexpr, S: gl.constexpr, P: gl.constexpr):
    """Zero a tile's values outside positions [first_key, end_key) in shared memory, ROWS keys at a time.

    first: position of the tile's first key.  Values are handled as 32-bit words, because 16-bit elements would take
    five times as much machine code.
    """
    SLOTS: gl.constexpr = slots_of_tile(P)
    LAYOUT: gl.constexpr = rows_layout(4, S.VALUE_PADDED // SLOTS, P.ROWS // 16)
    wait_tile(values, turn, P)
    if P.PACKED:
        zero_values_outside(values, turn, first, first_key, end_key, S, P)
    else:
        for j in gl.static_range(SLOTS):
            if j > 0:
                turn = advance(turn, P.KEY_STAGES)
                wait_tile(values, turn, P)
            words = words_of(values, turn, S.TILE, S.VALUE_PADDED // SLOTS * 2)
            for i in gl.static_range(S.TILE // ROWS):
                pos = first + i * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
                live = (pos >= first_key) & (pos < end_key)
                part = words.slice(i * ROWS, ROWS, dim=0)
                part.store(gl.where(gl.expand_dims(live, 1), part.load(LAYOUT), 0))
    fence_async_shared()
    thread_barrier()


@gluon.jit
def clear_dead(
    values, turn, tile, first_key, end_key, context_len, ROWS: gl.constexpr, S: gl.constexpr, P: gl.constexpr, both=None
):
    """Zero the next tile's values outside positions [first_key, end_key), if there are any, because 0 * NaN is NaN.

    both: mbarrier of two consumers that share a tile of latents.  Both wait until both have multiplied the tile's keys;
    then each zeros all of these values.
    """
    empty = gap_before(tile, context_len, S)
    first = tile * S.TILE - empty
    end = end_in(tile, end_key, context_len, S)
    if (first < first_key) | ((tile + 1) * S.TILE - empty > end):
        if both is not None:
            meet_consumers(both, 0)
        zero_outside(values, turn, first, first_key, end, ROWS, S, P)
        if both is not None:
            meet_consumers(both, 1)


@gluon.jit
def places_of_keys(L: gl.constexpr, S: gl.constexpr):
    """(a, b), int32: a + b is a key's number in its tile, for scores [R, TILE / 8, 4, 2] (`by_thread`) in layout L.

    a [1, TILE / 8, 1, 2] is known at compile time for each register.  b [1, 1, 4, 1] depends on the thread alone.
    """
    eight = gl.arange(0, S.TILE // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L))))
    pair = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L))))
    one = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L))))
    eight = gl.expand_dims(gl.expand_dims(gl.expand_dims(eight, 0), 2), 3)
    pair = gl.expand_dims(gl.expand_dims(gl.expand_dims(pair, 0), 1), 3)
    one = gl.expand_dims(gl.expand_dims(gl.expand_dims(one, 0), 1), 2)
    return 8 * eight + one, 2 * pair


@gluon.jit
def add_alibi(
    scores, factor, rows, slopes, first, offset, mods, BY_ROW: gl.constexpr, S: gl.constexpr, P: gl.constexpr
):
    """Return scores [R, N] * factor + slope * (key - query) + offset, by two operations for each score.

    Symmetric ALiBi adds -slope * |key - query| instead, by four operations.

    first: position of the tile's first key.  offset [R, 4] is equal in the row's four threads.  None: 0.

    A key's number is a sum of a number that is known at compile time and a number of the thread (`places_of_keys`).
    Converting an integer for each score would take as long as an exponential.
    """
    x = by_thread(scores)
    L: gl.constexpr = x.type.layout
    known, pair = places_of_keys(L, S)
    if mods.shard_rank is not None:
        if added_apart(S.STRIPE, S.TILE):
            known, pair, first = spread(known, S), spread(pair, S), place_of_key(first, mods, S)
        else:  # then no part of a key's position is known at compile time
            pair = place_of_key(first + known + pair, mods, S)
            known, first = 0 * known, 0 * first
    slope = _by_row(slopes, L)
    distance = (_by_row(first - rows.pos, L) + pair).to(gl.float32)
    if mods.ALIBI_SYMMETRIC is not None:
        # distance and known are whole numbers, so their sum is exact
        bias = -slope * gl.abs(distance + known.to(gl.float32))
        if offset is not None:
            bias += beside(offset, x)
    else:
        bias = slope * distance
        if offset is not None:
            bias += beside(offset, x)
        bias = gl.fma(slope, known.to(gl.float32), bias)
    if BY_ROW:
        x = gl.fma(x, _by_row(factor, L), bias)
    else:
        x = gl.fma(x, factor, bias)
    return as_product(x, scores)


@gluon.jit
def slopes_of(rows, mods, S: gl.constexpr):
    """Return ALiBi slopes of rows, [R], for all tiles; 0.0 without ALiBi."""
    if mods.alibi_slopes is not None:
        return load_slopes(rows, mods, S)
    else:
        return 0.0


@gluon.jit
def _by_row(x, L: gl.constexpr):
    """Return x [R] as [R, 1, 1, 1] in layout L."""
    x = gl.convert_layout(x, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L))))
    return gl.expand_dims(gl.expand_dims(gl.expand_dims(x, 1), 2), 3)


@gluon.jit
def has_edges(rows, span, tile, S: gl.constexpr):
    """Whether a tile has keys outside the bounds of some row."""
    first = tile * S.TILE - gap_before(tile, rows.context_len, S)
    return (first < span.full_lo) | (first + S.TILE > end_in(tile, span.full_hi, rows.context_len, S))


@gluon.jit
def mask_edges(scores, rows, span, tile, mods, S: gl.constexpr):
    """Return scores [R, N] with minus infinity where a key is outside a row's bounds.

    Bounds are compared with the part of a key's number that is known at compile time, which takes no registers.  The
    thread's part of the number is subtracted from the bounds.
    """
    if has_edges(rows, span, tile, S):
        first = tile * S.TILE - gap_before(tile, rows.context_len, S)
        end = end_in(tile, span.hi, rows.context_len, S)
        x = by_thread(scores)
        L: gl.constexpr = x.type.layout
        known, pair = places_of_keys(L, S)
        visible = known <= gl.minimum(_by_row(rows.last_key, L) - pair, end - 1 - pair) - first
        if mods.left is not None:
            visible &= known >= _by_row(rows.first_key, L) - pair - first
        scores = as_product(gl.where(visible, x, float("-inf")), scores)
    return scores


@gluon.jit
def judge(
    scores, row_max, acc, rows, span, key, tile, scale, slopes, mods, AT_ONCE: gl.constexpr, S: gl.constexpr,
    P: gl.constexpr,
):  # fmt: skip
    """(weights, decay, maxima, sums, acc) of a tile's scores [R, N], after modifiers and masks; see `weigh`.

    slopes: from `slopes_of`.  AT_ONCE: weigh by the maxima so far, and multiply acc by decay.  Without AT_ONCE, the
    caller has to multiply acc by decay.  A first tile, whose rows mostly have no maximum, always comes without AT_ONCE.
    """
    # RELATIVE: ALiBi's bias already subtracts the row's maximum, so a weight is exp2(score), by one operation less.
    # False with HIDES, which includes biases and score_mods: these need scores from which nothing is subtracted.
    # False with sinks: a sink far below all scores may be a row's first maximum.  Scores minus this maximum are large,
    # and float32 rounds away low bits, which are then missing when the row is weighed again.
    HIDES: gl.constexpr = hides_between(mods, S)
    PLAIN: gl.constexpr = not HIDES and mods.sinks is None
    RELATIVE: gl.constexpr = AT_ONCE and mods.alibi_slopes is not None and PLAIN
    unit, shift, cap_factor = scale * LOG2E, None, None
    if AT_ONCE and P.TERMS > 0:
        unit, cap_factor = mods.softcap * LOG2E, scale / mods.softcap
    elif S.SCALE_FIRST:
        unit, factor, offset = LOG2E, scale, None
        first = tile * S.TILE - gap_before(tile, rows.context_len, S)
        BY_ROW: gl.constexpr = S.BY_ROW and mods.softcap is None
        if mods.softcap is not None:
            # cap * tanh(x) = 2 cap / (1 + e^-2x) - cap; the last term is equal for all keys, and becomes the shift
            if S.FAR_CAP:
                scores = softcap(times(scores, scale, S.BY_ROW), mods.softcap, True)
                factor = mods.softcap * 0.0 + 1.0
            elif P.TANH:
                scores = tanh(times(scores, scale / mods.softcap, S.BY_ROW))
                factor = mods.softcap
            else:
                scores = logistic(times(scores, scale * (-2 * LOG2E / mods.softcap), S.BY_ROW))
                factor, shift = 2 * mods.softcap, -mods.softcap * LOG2E
        if RELATIVE:
            factor, slopes, offset = factor * LOG2E, slopes * LOG2E, -base_of(row_max)
            if shift is not None:
                offset += shift
        if mods.alibi_slopes is not None:
            scores = add_alibi(scores, factor, rows, slopes, first, offset, mods, BY_ROW, S, P)
            scores = move_own(scores, rows, slopes, key, first, mods, S)
        elif mods.softcap is not None and mods.qq_bias is None and S.SCORE_MOD is None:
            unit = factor * LOG2E
        else:
            scores = times(scores, factor, BY_ROW)
        scores = add_qq_bias(scores, rows, key, first, mods, S)
        if S.SCORE_MOD is not None:
            if shift is not None:  # a score_mod needs whole scores
                scores, shift = scores - mods.softcap, None
            scores = call_score_mod(scores, rows, key, first, mods, S)
    scores = mask_edges(scores, rows, span, tile, mods, S)
    scores = cut_own(scores, rows, key, tile * S.TILE - gap_before(tile, rows.context_len, S), mods, S)
    if AT_ONCE:
        return weigh_at_once(scores, row_max, acc, unit, shift, cap_factor, RELATIVE, S, P)
    else:
        weights, decay, row_max, sums = weigh(scores, row_max, unit, shift, S, P)
        return weights, decay, row_max, sums, acc


@gluon.jit
def leave(ring, turn, STAGES: gl.constexpr, P: gl.constexpr):
    """Release the turn's tile; return the next turn."""
    release_tile(ring, turn, P)
    return advance(turn, STAGES)
