"""Gates: mbarriers at which each consumer warp waits by itself.

Gates serve consumers of several warpgroups, three consumers, and few rows beside blocks.  All gates lie in one array
[kind, slot] of shared memory.  A tag behind the array tells each warp the array's address.
"""

import triton

from ..args import Gates, is_gated
from ..asm.barriers import TAG, find_tag, init_at
from ..layouts import line_layout
from ..planning import operands
from ..shim import gl, gluon, mbarrier, reinterpret, thread_barrier

# Kinds of full barriers, each a row of the array.  The next row has the empty barriers of the same slots.
KEYS, VALUES, QUERIES, MAIL = gl.constexpr(0), gl.constexpr(2), gl.constexpr(4), gl.constexpr(6)
KINDS = gl.constexpr(8)  # rows of the array for blocks; few rows beside blocks have KINDS more rows
DEPTH = gl.constexpr(8)  # maximum number of slots of a ring
WIDEN = gl.constexpr(operands.WIDEN)  # the only conversion of keys; the converter then fills the consumers' key ring


@triton.constexpr_function
def arrivals_of(P):
    """Number of arrivals that complete one phase of each kind of barrier; 0: this pipe has no barrier of that kind.

    Each consumer warp that reads a slot arrives once.
    """
    readers, convert = P.CONSUMERS * P.ROWS // 16, int(P.CONVERT != 0)
    keys = 1 if WIDEN.value == P.CONVERT else P.LOADERS
    values = 1 if convert else P.LOADERS
    queries = (1, readers) if P.QUERY_BOX else (0, 0)
    mail = (1, readers + 2 * P.LOADERS - 1 + convert)
    return keys, readers, values, readers, *((*queries, *mail) if P.ROWS >= 128 or P.BESIDE else (0, 0, 0, 0))


@triton.constexpr_function
def depths_of(P):
    """Number of barriers of each kind, which is the number of slots that they guard."""
    return P.KEY_STAGES, P.KEY_STAGES, P.VALUE_STAGES, P.VALUE_STAGES, 2, 2, 2, 2


@triton.constexpr_function
def gate_rows(P, G):
    """Number of the array's rows: KINDS for blocks, and KINDS more if few rows run beside blocks, with pipe G."""
    return KINDS.value * (1 if G is None else 2)


@gluon.jit
def arrivals_at(warp, slot, P: gl.constexpr):
    """Arrival count of barrier (kind = warp, slot), for each thread; 0 where there is no such barrier."""
    ARRIVALS: gl.constexpr = arrivals_of(P)
    DEPTHS: gl.constexpr = depths_of(P)
    WARPS: gl.constexpr = KINDS if P.BESIDE else P.ROWS // 16
    arrivals = warp * 0
    for kind in gl.static_range(min(KINDS, WARPS)):  # with four warps: keys and values alone
        arrivals = gl.where((warp == kind) & (slot >= 0) & (slot < DEPTHS[kind]), ARRIVALS[kind], arrivals)
    return arrivals


@gluon.jit
def make_gates(P: gl.constexpr, G: gl.constexpr = None):
    """Make the array of barriers, and find its address; return Gates, or 0 if no warp waits by itself.

    Consumers of several warpgroups, and few rows beside blocks, have in the array all kinds of barriers that they use.
    Three consumers have only those of keys and values there.  Each warp writes a tag behind the array, and searches for
    the tag.

    The threads of a warp initialise barriers one after another, so kinds are spread over the warps.  Warp n initialises
    kind n for blocks (P) and, if there are any, for few rows beside blocks (G).
    """
    if is_gated(P):
        ROWS: gl.constexpr = gate_rows(P, G)
        THREADS: gl.constexpr = line_layout(P.ROWS // 16)
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
    """Let all threads meet before warp partitions start.

    Triton passes arguments of partitions through shared memory, where a late warp may still have to read the result of
    the last reduction.  Triton puts no barrier in between, and the warp would read arguments instead of the result.
    """
    thread_barrier()


@gluon.jit
def start_with(gates, P: gl.constexpr, G: gl.constexpr = None):
    """Do `start_together`, and erase the tag of the gates."""
    start_together()
    if is_gated(P):  # all warps have found the tag; the next program on the multiprocessor must not find it
        THREADS: gl.constexpr = line_layout(P.ROWS // 16)
        gates.barriers.index(gate_rows(P, G)).store(gl.full([DEPTH], 0, gl.int64, THREADS))


@gluon.jit
def gate(gates, KIND: gl.constexpr, P: gl.constexpr):
    """(barriers [DEPTH, 1] of one kind, address of the first)."""
    ROW: gl.constexpr = KIND + KINDS if P.BESIDE else KIND
    row = gates.barriers.index(ROW)
    return reinterpret(row, gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout()), gates.at + ROW * DEPTH * 8
