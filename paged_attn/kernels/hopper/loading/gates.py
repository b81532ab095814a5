"""mbarriers between loader warps and consumers of several warpgroups.

Each warp waits by itself.  All barriers lie in one array [kind, slot] of shared memory, behind which a tag tells the
warps its address.
"""

import triton

from ..args import Gates, is_gated
from ..asm.barriers import TAG, find_tag, init_at
from ..planning import operands
from ..shim import gl, gluon, mbarrier, reinterpret, thread_barrier

# Kinds of barriers, rows of the array: full barriers; the row behind has the empty barriers.
KEYS, VALUES, QUERIES, MAIL = gl.constexpr(0), gl.constexpr(2), gl.constexpr(4), gl.constexpr(6)
KINDS = gl.constexpr(8)  # rows for blocks; few rows beside blocks have KINDS more rows
DEPTH = gl.constexpr(8)  # slots of a ring, at most
WIDEN = gl.constexpr(operands.WIDEN)  # the one conversion of keys: a converter fills the ring that consumers read


@triton.constexpr_function
def arrivals_of(P):
    """Arrivals that complete one phase of each kind of barrier; 0: this pipe has no barrier of that kind.

    Each consumer warp arrives once.
    """
    readers, convert = P.CONSUMERS * P.ROWS // 16, int(P.CONVERT != 0)
    keys = 1 if WIDEN.value == P.CONVERT else P.LOADERS
    values = 1 if convert else P.LOADERS
    queries = (1, readers) if P.QUERY_BOX else (0, 0)
    mail = (1, readers + 2 * P.LOADERS - 1 + convert)
    return keys, readers, values, readers, *((*queries, *mail) if P.ROWS >= 128 or P.BESIDE else (0, 0, 0, 0))


@triton.constexpr_function
def depths_of(P):
    """Number of barriers of each kind: the depth of its ring."""
    return P.KEY_STAGES, P.KEY_STAGES, P.VALUE_STAGES, P.VALUE_STAGES, 2, 2, 2, 2


@triton.constexpr_function
def gate_rows(P, G):
    """Rows of the array: KINDS for blocks, and KINDS more if few rows run beside blocks (G)."""
    return KINDS.value * (1 if G is None else 2)


@gluon.jit
def arrivals_at(warp, slot, P: gl.constexpr):
    """Arrivals of barrier (kind = warp, slot), for each thread; 0: there is no such barrier."""
    ARRIVALS: gl.constexpr = arrivals_of(P)
    DEPTHS: gl.constexpr = depths_of(P)
    WARPS: gl.constexpr = KINDS if P.BESIDE else P.ROWS // 16
    arrivals = warp * 0
    for kind in gl.static_range(min(KINDS, WARPS)):  # with four warps: keys and values alone
        arrivals = gl.where((warp == kind) & (slot >= 0) & (slot < DEPTHS[kind]), ARRIVALS[kind], arrivals)
    return arrivals


@gluon.jit
def make_gates(P: gl.constexpr, G: gl.constexpr = None):
    """Make the array of barriers, and find its address; 0 if no warp waits by itself.

    A consumer of several warpgroups has all kinds there; three consumers have those of keys and values.  Each warp
    writes a tag behind the array, and finds it.  A warp initialises its barriers one after another, so warp n takes
    kind n: of blocks (P) and, if there are any, of few rows beside them (G).
    """
    if is_gated(P):
        ROWS: gl.constexpr = gate_rows(P, G)
        THREADS: gl.constexpr = gl.BlockedLayout([1], [32], [P.ROWS // 16], [0])
        barriers = gl.allocate_shared_memory(gl.int64, [ROWS + 1, DEPTH], mbarrier.MBarrierLayout())
        barriers.index(ROWS).store(gl.full([DEPTH], TAG, gl.int64, THREADS))
        at = find_tag(gl.to_tensor(TAG)) - (ROWS + 1) * DEPTH * 8 + 8  # the tag found is the last word
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
    """Have all threads meet before partitions start.

    Arguments of partitions pass through shared memory that may still hold the result of the last reduction.  Triton
    puts no barrier between the two, so a late warp would read arguments as that result.
    """
    thread_barrier()


@gluon.jit
def start_with(gates, P: gl.constexpr, G: gl.constexpr = None):
    """`start_together`, for all pipes; erases the tag."""
    start_together()
    if is_gated(P):  # all warps have found the tag; the next program on the multiprocessor must not find it
        THREADS: gl.constexpr = gl.BlockedLayout([1], [32], [P.ROWS // 16], [0])
        gates.barriers.index(gate_rows(P, G)).store(gl.full([DEPTH], 0, gl.int64, THREADS))


@gluon.jit
def gate(gates, KIND: gl.constexpr, P: gl.constexpr):
    """(barriers [DEPTH, 1] of one kind, address of the first)."""
    ROW: gl.constexpr = KIND + KINDS if P.BESIDE else KIND
    row = gates.barriers.index(ROW)
    return reinterpret(row, gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout()), gates.at + ROW * DEPTH * 8
