"""The mainloop over tiles: each round starts the products of a tile's keys and of the previous tile's values.

Ping-pong (Pipe.IN_TURN): a consumer's two warpgroups start products in turn, and the tensor cores work for one
warpgroup during the softmax of the other.  Without turns, the warpgroups either alternate by themselves or run in step.
In step, each warpgroup waits for the products of both, and the tensor cores wait for both softmaxes, which takes a
fifth longer.  A few cycles decide whether warpgroups alternate: the loop's place in an instruction-cache line matters,
and so does the launch's prologue.  One build of a kernel mostly behaves alike in all launches.  Turns cost 1 to 3% of
the time.
"""

import triton

from ...common.blocking import end_in, gap_before
from ...common.records import State
from ...common.shards import own_before
from ..args import Item, Turns, queries_leave_early
from ..asm.barriers import give_turn, take_turn
from ..asm.registers import pin
from ..layouts import product_layout, weights_layout
from ..loading.convert import NONE
from ..loading.queries import leave_queries
from ..shim import COPIES_OPERANDS, gl, gluon, replaced, warpgroup_mma_wait
from .fragments import of_rows, packed, spread, unpacked
from .row_softmax import scale_rows
from .tile_scores import clear_dead, judge, leave, multiply_keys, multiply_values, slopes_of, zero_outside


@gluon.jit
def attend_keys(q, rings, turns, item, first_key, rows, span, state, scale, mods, S: gl.constexpr, P: gl.constexpr):
    """(turns, state) after the tiles of an item, the last tile first; the state's acc is [R, VALUE_PADDED].

    The item must have a tile.  first_key: first key that some row of the block sees, inclusive.
    """
    if P.PACKED and S.APART:  # tiles of new keys are not x-packed, and take other instructions
        border = gl.cdiv(gl.maximum(rows.context_len, 0), S.TILE)
        border = gl.minimum(gl.maximum(border, item.begin), item.end)
        new, stored = with_tiles(item, border, item.end), with_tiles(item, item.begin, border)
        if border < item.end:
            UNPACKED: gl.constexpr = replaced(P, PACKED=False)  # for tiles of new keys
            turns, state = attend_tiles(
                q, rings, turns, new, first_key, rows, span, state, scale, mods, S, UNPACKED, LEAVE=False
            )
        if item.begin < border:
            turns, state = attend_tiles(
                q, rings, turns, stored, first_key, rows, span, state, scale, mods, S, P, MORE=True, LEAVE=False
            )
        leave_queries(rings.queries, turns.query, S, P)
    else:
        turns, state = attend_tiles(q, rings, turns, item, first_key, rows, span, state, scale, mods, S, P)
    return turns, state


@gluon.jit
def with_tiles(item, begin, end):
    """Return the item with tiles [begin, end) instead of its own tiles."""
    return Item(
        item.block, begin, end, item.first, item.pieces, item.holders, item.first_row, item.row,
        item.counter,
    )  # fmt: skip


@gluon.jit
def attend_tiles(
    q, rings, turns, item, first_key, rows, span, state, scale, mods, S: gl.constexpr, P: gl.constexpr,
    MORE: gl.constexpr = False, LEAVE: gl.constexpr = True,
):  # fmt: skip
    """Do `attend_keys` for tiles of one form, x-packed or not.  MORE, LEAVE: as in `send_tiles`."""
    scores = multiply_keys(q, rings.key, turns.key, S, P)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    turns, sent = send_tiles(
        q, scores, rings, turns, item, first_key, rows, span, state, scale, mods, S, P, MORE, LEAVE
    )  # fmt: skip
    return receive(sent, rings, turns, state, P)


@gluon.jit
def receive(sent, rings, turns, state, P: gl.constexpr):
    """Wait for the product that `send_tiles` left running; return (turns, state).

    Each thread's maxima and sums, [R, 4], become maxima and sums of rows, [R].
    """
    acc = warpgroup_mma_wait(0, deps=(sent.acc,))
    row_max, row_sum = of_rows(sent.max, sent.sum, state.max)
    v_turn = leave(rings.value, turns.value, P.VALUE_STAGES, P)
    return Turns(turns.key, v_turn, turns.query), State(acc, row_max, row_sum)


@triton.constexpr_function
def carries_words(S, P):
    """Whether weights pass between rounds of the loop as 32-bit words of two 16-bit weights.

    Instructions that move single 16-bit numbers are slower.
    """
    return (P.CONSUMERS == 3 or P.ROWS == 256) and P.AT_ONCE and not S.APART and not COPIES_OPERANDS.value


@gluon.jit
def as_operand(weights, S: gl.constexpr, P: gl.constexpr):
    """Return weights, 16-bit numbers [R, TILE] or words of two [R, TILE / 8, 4], as a left operand [R, TILE]."""
    LAYOUT: gl.constexpr = product_layout(S.TILE, P.FP8_KEYS, P.ROWS)
    if weights.dtype == gl.int32:
        weights = unpacked(weights, LAYOUT, S)
    return gl.convert_layout(weights, weights_layout(S.VALUE_PADDED, P.FP8_PRODUCTS, P.ROWS, P.CONVERT != NONE))


@gluon.jit
def carried(weights, S: gl.constexpr, P: gl.constexpr):
    """Return a tile's weights in the form in which they pass to the next round: a left operand, or words of two."""
    if not carries_words(S, P):
        return as_operand(weights, S, P)
    elif weights.dtype == gl.int32:
        return weights
    else:
        return packed(weights)


@gluon.jit
def operand_of(weights, S: gl.constexpr, P: gl.constexpr):
    """Return `carried` weights as a left operand, which is complete before the next product begins."""
    if carries_words(S, P):
        return pin(as_operand(weights, S, P))
    else:
        return weights


@gluon.jit
def send_tiles(
    q, scores, rings, turns, item, first_key, rows, span, state, scale, mods, S: gl.constexpr, P: gl.constexpr,
    MORE: gl.constexpr = False, LEAVE: gl.constexpr = True,
):  # fmt: skip
    """Do an item's tiles, and return (turns, state) without a wait for the last value product.

    `receive` waits for that product.  The returned state has each thread's maxima and sums, [R, 4].

    scores [R, TILE]: scores of the item's last tile, which is visited first.
    MORE: the state already has results of other tiles.  LEAVE: release the queries after the last keys.
    """
    keys, values = rings.key, rings.value
    k_turn, v_turn = turns.key, turns.value
    begin, end, context_len = item.begin, item.end, rows.context_len
    end_key = own_before(item.block.seq_len, mods, S)
    acc, row_max, sums = state.acc, spread(state.max, P.ROWS), spread(state.sum, P.ROWS)
    ROWS_AT_ONCE: gl.constexpr = 32 if S.APART else S.TILE  # keys zeroed together; inside the loop, registers are few
    slopes = slopes_of(rows, mods, S)
    key = gl.arange(0, S.TILE, layout=gl.SliceLayout(0, product_layout(S.TILE, P.FP8_KEYS, P.ROWS)))

    tile = end - 1
    k_turn = leave(keys, k_turn, P.KEY_STAGES, P)
    weights, decay, row_max, added, acc = judge(
        scores, row_max, acc, rows, span, key, tile, scale, slopes, mods, False, S, P
    )
    # the first of a row's four threads gets the row's whole sum so far
    lane = gl.arange(0, 4, layout=gl.SliceLayout(0, sums.type.layout))
    sums = gl.where(gl.expand_dims(lane == 0, 0), sums * decay, 0.0) + added
    if MORE:
        acc = scale_rows(acc, decay, S)
    weights = carried(weights, S, P)
    if P.CONVERT == NONE:
        clear_dead(values, v_turn, tile, first_key, end_key, context_len, ROWS_AT_ONCE, S, P)

    for i in range(1, end - begin):
        tile = end - 1 - i
        operand = operand_of(weights, S, P)
        if P.IN_TURN:
            take_turn()
        scores = multiply_keys(q, keys, k_turn, S, P)
        acc = multiply_values(operand, values, v_turn, acc, True, S, P)
        if P.IN_TURN:
            give_turn()
        if P.AT_ONCE:  # the rare branch of `weigh_again` waits for acc, too, and multiplies it
            scores, acc = warpgroup_mma_wait(1, deps=(scores, acc))
        else:
            scores = warpgroup_mma_wait(1, deps=(scores,))
        k_turn = leave(keys, k_turn, P.KEY_STAGES, P)
        if LEAVE and queries_leave_early(P):
            leave_queries(rings.queries, turns.query, S, P, tile == begin)
        following, decay, row_max, added, acc = judge(
            scores, row_max, acc, rows, span, key, tile, scale, slopes, mods, P.AT_ONCE, S, P
        )
        sums = sums * decay + added
        following = pin(following)
        # ptxas moves exponentials of new maxima behind this wait; keeping them before the wait cost more than it saved
        acc = warpgroup_mma_wait(0, deps=(acc,))
        operand = pin(operand)
        v_turn = leave(values, v_turn, P.VALUE_STAGES, P)
        if not P.AT_ONCE:
            acc = scale_rows(acc, decay, S)
        weights = carried(following, S, P)
        if S.APART:  # noqa: SIM102 (one is decided at compile time)
            if tile == context_len // S.TILE:  # the cache ends in this tile
                clear_dead(values, v_turn, tile, first_key, end_key, context_len, ROWS_AT_ONCE, S, P)

    operand = operand_of(weights, S, P)
    if LEAVE and queries_leave_early(P):
        leave_queries(rings.queries, turns.query, S, P, end - begin == 1)
    elif LEAVE:
        leave_queries(rings.queries, turns.query, S, P)
    if P.CONVERT == NONE and mods.left is not None:
        first = tile * S.TILE - gap_before(tile, context_len, S)
        if (first < first_key) & (tile < end - 1):
            zero_outside(values, v_turn, first, first_key, end_in(tile, end_key, context_len, S), ROWS_AT_ONCE, S, P)
    acc = multiply_values(operand, values, v_turn, acc, True, S, P)
    return Turns(k_turn, v_turn, turns.query), State(acc, row_max, sums)
