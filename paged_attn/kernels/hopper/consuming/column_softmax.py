"""The online softmax of query rows that are columns of products; a column's scores are spread over all warps.

With a new maximum over each tile's keys, maxima and weights would pass through shared memory: seven barriers a tile.
So weights use the maximum so far, and are made again if a thread's sum of weights is too large: two barriers a tile.
After the first barrier, all weights are written, and all warps know whether a sum is too large.
"""

from ...common.blocking import end_in, gap_before
from ...common.numerics import LOG2E
from ...common.records import State
from ...common.scores import cut_own, mask, modify
from ...common.softmax import base_of
from ..asm import weights
from ..asm.weights import any_beyond
from ..shim import fence_async_shared, gl, gluon, thread_barrier
from .fragments import larger
from .row_softmax import SLACK, exp2_below, times
from .tile_scores import has_edges

MAX_SUM_PER_THREAD = gl.constexpr(weights.MAX_SUM_PER_THREAD)
MIN_FLOAT32 = gl.constexpr(-3.4028234e38)  # the smallest finite float32


@gluon.jit
def make_flags(P: gl.constexpr):
    """Allocate a flag for each warp (`raise_flags`), int32 [lane, warp]; all lanes of a warp write equal flags."""
    return gl.allocate_shared_memory(gl.int32, [32, P.ROWS // 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def make_flags_of_each(P: gl.constexpr):
    """Allocate flags of each consumer, int32 [CONSUMERS, lane, warp]."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return gl.allocate_shared_memory(gl.int32, [P.CONSUMERS, 32, P.ROWS // 16], layout)


@gluon.jit
def judge_columns(scores, rows, span, key, tile, scale, mods, S: gl.constexpr):
    """(scores [N, TILE] after modifiers and masks, factor by which scores become exponents of 2)."""
    unit = scale * LOG2E
    first = tile * S.TILE - gap_before(tile, rows.context_len, S)
    if S.SCALE_FIRST:
        unit = LOG2E
        scores = modify(times(scores, scale, S.BY_ROW), rows, key, first, mods, S)
    if has_edges(rows, span, tile, S):
        scores = mask(scores, rows, key, first, end_in(tile, span.hi, rows.context_len, S), mods)
    return cut_own(scores, rows, key, first, mods, S), unit


@gluon.jit
def raise_by_power(scores, unit, powers, rows, S: gl.constexpr):
    """(scores * unit + powers [N, TILE], 1): exponents of 2, and the factor that is left to apply to them.

    powers [TILE]: base-2 logarithms of the values' scales (`slot_scales`).  So each weight contains its value's
    scale.  Maxima are found afterwards, with the scales, and keep these weights in float16's range.
    """
    BY_ROW: gl.constexpr = S.BY_ROW and not S.SCALE_FIRST
    one = 1.0
    if BY_ROW:
        one = rows.slot.to(gl.float32) * 0.0 + 1.0
    return times(scores, unit, BY_ROW) + gl.expand_dims(powers, 0), one


@gluon.jit
def exp2_columns(scores, unit, base, S: gl.constexpr):
    """Return 2^(scores [N, TILE] * unit - base [N]); unit is a scalar or [N]."""
    BY_ROW: gl.constexpr = S.BY_ROW and not S.SCALE_FIRST
    factor = gl.expand_dims(unit, 1) if BY_ROW else unit
    return exp2_below(scores, factor, gl.expand_dims(base, 1), S)


@gluon.jit
def raise_columns(scores, unit, row_max, over, S: gl.constexpr):
    """(weights [N, TILE], decay [N], maximum [N]); a maximum rises by more than the slack, or not at all.

    over [N]: whether a row's maximum may rise.  decay: factor of the row's earlier results and sums.
    """
    top = gl.where(over, gl.max(scores, axis=1) * unit, row_max)
    top = gl.where(top > row_max + SLACK, top, row_max)
    base = base_of(top)
    return exp2_columns(scores, unit, base, S), gl.exp2(row_max - base), top


@gluon.jit
def scale_columns(acc, factor):
    """Return results [DIM, N], each column times its factor [N]."""
    return acc * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(0, acc.type.layout)), 0)


@gluon.jit
def with_sink(acc, row_max, row_sum, sink_max, sink_sum):
    """(acc [DIM, N], max [N], sum [N]) of a state joined with the sink's max and sum (`softmax.start`)."""
    top = gl.maximum(row_max, sink_max)
    base = base_of(top)
    decay = gl.exp2(row_max - base)
    return scale_columns(acc, decay), top, row_sum * decay + sink_sum * gl.exp2(sink_max - base)


@gluon.jit
def scale_results(acc, factor, S: gl.constexpr):
    """Do `scale_columns` for results or, with latents, for each of a tuple of results with some of the dims."""
    if S.REST is None:
        return scale_columns(acc, factor)
    else:
        scaled = ()
        for i in gl.static_range(len(acc)):
            scaled = scaled + (scale_columns(acc[i], factor),)  # type: ignore[assignment]
        return scaled


@gluon.jit
def by_lane(x, S: gl.constexpr, P: gl.constexpr):
    """Return each thread's sum of each row, [N, warps, 8 lanes], of a transposed product x [N, TILE]."""
    x = x.reshape([P.COLUMNS, S.TILE // P.ROWS, P.ROWS // 16, 2, 8])
    return gl.sum(gl.sum(x, axis=3), axis=1)


@gluon.jit
def beside_lanes(x, like):
    """Return x [N] as [N, 1, 1] in the layout of `like` [N, warps, 8]."""
    L: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, like.type.layout))
    return gl.expand_dims(gl.expand_dims(gl.convert_layout(x, L), 1), 2)


@gluon.jit
def no_sums(state, S: gl.constexpr, P: gl.constexpr):
    """Return zeros [N, warps, 8 lanes], the initial sums of weights of each thread."""
    ROWS: gl.constexpr = state.max.type.layout
    return by_lane(gl.full([P.COLUMNS, S.TILE], 0.0, gl.float32, ROWS.parent), S, P)


@gluon.jit
def sums_together(state, sums):
    """Return the state with the sums of all threads added to its sum."""
    added = gl.sum(gl.sum(sums, axis=2), axis=1)
    return State(state.acc, state.max, state.sum + gl.convert_layout(added, state.sum.type.layout))


@gluon.jit
def without_zeros(acc, below, UNIT: gl.constexpr):
    """Return results [DIM, N] of int4 values: acc, sums of weighted stored numbers, less weighted zero points.

    below [N, warps, 8 lanes]: each thread's sums of weights times zero points.  UNIT: number in acc that stands for 1
    in even dims.  In odd dims, 16 * UNIT stands for 1.  `columns.gather_columns` orders dims later: here, every second
    group of eight rows has odd dims.
    """
    row = gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, acc.type.layout))
    unit = gl.where(row // 8 % 2 == 1, 1 / 16 / UNIT, 1 / UNIT)
    zeros = gl.convert_layout(gl.sum(gl.sum(below, axis=2), axis=1), gl.SliceLayout(0, acc.type.layout))
    return acc * gl.expand_dims(unit, 1) - gl.expand_dims(zeros, 0)


@gluon.jit
def raise_flags(flags, sums, count, P: gl.constexpr):
    """Write whether this warp has sums beyond the limit.  Rows from `count` on have no queries, and are ignored."""
    row = gl.arange(0, P.COLUMNS, layout=gl.SliceLayout(1, gl.SliceLayout(2, sums.type.layout)))
    sums = gl.where(gl.expand_dims(gl.expand_dims(row < count, 1), 2), sums, 0.0)
    WARPS: gl.constexpr = P.ROWS // 16
    sums = gl.reduce(sums.reshape([P.COLUMNS // 8, 4, 2, WARPS, 8]), 2, larger)
    flags.store(any_beyond(gl.reduce(sums, 0, larger)).permute((2, 0, 1)).reshape([32, WARPS]))


@gluon.jit
def any_flag(flags, P: gl.constexpr):
    """Return 1 if any warp has raised its flag, else 0; only the flag of each warp's first lane is read."""
    WARPS: gl.constexpr = P.ROWS // 16
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, WARPS], [32, 1], [WARPS, 1], [1, 0])
    return gl.max(gl.max(flags.slice(0, 1, dim=0).load(LAYOUT), axis=1), axis=0)


@gluon.jit
def weigh_columns(
    scores, unit, state, sums, first, count, room, flags, S: gl.constexpr, P: gl.constexpr, inverse=None, zeros=None,
    below=None,
):  # fmt: skip
    """(state, sums) after a tile's weights are written to `room`, shared memory [N, TILE].

    Weights use the maxima so far, unless a sum exceeds the limit.  An item's first tile (`first`) always gets new
    maxima, because most rows have no maximum yet.  Only the first `count` rows have queries.  In later tiles, a row
    without a maximum has infinite weights for all keys that it sees, so its sum exceeds the limit.  A row within the
    limit keeps its maximum, so its result has the same bits whichever rows share its block.

    inverse [TILE]: factor of each weight in its row's sum: the inverse of the value's scale (`slot_scales`).  None: 1.

    zeros [TILE]: zero points of int4 values.  Rounded weights times zero points are added to `below`, which is then
    returned, too.
    """
    acc, row_max, row_sum = state.acc, state.max, state.sum
    ROWS: gl.constexpr = row_max.type.layout
    added, found, too_large = sums, sums, 1
    if zeros is not None:
        taken = below
    if not first:
        weights = exp2_columns(scores, unit, gl.maximum(row_max, MIN_FLOAT32), S)
        found = by_lane(weights, S, P)
        added = found if inverse is None else by_lane(weights * gl.expand_dims(inverse, 0), S, P)
        rounded = weights.to(room.dtype)
        room.store(rounded)
        if zeros is not None:
            taken = by_lane(rounded.to(gl.float32) * gl.expand_dims(zeros, 0), S, P)
        raise_flags(flags, found, count, P)
        fence_async_shared()
        thread_barrier()
        too_large = any_flag(flags, P)
    if too_large > 0:
        over = gl.full([P.COLUMNS], True, gl.int1, ROWS)
        if not first:
            over = gl.convert_layout(gl.max(gl.max(found, axis=2), axis=1), ROWS) > MAX_SUM_PER_THREAD
        weights, decay, row_max = raise_columns(scores, unit, row_max, over, S)
        rounded = weights.to(room.dtype)
        room.store(rounded)
        if zeros is not None:
            taken = by_lane(rounded.to(gl.float32) * gl.expand_dims(zeros, 0), S, P)
            below *= beside_lanes(decay, below)
        if inverse is not None:
            weights *= gl.expand_dims(inverse, 0)
        added = by_lane(weights, S, P)
        row_sum *= decay
        if not first:
            sums *= beside_lanes(decay, sums)
            acc = scale_results(acc, decay, S)
        fence_async_shared()
        thread_barrier()
    if zeros is None:
        return State(acc, row_max, row_sum), sums + added
    else:
        return State(acc, row_max, row_sum), sums + added, below + taken
