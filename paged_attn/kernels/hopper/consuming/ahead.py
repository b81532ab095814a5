"""A consumer that is an item ahead: the next item's first keys are multiplied while an item's results are stored.

Without that, a single consumer leaves the tensor cores idle during the letter, first product and stores of every item.
"""

from ...common.bounds import row_tile, visible_range
from ...common.records import State
from ...common.scores import scale_by_token
from ...common.softmax import start
from ..args import Turn, Turns, is_shared
from ..layouts import product_layout
from ..loading.convert import NONE
from ..loading.queries import rows_in, wait_queries
from ..schedule.mail import read
from ..shim import gl, gluon, warpgroup_mma_wait
from .epilogue import leaving, store
from .tile_loop import receive, send_tiles
from .tile_scores import multiply_keys, score_scale, value_scale


@gluon.jit
def first_scores(rings, turns, item, S: gl.constexpr, P: gl.constexpr):
    """Start q @ k^T of an item's first tile, float32 [ROWS, TILE]; without a tile, of arbitrary data that nobody reads.

    A branch around the product would have to wait for the product, which should run on.
    """
    there = (item.block.kv_head >= 0) & (item.begin < item.end)
    wait_queries(rings.queries, turns.query, 0, S, P, there)
    return multiply_keys(rows_in(rings.queries, turns.query, 0, S, P), rings.key, turns.key, S, P, there)


@gluon.jit
def consume_ahead(out, results, mail, rings, turns, item, scores, number, mods, S: gl.constexpr, P: gl.constexpr):
    """Compute an item from its first scores on, and store it; return (turns, item `number`, its first scores)."""
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
    # started before the last values' wait, this product would have them wait for its keys, too: 1% slower
    running = first_scores(rings, turns, following, S, P)
    rows, state = leaving(state, item, block, mods, rings.room, 0, S, P)
    store(out, results, item, rows, count, state, 0, S, P)
    return turns, following, warpgroup_mma_wait(0, deps=(running,))


@gluon.jit
def consume_items_ahead(out, results, rings, jobs, S: gl.constexpr, P: gl.constexpr):
    """`blocks.consume_items`, an item ahead."""
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
