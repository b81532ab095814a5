"""What a consumer does with one tile: its products, the judgement of its scores, and leave."""

from ...common.blocking import end_in, gap_before
from ...common.numerics import LOG2E, scale_of
from ...common.scores import add_qq_bias, call_score_mod, cut_own, hides_between, load_slopes, move_own, softcap
from ...common.softmax import base_of
from ..args import slots_of_tile
from ..asm.numbers import logistic, tanh
from ..asm.products import multiply_cores
from ..layouts import product_layout, rows_layout
from ..loading.packed import value_tile, zero_values_outside
from ..loading.ring import advance, meet_consumers, release_tile, tile_in, wait_tile, words_of
from ..shim import fence_async_shared, gl, gluon, thread_barrier, warpgroup_mma
from .fragments import as_product, beside, by_thread
from .row_softmax import times, weigh, weigh_at_once


@gluon.jit
def score_scale(scales, block, P: gl.constexpr):
    """What a product of a stored query and a stored key is multiplied by."""
    head = block.kv_head // P.PARTS  # of the cache
    scale = scales.softmax * scale_of(
        scales.query, scales.query_ptr, scales.query_stride, head, scales.query_stride_seq, block
    )
    return scale * scale_of(scales.key, scales.key_ptr, scales.key_stride, head, scales.key_stride_seq, block)


@gluon.jit
def value_scale(scales, block, P: gl.constexpr):
    """What a sum of weighted stored values is multiplied by."""
    head = block.kv_head // P.PARTS
    return scale_of(scales.value, scales.value_ptr, scales.value_stride, head, scales.value_stride_seq, block)


@gluon.jit
def multiply_keys(q, keys, turn, S: gl.constexpr, P: gl.constexpr, there=None):
    """Start <q, k> of the next tile; its result is there after a wait.  there: as in `ring.wait_full`."""
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
    """Start <k, q>, [TILE, N]."""
    zero = gl.full([S.TILE, P.COLUMNS], 0.0, gl.float32, product_layout(P.COLUMNS, False, P.ROWS))
    return warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def multiply_values(weights, values, turn, acc, use_acc, S: gl.constexpr, P: gl.constexpr):
    """Start acc + weights @ v of the next tile; unless use_acc without acc, whatever it holds."""
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
    """Zero values of a tile, from position first on, outside [first_key, end_key) in shared memory, ROWS at a time.

    As words: 16 bits at a time would be five times the machine code.
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
    """Zero what the next tile of values holds outside [first_key, end_key), if anything: 0 * NaN is NaN.

    both: barrier of two consumers that share the tile, whose keys it holds as well: no sooner than both have multiplied
    these, and each for itself the same.
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
    """(a, b) whose sum is a key's number in its tile, by thread: a is known when this is compiled, b [1, 1, 4, 1]."""
    eight = gl.arange(0, S.TILE // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L))))
    pair = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L))))
    one = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L))))
    eight = gl.expand_dims(gl.expand_dims(gl.expand_dims(eight, 0), 2), 3)
    pair = gl.expand_dims(gl.expand_dims(gl.expand_dims(pair, 0), 1), 3)
    one = gl.expand_dims(gl.expand_dims(gl.expand_dims(one, 0), 1), 2)
    return 8 * eight + one, 2 * pair


@gluon.jit
def add_alibi(
    scores, factor, rows, slopes, first, offset, SYMMETRIC: gl.constexpr, BY_ROW: gl.constexpr, S: gl.constexpr,
    P: gl.constexpr,
):  # fmt: skip
    """scores [R, N] of a product * factor + slope * (key - query), two operations for a score; plus an offset [R, 4].

    SYMMETRIC: - slope * |key - query| instead, of four operations.

    Keys are numbers of the tile plus what a thread's register adds to them, which is known when this is compiled: a
    conversion from an integer for each would take as long as its exponential.
    """
    x = by_thread(scores)
    L: gl.constexpr = x.type.layout
    known, pair = places_of_keys(L, S)
    slope = _by_row(slopes, L)
    distance = (_by_row(first - rows.pos, L) + pair).to(gl.float32)
    if SYMMETRIC:
        # whole numbers, whose sum is exact
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
    """ALiBi's slopes of rows, once for all tiles."""
    if mods.alibi_slopes is not None:
        return load_slopes(rows, mods, S)
    else:
        return 0.0


@gluon.jit
def _by_row(x, L: gl.constexpr):
    """[R] as [R, 1, 1, 1]."""
    x = gl.convert_layout(x, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L))))
    return gl.expand_dims(gl.expand_dims(gl.expand_dims(x, 1), 2), 3)


@gluon.jit
def has_edges(rows, span, tile, S: gl.constexpr):
    """Whether a tile has keys at which some row must not look."""
    first = tile * S.TILE - gap_before(tile, rows.context_len, S)
    return (first < span.full_lo) | (first + S.TILE > end_in(tile, span.full_hi, rows.context_len, S))


@gluon.jit
def mask_edges(scores, rows, span, tile, mods, S: gl.constexpr):
    """Minus infinity where a row must not look.

    What is known of keys when this is compiled is compared, which takes no registers; the rest moves the bounds.
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
    """What `weigh` returns of a tile's scores, a product of rows of queries, after modifiers and masks; and acc.

    slopes: of the rows, if mods have any.  AT_ONCE: weighed by the maxima so far; in a first tile most have none.  Then
    acc is multiplied by the factor of what was there before; otherwise that is left to the caller.
    """
    # Biases that take in the maximum leave nothing for the weights to do but a power: an operation a score less.
    # A sink may be the first maximum, and so far below all scores that their differences to it lose their bits.
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
            # cap tanh(x) = 2 cap / (1 + e^-2x) - cap, of which the end is the same for all keys
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
            SYMMETRIC: gl.constexpr = mods.ALIBI_SYMMETRIC is not None
            scores = add_alibi(scores, factor, rows, slopes, first, offset, SYMMETRIC, BY_ROW, S, P)
            scores = move_own(scores, rows, slopes, key, first, mods, S)
        elif mods.softcap is not None and mods.qq_bias is None and S.SCORE_MOD is None:
            unit = factor * LOG2E
        else:
            scores = times(scores, factor, BY_ROW)
        scores = add_qq_bias(scores, rows, key, first, mods, S)
        if S.SCORE_MOD is not None:
            if shift is not None:  # whoever reads scores wants all of them
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
    """Done with a tile."""
    release_tile(ring, turn, P)
    return advance(turn, STAGES)
