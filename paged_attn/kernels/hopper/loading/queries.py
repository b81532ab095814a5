"""Loading of queries into shared memory: by TMA from a loader warp, or through the consumer's registers."""

import triton

from ...common.bounds import row_tile
from ...common.output import load_query
from ..args import Queries, QueryRows, Turn, dim_parts, has_latent_rows, is_int4, query_parts, slots_of_tile
from ..asm.barriers import arrive_at, await_at
from ..asm.conversions import INT4_UNIT, e4m3_in_two
from ..asm.instructions import bring_near
from ..layouts import line_layout, rows_layout
from ..shim import fence_async_shared, gl, gluon, load_box, mbarrier, thread_barrier
from .gates import QUERIES, gate
from .ring import address_of, as_words, wait_released


@triton.constexpr_function
def take_turns(P):
    """Whether blocks take query slots in turn, with full and empty barriers; if not, all blocks use the same slots."""
    return P.QUERY_BOX and (P.ROWS >= 128 or P.BESIDE)


@triton.constexpr_function
def most_rows(P):
    """Maximum number of query rows of a block that TMA brings for one consumer."""
    return P.COLUMNS if P.BESIDE else P.ROWS


@gluon.jit
def turn_of(done, P: gl.constexpr):
    """Turn (slot and phase) of a block's queries; done: number of blocks before the block."""
    SLOTS: gl.constexpr = P.QUERY_SLOTS
    return Turn(done % SLOTS, done // SLOTS & 1)


@gluon.jit
def make_queries(dtype: gl.constexpr, gates, S: gl.constexpr, P: gl.constexpr):
    """Allocate slots and barriers of query rows; a slot has ROWS rows or, for columns of even shares, about COLUMNS."""
    # at least BOX rows if an empty box of keys comes first (loader.fetch_descriptors)
    FEW: gl.constexpr = P.BOX if P.PREFETCH and P.COLUMNS < P.BOX else P.COLUMNS
    ROWS: gl.constexpr = FEW if P.SHARES and P.COLUMNS > 0 and FEW < 64 else P.ROWS
    PARTS: gl.constexpr = slots_of_tile(P) if P.HALVES else dim_parts(S.DIM)
    gl.static_assert(PARTS == 1 or P.QUERY_BOX or P.HALVES)
    SHAPE: gl.constexpr = [ROWS, 1, S.DIM // PARTS]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(SHAPE, dtype)
    IN_TURN: gl.constexpr = take_turns(P)
    SLOTS: gl.constexpr = PARTS * (
        P.QUERY_SLOTS if IN_TURN else 1 if has_latent_rows(S, P) else P.CONSUMERS * query_parts(P)
    )
    slots = gl.allocate_shared_memory(dtype, [SLOTS, SHAPE[0], SHAPE[1], SHAPE[2]], layout)
    # unused fields hold the slots, because Triton 3.6 returns no record with a None
    full, empty, full_at, empty_at = slots, slots, 0, 0
    if IN_TURN:
        full, full_at = gate(gates, QUERIES, P)
        empty, empty_at = gate(gates, QUERIES + 1, P)
    elif P.QUERY_BOX or P.PREFETCH:
        CONSUMERS: gl.constexpr = P.CONSUMERS
        full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(CONSUMERS):
            mbarrier.init(full.index(i), count=1)
    at = address_of(slots, QUERIES, P) if P.PACKED and not P.SHARES else 0
    if P.QUERY_BOX and most_rows(P) % S.GROUP != 0:
        _clear(slots, SLOTS, S, P)
    return Queries(slots, full, empty, full_at, empty_at, at)


@gluon.jit
def _clear(slots, SLOTS: gl.constexpr, S: gl.constexpr, P: gl.constexpr):
    """Zero all query slots, because boxes do not fill all rows; NaN in an unused row would cost a second weighing."""
    BYTES: gl.constexpr = slots.shape[3] * slots.dtype.primitive_bitwidth // 8
    ROWS: gl.constexpr = most_rows(P)
    WARPS: gl.constexpr = 8 if P.BESIDE else P.ROWS // 16  # few rows beside blocks: all warps of the blocks' consumer
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [128 // (BYTES // 4), BYTES // 16], [WARPS, 1], [1, 0])
    for i in gl.static_range(SLOTS):
        as_words(slots.index(i), ROWS, BYTES).store(gl.full([ROWS, BYTES // 4], 0, gl.int32, LAYOUT))


@gluon.jit
def bring_queries(query, num_tokens, S: gl.constexpr, P: gl.constexpr):
    """Let the L2 fetch all queries while the schedule is computed.

    Nothing is fetched if queries do not come by TMA, or if the launch has more tokens than warps.  With so many tokens,
    a program should fetch only the queries of its first block, and the first block is not known yet.
    """
    WARPS: gl.constexpr = P.ROWS // 16
    programs = gl.num_programs(0)
    if P.QUERY_BOX:  # noqa: SIM102 (one is decided at compile time)
        if num_tokens <= WARPS * programs:
            thread = gl.arange(0, 32 * WARPS, layout=line_layout(WARPS))
            token = gl.program_id(0) + thread // 32 * programs
            if query.WIDE is not None:
                token = token.to(gl.int64)
            address = (query.ptr + token * query.stride_token).to(gl.int64)
            BITS: gl.constexpr = S.KV_HEADS * S.GROUP * S.HEAD_DIM * query.ptr.dtype.element_ty.primitive_bitwidth
            bring_near(address, thread * 0 + BITS // 128 * 16, (thread % 32 == 0) & (token < num_tokens))


@gluon.jit
def _load_rows(box, queries, slot, token, item, S: gl.constexpr, P: gl.constexpr):
    """Start the loads of one consumer's query rows, from `token` on, into a slot."""
    ROWS: gl.constexpr = most_rows(P) // S.GROUP * S.GROUP
    mbarrier.expect(queries.full.index(slot), ROWS * S.DIM * (queries.slots.dtype.primitive_bitwidth // 8))
    PARTS: gl.constexpr = dim_parts(S.DIM)
    for i in gl.static_range(PARTS):
        part = queries.slots.index(slot if PARTS == 1 else slot * PARTS + i)
        load_box(box, [token, item.block.kv_head * S.GROUP, i * (S.DIM // PARTS)], queries.full.index(slot), part)


@gluon.jit
def load_queries(box, queries, done, keys, turn, item, S: gl.constexpr, P: gl.constexpr):
    """Load an item's queries once no consumer needs the old queries in their slots.

    done: number of blocks whose queries were loaded before.  keys, turn: ring of keys and its next turn.  If blocks do
    not take query slots in turn, the old queries are no longer needed once all keys loaded so far are released.
    """
    token = item.block.first_token + item.block.first
    if take_turns(P):
        at = turn_of(done, P)
        mbarrier.wait(queries.empty.index(at.stage), at.phase ^ 1)
        _load_rows(box, queries, at.stage, token, item, S, P)
    else:
        wait_released(keys, turn, P.KEY_STAGES)
        CONSUMERS: gl.constexpr = P.CONSUMERS
        for w in gl.static_range(CONSUMERS):
            _load_rows(box, queries, w, token + w * (P.ROWS // S.GROUP), item, S, P)


@gluon.jit
def wait_queries(queries, done, NUMBER: gl.constexpr, S: gl.constexpr, P: gl.constexpr, there=None):
    """Wait for a consumer's query rows; done: number of blocks before this one.

    there: whether to wait, by default always; given only if blocks take slots in turn.
    """
    if take_turns(P):
        at = turn_of(done, P)
        await_at(queries.full_at + at.stage * 8, at.phase, there)
    else:
        gl.static_assert(there is None)
        mbarrier.wait(queries.full.index(NUMBER), done & 1)


@gluon.jit
def leave_queries(queries, done, S: gl.constexpr, P: gl.constexpr, there=None):
    """Release a block's queries after their last product, if blocks take slots in turn; there: as in `arrive_at`."""
    if take_turns(P):
        arrive_at(queries.empty_at + turn_of(done, P).stage * 8, there)


@gluon.jit
def rows_in(queries, done, NUMBER: gl.constexpr, S: gl.constexpr, P: gl.constexpr):
    """Return a consumer's QueryRows of a block; done: number of blocks before the block."""
    BESIDE: gl.constexpr = dim_parts(S.DIM)
    PARTS: gl.constexpr = query_parts(P) * BESIDE
    first = turn_of(done, P).stage if take_turns(P) else NUMBER * PARTS
    if BESIDE > 1 and take_turns(P):
        first *= BESIDE
    parts = ()
    for i in gl.static_range(PARTS):
        slot = queries.slots.index(first + i)
        parts = parts + (slot.reshape([slot.shape[0] * slot.shape[1], slot.shape[2]]),)  # type: ignore[assignment]
    return QueryRows(parts, queries.at + first * (P.ROWS * S.DIM * 2))


@gluon.jit
def store_in_two(lower, upper, x, S: gl.constexpr, P: gl.constexpr):
    """Store normalized bfloat16 rows x [ROWS, DIM], divided by 2^7, as sums of two e4m3 numbers.

    After the division, the largest element is below 2^8.  Two e4m3 numbers have bfloat16's eight significant bits.
    Elements down to 2^-9 of a row's largest lose nothing, and no element loses more than 2^-17 of the largest.  `lower`
    gets the small terms.  They are multiplied first, because the tensor cores keep 14 bits of a sum.
    """
    x = (x.to(gl.float32) * (1 / 128)).reshape([P.ROWS, S.DIM // 4, 2, 2])
    even, odd = gl.split(x)
    a, c = gl.split(even)
    b, d = gl.split(odd)
    words, rest = e4m3_in_two(a, b, c, d)
    as_words(lower, P.ROWS, S.DIM).store(rest)
    as_words(upper, P.ROWS, S.DIM).store(words)


@gluon.jit
def scatter(x, ROWS: gl.constexpr, S: gl.constexpr):
    """Return queries x [ROWS, DIM] with dims in the order of `columns.widened_keys`."""
    x = x.reshape([ROWS, S.DIM // 64, 4, 4, 2, 2])  # a thread's 16 dims are four words of two pairs
    return x.permute((0, 1, 3, 4, 2, 5)).reshape([ROWS, S.DIM])


@gluon.jit
def scatter_int4(x, dim, ROWS: gl.constexpr, S: gl.constexpr):
    """Return float32 queries x [ROWS, DIM] as operands, with dims in the order of `columns.widened_int4_keys`.

    Odd dims of keys count 16 times as much as even dims, so odd dims of queries are divided by 16.  dim [DIM]: numbers
    of the dims.
    """
    x = (x * gl.expand_dims(gl.where(dim % 2 == 1, 1 / 16, 1.0), 0)).to(S.COMPUTE)
    WORDS: gl.constexpr = 4 if S.DIM > 64 else 2  # words of a key that a thread has
    x = x.reshape([ROWS, S.DIM // (32 * WORDS), 4, WORDS, 2, 2, 2])  # a word is eight dims
    return x.permute((0, 1, 3, 5, 6, 2, 4)).reshape([ROWS, S.DIM])


@gluon.jit
def take_queries(
    query, queries, block, scale, done, mods, NUMBER: gl.constexpr, ROWS: gl.constexpr, S: gl.constexpr,
    P: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Bring a consumer's ROWS query rows into shared memory; return the scale of their scores, [R] if rows differ.

    int4: return (scale, sums [R] over each query's dims, in the units of the products' scores).

    With QUERY_BOX, the consumer waits for a box.  Otherwise queries pass through the consumer's registers: queries of
    `shares_kernel`, queries that change type, and queries with strides that fit no box.
    """
    if P.QUERY_BOX:
        wait_queries(queries, done, NUMBER, S, P)
        return scale
    else:
        READ: gl.constexpr = rows_layout(8, S.DIM, P.ROWS // 16)
        row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, READ))
        rows = row_tile(block, row, mods, ROWS // S.GROUP, S)
        dim = gl.arange(0, S.DIM, layout=gl.SliceLayout(0, READ))
        thread_barrier()  # products with the previous queries must be done
        loaded = load_query(query, rows, dim, 1, S)
        x = loaded.parts[0]
        if is_int4(P):
            x = x.to(gl.float32)
            total = gl.convert_layout(gl.sum(x, axis=1), LAYOUT) * INT4_UNIT
            x = scatter_int4(x, dim, ROWS, S)
        elif P.SHARES and P.FP8 > 0:
            x = scatter(x, ROWS, S)
        slots = rows_in(queries, done, NUMBER, S, P).parts
        unit = loaded.unit
        if query_parts(P) == 2:
            store_in_two(slots[0], slots[1], x, S, P)
            unit *= 128
        else:
            slots[0].slice(0, ROWS, dim=0).store(x)
        fence_async_shared()
        thread_barrier()
        if S.NORMALIZED:
            scale = gl.convert_layout(unit, LAYOUT) * scale
        if is_int4(P):
            return scale * (1 / INT4_UNIT), total
        else:
            return scale
