"""States of the pieces of a cut block: store them in scratch, count the items that are stored, and join them.

Without a merge launch, the program that stores the last state of a block, or of a group of pieces, joins the states.
"""

from typing import Any, NamedTuple

import triton

from ...common.merge import cuts_of, join
from ...common.output import rows_from, store_partial, store_rows
from ...common.records import State
from ...common.softmax import base_of, merge
from ..args import rows_of_consumer
from ..asm.instructions import exp2, times_logistic
from ..layouts import dims_at_once, fours_layout, pieces_at_once, rows_at_once, states_layout
from ..shim import gl, gluon, thread_barrier
from .items import COUNTERS_PER_LAUNCH


@gluon.jit
def keep(results, item, piece, rows, state, NUMBER: gl.constexpr, S: gl.constexpr, P: gl.constexpr):
    """Store a consumer's state of a piece, acc [R, VALUE_PADDED], in scratch.  piece: 0 is the item's last piece."""
    LAYOUT: gl.constexpr = state.acc.type.layout
    BEGIN: gl.constexpr = NUMBER * rows_of_consumer(P)
    first_row = item.row + piece * P.SKIP + BEGIN
    row = gl.arange(0, state.max.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    dim = gl.arange(0, S.VALUE_PADDED, layout=gl.SliceLayout(0, LAYOUT))
    valid = rows.valid
    if S.LIVE < P.ROWS:  # scratch has rows for max_seqlen_q query tokens only
        valid &= row < S.LIVE - BEGIN
    # with BRIEF, accumulators of rows that saw no key are stored, too, because `join_at_once` reads them
    store_partial(results.partial, first_row + row, valid, dim, state, S, P.BRIEF)


@gluon.jit
def load_state(parts, row, values, valid, inside, ahead, DIM: gl.constexpr):
    """(maxima [R], sums [R], accumulators [R, D]) of the state in the scratch rows row + ahead; row [R].

    values [R, D]: addresses of accumulators at `row`.
    """
    row_max = gl.load(parts.max + row + ahead, valid, float("-inf"))
    return row_max, gl.load(parts.sum + row + ahead, valid, 0.0), gl.load(values + ahead * DIM, inside, 0.0)


@gluon.jit
def join_at_once(parts, at, valid, dim, pieces, CHUNK: gl.constexpr, S: gl.constexpr):
    """Join states as `merge.join`, with one maximum and one address for CHUNK states: a third of the machine code.

    Small decodes wait until machine code is fetched, also for the code of a join.  The accumulator of a row that saw
    no key gets the weight 0, so the accumulator must have been stored, and must have no NaN.

    All rows are heads of one token.  If the heads' windows are equal, all rows have the same bounds.  Values outside
    the bounds are zeroed, so the accumulator of a row that saw no key is 0.  But if a window by head, a mask or a
    score_mod hides a key, a NaN in the key's value may reach the accumulator.
    """
    inside = gl.expand_dims(valid, 1) & gl.expand_dims(dim < S.VALUE_PADDED, 0)
    values = parts.acc + gl.expand_dims(at * S.VALUE_PADDED, 1) + gl.expand_dims(dim, 0)
    row_max, row_sum = at * 0.0 + float("-inf"), at * 0.0
    acc = gl.expand_dims(row_sum, 1) + gl.expand_dims(dim * 0.0, 0)
    for first in range(0, pieces.count, CHUNK):
        there = first < pieces.count
        loaded = (load_state(parts, at, values, valid & there, inside & there, 0, S.VALUE_PADDED),)
        before = gl.where(first == 0, pieces.skip - pieces.stride, 0)  # the second state may be nearer than a stride
        at += before
        values += before * S.VALUE_PADDED
        for i in gl.static_range(1, CHUNK):
            there = first + i < pieces.count
            state = load_state(parts, at, values, valid & there, inside & there, i * pieces.stride, S.VALUE_PADDED)
            loaded = loaded + (state,)  # type: ignore[assignment]
        at += CHUNK * pieces.stride
        values += CHUNK * pieces.stride * S.VALUE_PADDED
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


class Pieces(NamedTuple):
    """States in scratch that are to be joined, in order.  Rows are rows of scratch."""

    row: Any  # first row of the first state
    skip: Any  # rows from the first state to the second
    stride: Any  # rows from each later state to the next
    count: Any  # number of states


@gluon.jit
def join_states(out, results, block, pieces, token, count, whole, ROWS: gl.constexpr, S: gl.constexpr, P: gl.constexpr):
    """Join pieces of a consumer's `count` query rows, at most ROWS; token: the rows' first query token in the batch.

    whole: store results; otherwise the joined state replaces the first state.  Waiting for memory takes most of the
    time, so a thread loads elements of several rows and pieces at once.
    """
    WARPS: gl.constexpr = P.ROWS // 16
    LIVE: gl.constexpr = S.LIVE if S.LIVE < ROWS else ROWS
    AT_ONCE: gl.constexpr = rows_at_once(LIVE, WARPS, P.BRIEF and S.GROUP <= WARPS)
    WIDTH: gl.constexpr = dims_at_once(S.VALUE_PADDED, AT_ONCE, P.JOINED, WARPS)
    CHUNK: gl.constexpr = pieces_at_once(AT_ONCE * WIDTH, WARPS, P.JOINED, P.FP8)
    LAYOUT: gl.constexpr = states_layout(AT_ONCE, WARPS)
    parts = results.partial
    for first in range(0, count, AT_ONCE):
        row = first + gl.arange(0, AT_ONCE, layout=gl.SliceLayout(1, LAYOUT))
        rows = rows_from(token, block.kv_head, row, row < count, S)
        for first_dim in range(0, S.VALUE_PADDED, WIDTH):
            dim = first_dim + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
            at = pieces.row + row
            if P.BRIEF:
                state = join_at_once(parts, at, rows.valid, dim, pieces, CHUNK, S)
            else:
                state = join(
                    parts, at, rows.valid, dim, pieces.skip, pieces.stride, pieces.count, CHUNK, S.VALUE_PADDED
                )
            if whole:
                store_rows(out, results.lse, rows, dim, state, results.scales, S, times_logistic)
            else:
                replace_first(parts, at, rows.valid, dim, state, first_dim + WIDTH == S.VALUE_PADDED, S)


@gluon.jit
def replace_first(parts, at, valid, dim, state, last, S: gl.constexpr):
    """Store some dims of a joined state over the first state; last: these are the last dims.

    Maxima and sums are stored with the last dims, because joining each group of dims reads them.
    """
    gl.store(
        parts.acc + gl.expand_dims(at * S.VALUE_PADDED, 1) + gl.expand_dims(dim, 0), state.acc, gl.expand_dims(valid, 1)
    )
    thread_barrier()  # several threads read a row's maximum
    gl.store(parts.max + at, state.max, valid & last)
    gl.store(parts.sum + at, state.sum, valid & last)


@triton.constexpr_function
def joins_in_place(S, P):
    """Whether a block's last program joins other pieces with its own piece in registers, and stores all rows.

    Two pieces are joined in half the time of `join_states`, because one is in registers already.  Other blocks use
    `join_states`:

    - Blocks of the kernel for even shares, which may have many pieces, of which `join_states` loads more at a time.
    - Rows of more than 128 dims, because their registers would spill.
    - Two lists, because their columns need `join_states` anyway.
    - fp8 products, because their dims lie in another order.
    - Pieces of a fixed size, because these are folded in order.
    """
    return not (P.SHARES or P.MIXED or P.FP8_PRODUCTS) and S.PIECE is None and S.VALUE_PADDED <= 128


@gluon.jit
def in_fours(acc, ROWS: gl.constexpr, DIM: gl.constexpr):
    """Return results acc [ROWS, DIM] as [DIM / 16, ROWS, 16], where each thread has four neighbouring elements.

    In this order, a warp stores whole lines of memory.
    """
    x = acc.reshape([ROWS, DIM // 16, 2, 4, 2]).permute((1, 0, 3, 2, 4)).reshape([DIM // 16, ROWS, 16])
    return gl.convert_layout(x, fours_layout(DIM, ROWS), assert_trivial=True)


@gluon.jit
def from_fours(x, LAYOUT: gl.constexpr, ROWS: gl.constexpr, DIM: gl.constexpr):
    """Return results [ROWS, DIM] from x [DIM / 16, ROWS, 16], the inverse of `in_fours`."""
    x = x.reshape([DIM // 16, ROWS, 4, 2, 2]).permute((1, 0, 3, 2, 4)).reshape([ROWS, DIM])
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def places_in_fours(x, row, valid, ROWS: gl.constexpr):
    """(offsets [DIM / 16, ROWS, 16] in scratch of elements in the order of `in_fours`, valid rows [1, ROWS, 1])."""
    LAYOUT: gl.constexpr = x.type.layout
    IN_ROW: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    row = gl.convert_layout(row, gl.SliceLayout(0, IN_ROW), assert_trivial=True)
    valid = gl.convert_layout(valid, gl.SliceLayout(0, IN_ROW), assert_trivial=True)
    first_dim = 16 * gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, IN_ROW))
    inner = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)))
    at = gl.expand_dims(first_dim * ROWS, 1) + gl.expand_dims(row * 16, 0)
    at = gl.expand_dims(at, 2) + gl.expand_dims(gl.expand_dims(inner, 0), 0)
    return at, gl.expand_dims(gl.expand_dims(valid, 0), 2)


@gluon.jit
def keep_in_fours(parts, first_row, row, valid, state, S: gl.constexpr, P: gl.constexpr):
    """Store a state of P.ROWS rows in scratch from `first_row` on, with dims in the order of `in_fours`."""
    x = in_fours(state.acc, P.ROWS, S.VALUE_PADDED)
    at, live = places_in_fours(x, row, valid, P.ROWS)
    gl.store(parts.acc + first_row * S.VALUE_PADDED + at, x, live)
    gl.store(parts.max + first_row + row, state.max, valid)
    gl.store(parts.sum + first_row + row, state.sum, valid)


@gluon.jit
def join_in_place(parts, item, first_row, row, valid, state, S: gl.constexpr, P: gl.constexpr):
    """Join the states of all pieces of a block in order: this piece's from registers, the others from scratch."""
    LAYOUT: gl.constexpr = state.acc.type.layout
    own = in_fours(state.acc, P.ROWS, S.VALUE_PADDED)
    at, live = places_in_fours(own, row, valid, P.ROWS)
    zero = gl.full([P.ROWS], 0.0, gl.float32, row.type.layout)
    joined = State(gl.full([P.ROWS, S.VALUE_PADDED], 0.0, gl.float32, LAYOUT), zero + float("-inf"), zero)
    for i in range(item.pieces):
        other = item.first_row + i * P.STRIDE != item.row
        row_max = gl.load(parts.max + first_row + row, valid & other, state.max)
        row_sum = gl.load(parts.sum + first_row + row, valid & other, state.sum)
        part = gl.load(parts.acc + first_row * S.VALUE_PADDED + at, live & other, own)
        joined = merge(joined, from_fours(part, LAYOUT, P.ROWS, S.VALUE_PADDED), row_max, row_sum)
        first_row += P.STRIDE
    return joined


# ---- the program that joins ----------------------------------------------------------------------


@gluon.jit
def told_in(scratch, slots, S: gl.constexpr):
    """Address of the counters of items whose states are stored; with a merge launch, of the cuts that it reads."""
    if S.MERGE > 0:
        return scratch.counters + COUNTERS_PER_LAUNCH
    else:
        return cuts_of(scratch, slots * S.LIVE, S)


@gluon.jit
def is_last(counter, holders):
    """Count an item or a group whose states are stored; return whether all `holders` of these are counted now."""
    thread_barrier()  # one thread counts, after the stores of all threads
    last = gl.atomic_add(counter, 1, sem="acq_rel") == holders - 1
    if last:
        gl.store(counter, 0)  # for the next launch
    return last


@gluon.jit
def counter_of(results, item, NUMBER: gl.constexpr, P: gl.constexpr):
    """Address of the counter for consumer NUMBER's rows of an item's block."""
    return results.told + item.counter * P.CONSUMERS + NUMBER


@gluon.jit
def join_if_last(
    out, results, item, token, count, ROWS: gl.constexpr, NUMBER: gl.constexpr, S: gl.constexpr, P: gl.constexpr
):
    """Count an item of a block whose states are stored; the last item's program joins all states and stores results.

    token: the consumer's first query token in the batch.  count: query rows of the consumer, at most ROWS.
    """
    if S.LIVE < P.ROWS:
        count = gl.minimum(count, S.LIVE)
    if P.GROUPED == 0:
        join_block(out, results, item, token, count, ROWS, NUMBER, S, P)
    elif P.BRIEF:  # with offsets known at compile time, few pieces are joined sooner
        if item.pieces <= P.GROUPED:
            join_block(out, results, item, token, count, ROWS, NUMBER, S, P)
        else:
            join_groups(out, results, item, token, count, ROWS, S, P)
    else:
        join_groups(out, results, item, token, count, ROWS, S, P)


@gluon.jit
def join_block(
    out, results, item, token, count, ROWS: gl.constexpr, NUMBER: gl.constexpr, S: gl.constexpr, P: gl.constexpr
):
    """Do `join_if_last` for all pieces of a block at once."""
    if is_last(counter_of(results, item, NUMBER, P), item.holders):
        pieces = Pieces(item.first_row + NUMBER * P.ROWS, P.SKIP, P.STRIDE, item.pieces)
        join_states(out, results, item.block, pieces, token, count, True, ROWS, S, P)


@gluon.jit
def group_size(pieces, P: gl.constexpr):
    """Number of pieces of a group, about as many as there are groups; all pieces if there are at most P.GROUPED."""
    size = gl.where(pieces > 128, 16, gl.where(pieces > 32, 8, 4))
    return gl.where(pieces > P.GROUPED, size, pieces)


@gluon.jit
def join_groups(out, results, item, token, count, ROWS: gl.constexpr, S: gl.constexpr, P: gl.constexpr):
    """Do `join_if_last` in groups: a group's last program joins the group; the last of these programs joins all groups.

    One program would take too long to join many pieces.  A group's state replaces the state of its first piece, whose
    slot has a counter for the group.
    """
    gl.static_assert(P.SHARES and P.CONSUMERS == 1 and S.PIECE is None and P.STRIDE == 2 * P.SKIP)
    size = group_size(item.pieces, P)
    groups = gl.cdiv(item.pieces, size)
    first = (item.row - item.first_row + P.SKIP) // P.STRIDE // size * size  # the group's first piece
    # the block's second state lies SKIP rows behind its first, each later state STRIDE rows behind the state before
    row = item.first_row + first * P.STRIDE - gl.where(first > 0, P.SKIP, 0)
    pieces = Pieces(row, gl.where(first > 0, P.STRIDE, P.SKIP), P.STRIDE, gl.minimum(item.pieces - first, size))
    # counters of groups lie behind those of blocks
    counter = results.told + gl.where(groups > 1, gl.num_programs(0) + row // S.ROWS, item.counter)
    left = gl.minimum(groups, 2)  # joins that this program may have to do
    while left > 0:
        if is_last(counter, pieces.count):
            join_states(out, results, item.block, pieces, token, count, left == 1, ROWS, S, P)
            left -= 1
            counter = results.told + item.counter
            pieces = Pieces(item.first_row, size * P.STRIDE - P.SKIP, size * P.STRIDE, groups)
        else:
            left = 0
