"""Rings of shared memory slots: loaders fill them in turn, consumers empty them in the same turn."""

import triton

from .args import Ring, Turn
from .asm import TAG, arrive_at, await_at, find_tag
from .shim import async_copy, gl, gluon, mbarrier, reinterpret, thread_barrier

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
def make_ring(
    dtype: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    FILLERS: gl.constexpr,
    READERS: gl.constexpr,
    WARPS: gl.constexpr = 4,
    NUMBER: gl.constexpr = 0,
):
    """An empty ring of tiles in the layout that a box arrives in: so many arrivals fill and empty a slot."""
    SHAPE: gl.constexpr = [ROWS, 1, COLUMNS]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(SHAPE, dtype)
    slots = gl.allocate_shared_memory(dtype, [STAGES, ROWS, 1, COLUMNS], layout)
    if WARPS == 8:
        barriers: gl.constexpr = mbarrier.MBarrierLayout()
        full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
        one: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
        full.index(0).store(gl.full([1], TAG + NUMBER, gl.int64, one))
        empty.index(0).store(gl.full([1], TAG + NUMBER + 2, gl.int64, one))
        thread_barrier()
        full_at, empty_at = find_tag(gl.to_tensor(TAG + NUMBER)), find_tag(gl.to_tensor(TAG + NUMBER + 2))
        thread_barrier()
        # barriers are kept apart from this memory: a tag would stay in it for the next program to find
        full.index(0).store(gl.full([1], 0, gl.int64, one))
        empty.index(0).store(gl.full([1], 0, gl.int64, one))
        thread_barrier()
        for i in gl.static_range(STAGES):
            mbarrier.init(full.index(i), count=FILLERS)
            mbarrier.init(empty.index(i), count=READERS)
        return Ring(slots, full, empty, full_at, empty_at)
    else:
        full, empty = make_barriers(STAGES, FILLERS, READERS)
        return Ring(slots, full, empty, 0, 0)


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
def wait_full(ring, turn, there=True):
    """Until the slot's tile has arrived, if there is one to come."""
    mbarrier.wait(ring.full.index(turn.stage), turn.phase, pred=there)


@gluon.jit
def wait_tile(ring, turn, P: gl.constexpr):
    """`wait_full` of consumers of rows."""
    if P.ROWS == 128:
        await_at(ring.full_at + turn.stage * 8, turn.phase)
    else:
        wait_full(ring, turn)


@gluon.jit
def release_tile(ring, turn, P: gl.constexpr):
    """`release` of the turn's slot by a consumer."""
    if P.ROWS == 128:
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
def words_of(ring, turn, ROWS: gl.constexpr, BYTES: gl.constexpr):
    """The slot as a matrix of 32-bit words; the copy engine's swizzle moves 16 bytes at a time, whatever they hold."""
    SWIZZLE: gl.constexpr = BYTES if BYTES < 128 else 128
    layout: gl.constexpr = gl.NVMMASharedLayout(SWIZZLE, 32, 2)
    return reinterpret(ring.slots.index(turn.stage), gl.int32, [ROWS, BYTES // 4], layout)
