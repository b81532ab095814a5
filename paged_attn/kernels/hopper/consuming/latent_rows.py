"""64 query rows against latents, by two consumers that share the rows and take tiles in turn.

Each tile belongs to one consumer, which multiplies the tile's keys, and writes weights and maxima of rows to shared
memory.  Then each consumer multiplies the weights by its half of the value dims, because registers of a consumer hold
only half of the dims of 64 rows.  Because tiles alternate, the softmax of one consumer runs under products of the
other.  A row's sum has a part in each consumer until the item ends.
"""

from ...common.bounds import row_tile, visible_range
from ...common.merge import tell_cut
from ...common.output import store_partial, store_rows
from ...common.records import State
from ...common.scores import scale_by_token
from ...common.shards import own_before
from ...common.softmax import base_of, start
from ..args import Turns
from ..asm.barriers import meet_other, tell_read, tell_written, wait_read, wait_written
from ..asm.instructions import times_logistic
from ..asm.maxima import rescale
from ..asm.products import multiply_two_parts
from ..layouts import product_layout, results_layout, threads_layout
from ..loading.latent_queries import take_rows
from ..loading.ring import advance, tile_in, wait_tile
from ..shim import fence_async_shared, gl, gluon, thread_barrier, warpgroup_mma, warpgroup_mma_wait
from .fragments import as_product, beside, by_thread, of_rows, spread
from .tile_scores import clear_dead, judge, release_tile, score_scale, slopes_of, value_scale

ROWS_CLEARED_BY_EACH = gl.constexpr(8)  # few enough to leave registers for results


@gluon.jit
def make_numbers(P: gl.constexpr):
    """Allocate float32 [2, ROWS, 4], in which the two consumers exchange maxima, sums and factors of rows.

    Axis 1 is the row, axis 2 the thread of the row's quad.
    """
    return gl.allocate_shared_memory(gl.float32, [2, P.ROWS, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def scale_half(acc, factor):
    """Return acc [R, VALUE_PADDED / 2] times each row's factor [R, 4], as `row_softmax.scale_rows` does."""
    x = by_thread(acc)
    return as_product(rescale(x, beside(factor, x), acc.shape[1]), acc)


@gluon.jit
def multiply_latents(rings, turn, S: gl.constexpr, P: gl.constexpr):
    """Start q @ k^T of the turn's tile; return float32 scores [ROWS, TILE], valid after a wait."""
    keys, rests = rings.key, rings.value
    wait_tile(keys, turn, P)
    if S.REST > 0:
        wait_tile(rests, turn, P)
    at, rest_at = keys.at + turn.stage * (S.TILE * S.DIM * 2), rests.at + turn.stage * (S.TILE * S.REST * 2)
    scores = gl.full([P.ROWS, S.TILE], 0.0, gl.float32, product_layout(S.TILE, False, P.ROWS))
    return multiply_two_parts(
        rings.queries.at, at, rings.extra.rest_at, rest_at, scores, S.TILE, S.DIM, S.REST, keys.slots.dtype
    )


@gluon.jit
def multiply_half_of_values(rings, turn, acc, OF: gl.constexpr, NUMBER: gl.constexpr, S: gl.constexpr):
    """Start acc + weights @ v for consumer NUMBER's half of the value dims, with the weights of consumer OF.

    A consumer's own weights need a barrier here, after the fence of `put_weights`.  Triton's automatic barrier does not
    suffice, because Triton may place it before that fence, between the two stores of `put_weights`.
    """
    DIMS: gl.constexpr = S.VALUE_PADDED // 2
    v = tile_in(rings.key, turn, S.DIM, S).slice(NUMBER * DIMS, DIMS, dim=1)
    weights = rings.room.index(OF)
    if OF == NUMBER:
        thread_barrier()
    return warpgroup_mma(weights, v, acc, is_async=True)


@gluon.jit
def add_half_of_values(rings, turn, acc, OF: gl.constexpr, NUMBER: gl.constexpr, S: gl.constexpr, P: gl.constexpr):
    """Do `multiply_half_of_values`, wait for the product and release the tile; return (acc, turn of the next tile)."""
    acc = multiply_half_of_values(rings, turn, acc, OF, NUMBER, S)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    release_tile(rings.key, turn, P)
    return acc, advance(turn, P.KEY_STAGES)


@gluon.jit
def take_maxima(acc, row_max, sums, rings, NUMBER: gl.constexpr, P: gl.constexpr):
    """Wait for the other consumer's weights, and rescale acc and each thread's sums to the other consumer's maxima.

    Return (acc, the other consumer's maxima, sums).
    """
    wait_written(1 - NUMBER)
    theirs = rings.extra.both.index(1 - NUMBER).load(threads_layout(P.ROWS))
    decay = gl.exp2(row_max - base_of(theirs))
    return scale_half(acc, decay), theirs, sums * decay


@gluon.jit
def put_weights(weights, row_max, rings, NUMBER: gl.constexpr):
    """Store a tile's weights and their maxima for both consumers, and tell the other consumer."""
    rings.room.index(NUMBER).store(weights)
    rings.extra.both.index(NUMBER).store(row_max)
    fence_async_shared()
    tell_written(NUMBER)


@gluon.jit
def attend_in_turn(
    rings, turns, item, lo, rows, span, state, scale, mods, NUMBER: gl.constexpr, S: gl.constexpr, P: gl.constexpr
):
    """(turns, state) after the tiles of an item, at least one, the last tile first; the acc is [R, VALUE_PADDED / 2].

    Both rings have equally many slots, so one turn serves both.  lo: first key that some row sees, inclusive.
    """
    keys, rests = rings.key, rings.value
    end, count, context_len = own_before(item.block.seq_len, mods, S), item.end - item.begin, rows.context_len
    acc, row_max, sums = state.acc, spread(state.max, P.ROWS), spread(state.sum, P.ROWS)
    slopes = slopes_of(rows, mods, S)
    key = gl.arange(0, S.TILE, layout=gl.SliceLayout(0, product_layout(S.TILE, False, P.ROWS)))
    # the first of a row's four threads gets the row's whole sum so far
    lane = gl.arange(0, 4, layout=gl.SliceLayout(0, sums.type.layout))
    sums = gl.where(gl.expand_dims(lane == 0, 0), sums, 0.0)
    before = turns.key  # turn of the first tile whose values this consumer has not multiplied
    if NUMBER == 0:  # the first tile has no tile before it
        scores = multiply_latents(rings, before, S, P)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        if S.REST > 0:
            release_tile(rests, before, P)
        tile = item.end - 1
        weights, decay, row_max, added, acc = judge(
            scores, row_max, acc, rows, span, key, tile, scale, slopes, mods, False, S, P
        )
        sums = sums * decay + added
        clear_dead(keys, before, tile, lo, end, context_len, ROWS_CLEARED_BY_EACH, S, P)
        put_weights(weights, row_max, rings, NUMBER)
        acc, before = add_half_of_values(rings, before, acc, NUMBER, NUMBER, S, P)
    for i in range(2 - NUMBER, count, 2):
        tile = item.end - 1 - i
        own = advance(before, P.KEY_STAGES)
        scores = multiply_latents(rings, own, S, P)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        if S.REST > 0:
            release_tile(rests, own, P)
        acc, row_max, sums = take_maxima(acc, row_max, sums, rings, NUMBER, P)
        acc = multiply_half_of_values(rings, before, acc, 1 - NUMBER, NUMBER, S)
        weights, decay, row_max, added, acc = judge(
            scores, row_max, acc, rows, span, key, tile, scale, slopes, mods, False, S, P
        )
        sums = sums * decay + added
        acc = warpgroup_mma_wait(0, deps=(acc,))
        release_tile(keys, before, P)
        if i + 1 < count:
            tell_read(1 - NUMBER)
        acc = scale_half(acc, decay)
        clear_dead(keys, own, tile, lo, end, context_len, ROWS_CLEARED_BY_EACH, S, P)
        if i > 1:
            wait_read(NUMBER)
        put_weights(weights, row_max, rings, NUMBER)
        acc, before = add_half_of_values(rings, own, acc, NUMBER, NUMBER, S, P)
    if count % 2 == NUMBER:  # the last tile is the other consumer's
        acc, row_max, sums = take_maxima(acc, row_max, sums, rings, NUMBER, P)
        acc, before = add_half_of_values(rings, before, acc, 1 - NUMBER, NUMBER, S, P)
    meet_other()  # the other consumer has read the last maxima
    rings.extra.both.index(NUMBER).store(sums)
    meet_other()
    sums += rings.extra.both.index(1 - NUMBER).load(threads_layout(P.ROWS))
    row_max, row_sum = of_rows(row_max, sums, state.max)
    return Turns(before, before, turns.query), State(acc, row_max, row_sum)


@gluon.jit
def consume_latent_rows(
    out, results, query, rings, turns, item, mods, NUMBER: gl.constexpr, S: gl.constexpr, P: gl.constexpr
):
    """Compute a consumer's half of the dims of an item's rows, and store results or a state; return the turns."""
    DIMS: gl.constexpr = S.VALUE_PADDED // 2
    S_ROWS: gl.constexpr = gl.SliceLayout(1, product_layout(S.TILE, False, P.ROWS))
    LAYOUT: gl.constexpr = results_layout(DIMS, False, P.ROWS, P.CONVERT > 0)
    TOKENS: gl.constexpr = P.ROWS // S.GROUP
    scales, done = results.scales, turns.query
    block = item.block
    rows = row_tile(block, gl.arange(0, P.ROWS, layout=S_ROWS), mods, TOKENS, S, BLIND=False)
    row_max, row_sum = start(mods.sinks, rows, item.first > 0, S)
    acc = gl.full([P.ROWS, DIMS], 0.0, gl.float32, LAYOUT)
    if item.begin < item.end:
        extra = rings.extra
        unit = take_rows(query, rings.queries, extra.rest, extra.both, block, mods, NUMBER, S, P, S_ROWS)
        scale = score_scale(scales, block, P)
        if S.NORMALIZED:
            scale = unit * scale
        scale = scale_by_token(scale, scales, rows, P.PARTS)
        span = visible_range(block, mods, TOKENS, S)
        own_sum = row_sum if NUMBER == 0 else rows.slot * 0.0  # a sink is counted once
        state = State(acc, row_max, own_sum)
        turns, state = attend_in_turn(rings, turns, item, span.lo, rows, span, state, scale, mods, NUMBER, S, P)
        done += 1
        acc = state.acc * value_scale(scales, block, P)
        row_max, row_sum = state.max, state.sum
    O_ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    row = gl.arange(0, P.ROWS, layout=O_ROWS)
    rows = row_tile(block, row, mods, TOKENS, S)
    state = State(acc, gl.convert_layout(row_max, O_ROWS), gl.convert_layout(row_sum, O_ROWS))
    dim = NUMBER * DIMS + gl.arange(0, DIMS, layout=gl.SliceLayout(0, LAYOUT))
    if item.pieces > 1:
        valid = rows.valid & (row < S.LIVE)  # scratch may have rows for max_seqlen_q query tokens only
        store_partial(results.partial, item.row + row, valid, dim, state, S)
    else:
        store_rows(out, results.lse, rows, dim, state, scales, S, times_logistic)
    if NUMBER == 0 and item.first > 0:
        tell_cut(results.told, block, item.pieces, item.first_row, S)
    return Turns(turns.key, turns.value, done)
