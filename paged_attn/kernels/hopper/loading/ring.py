"""Rings of shared memory slots: loaders fill them in turn, consumers empty them in the same turn."""

import math

import triton

from ..args import Ring, Turn, dim_parts, is_gated
from ..asm.barriers import TAG, arrive_at, await_at, find_tag
from ..shim import async_copy, gl, gluon, mbarrier, reinterpret, thread_barrier
from .gates import DEPTH, KEYS, gate

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


@gluon.jit
def make_meeting(THREADS: gl.constexpr):
    """A barrier of all threads of two consumers."""
    both = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(both.index(0), count=THREADS)
    return both


@gluon.jit
def meet_consumers(both, PHASE: gl.constexpr):
    """Until both consumers are here; they meet twice, by phases 0 and 1, so that the next time begins with 0 again."""
    release(both.index(0))
    mbarrier.wait(both.index(0), PHASE)


@triton.constexpr_function
def bytes_of_slot(slots):
    """Of one of these slots, whatever its axes."""
    return math.prod(slots.shape[1:]) * slots.dtype.primitive_bitwidth // 8


@gluon.jit
def make_slots(dtype: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr):
    """Tiles in the layout that a box arrives in."""
    PARTS: gl.constexpr = dim_parts(COLUMNS)
    SHAPE: gl.constexpr = [ROWS, 1, COLUMNS // PARTS]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(SHAPE, dtype)
    return gl.allocate_shared_memory(dtype, [STAGES * PARTS, ROWS, 1, COLUMNS // PARTS], layout)


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
def tile_in(ring, turn, DIM: gl.constexpr, S: gl.constexpr, PART: gl.constexpr = 0):
    """The slot as a matrix [N, D], or of dims in parts one of these [N, 64]."""
    PARTS: gl.constexpr = dim_parts(DIM)
    if PARTS == 1:
        return ring.slots.index(turn.stage).reshape([S.TILE, DIM])
    else:
        return ring.slots.index(turn.stage * PARTS + PART).reshape([S.TILE, DIM // PARTS])


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
