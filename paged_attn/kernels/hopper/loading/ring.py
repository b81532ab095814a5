"""Rings of slots in shared memory: loaders fill the slots in order, and consumers empty them in the same order."""

import math

import triton

from ..args import Ring, Turn, dim_parts, is_gated
from ..asm.barriers import TAG, arrive_at, await_at, find_tag
from ..layouts import line_layout
from ..shim import async_copy, gl, gluon, mbarrier, reinterpret, thread_barrier
from .gates import DEPTH, KEYS, gate

WARPGROUP = gl.constexpr(128)  # threads


@triton.constexpr_function
def threads_of(rows):
    """Number of threads of a consumer of `rows` rows."""
    return 2 * rows


@gluon.jit
def make_barriers(NUMBER: gl.constexpr, FILLERS: gl.constexpr, READERS: gl.constexpr):
    """Make NUMBER full and NUMBER empty mbarriers, whose phases complete after FILLERS and READERS arrivals.

    Use each barrier until the program ends, or invalidate it after its last use.  Triton reuses a barrier's memory, but
    the multiprocessor caches barriers and may write them back at any time.
    """
    layout: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], layout)
    empty = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], layout)
    # Between two successive inits in the same allocation, Triton synchronises all threads.  Inits that alternate
    # between two allocations are synchronised half as often.
    for i in gl.static_range(NUMBER):
        mbarrier.init(full.index(i), count=FILLERS)
        mbarrier.init(empty.index(i), count=READERS)
    return full, empty


@gluon.jit
def make_meeting(THREADS: gl.constexpr):
    """Make an mbarrier at which all THREADS threads of two consumers meet."""
    both = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(both.index(0), count=THREADS)
    return both


@gluon.jit
def meet_consumers(both, PHASE: gl.constexpr):
    """Wait until both consumers are here.  Consumers always meet twice, with PHASE 0 and then with PHASE 1."""
    release(both.index(0))
    mbarrier.wait(both.index(0), PHASE)


@triton.constexpr_function
def bytes_of_slot(slots):
    """Number of bytes of one slot; with dims in parts, of one part of a slot."""
    return math.prod(slots.shape[1:]) * slots.dtype.primitive_bitwidth // 8


@gluon.jit
def make_slots(dtype: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr):
    """Allocate STAGES tiles [ROWS, 1, COLUMNS] in the layout in which boxes arrive, with dims in parts if needed."""
    PARTS: gl.constexpr = dim_parts(COLUMNS)
    SHAPE: gl.constexpr = [ROWS, 1, COLUMNS // PARTS]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(SHAPE, dtype)
    return gl.allocate_shared_memory(dtype, [STAGES * PARTS, ROWS, 1, COLUMNS // PARTS], layout)


@gluon.jit
def make_matrices(dtype: gl.constexpr, NUMBER: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Allocate NUMBER matrices [ROWS, COLUMNS] in the layout of a product's operands."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], dtype)
    return gl.allocate_shared_memory(dtype, [NUMBER, ROWS, COLUMNS], layout)


@gluon.jit
def address_of(slots, KIND: gl.constexpr, P: gl.constexpr):
    """Return the shared-memory address of slots.

    Each warp writes the tag of KIND into the first slot, and searches shared memory for that tag.

    The tag is erased at once.  Otherwise a program without work would leave its tag, and the next program on the
    multiprocessor could find it.
    """
    WORDS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    THREADS: gl.constexpr = line_layout(P.ROWS // 16)
    OWN_TAG: gl.constexpr = TAG + 1 + KIND
    words = reinterpret(slots.index(0), gl.int64, [slots.shape[1] * slots.shape[2] * slots.shape[3] // 4], WORDS)
    words = words.slice(0, 32, dim=0)
    words.store(gl.full([32], OWN_TAG, gl.int64, THREADS))
    at = find_tag(gl.to_tensor(OWN_TAG), 1024)
    thread_barrier()  # all warps have found the tag
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
    """Make an empty ring of tiles [ROWS, COLUMNS]: FILLERS arrivals fill a slot, READERS arrivals empty it."""
    return ring_of(make_slots(dtype, ROWS, COLUMNS, STAGES), STAGES, FILLERS, READERS)


@gluon.jit
def ring_of(slots, STAGES: gl.constexpr, FILLERS: gl.constexpr, READERS: gl.constexpr):
    """Make an empty ring of the given slots; FILLERS, READERS: as for `make_ring`."""
    full, empty = make_barriers(STAGES, FILLERS, READERS)
    return Ring(slots, full, empty, 0, 0, 0, 0)


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
    """Make an empty ring that consumers read.

    If each consumer warp waits by itself (`is_gated`), the ring's full and empty barriers are those of kinds KIND and
    KIND + 1 in `gates`.
    """
    if is_gated(P):
        gl.static_assert(STAGES <= DEPTH)
        full, full_at = gate(gates, KIND, P)
        empty, empty_at = gate(gates, KIND + 1, P)
        slots = make_slots(dtype, ROWS, COLUMNS, STAGES)
        at = address_of(slots, KIND, P) if P.PACKED and KIND == KEYS else 0
        return Ring(slots, full, empty, full_at, empty_at, at, 0)
    else:
        gl.static_assert(not P.PACKED)  # x-packed keys need an address
        return make_ring(dtype, ROWS, COLUMNS, STAGES, FILLERS, P.CONSUMERS * threads_of(P.ROWS))


@gluon.jit
def advance(turn, STAGES: gl.constexpr):
    """Return the turn of the next slot; the phase changes with every round."""
    stage = turn.stage + 1
    wrapped = stage == STAGES
    return Turn(gl.where(wrapped, 0, stage), gl.where(wrapped, turn.phase ^ 1, turn.phase))


@gluon.jit
def wait_full(ring, turn, there=None):
    """Wait until the tile in the turn's slot has arrived; there: whether to wait, by default always."""
    if there is None:
        mbarrier.wait(ring.full.index(turn.stage), turn.phase)
    else:
        mbarrier.wait(ring.full.index(turn.stage), turn.phase, pred=there)


@gluon.jit
def wait_tile(ring, turn, P: gl.constexpr, there=None):
    """Wait, as a consumer, until the tile in the turn's slot has arrived; there: as in `wait_full`."""
    if is_gated(P):
        await_at(ring.full_at + turn.stage * 8, turn.phase, there)
    else:
        wait_full(ring, turn, there)


@gluon.jit
def release_tile(ring, turn, P: gl.constexpr):
    """Release the turn's slot as a consumer; its products and reads must be done."""
    if is_gated(P):
        arrive_at(ring.empty_at + turn.stage * 8)
    else:
        release(ring.empty.index(turn.stage))


@gluon.jit
def wait_empty(ring, turn):
    """Wait until every reader has released the turn's slot; in the first round, return at once."""
    mbarrier.wait(ring.empty.index(turn.stage), turn.phase ^ 1)


@gluon.jit
def wait_released(ring, turn, STAGES: gl.constexpr):
    """Wait until every consumer has released the slot that was filled last, the slot before the turn's.

    Consumers release slots in order, so all filled slots are then released.  Before the first fill, return at once.
    """
    first = turn.stage == 0
    stage = gl.where(first, STAGES - 1, turn.stage - 1)
    mbarrier.wait(ring.empty.index(stage), gl.where(first, turn.phase ^ 1, turn.phase))


@gluon.jit
def release(barrier):
    """Arrive at an mbarrier in every thread by itself; `mbarrier.arrive` would let the whole warpgroup meet first.

    The arrival orders no reads.  Before it, the thread's reads of the slot must be complete: their results were used,
    or the product that reads the slot is done.
    """
    async_copy.mbarrier_arrive(barrier, increment_count=False)


@gluon.jit
def tile_in(ring, turn, DIM: gl.constexpr, S: gl.constexpr, PART: gl.constexpr = 0):
    """Return the turn's slot as a matrix [TILE, DIM]; with dims in parts, its part PART, [TILE, 64]."""
    PARTS: gl.constexpr = dim_parts(DIM)
    if PARTS == 1:
        return ring.slots.index(turn.stage).reshape([S.TILE, DIM])
    else:
        return ring.slots.index(turn.stage * PARTS + PART).reshape([S.TILE, DIM // PARTS])


@gluon.jit
def words_of(ring, turn, ROWS: gl.constexpr, BYTES: gl.constexpr, dtype: gl.constexpr = gl.int32):
    """Return the turn's slot as a matrix of words, [ROWS, BYTES / bytes of dtype]."""
    return as_words(ring.slots.index(turn.stage), ROWS, BYTES, dtype)


@gluon.jit
def as_words(slot, ROWS: gl.constexpr, BYTES: gl.constexpr, dtype: gl.constexpr = gl.int32):
    """Return a slot, which TMA swizzles in units of 16 bytes, as a matrix of words [ROWS, BYTES / bytes of dtype]."""
    SWIZZLE: gl.constexpr = BYTES if BYTES < 128 else 128
    BITS: gl.constexpr = dtype.primitive_bitwidth
    layout: gl.constexpr = gl.NVMMASharedLayout(SWIZZLE, BITS, 2)
    return reinterpret(slot, dtype, [ROWS, BYTES * 8 // BITS], layout)
