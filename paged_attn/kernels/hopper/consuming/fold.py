"""Pieces of a fixed size, whose states are folded in order, so that cuts of a block never change a bit of results.

States are merged from the last piece to the first, as tiles arrive, by `softmax.merge`.  A program that has all pieces
of a block merges their states here.  Otherwise, `join.join_states` merges states from scratch in the same order.
"""

from ...common.bounds import visible_range
from ...common.records import State
from ...common.scores import scale_by_token
from ...common.softmax import merge, start
from ..args import Item
from ..layouts import bank_layout, product_layout
from ..loading.queries import rows_in, take_queries
from ..schedule.join import keep
from ..shim import gl, gluon
from .epilogue import leaving
from .tile_loop import attend_keys
from .tile_scores import score_scale, value_scale


@gluon.jit
def make_bank(S: gl.constexpr, P: gl.constexpr):
    """Allocate the bank: float32 accumulators [CONSUMERS, ROWS, VALUE_PADDED] in shared memory."""
    layout: gl.constexpr = bank_layout(S.PIECE is not None)
    return gl.allocate_shared_memory(gl.float32, [P.CONSUMERS, P.ROWS, S.VALUE_PADDED], layout)


@gluon.jit
def tiles_of_item(item, mods, S: gl.constexpr):
    """Tiles [begin, end) of an item that some row of its block sees."""
    if S.PIECE is None:
        return item.begin, item.end
    else:
        span = visible_range(item.block, mods, S.BLOCK_Q, S)
        begin = gl.maximum(item.begin, span.lo // S.TILE)
        return begin, gl.maximum(begin, gl.minimum(item.end, gl.cdiv(span.hi, S.TILE)))


@gluon.jit
def attend_piece(
    q, rings, turns, item, first_key, rows, span, first, scale, scales, mods, S: gl.constexpr, P: gl.constexpr
):
    """(turns, state) of a consumer's rows after the tiles of one piece, which may have none.

    first [R]: whether a row's sink counts in this piece.
    """
    row_max, row_sum = start(mods.sinks, rows, first, S)
    acc = gl.full([P.ROWS, S.VALUE_PADDED], 0.0, gl.float32, product_layout(S.VALUE_PADDED, False, P.ROWS))
    if item.begin < item.end:
        state = State(acc, row_max, row_sum)
        turns, state = attend_keys(q, rings, turns, item, first_key, rows, span, state, scale, mods, S, P)
        acc = state.acc * value_scale(scales, item.block, P)
        row_max, row_sum = state.max, state.sum
    return turns, State(acc, row_max, row_sum)


@gluon.jit
def attend_pieces(
    query, rings, turns, item, block, rows, results, mods, NUMBER: gl.constexpr, S: gl.constexpr, P: gl.constexpr
):
    """(turns, rows, state) after all pieces of an item; rows and state as from `leaving`.

    States of a cut block go to scratch, and the returned state is not used.  How a row's result is summed depends on
    the row's position alone: tiles and pieces that only other rows of the block see change nothing.
    """
    PIECE: gl.constexpr = S.PIECE // S.TILE
    queries, scales = rings.queries, results.scales
    LAYOUT: gl.constexpr = rows.pos.type.layout
    begin, end = tiles_of_item(item, mods, S)
    scale = score_scale(scales, block, P)
    if begin < end:
        scale = take_queries(query, queries, block, scale, turns.query, mods, NUMBER, P.ROWS, S, P, LAYOUT)
    scale = scale_by_token(scale, scales, rows, P.PARTS)
    q = rows_in(queries, turns.query, NUMBER, S, P)
    span = visible_range(block, mods, P.ROWS // S.GROUP, S)
    first_key = visible_range(item.block, mods, S.BLOCK_Q, S).lo  # for the rows of all consumers
    begin_all = item.begin // PIECE
    last = gl.maximum(gl.cdiv(item.end, PIECE), begin_all + 1) - 1  # at least one piece, which gets the sinks
    bank = rings.room.index(NUMBER)
    row_max, row_sum = start(None, rows, False, S)
    acc = gl.full([P.ROWS, S.VALUE_PADDED], 0.0, gl.float32, product_layout(S.VALUE_PADDED, False, P.ROWS))
    out_rows, state = leaving(State(acc, row_max, row_sum), item, block, mods, rings.room, NUMBER, S, P)
    for i in range(last + 1 - begin_all):
        piece = last - i
        # a row's sink counts in the piece of the row's own first key
        first = rows.first_key // S.PIECE == piece
        from_tile, to_tile = gl.maximum(piece * PIECE, begin), gl.minimum((piece + 1) * PIECE, end)
        part = Item(item.block, from_tile, to_tile, 1, 1, 1, 0, 0, 0)
        turns, new = attend_piece(q, rings, turns, part, first_key, rows, span, first, scale, scales, mods, S, P)
        _, new = leaving(new, item, block, mods, rings.room, NUMBER, S, P)
        cut = item.pieces > 1
        if S.SPLIT:  # noqa: SIM102 (one is decided at compile time)
            if cut:
                keep(results, item, i, out_rows, new, NUMBER, S, P)
        state = fold(bank, state, new, cut | (i == 0), cut | (piece == begin_all))
    return turns, out_rows, state


@gluon.jit
def fold(bank, state, part, first, last):
    """Merge the state so far, whose acc is in the bank, with the state `part` of one more piece.

    With `first`, there is no state so far.  With `last`, the new acc stays in registers.  Otherwise the bank gets it.
    """
    if first:  # as `merge` with an empty state
        seen = gl.expand_dims(part.max > float("-inf"), 1)
        state = State(gl.where(seen, part.acc, 0.0), part.max, part.sum)
    else:
        state = merge(State(bank.load(part.acc.type.layout), state.max, state.sum), part.acc, part.max, part.sum)
    if not last:
        bank.store(state.acc)
    return state
