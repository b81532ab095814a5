"""How a block's rows leave: as results, or as a state for the last piece's program."""

import triton

from ..kernels.args import State
from ..kernels.merge import join
from ..kernels.output import rows_from, store_lse, store_partial, store_results, store_rows
from ..kernels.schedule import row_tile
from ..kernels.softmax import base_of, finish, merge, start
from .asm import exp2, words_beside
from .fp8 import in_order
from .layouts import fours_layout, pieces_at_once, result_layout, rows_at_once, states_layout
from .shim import gl, gluon, thread_barrier


@gluon.jit
def leaving(state, item, block, mods, room, NUMBER: gl.constexpr, S: gl.constexpr, P: gl.constexpr):
    """(rows, state) of an item as results leave: in the layout of the last product, dims in order, with the sink."""
    acc = state.acc
    if P.FP8_PRODUCTS:
        acc = in_order(acc, room, NUMBER, S, P)
    ROWS: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    rows = row_tile(block, item.kv_head, gl.arange(0, P.ROWS, layout=ROWS), mods, P.ROWS // S.GROUP, S)
    state = State(acc, gl.convert_layout(state.max, ROWS), gl.convert_layout(state.sum, ROWS))
    if P.FP8_PRODUCTS and mods.sinks is not None:
        row_max, row_sum = start(mods.sinks, rows, item.first > 0, S)
        state = merge(state, acc * 0.0, row_max, row_sum)
    return rows, state


@gluon.jit
def store_shuffled(out, rows, count, x, scales, S: gl.constexpr, P: gl.constexpr):
    """Results of 16 bits with four neighbours in each thread, whole sectors of memory at a time; no warp waits."""
    LAYOUT: gl.constexpr = result_layout(S.DIM, P.ROWS)
    dtype: gl.constexpr = out.ptr.dtype.element_ty
    # dim = 16 g + 8 j + 4 t1 + 2 t0 + b, of lane 2 t1 + t0
    x = x.reshape([P.ROWS, S.DIM // 16, 2, 2, 2, 2]).permute((0, 1, 3, 4, 5, 2))
    first, second = gl.split(x)
    a, b = gl.split(first)
    c, d = gl.split(second)
    lower, upper = words_beside(a, b, c, d, dtype)
    words = gl.join(lower, upper).permute((0, 1, 3, 2, 4)).reshape([P.ROWS, S.DIM // 2])
    low, high = words.to(gl.int16).to(dtype, bitcast=True), (words >> 16).to(gl.int16).to(dtype, bitcast=True)
    x = gl.convert_layout(gl.join(low, high).reshape([P.ROWS, S.DIM]), LAYOUT, assert_trivial=True)
    row = gl.arange(0, P.ROWS, layout=gl.SliceLayout(1, LAYOUT))
    dim = gl.arange(0, S.DIM, layout=gl.SliceLayout(0, LAYOUT))
    store_results(out, rows_from(rows.token, rows.kv_head, row, row < count, S), dim, x, scales, S)


@gluon.jit
def store_block(out, results, rows, count, state, NUMBER: gl.constexpr, S: gl.constexpr, P: gl.constexpr):
    """Finished rows, those of 16 bits so that memory gets whole sectors."""
    IN_ROWS: gl.constexpr = state.acc.shape[0] == P.ROWS and P.COLUMNS < P.ROWS and not P.FP8_PRODUCTS
    # wider rows would spill
    if IN_ROWS and S.DIM <= 128 and out.ptr.dtype.element_ty.primitive_bitwidth == 16:
        x = finish(state.acc, gl.expand_dims(state.sum, 1))
        store_shuffled(out, rows, count, x, results.scales, S, P)
        if results.lse is not None:
            store_lse(results.lse, rows, state, S)
    else:
        dim = gl.arange(0, S.DIM, layout=gl.SliceLayout(0, state.acc.type.layout))
        store_rows(out, results.lse, rows, dim, state, results.scales, S)


@gluon.jit
def load_state(parts, row, values, valid, inside, AHEAD: gl.constexpr, DIM: gl.constexpr):
    """(maxima, sums, accumulators) of the state AHEAD rows further on."""
    row_max = gl.load(parts.max + row + AHEAD, valid, float("-inf"))
    return row_max, gl.load(parts.sum + row + AHEAD, valid, 0.0), gl.load(values + AHEAD * DIM, inside, 0.0)


@gluon.jit
def join_at_once(parts, at, valid, dim, pieces, CHUNK: gl.constexpr, S: gl.constexpr, P: gl.constexpr):
    """`merge.join` with one maximum for all states that are loaded together, and one address: a third of the code.

    Small decodes wait for machine code at their end, too.  Their rows are heads of one token, which see the same keys:
    no state of a row that saw nothing holds a product of 0 with what is no number.
    """
    inside = gl.expand_dims(valid, 1) & gl.expand_dims(dim < S.DIM, 0)
    values = parts.acc + gl.expand_dims(at * S.DIM, 1) + gl.expand_dims(dim, 0)
    row_max, row_sum = at * 0.0 + float("-inf"), at * 0.0
    acc = gl.expand_dims(row_sum, 1) + gl.expand_dims(dim * 0.0, 0)
    for first in range(0, pieces, CHUNK):
        there = first < pieces
        loaded = (load_state(parts, at, values, valid & there, inside & there, 0, S.DIM),)
        before = gl.where(first == 0, P.SKIP - P.STRIDE, 0)  # the second state is nearer to the first than others
        at += before
        values += before * S.DIM
        for i in gl.static_range(1, CHUNK):
            there = first + i < pieces
            state = load_state(parts, at, values, valid & there, inside & there, i * P.STRIDE, S.DIM)
            loaded = loaded + (state,)  # type: ignore[assignment]
        at += CHUNK * P.STRIDE
        values += CHUNK * P.STRIDE * S.DIM
        top = row_max
        for i in gl.static_range(CHUNK):
            top = gl.maximum(top, loaded[i][0])
        base = base_of(top)
        decay = exp2(row_max - base)
        row_max, row_sum, acc = top, row_sum * decay, acc * gl.expand_dims(decay, 1)
        for i in gl.static_range(CHUNK):
            weight = exp2(loaded[i][0] - base)
            row_sum += loaded[i][1] * weight
            acc += loaded[i][2] * gl.expand_dims(weight, 1)
    return State(acc, row_max, row_sum)


@gluon.jit
def merge_pieces(out, results, item, first_row, token, count, ROWS: gl.constexpr, S: gl.constexpr, P: gl.constexpr):
    """Join the states of all pieces of `count` rows, at most ROWS, from a token on, in order.

    What takes time is to wait for memory: a thread asks for many elements at once, of some rows and pieces.
    """
    WARPS: gl.constexpr = P.ROWS // 16
    WIDTH: gl.constexpr = 128 if S.DIM > 128 else S.DIM
    LIVE: gl.constexpr = S.LIVE if S.LIVE < ROWS else ROWS
    AT_ONCE: gl.constexpr = rows_at_once(LIVE, WARPS, P.BRIEF and S.GROUP <= WARPS)
    CHUNK: gl.constexpr = pieces_at_once(AT_ONCE * WIDTH, WARPS, P.JOINED, P.FP8)
    LAYOUT: gl.constexpr = states_layout(AT_ONCE, WARPS)
    for first in range(0, count, AT_ONCE):
        row = first + gl.arange(0, AT_ONCE, layout=gl.SliceLayout(1, LAYOUT))
        rows = rows_from(token, item.kv_head, row, row < count, S)
        for first_dim in range(0, S.DIM, WIDTH):
            dim = first_dim + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
            at = first_row + row
            if P.BRIEF:
                state = join_at_once(results.partial, at, rows.valid, dim, item.pieces, CHUNK, S, P)
            else:
                state = join(results.partial, at, rows.valid, dim, P.SKIP, P.STRIDE, item.pieces, CHUNK, S.DIM)
            store_rows(out, results.lse, rows, dim, state, results.scales, S)


@gluon.jit
def keep(results, item, piece, rows, state, NUMBER: gl.constexpr, S: gl.constexpr, P: gl.constexpr):
    """The state of one piece, of several of an item number `piece`, in scratch."""
    LAYOUT: gl.constexpr = state.acc.type.layout
    first_row = item.row + piece * P.SKIP + NUMBER * P.ROWS
    row = gl.arange(0, state.max.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    dim = gl.arange(0, S.DIM, layout=gl.SliceLayout(0, LAYOUT))
    valid = rows.valid
    if S.LIVE < P.ROWS:  # more queries than the host was told of have no room
        valid &= row < S.LIVE
    store_partial(results.partial, first_row + row, valid, dim, state, S)


@gluon.jit
def is_last(results, item, NUMBER: gl.constexpr, P: gl.constexpr):
    """Count a program that has kept its pieces of a block; whether it is the last one."""
    counter = results.counters + item.counter * P.CONSUMERS + NUMBER
    thread_barrier()  # every thread's rows are written before one of them tells
    last = gl.atomic_add(counter, 1, sem="acq_rel") == item.holders - 1
    if last:
        gl.store(counter, 0)  # for the next launch
    return last


@gluon.jit
def join_if_last(
    out, results, item, token, count, ROWS: gl.constexpr, NUMBER: gl.constexpr, S: gl.constexpr, P: gl.constexpr
):
    """Count a program that has kept its pieces of a block; the last one joins and stores all."""
    if S.LIVE < P.ROWS:
        count = gl.minimum(count, S.LIVE)
    if is_last(results, item, NUMBER, P):
        merge_pieces(out, results, item, item.first_row + NUMBER * P.ROWS, token, count, ROWS, S, P)


@triton.constexpr_function
def joins_in_place(S, P):
    """Whether the last program adds the other pieces to its own where that lies, and stores all rows at once.

    That is a third of the code and of the time.  Wider rows would spill, and mixed batches have the other way for
    columns anyway.
    """
    return not (P.SHARES or P.MIXED or P.FP8_PRODUCTS) and S.PIECE is None and S.DIM <= 128


@gluon.jit
def in_fours(acc, ROWS: gl.constexpr, DIM: gl.constexpr):
    """A product's rows so that a thread has four neighbours in memory, and a warp whole lines: [DIM / 16, ROWS, 16]."""
    x = acc.reshape([ROWS, DIM // 16, 2, 4, 2]).permute((1, 0, 3, 2, 4)).reshape([DIM // 16, ROWS, 16])
    return gl.convert_layout(x, fours_layout(DIM, ROWS), assert_trivial=True)


@gluon.jit
def from_fours(x, LAYOUT: gl.constexpr, ROWS: gl.constexpr, DIM: gl.constexpr):
    """What was `in_fours`, [ROWS, DIM]."""
    x = x.reshape([DIM // 16, ROWS, 4, 2, 2]).permute((1, 0, 3, 2, 4)).reshape([ROWS, DIM])
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def places_in_fours(x, row, valid, ROWS: gl.constexpr):
    """Offsets of an accumulator `in_fours`, as x is, and which of them are of rows that live."""
    LAYOUT: gl.constexpr = x.type.layout
    IN_ROW: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    row = gl.convert_layout(row, gl.SliceLayout(0, IN_ROW), assert_trivial=True)
    valid = gl.convert_layout(valid, gl.SliceLayout(0, IN_ROW), assert_trivial=True)
    sixteen = gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, IN_ROW))
    inner = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)))
    at = gl.expand_dims(sixteen * (16 * ROWS), 1) + gl.expand_dims(row * 16, 0)
    at = gl.expand_dims(at, 2) + gl.expand_dims(gl.expand_dims(inner, 0), 0)
    return at, gl.expand_dims(gl.expand_dims(valid, 0), 2)


@gluon.jit
def keep_in_fours(parts, first_row, row, valid, state, S: gl.constexpr, P: gl.constexpr):
    """A state of P.ROWS rows in scratch, from a row on."""
    x = in_fours(state.acc, P.ROWS, S.DIM)
    at, live = places_in_fours(x, row, valid, P.ROWS)
    gl.store(parts.acc + first_row * S.DIM + at, x, live)
    gl.store(parts.max + first_row + row, state.max, valid)
    gl.store(parts.sum + first_row + row, state.sum, valid)


@gluon.jit
def join_in_place(parts, item, first_row, row, valid, state, S: gl.constexpr, P: gl.constexpr):
    """The states of all pieces of a block in their order, this one's from registers and the others from scratch."""
    LAYOUT: gl.constexpr = state.acc.type.layout
    own = in_fours(state.acc, P.ROWS, S.DIM)
    at, live = places_in_fours(own, row, valid, P.ROWS)
    zero = gl.full([P.ROWS], 0.0, gl.float32, row.type.layout)
    joined = State(gl.full([P.ROWS, S.DIM], 0.0, gl.float32, LAYOUT), zero + float("-inf"), zero)
    for i in range(item.pieces):
        other = item.first_row + i * P.STRIDE != item.row
        row_max = gl.load(parts.max + first_row + row, valid & other, state.max)
        row_sum = gl.load(parts.sum + first_row + row, valid & other, state.sum)
        part = gl.load(parts.acc + first_row * S.DIM + at, live & other, own)
        joined = merge(joined, from_fours(part, LAYOUT, P.ROWS, S.DIM), row_max, row_sum)
        first_row += P.STRIDE
    return joined


@gluon.jit
def store_or_join(out, results, item, rows, count, state, NUMBER: gl.constexpr, S: gl.constexpr, P: gl.constexpr):
    """`store` of blocks whose last piece joins all in place."""
    gl.static_assert(P.SKIP == P.STRIDE)
    row = gl.arange(0, P.ROWS, layout=gl.SliceLayout(1, state.acc.type.layout))
    if S.LIVE < P.ROWS:  # more queries than the host was told of have no room
        count = gl.where(item.pieces > 1, gl.minimum(count, S.LIVE), count)
        rows = rows_from(rows.token, item.kv_head, row, row < count, S)
    whole = True
    if item.pieces > 1:
        parts, valid = results.partial, row < count
        keep_in_fours(parts, item.row + NUMBER * P.ROWS, row, valid, state, S, P)
        whole = is_last(results, item, NUMBER, P)
        if whole:
            state = join_in_place(parts, item, item.first_row + NUMBER * P.ROWS, row, valid, state, S, P)
    if whole:
        store_block(out, results, rows, count, state, NUMBER, S, P)


@gluon.jit
def store(out, results, item, rows, count, state, NUMBER: gl.constexpr, S: gl.constexpr, P: gl.constexpr):
    """`count` rows of an item: finished, or the state of a piece; those of pieces of a fixed size are kept already."""
    if S.SPLIT and joins_in_place(S, P):
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
