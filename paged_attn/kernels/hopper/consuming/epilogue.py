"""The epilogue: store a block's rows as results, or as the state of a piece."""

from ...common.bounds import row_tile
from ...common.merge import tell_cut
from ...common.output import gated, rows_from, store_lse, store_results, store_rows
from ...common.records import State
from ...common.softmax import finish, merge, start
from ..asm.instructions import times_logistic
from ..asm.registers import words_beside
from ..layouts import result_layout
from ..schedule.join import counter_of, is_last, join_if_last, join_in_place, joins_in_place, keep, keep_in_fours
from ..shim import gl, gluon
from .fp8 import in_order


@gluon.jit
def leaving(state, item, block, mods, room, NUMBER: gl.constexpr, S: gl.constexpr, P: gl.constexpr):
    """(rows, state) of an item, ready to be stored: dims in order, the sink included, maxima and sums in acc's layout.

    acc [ROWS, VALUE_PADDED].  room: the bank, through which results of fp8 products pass to get their dims in order.
    """
    acc = state.acc
    if P.FP8_PRODUCTS:
        acc = in_order(acc, room, NUMBER, S, P)
    ROWS: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    rows = row_tile(block, gl.arange(0, P.ROWS, layout=ROWS), mods, P.ROWS // S.GROUP, S)
    state = State(acc, gl.convert_layout(state.max, ROWS), gl.convert_layout(state.sum, ROWS))
    if P.FP8_PRODUCTS and mods.sinks is not None:
        row_max, row_sum = start(mods.sinks, rows, item.first > 0, S)
        state = merge(state, acc * 0.0, row_max, row_sum)
    return rows, state


@gluon.jit
def dims_from(dim, P: gl.constexpr):
    """Return the output's dims for dims of this launch, counted from 0; the launch's first dim is FROM_DIM."""
    if P.FROM_DIM > 0:
        return dim + P.FROM_DIM
    else:
        return dim


@gluon.jit
def store_shuffled(out, rows, count, x, scales, S: gl.constexpr, P: gl.constexpr):
    """Round results x [ROWS, VALUE_PADDED] to 16 bits and store them, four neighbouring dims from each thread.

    So stores fill whole sectors of memory.  Threads exchange words by shuffles, without a barrier.
    """
    LAYOUT: gl.constexpr = result_layout(S.VALUE_PADDED, P.ROWS)
    dtype: gl.constexpr = out.ptr.dtype.element_ty
    # lane 2 t1 + t0 of the quad has dims 16 g + 8 j + 4 t1 + 2 t0 + b
    x = x.reshape([P.ROWS, S.VALUE_PADDED // 16, 2, 2, 2, 2]).permute((0, 1, 3, 4, 5, 2))
    first, second = gl.split(x)
    a, b = gl.split(first)
    c, d = gl.split(second)
    lower, upper = words_beside(a, b, c, d, dtype)
    words = gl.join(lower, upper).permute((0, 1, 3, 2, 4)).reshape([P.ROWS, S.VALUE_PADDED // 2])
    low, high = words.to(gl.int16).to(dtype, bitcast=True), (words >> 16).to(gl.int16).to(dtype, bitcast=True)
    x = gl.convert_layout(gl.join(low, high).reshape([P.ROWS, S.VALUE_PADDED]), LAYOUT, assert_trivial=True)
    row = gl.arange(0, P.ROWS, layout=gl.SliceLayout(1, LAYOUT))
    dim = dims_from(gl.arange(0, S.VALUE_PADDED, layout=gl.SliceLayout(0, LAYOUT)), P)
    store_results(out, rows_from(rows.token, rows.kv_head, row, row < count, S), dim, x, scales, S)


@gluon.jit
def store_block(out, results, rows, count, state, NUMBER: gl.constexpr, S: gl.constexpr, P: gl.constexpr):
    """Finish and store rows; 16-bit rows of up to 128 dims by `store_shuffled`, except columns and fp8 products."""
    IN_ROWS: gl.constexpr = state.acc.shape[0] == P.ROWS and P.COLUMNS < P.ROWS and not P.FP8_PRODUCTS
    # in `store_shuffled`, registers of rows of more than 128 dims would spill
    if IN_ROWS and S.VALUE_PADDED <= 128 and out.ptr.dtype.element_ty.primitive_bitwidth == 16:
        x = finish(state.acc, gl.expand_dims(state.sum, 1))
        dim = dims_from(gl.arange(0, S.VALUE_PADDED, layout=gl.SliceLayout(0, state.acc.type.layout)), P)
        x = gated(x, rows, dim, results.scales, S, times_logistic)  # before rounding to 16 bits
        store_shuffled(out, rows, count, x, results.scales, S, P)
        if results.lse is not None:
            store_lse(results.lse, rows, state, S)
    else:
        dim = dims_from(gl.arange(0, S.VALUE_PADDED, layout=gl.SliceLayout(0, state.acc.type.layout)), P)
        store_rows(out, results.lse, rows, dim, state, results.scales, S, times_logistic)


@gluon.jit
def store_or_join(out, results, item, rows, count, state, NUMBER: gl.constexpr, S: gl.constexpr, P: gl.constexpr):
    """Do `store` for blocks whose last program joins other pieces with its own in registers (`join.joins_in_place`)."""
    gl.static_assert(P.SKIP == P.STRIDE and S.LIVE >= P.ROWS)
    whole = True
    if item.pieces > 1:
        row = gl.arange(0, P.ROWS, layout=gl.SliceLayout(1, state.acc.type.layout))
        parts, valid = results.partial, row < count
        keep_in_fours(parts, item.row + NUMBER * P.ROWS, row, valid, state, S, P)
        whole = is_last(counter_of(results, item, NUMBER, P), item.holders)
        if whole:
            state = join_in_place(parts, item, item.first_row + NUMBER * P.ROWS, row, valid, state, S, P)
    if whole:
        store_block(out, results, rows, count, state, NUMBER, S, P)


@gluon.jit
def store(out, results, item, rows, count, state, NUMBER: gl.constexpr, S: gl.constexpr, P: gl.constexpr):
    """Store `count` query rows of an item: results, or the state of a piece.

    The block's last program, or a merge launch, joins the states.  States of fixed pieces are in scratch already.
    """
    if S.MERGE == 0:
        if item.pieces > 1:
            keep(results, item, 0, rows, state, NUMBER, S, P)
        else:
            store_block(out, results, rows, count, state, NUMBER, S, P)
        if NUMBER == 0 and item.first > 0:
            tell_cut(results.told, item.block, item.pieces, item.first_row, S)
    elif S.SPLIT and joins_in_place(S, P):
        store_or_join(out, results, item, rows, count, state, NUMBER, S, P)
    elif S.SPLIT:
        if item.pieces > 1:
            if S.PIECE is None:
                keep(results, item, 0, rows, state, NUMBER, S, P)
            join_if_last(out, results, item, rows.token, count, state.max.shape[0], NUMBER, S, P)
        else:
            store_block(out, results, rows, count, state, NUMBER, S, P)
    else:
        store_block(out, results, rows, count, state, NUMBER, S, P)
