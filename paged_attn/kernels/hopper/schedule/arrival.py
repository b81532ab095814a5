"""Joining of a cut block without a merge launch: the program that stores the last state of a block, or group, joins."""

from ...common.merge import cuts_of
from ..shim import gl, gluon, thread_barrier
from .items import COUNTERS_PER_LAUNCH
from .join import Pieces, join_states


@gluon.jit
def told_in(scratch, slots, S: gl.constexpr):
    """Address of the counters of states kept in scratch or, with a merge launch, of the cuts that it reads."""
    if S.MERGE > 0:
        return scratch.counters + COUNTERS_PER_LAUNCH
    else:
        return cuts_of(scratch, slots * S.LIVE, S)


@gluon.jit
def is_last(counter, holders):
    """Count a program that has stored its states; return whether all `holders` have stored theirs now."""
    thread_barrier()  # every thread's rows are written before one of them tells
    last = gl.atomic_add(counter, 1, sem="acq_rel") == holders - 1
    if last:
        gl.store(counter, 0)  # for the next launch
    return last


@gluon.jit
def counter_of(results, item, NUMBER: gl.constexpr, P: gl.constexpr):
    """Address of the counter of a consumer's rows of a block."""
    return results.told + item.counter * P.CONSUMERS + NUMBER


@gluon.jit
def join_if_last(
    out, results, item, token, count, ROWS: gl.constexpr, NUMBER: gl.constexpr, S: gl.constexpr, P: gl.constexpr
):
    """Count a program that has stored its states of a block; the last program joins all and stores the results."""
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
    """`join_if_last`, joining all pieces at once."""
    if is_last(counter_of(results, item, NUMBER, P), item.holders):
        pieces = Pieces(item.first_row + NUMBER * P.ROWS, P.SKIP, P.STRIDE, item.pieces)
        join_states(out, results, item.block, pieces, token, count, True, ROWS, S, P)


@gluon.jit
def group_size(pieces, P: gl.constexpr):
    """Pieces of a group, about as many as there are groups; all pieces if there are at most P.GROUPED."""
    size = gl.where(pieces > 128, 16, gl.where(pieces > 32, 8, 4))
    return gl.where(pieces > P.GROUPED, size, pieces)


@gluon.jit
def join_groups(out, results, item, token, count, ROWS: gl.constexpr, S: gl.constexpr, P: gl.constexpr):
    """`join_if_last` in groups: a group's last program joins the group, and the last of these programs all groups.

    One program alone would take too long.  A group's state replaces that of its first piece, whose slot has a counter.
    """
    gl.static_assert(P.SHARES and P.CONSUMERS == 1 and S.PIECE is None and P.STRIDE == 2 * P.SKIP)
    size = group_size(item.pieces, P)
    groups = gl.cdiv(item.pieces, size)
    first = (item.row - item.first_row + P.SKIP) // P.STRIDE // size * size  # the group's first piece
    row = item.first_row + first * P.STRIDE - gl.where(first > 0, P.SKIP, 0)  # the second state is SKIP rows on
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
