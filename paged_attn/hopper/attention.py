"""The kernel for many rows: blocks of 128 rows, two consumer warpgroups, items from one counter.

Twelve warps: two warpgroups multiply, one to four single warps load, the last of which also hands out the work.
"""

from ..kernels.args import Batch, Block, State
from ..kernels.numerics import scale_of
from ..kernels.output import clear_padding
from ..kernels.schedule import row_tile, visible_range
from ..kernels.softmax import start
from .args import Jobs, Queries, Results, Turn
from .consumer import attend, drain
from .epilogue import store_block, store_piece
from .loader import fill, load_queries, load_tiles, page_rows
from .mail import make_mail, publish, read
from .ring import WARPGROUP, advance, make_ring, release
from .schedule import Cursor, item_of, piece_size
from .shim import fence_async_shared, gl, gluon, mbarrier, tma


@gluon.jit
def make_queries(like, S: gl.constexpr, P: gl.constexpr):
    """Room for a block's queries, and for its results if they leave as boxes."""
    CONSUMERS: gl.constexpr = P.CONSUMERS
    SHAPE: gl.constexpr = [S.BLOCK_Q // P.CONSUMERS, S.GROUP, S.DIM]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(SHAPE, like.dtype)
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    slots = gl.allocate_shared_memory(like.dtype, [P.CONSUMERS, SHAPE[0], SHAPE[1], SHAPE[2]], layout)
    full = gl.allocate_shared_memory(gl.int64, [P.CONSUMERS, 1], bars)
    empty = gl.allocate_shared_memory(gl.int64, [P.CONSUMERS, 1], bars)
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=WARPGROUP)
    if P.OUT_BOX:
        out = gl.allocate_shared_memory(like.dtype, [P.CONSUMERS, SHAPE[0], SHAPE[1], SHAPE[2]], layout)
        return Queries(slots, full, empty, out)
    else:
        return Queries(slots, full, empty, slots)  # never used: a record with a None cannot be returned


@gluon.jit
def load_items(box, query_box, ring, queries, jobs, FIRST: gl.constexpr, PART: gl.constexpr, STAGES: gl.constexpr, S: gl.constexpr, P: gl.constexpr):  # fmt: skip
    """One warp: its part of the tiles of every item; FIRST: the queries too."""
    mail, batch, mods = jobs.mail, jobs.batch, jobs.mods
    turn = Turn(0, 0)
    phase = 0
    number = 0
    item = read(mail, number, 1)
    while item.kv_head >= 0:
        if item.begin < item.end:
            table = batch.page_table + item.block.seq.to(gl.int64) * batch.page_table_stride
            lo = visible_range(item.block, mods, S.BLOCK_Q).lo
            if FIRST:
                load_queries(query_box, queries, phase, item, S, P)
                phase ^= 1
            turn = load_tiles(box, ring, turn, table, item.kv_head, item.begin, item.end, lo, item.block.seq_len, PART, STAGES, S, P)  # fmt: skip
        number += 1
        item = read(mail, number, 1)


@gluon.jit
def hand_out_items(box, ring, jobs, PART: gl.constexpr, STAGES: gl.constexpr, S: gl.constexpr, P: gl.constexpr):  # fmt: skip
    """One warp: the next item for everybody, taken as late as possible for balance, and its own part of the tiles."""
    mail, counter, batch, mods = jobs.mail, jobs.counter, jobs.batch, jobs.mods
    size = piece_size(batch, mods, S)
    turn = Turn(0, 0)
    number = 0
    cursor, item = item_of(batch, Cursor(0, 0, 0), gl.program_id(0), size, mods, S)
    publish(mail, number, item)
    while item.kv_head >= 0:
        table = batch.page_table + item.block.seq.to(gl.int64) * batch.page_table_stride
        lo = visible_range(item.block, mods, S.BLOCK_Q).lo
        end_key = item.block.seq_len
        # all but the last tile
        turn = load_tiles(box, ring, turn, table, item.kv_head, item.begin + 1, item.end, lo, end_key, PART, STAGES, S, P)  # fmt: skip
        index = gl.atomic_add(counter, 1, sem="relaxed") + gl.num_programs(0)
        if item.begin < item.end:
            rows = page_rows(table, item.begin, lo, end_key, PART, S, P)
            fill(box, ring, turn, rows, item.kv_head, PART, S, P)
            turn = advance(turn, STAGES)
        cursor, item = item_of(batch, cursor, index, size, mods, S)
        number += 1
        publish(mail, number, item)
    if gl.atomic_add(counter + 1, 1, sem="relaxed") == gl.num_programs(0) - 1:
        # the last program leaves the counters as it found them
        gl.store(counter, 0)
        gl.store(counter + 1, 0)


@gluon.jit
def consume_items(out, results, keys, values, queries, done, jobs, NUMBER: gl.constexpr, S: gl.constexpr, P: gl.constexpr):  # fmt: skip
    """One warpgroup: 64 rows of every item, from the first key to the stored result."""
    mail, mods, scales = jobs.mail, jobs.mods, results.scales
    S_ROWS: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, S.TILE, 16]))
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, S.DIM, 16])
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    TOKENS: gl.constexpr = S.BLOCK_Q // P.CONSUMERS
    k_turn, v_turn = Turn(0, 0), Turn(0, 0)
    phase = 0
    number = 0
    item = read(mail, number, 4)
    while item.kv_head >= 0:
        whole = item.block
        block = Block(whole.seq, whole.first_token, whole.query_len, whole.seq_len, whole.first + NUMBER * TOKENS)
        count = gl.minimum(whole.query_len - block.first, TOKENS) * S.GROUP
        tiles = item.end - item.begin
        if count > 0:
            rows = row_tile(block, item.kv_head, gl.arange(0, 64, layout=S_ROWS), mods, TOKENS, S)
            out_row = gl.arange(0, 64, layout=O_ROWS)
            out_rows = row_tile(block, item.kv_head, out_row, mods, TOKENS, S)
            row_max, row_sum = start(mods.sinks, rows, item.piece == 0, S)
            if tiles > 0:
                span = visible_range(block, mods, TOKENS)
                first_key = visible_range(whole, mods, S.BLOCK_Q).lo  # the other warpgroup's keys live too
                scale = scales.softmax * scale_of(scales.query, scales.query_ptr, scales.query_stride, item.kv_head)
                scale *= scale_of(scales.key, scales.key_ptr, scales.key_stride, item.kv_head)
                mbarrier.wait(queries.full.index(NUMBER), phase)
                q = queries.slots.index(NUMBER).reshape([64, S.DIM])
                k_turn, v_turn, state = attend(q, keys, values, k_turn, v_turn, done, rows, span, first_key, block.seq_len, item.begin, item.end, row_max, row_sum, scale, mods, S, P)  # fmt: skip
                release(queries.empty.index(NUMBER))
                acc = state.acc * scale_of(scales.value, scales.value_ptr, scales.value_stride, item.kv_head)
                row_max, row_sum = state.max, state.sum
            else:
                acc = gl.full([64, S.DIM], 0.0, gl.float32, O_LAYOUT)
            state = State(acc, gl.convert_layout(row_max, O_ROWS), gl.convert_layout(row_sum, O_ROWS))
            if S.SPLIT:
                if item.pieces > 1:
                    at = item.slot * S.ROWS + NUMBER * 64
                    mine = at + item.piece * S.ROWS + out_row
                    store_piece(out, results, 2 * item.slot + NUMBER, out_rows, mine, at, S.ROWS, count, item.pieces, state, S)  # fmt: skip
                else:
                    store_block(out, results, queries.out, NUMBER, out_rows, count == TOKENS * S.GROUP, state, S)  # fmt: skip
            else:
                store_block(out, results, queries.out, NUMBER, out_rows, count == TOKENS * S.GROUP, state, S)  # fmt: skip
        else:
            k_turn, v_turn = drain(keys, values, k_turn, v_turn, tiles, P)
            if tiles > 0:
                mbarrier.wait(queries.full.index(NUMBER), phase)
                release(queries.empty.index(NUMBER))
        if tiles > 0:
            phase ^= 1
        number += 1
        item = read(mail, number, 4)
    if P.OUT_BOX:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_seqs", "num_tokens"])
def blocks_kernel(
    out, lse, partial, key_box, value_box, query_box, out_box, counter, query_starts, seq_lens, page_table,
    page_table_stride, num_seqs, num_tokens, shortest, longest, least, mods, scales, S: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """Attention of blocks of queries x KV heads, as many programs as multiprocessors."""
    batch = Batch(query_starts, seq_lens, page_table, page_table_stride, num_seqs, num_tokens, shortest, longest, least)
    if S.CLEAR:
        clear_padding(out, lse, batch, gl.arange(0, S.DIM, layout=gl.BlockedLayout([1], [32], [4], [0])), S)
    keys = make_ring(key_box, P.KEY_STAGES, S, P)
    values = make_ring(value_box, P.VALUE_STAGES, S, P)
    queries = make_queries(query_box, S, P)
    mail = make_mail(P.CONSUMERS + 2 * P.LOADERS - 1)
    done = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(done.index(i), count=1)
    fence_async_shared()
    for i in gl.static_range(2):
        mbarrier.arrive(done.index(i), count=1)
    results = Results(lse, partial, out_box, scales)
    jobs = Jobs(mail, counter, batch, mods)
    K: gl.constexpr = P.KEY_STAGES
    V: gl.constexpr = P.VALUE_STAGES
    LAST: gl.constexpr = P.LOADERS - 1
    if P.LOADERS == 1:
        gl.warp_specialize([
            (consume_items, (out, results, keys, values, queries, done.index(0), jobs, 0, S, P)),
            (consume_items, (out, results, keys, values, queries, done.index(1), jobs, 1, S, P)),
            (load_items, (key_box, query_box, keys, queries, jobs, True, 0, K, S, P)),
            (hand_out_items, (value_box, values, jobs, LAST, V, S, P)),
        ], [4, 1, 1], [232, 40, 40])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume_items, (out, results, keys, values, queries, done.index(0), jobs, 0, S, P)),
            (consume_items, (out, results, keys, values, queries, done.index(1), jobs, 1, S, P)),
            (load_items, (key_box, query_box, keys, queries, jobs, True, 0, K, S, P)),
            (load_items, (key_box, query_box, keys, queries, jobs, False, 1, K, S, P)),
            (load_items, (value_box, query_box, values, queries, jobs, False, 0, V, S, P)),
            (hand_out_items, (value_box, values, jobs, LAST, V, S, P)),
        ], [4, 1, 1, 1, 1], [232, 40, 40, 40, 40])  # fmt: skip
