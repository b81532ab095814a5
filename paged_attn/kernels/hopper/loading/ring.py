"""Rings of shared memory slots: loaders fill them in turn, consumers empty them in the same turn."""

import triton

from ..args import Gates, Ring, Turn, is_gated
from ..asm.barriers import TAG, arrive_at, await_at, find_tag, init_at
from ..shim import async_copy, fence_async_shared, gl, gluon, mbarrier, reinterpret, thread_barrier

WARPGROUP = gl.constexpr(128)  # threads


@triton.constexpr_function
def threads_of(rows):
    """Of a consumer of so many rows."""
    return 2 * rows


@gluon.jit
def make_barriers(NUMBER: gl.constexpr, FILLERS: gl.constexpr, READERS: gl.constexpr):
    """So many pairs of barriers (full, empty), complete after so many arrivals each.

    Make none that nobody uses to the end, or invalidate it there: to Triton its memory would be free, but the
    multiprocessor keeps barriers apart and writes them back at any time.
    """
    layout: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], layout)
    empty = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], layout)
    for i in gl.static_range(NUMBER):  # in turn: between two of one allocation Triton has all threads wait
        mbarrier.init(full.index(i), count=FILLERS)
        mbarrier.init(empty.index(i), count=READERS)
    return full, empty


# Rows of the array of barriers: full, and empty one further.
KEYS, VALUES, QUERIES, MAIL = gl.constexpr(0), gl.constexpr(2), gl.constexpr(4), gl.constexpr(6)
KINDS = gl.constexpr(8)  # of blocks; as many rows further on those of few rows beside them
DEPTH = gl.constexpr(8)  # slots of a ring at most


@triton.constexpr_function
def arrivals_of(P):
    """That complete the barriers of each kind, one of each warp of the consumers; 0: there are none."""
    readers, convert = P.CONSUMERS * P.ROWS // 16, int(P.CONVERT != 0)
    fillers = P.LOADERS * (32 if P.GATHER else 1)  # `fillers_of`, which 3.6 cannot call from here
    keys = 1 if P.CONVERT == 1 else fillers
    values = 1 if convert else fillers
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


@gluon.jit
def make_slots(dtype: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr):
    """Tiles in the layout that a box arrives in."""
    SHAPE: gl.constexpr = [ROWS, 1, COLUMNS]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(SHAPE, dtype)
    return gl.allocate_shared_memory(dtype, [STAGES, ROWS, 1, COLUMNS], layout)


@gluon.jit
def address_of(slots, KIND: gl.constexpr, P: gl.constexpr):
    """Where slots of a kind lie in shared memory: each warp leaves a tag in the first one, and finds it.

    A program that gets no work writes nothing over it, and the next one on its multiprocessor must not find it.
    """
    WORDS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    THREADS: gl.constexpr = gl.BlockedLayout([1], [32], [P.ROWS // 16], [0])
    OWN_TAG: gl.constexpr = TAG + 1 + KIND
    words = reinterpret(slots.index(0), gl.int64, [slots.shape[1] * slots.shape[2] * slots.shape[3] // 4], WORDS)
    words = words.slice(0, 32, dim=0)
    words.store(gl.full([32], OWN_TAG, gl.int64, THREADS))
    at = find_tag(gl.to_tensor(OWN_TAG), 1024)
    thread_barrier()  # all have found it
    words.store(gl.full([32], 0, gl.int64, THREADS))
    return at


@gluon.jit
def make_ring(
    dtype: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    FILLERS: gl.constexpr,
    READERS: gl.constexpr,
):
    """An empty ring of tiles: so many arrivals fill and empty a slot."""
    return ring_of(make_slots(dtype, ROWS, COLUMNS, STAGES), STAGES, FILLERS, READERS)


@gluon.jit
def ring_of(slots, STAGES: gl.constexpr, FILLERS: gl.constexpr, READERS: gl.constexpr):
    """An empty ring of these slots."""
    full, empty = make_barriers(STAGES, FILLERS, READERS)
    return Ring(slots, full, empty, 0, 0, 0)


@gluon.jit
def make_read_ring(
    dtype: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    FILLERS: gl.constexpr,
    gates,
    KIND: gl.constexpr,
    P: gl.constexpr,
):
    """One that consumers empty."""
    if is_gated(P):
        gl.static_assert(STAGES <= DEPTH)
        full, full_at = gate(gates, KIND, P)
        empty, empty_at = gate(gates, KIND + 1, P)
        slots = make_slots(dtype, ROWS, COLUMNS, STAGES)
        at = address_of(slots, KIND, P) if P.PACKED and KIND == KEYS else 0
        return Ring(slots, full, empty, full_at, empty_at, at)
    else:
        gl.static_assert(not P.PACKED)  # whose keys have to have an address
        return make_ring(dtype, ROWS, COLUMNS, STAGES, FILLERS, P.CONSUMERS * threads_of(P.ROWS))


@gluon.jit
def start_together():
    """Before partitions start: their arguments go through shared memory that the last reduction may still be read from.

    Triton puts no barrier between the two, and a warp that is late would take arguments for the result.
    """
    thread_barrier()


@gluon.jit
def advance(turn, STAGES: gl.constexpr):
    """The next slot; the parity changes with every round."""
    stage = turn.stage + 1
    wrapped = stage == STAGES
    return Turn(gl.where(wrapped, 0, stage), gl.where(wrapped, turn.phase ^ 1, turn.phase))


@gluon.jit
def wait_full(ring, turn, there=None):
    """Until the slot's tile has arrived; there: if one is to come, where that is not certain."""
    if there is None:
        mbarrier.wait(ring.full.index(turn.stage), turn.phase)
    else:
        mbarrier.wait(ring.full.index(turn.stage), turn.phase, pred=there)


@gluon.jit
def wait_tile(ring, turn, P: gl.constexpr, there=None):
    """`wait_full` of consumers."""
    if is_gated(P):
        await_at(ring.full_at + turn.stage * 8, turn.phase, there)
    else:
        wait_full(ring, turn, there)
    if P.GATHER:  # what threads wrote, tensor cores will read
        fence_async_shared()


@gluon.jit
def release_tile(ring, turn, P: gl.constexpr):
    """`release` of the turn's slot by a consumer."""
    if is_gated(P):
        arrive_at(ring.empty_at + turn.stage * 8)
    else:
        release(ring.empty.index(turn.stage))


@gluon.jit
def wait_empty(ring, turn):
    """Until every consumer has released the slot; the first round waits for nothing."""
    mbarrier.wait(ring.empty.index(turn.stage), turn.phase ^ 1)


@gluon.jit
def wait_released(ring, turn, STAGES: gl.constexpr):
    """Until every consumer has released the slot before, and so all that were filled; before the first, at once."""
    first = turn.stage == 0
    stage = gl.where(first, STAGES - 1, turn.stage - 1)
    mbarrier.wait(ring.empty.index(stage), gl.where(first, turn.phase ^ 1, turn.phase))


@gluon.jit
def release(barrier):
    """Arrive, every thread for itself: mbarrier.arrive would put a barrier of the whole warpgroup before it.

    It orders nothing: what a thread has read of the slot must have been used before, as by a product that is done.
    """
    async_copy.mbarrier_arrive(barrier, increment_count=False)


@gluon.jit
def tile_of(ring, turn, S: gl.constexpr):
    """The slot as a matrix [N, D]."""
    return ring.slots.index(turn.stage).reshape([S.TILE, S.DIM])


@gluon.jit
def words_of(ring, turn, ROWS: gl.constexpr, BYTES: gl.constexpr, dtype: gl.constexpr = gl.int32):
    """The slot as a matrix of words."""
    return as_words(ring.slots.index(turn.stage), ROWS, BYTES, dtype)


@gluon.jit
def as_words(slot, ROWS: gl.constexpr, BYTES: gl.constexpr, dtype: gl.constexpr = gl.int32):
    """Shared memory as a matrix of words: the copy engine's swizzle moves 16 bytes, whatever they hold."""
    SWIZZLE: gl.constexpr = BYTES if BYTES < 128 else 128
    BITS: gl.constexpr = dtype.primitive_bitwidth
    layout: gl.constexpr = gl.NVMMASharedLayout(SWIZZLE, BITS, 2)
    return reinterpret(slot, dtype, [ROWS, BYTES * 8 // BITS], layout)
