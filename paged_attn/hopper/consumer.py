"""A consumer: 64 rows of queries for each of its warpgroups against the tiles in the rings.

The keys of one tile and the values of the one before are multiplied together; of two consumers, one's products run
under the other's softmax.
"""

from ..kernels.args import Block, State
from ..kernels.numerics import scale_of
from ..kernels.schedule import end_in, gap_before, row_tile, visible_range
from ..kernels.softmax import merge, start
from .args import Turns
from .asm import pin, rescale
from .convert import NONE
from .epilogue import store
from .fp8 import attend_fp8, in_order
from .layouts import operand_layout, product_layout
from .queries import take_queries
from .ring import release, wait_full
from .shim import gl, gluon, mbarrier, warpgroup_mma_wait
from .tiles import clear_dead, judge, leave, multiply_keys, multiply_values, score_scale, zero_outside


@gluon.jit
def attend(q, rings, turns, item, first_key, rows, span, state, scale, mods, S: gl.constexpr, P: gl.constexpr):
    """(turns, state) after the tiles of an item, at least one, the last one first.

    No key before first_key or past the sequence lives, and in the cache none past the context where new keys are apart.
    """
    keys, values = rings.key, rings.value
    k_turn, v_turn = turns.key, turns.value
    begin, end, end_key, context_len = item.begin, item.end, item.block.seq_len, rows.context_len
    acc, row_max, row_sum = state.acc, state.max, state.sum
    O_ROWS: gl.constexpr = gl.SliceLayout(1, product_layout(S.DIM, P.FP8_PRODUCTS, P.ROWS))
    P_LAYOUT: gl.constexpr = operand_layout(S.DIM, P.FP8_PRODUCTS, P.ROWS)
    dtype: gl.constexpr = keys.slots.dtype
    AT_ONCE: gl.constexpr = 32 if S.APART else S.TILE  # values: inside the loop registers are few
    key = gl.arange(0, S.TILE, layout=gl.SliceLayout(0, product_layout(S.TILE, P.FP8_PRODUCTS, P.ROWS)))

    tile = end - 1
    scores = multiply_keys(q, keys, k_turn, S, P)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    k_turn = leave(keys, k_turn, P.KEY_STAGES)
    weights, decay, row_max, sums = judge(scores, row_max, rows, span, key, tile, scale, mods, S, P)
    SUMS: gl.constexpr = sums.type.layout
    # all of a row's sum so far with the first of its four threads
    lane = gl.arange(0, 4, layout=gl.SliceLayout(0, SUMS))
    before = gl.convert_layout(row_sum * decay, gl.SliceLayout(1, SUMS))
    sums += gl.where(gl.expand_dims(lane == 0, 0), gl.expand_dims(before, 1), 0.0)
    operand = gl.convert_layout(weights.to(dtype), P_LAYOUT)
    if P.CONVERT == NONE:
        clear_dead(values, v_turn, tile, first_key, end_key, context_len, AT_ONCE, S, P)

    for i in range(1, end - begin):
        tile = end - 1 - i
        scores = multiply_keys(q, keys, k_turn, S, P)
        acc = multiply_values(operand, values, v_turn, acc, S, P)
        scores = warpgroup_mma_wait(1, deps=(scores,))
        k_turn = leave(keys, k_turn, P.KEY_STAGES)
        weights, decay, row_max, added = judge(scores, row_max, rows, span, key, tile, scale, mods, S, P)
        sums = sums * gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, SUMS)), 1) + added
        rounded = pin(weights.to(dtype))
        # ptxas puts the exponentials behind this wait; holding them cost more than it hid (benchmarks/NOTES.md)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        operand = pin(operand)
        v_turn = leave(values, v_turn, P.VALUE_STAGES)
        acc = rescale(acc, gl.convert_layout(decay, O_ROWS), S.DIM)
        operand = gl.convert_layout(rounded, P_LAYOUT)
        if S.APART:  # noqa: SIM102 (one is decided at compile time)
            if tile == context_len // S.TILE:  # in which the cache ends
                clear_dead(values, v_turn, tile, first_key, end_key, context_len, AT_ONCE, S, P)

    if P.CONVERT == NONE and mods.left is not None:
        first = tile * S.TILE - gap_before(tile, context_len, S)
        if (first < first_key) & (tile < end - 1):
            zero_outside(values, v_turn, first, first_key, end_in(tile, end_key, context_len, S), AT_ONCE, S, P)
    acc = multiply_values(operand, values, v_turn, acc, S, P)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    v_turn = leave(values, v_turn, P.VALUE_STAGES)
    row_sum = gl.convert_layout(gl.sum(sums, axis=1), row_max.type.layout)
    return Turns(k_turn, v_turn, turns.query), State(acc, row_max, row_sum)


@gluon.jit
def drain(rings, turns, count, P: gl.constexpr):
    """Let tiles pass that none of this consumer's rows is there to see."""
    k_turn, v_turn = turns.key, turns.value
    for _ in range(count):
        wait_full(rings.key, k_turn)  # released before it came, it would count for the one before
        k_turn = leave(rings.key, k_turn, P.KEY_STAGES)
        wait_full(rings.value, v_turn)
        v_turn = leave(rings.value, v_turn, P.VALUE_STAGES)
    return Turns(k_turn, v_turn, turns.query)


@gluon.jit
def attend_item(
    query, rings, turns, item, block, rows, scales, mods, NUMBER: gl.constexpr, S: gl.constexpr, P: gl.constexpr
):
    """(turns, state) of a consumer's rows after all tiles of an item; fp8 products leave the sink to `leaving`."""
    TOKENS: gl.constexpr = P.ROWS // S.GROUP
    queries, whole, kv_head = rings.queries, item.block, item.kv_head
    sinks = None if P.FP8_PRODUCTS else mods.sinks  # small beside a sink, fp8 weights would be zero
    row_max, row_sum = start(sinks, rows, item.first > 0, S)
    acc = gl.full([P.ROWS, S.DIM], 0.0, gl.float32, product_layout(S.DIM, P.FP8_PRODUCTS, P.ROWS))
    if item.end - item.begin > 0:
        scale = score_scale(scales, kv_head)
        LAYOUT: gl.constexpr = row_max.type.layout
        scale = take_queries(query, queries, block, kv_head, scale, turns.query, mods, NUMBER, P.ROWS, S, P, LAYOUT)
        span = visible_range(block, mods, TOKENS)
        first_key = visible_range(whole, mods, S.BLOCK_Q).lo  # the other consumer's keys live too
        q = queries.slots.index(NUMBER).reshape([P.ROWS, S.DIM])
        state = State(acc, row_max, row_sum)
        if P.FP8_PRODUCTS:
            turns, state = attend_fp8(q, rings, turns, item, rows, span, state, scale, mods, NUMBER, S, P)
        else:
            turns, state = attend(q, rings, turns, item, first_key, rows, span, state, scale, mods, S, P)
        if P.QUERY_BOX:
            release(queries.empty.index(NUMBER))
        acc = state.acc * scale_of(scales.value, scales.value_ptr, scales.value_stride, kv_head)
        row_max, row_sum = state.max, state.sum
    return turns, State(acc, row_max, row_sum)


@gluon.jit
def leaving(state, item, block, mods, S: gl.constexpr, P: gl.constexpr):
    """(rows, state) of an item as results leave: in the layout of the last product, dims in order, with the sink."""
    acc = state.acc
    if P.FP8_PRODUCTS:
        acc = in_order(acc, S)
    ROWS: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    rows = row_tile(block, item.kv_head, gl.arange(0, P.ROWS, layout=ROWS), mods, P.ROWS // S.GROUP, S)
    state = State(acc, gl.convert_layout(state.max, ROWS), gl.convert_layout(state.sum, ROWS))
    if P.FP8_PRODUCTS and mods.sinks is not None:
        row_max, row_sum = start(mods.sinks, rows, item.first > 0, S)
        state = merge(state, acc * 0.0, row_max, row_sum)
    return rows, state


@gluon.jit
def consume(out, results, query, rings, turns, item, mods, NUMBER: gl.constexpr, S: gl.constexpr, P: gl.constexpr):
    """A consumer's rows of an item, from the first key to the stored result; returns the turns."""
    S_ROWS: gl.constexpr = gl.SliceLayout(1, product_layout(S.TILE, P.FP8_PRODUCTS, P.ROWS))
    TOKENS: gl.constexpr = P.ROWS // S.GROUP
    queries, phase = rings.queries, turns.query
    whole = item.block
    tiles = item.end - item.begin
    block = Block(whole.seq, whole.first_token, whole.query_len, whole.seq_len, whole.first + NUMBER * TOKENS)
    count = gl.minimum(whole.query_len - block.first, TOKENS) * S.GROUP
    if count > 0:
        rows = row_tile(block, item.kv_head, gl.arange(0, P.ROWS, layout=S_ROWS), mods, TOKENS, S)
        turns, state = attend_item(query, rings, turns, item, block, rows, results.scales, mods, NUMBER, S, P)
        rows, state = leaving(state, item, block, mods, S, P)
        store(out, results, queries.out, item, rows, count, state, NUMBER, S, P)
    else:
        turns = drain(rings, turns, tiles, P)
        if P.QUERY_BOX:  # noqa: SIM102 (one is decided at compile time)
            if tiles > 0:
                mbarrier.wait(queries.full.index(NUMBER), phase)
                release(queries.empty.index(NUMBER))
    if tiles > 0:
        phase ^= 1
    return Turns(turns.key, turns.value, phase)
