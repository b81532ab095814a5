"""A consumer: each of its warpgroups computes 64 query rows over the tiles in the rings, one item after another.

With several consumers, one consumer's products run during another consumer's softmax.  A single consumer may work an
item ahead.
"""

from ...common.bounds import row_tile, visible_range
from ...common.records import Block, State
from ...common.scores import scale_by_token
from ...common.softmax import start
from ..args import Turn, Turns, is_shared
from ..layouts import product_layout, results_layout
from ..loading.convert import NONE
from ..loading.queries import rows_in, take_queries, wait_queries
from ..loading.ring import wait_tile
from ..schedule.mail import read
from ..shim import gl, gluon, warpgroup_mma_wait
from .epilogue import leaving, store
from .fold import attend_pieces, tiles_of_item
from .fp8 import attend_fp8
from .tile_loop import attend_keys, receive, send_tiles
from .tile_scores import leave, multiply_keys, score_scale, value_scale


@gluon.jit
def drain(rings, turns, count, P: gl.constexpr):
    """Release `count` tiles unread, as one of several consumers that has no rows in this block; return the turns."""
    k_turn, v_turn = turns.key, turns.value
    for _ in range(count):
        wait_tile(
            rings.key, k_turn, P
        )  # a release before the tile has arrived would count as a release of the slot's previous tile
        k_turn = leave(rings.key, k_turn, P.KEY_STAGES, P)
        wait_tile(rings.value, v_turn, P)
        v_turn = leave(rings.value, v_turn, P.VALUE_STAGES, P)
    return Turns(k_turn, v_turn, turns.query)


@gluon.jit
def attend_item(
    query, rings, turns, item, block, rows, scales, mods, NUMBER: gl.constexpr, S: gl.constexpr, P: gl.constexpr
):
    """(turns, state) of a consumer's rows [ROWS] after all tiles of an item.  fp8 products leave the sink to `leaving`.

    block: the item's block, with this consumer's first token in the field `first`.
    """
    TOKENS: gl.constexpr = P.ROWS // S.GROUP
    queries, whole = rings.queries, item.block
    sinks = None if P.FP8_PRODUCTS else mods.sinks  # relative to a large sink, all fp8 weights would be zero
    row_max, row_sum = start(sinks, rows, item.first > 0, S)
    ACC: gl.constexpr = results_layout(S.VALUE_PADDED, P.FP8_PRODUCTS, P.ROWS, P.CONVERT != NONE)
    acc = gl.full([P.ROWS, S.VALUE_PADDED], 0.0, gl.float32, ACC)
    if item.end - item.begin > 0:
        scale = score_scale(scales, block, P)
        LAYOUT: gl.constexpr = row_max.type.layout
        scale = take_queries(query, queries, block, scale, turns.query, mods, NUMBER, P.ROWS, S, P, LAYOUT)
        scale = scale_by_token(scale, scales, rows, P.PARTS)
        span = visible_range(block, mods, TOKENS, S)
        first_key = visible_range(whole, mods, S.BLOCK_Q, S).lo  # for the rows of all consumers
        q = rows_in(queries, turns.query, NUMBER, S, P)
        state = State(acc, row_max, row_sum)
        if P.FP8_PRODUCTS:
            turns, state = attend_fp8(q, rings, turns, item, rows, span, state, scale, mods, NUMBER, S, P)
        else:
            turns, state = attend_keys(q, rings, turns, item, first_key, rows, span, state, scale, mods, S, P)
        acc = state.acc * value_scale(scales, block, P)
        row_max, row_sum = state.max, state.sum
    return turns, State(acc, row_max, row_sum)


@gluon.jit
def consume(out, results, query, rings, turns, item, mods, NUMBER: gl.constexpr, S: gl.constexpr, P: gl.constexpr):
    """Compute a consumer's rows of an item, and store results or a state; return the turns."""
    S_ROWS: gl.constexpr = gl.SliceLayout(1, product_layout(S.TILE, P.FP8_KEYS, P.ROWS))
    TOKENS: gl.constexpr = P.ROWS // S.GROUP
    queries, done = rings.queries, turns.query
    whole = item.block
    begin, end = tiles_of_item(item, mods, S)
    tiles = end - begin
    first = whole.first + NUMBER * TOKENS
    block = Block(whole.seq, whole.first_token, whole.query_len, whole.seq_len, first, whole.kv_head)
    count = gl.minimum(whole.query_len - block.first, TOKENS) * S.GROUP
    some = True if P.CONSUMERS == 1 else count > 0  # one of several consumers may have no rows
    if some:
        rows = row_tile(block, gl.arange(0, P.ROWS, layout=S_ROWS), mods, TOKENS, S, BLIND=False)
        if S.PIECE is None:
            turns, state = attend_item(query, rings, turns, item, block, rows, results.scales, mods, NUMBER, S, P)
            rows, state = leaving(state, item, block, mods, rings.room, NUMBER, S, P)
        else:
            turns, rows, state = attend_pieces(query, rings, turns, item, block, rows, results, mods, NUMBER, S, P)
        store(out, results, item, rows, count, state, NUMBER, S, P)
    else:
        if P.QUERY_BOX:  # noqa: SIM102 (one is decided at compile time)
            if tiles > 0:  # wait before keys are released: after their release, the next block's queries may come
                wait_queries(queries, done, NUMBER, S, P)
        turns = drain(rings, turns, tiles, P)
    if tiles > 0:
        done += 1
    return Turns(turns.key, turns.value, done)


# ---- an item ahead -------------------------------------------------------------------------------
# The next item's first keys are multiplied while an item's results are stored.  Otherwise a single consumer would leave
# the tensor cores idle while it reads a letter, waits for an item's first product, and stores results.


@gluon.jit
def first_scores(rings, turns, item, S: gl.constexpr, P: gl.constexpr):
    """Start q @ k^T of an item's first tile; return float32 scores [ROWS, TILE], valid after a wait.

    For an item without a tile, the product multiplies arbitrary data, and nobody reads the scores.  A branch around the
    product would have to wait for the product, which should run on.
    """
    there = (item.block.kv_head >= 0) & (item.begin < item.end)
    wait_queries(rings.queries, turns.query, 0, S, P, there)
    return multiply_keys(rows_in(rings.queries, turns.query, 0, S, P), rings.key, turns.key, S, P, there)


@gluon.jit
def consume_ahead(out, results, mail, rings, turns, item, scores, number, mods, S: gl.constexpr, P: gl.constexpr):
    """Compute an item from its first scores on, and store its results; begin item `number`, the next one.

    Return (turns, item `number`, first scores of item `number`).
    """
    LAYOUT: gl.constexpr = gl.SliceLayout(1, product_layout(S.TILE, False, P.ROWS))
    block, scales = item.block, results.scales
    count = gl.minimum(block.query_len - block.first, S.BLOCK_Q) * S.GROUP
    rows = row_tile(block, gl.arange(0, P.ROWS, layout=LAYOUT), mods, S.BLOCK_Q, S, BLIND=False)
    row_max, row_sum = start(mods.sinks, rows, item.first > 0, S)
    acc = gl.full([P.ROWS, S.VALUE_PADDED], 0.0, gl.float32, product_layout(S.VALUE_PADDED, False, P.ROWS))
    state = State(acc, row_max, row_sum)
    if item.begin < item.end:
        scale = scale_by_token(score_scale(scales, block, P), scales, rows, P.PARTS)
        span = visible_range(block, mods, S.BLOCK_Q, S)
        q = rows_in(rings.queries, turns.query, 0, S, P)
        turns, sent = send_tiles(q, scores, rings, turns, item, span.lo, rows, span, state, scale, mods, S, P)
        following = read(mail, number, P.ROWS // 16)  # while values are multiplied
        turns, state = receive(sent, rings, turns, state, P)
        acc = state.acc * value_scale(scales, block, P)
        state = State(acc, state.max, state.sum)
        turns = Turns(turns.key, turns.value, turns.query + 1)
    else:
        following = read(mail, number, P.ROWS // 16)
    # if this product began before `receive`, its wait for keys would delay the last values: 1% slower
    running = first_scores(rings, turns, following, S, P)
    rows, state = leaving(state, item, block, mods, rings.room, 0, S, P)
    store(out, results, item, rows, count, state, 0, S, P)
    return turns, following, warpgroup_mma_wait(0, deps=(running,))


@gluon.jit
def consume_items_ahead(out, results, rings, jobs, S: gl.constexpr, P: gl.constexpr):
    """Do `blocks.consume_items` for all items, an item ahead."""
    gl.static_assert(is_shared(P) and P.CONSUMERS == 1 and P.QUERY_BOX and P.CONVERT == NONE and P.COLUMNS == 0)
    gl.static_assert(not S.SPLIT and S.PIECE is None)
    turns = Turns(Turn(0, 0), Turn(0, 0), 0)
    number = 0
    item = read(jobs.mail, number, P.ROWS // 16)
    scores = warpgroup_mma_wait(0, deps=(first_scores(rings, turns, item, S, P),))
    while item.block.kv_head >= 0:
        number += 1
        turns, item, scores = consume_ahead(
            out, results, jobs.mail, rings, turns, item, scores, number, jobs.mods, S, P
        )
