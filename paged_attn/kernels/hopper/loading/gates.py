"""Barriers of consumers of several warpgroups, whose warps wait each for itself: rows of one array, found by a tag."""

import triton

from ..args import Gates, is_gated
from ..asm.barriers import TAG, find_tag, init_at
from ..shim import gl, gluon, mbarrier, reinterpret, thread_barrier

# Rows of the array of barriers: full, and empty one further.
KEYS, VALUES, QUERIES, MAIL = gl.constexpr(0), gl.constexpr(2), gl.constexpr(4), gl.constexpr(6)
KINDS = gl.constexpr(8)  # of blocks; as many rows further on those of few rows beside them
DEPTH = gl.constexpr(8)  # slots of a ring at most


@triton.constexpr_function
def arrivals_of(P):
    """That complete the barriers of each kind, one of each warp of the consumers; 0: there are none."""
    readers, convert = P.CONSUMERS * P.ROWS // 16, int(P.CONVERT != 0)
    keys = 1 if P.CONVERT == 1 else P.LOADERS
    values = 1 if convert else P.LOADERS
    queries = (1, readers) if P.QUERY_BOX else (0, 0)
    mail = (1, readers + 2 * P.LOADERS - 1 + convert)
    return keys, readers, values, readers, *((*queries, *mail) if P.ROWS >= 128 or P.BESIDE else (0, 0, 0, 0))


@triton.constexpr_function
def depths_of(P):
    """Barriers of each kind."""
    return P.KEY_STAGES, P.KEY_STAGES, P.VALUE_STAGES, P.VALUE_STAGES, 2, 2, 2, 2


@triton.constexpr_function
def gate_rows(P, G):
    """Rows of barriers: of blocks, and of few rows beside them."""
    return KINDS.value * (1 if G is None else 2)


@gluon.jit
def arrivals_at(warp, slot, P: gl.constexpr):
    """Of the barrier in each thread's slot of the kind that is its warp's; 0: there is none."""
    ARRIVALS: gl.constexpr = arrivals_of(P)
    DEPTHS: gl.constexpr = depths_of(P)
    WARPS: gl.constexpr = KINDS if P.BESIDE else P.ROWS // 16
    arrivals = warp * 0
    for kind in gl.static_range(min(KINDS, WARPS)):  # all, or those of tiles
        arrivals = gl.where((warp == kind) & (slot >= 0) & (slot < DEPTHS[kind]), ARRIVALS[kind], arrivals)
    return arrivals


@gluon.jit
def make_gates(P: gl.constexpr, G: gl.constexpr = None):
    """Barriers whose addresses are known, of a consumer of several warpgroups all, of three consumers those of tiles.

    Each warp leaves a tag in the row behind them, and finds it.  A warp makes its barriers one after another, so each
    makes those of one kind, and of the same kind those of few rows beside blocks, whose pipe is G.
    """
    if is_gated(P):
        ROWS: gl.constexpr = gate_rows(P, G)
        THREADS: gl.constexpr = gl.BlockedLayout([1], [32], [P.ROWS // 16], [0])
        barriers = gl.allocate_shared_memory(gl.int64, [ROWS + 1, DEPTH], mbarrier.MBarrierLayout())
        barriers.index(ROWS).store(gl.full([DEPTH], TAG, gl.int64, THREADS))
        at = find_tag(gl.to_tensor(TAG)) - (ROWS + 1) * DEPTH * 8 + 8  # the last one
        thread = gl.arange(0, 2 * P.ROWS, layout=THREADS)
        warp, slot = thread // 32, thread % 32
        place = warp * DEPTH + slot
        arrivals = arrivals_at(warp, slot, P)
        if G is not None:
            gl.static_assert(P.ROWS // 16 == KINDS)
            beside = slot >= DEPTH
            arrivals = gl.where(beside, arrivals_at(warp, slot - DEPTH, G), arrivals)
            place += gl.where(beside, (KINDS - 1) * DEPTH, 0)
        init_at(at + place * 8, arrivals)
        return Gates(barriers, at)
    else:
        return 0


@gluon.jit
def start_together():
    """Before partitions start: their arguments go through shared memory that the last reduction may still be read from.

    Triton puts no barrier between the two, and a warp that is late would take arguments for the result.
    """
    thread_barrier()


@gluon.jit
def start_with(gates, P: gl.constexpr, G: gl.constexpr = None):
    """`start_together`, of whatever consumers."""
    start_together()
    if is_gated(P):  # all have found the tag, which no other program must
        THREADS: gl.constexpr = gl.BlockedLayout([1], [32], [P.ROWS // 16], [0])
        gates.barriers.index(gate_rows(P, G)).store(gl.full([DEPTH], 0, gl.int64, THREADS))


@gluon.jit
def gate(gates, KIND: gl.constexpr, P: gl.constexpr):
    """(barriers [DEPTH, 1] of one kind, the address of the first)."""
    ROW: gl.constexpr = KIND + KINDS if P.BESIDE else KIND
    row = gates.barriers.index(ROW)
    return reinterpret(row, gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout()), gates.at + ROW * DEPTH * 8
