"""The kernel for mixed batches: blocks of many rows and, in the same programs at the same time, shares of few rows.

Blocks keep the tensor cores busy, and few rows keep memory busy.  Two warpgroups, which run one copy of the code, serve
blocks, as in `blocks.py`.  A third warpgroup serves few rows.  Blocks and few rows have rings and loaders of their own.
"""

import triton

from ..common.merge import partial_of
from ..common.output import clear_padding, tokens_of
from ..common.records import Batch, Scratch, Walk
from ..common.schedule import find_share, next_seq, next_unit, room_of, unflatten, work
from .args import Jobs, Loader, Results, Rings, Turn, Turns
from .blocks import consume_items, hand_out_items, load_items, make_rings
from .consuming.column_softmax import make_flags
from .consuming.columns import consume_columns, make_weights
from .layouts import lanes_layout, line_layout
from .loading.gates import KEYS, VALUES, make_gates, start_with
from .loading.loader import begin_item, load_tiles
from .loading.queries import bring_queries, load_queries, make_queries
from .loading.ring import make_read_ring
from .schedule.items import COUNTERS_PER_LAUNCH, bring_lengths
from .schedule.join import told_in
from .schedule.lists import known_same, make_lists
from .schedule.mail import make_mail, no_item, publish, read
from .schedule.walk import item_at, share_of_heads
from .shim import fence_async_shared, gdc_wait, gl, gluon, replaced

# Registers of a thread that serves few rows, and of a loader's thread.  Threads that serve blocks have 176.
REGISTERS_OF_FEW_ROWS, REGISTERS_OF_LOADERS = gl.constexpr(120), gl.constexpr(40)


@triton.constexpr_function
def one_scan(scan):
    """Sequences that one warp takes at a time to make a schedule: `scan`, at most 128."""
    return min(scan, 128)


@gluon.jit
def lanes(S: gl.constexpr):
    """Return 0, 1, ..., SCAN - 1, int32 [SCAN], in a single warp."""
    return gl.arange(0, S.SCAN, layout=lanes_layout(S.SCAN, 16))


@gluon.jit
def hand_out_blocks(loader, jobs, STAGES: gl.constexpr, S: gl.constexpr, P: gl.constexpr):
    """Make the lists and run `blocks.hand_out_items`, in one warp; another warp makes the shares of few rows."""
    ONE: gl.constexpr = replaced(S, SCAN=one_scan(S.SCAN))
    lists = known_same(make_lists(jobs.batch, lanes(ONE), jobs.mods, ONE, P))
    hand_out_items(loader, jobs, lists, P.LOADERS - 1, STAGES, S, P)


@gluon.jit
def hand_out_share(loader, query_box, queries, jobs, STAGES: gl.constexpr, S: gl.constexpr, P: gl.constexpr):
    """Run the scheduling warp of few rows: publish the pieces of a share, and load their queries and key tiles."""
    mail, batch, mods = jobs.mail, jobs.batch, jobs.mods
    ONE: gl.constexpr = replaced(S, SCAN=one_scan(S.SCAN))
    lane = lanes(ONE)
    index, kv_head = unflatten(S)
    ahead = None
    if S.BY_HEAD:
        index, kv_head, num_shares, ahead = share_of_heads(batch, mods, 1, S)
    first = work(batch, lane, lane < batch.num_seqs, mods, S, kv_head)
    if not S.BY_HEAD:
        num_shares = gl.num_programs(0) // S.KV_HEADS
    share, seq, before = find_share(batch, first, index, num_shares, lane, mods, ONE, kv_head)
    walk = Walk(share.begin, seq, before, kv_head)
    turn = Turn(0, 0)
    number = batch.num_seqs * 0
    done = number
    while walk.unit < share.end:
        blocks, tiles = room_of(batch, share, walk, mods, S)
        seq_end = walk.before + blocks * tiles
        if walk.unit >= seq_end:
            walk = next_seq(walk, walk.seq + 1, seq_end)
        else:
            item, count = item_at(batch, share, walk, ahead, blocks, tiles, mods, S, P)
            publish(mail, number, item)
            number += 1
            if item.begin < item.end:
                load_queries(query_box, queries, done, loader.ring, turn, item, S, P)
                done += 1
                block, table, _, lo = begin_item(batch, item, mods, S, P)
                turn = load_tiles(
                    loader, turn, table, batch, block, kv_head, item.begin, item.end, lo, 0, STAGES, S, P
                )  # fmt: skip
            walk = next_unit(walk, walk.unit + count)
    publish(mail, number, no_item(walk.unit))


@gluon.jit
def consume_few(out, results, query, rings, jobs, S: gl.constexpr, P: gl.constexpr):
    """Run the consumer of few rows: compute and store all pieces of a share."""
    turns = Turns(Turn(0, 0), Turn(0, 0), 0)
    number = 0
    item = read(jobs.mail, number, P.ROWS // 16, BY_WARP=True)
    while item.block.kv_head >= 0:
        turns = consume_columns(out, results, query, rings, turns, item, jobs.mods, S, P)
        number += 1
        item = read(jobs.mail, number, P.ROWS // 16, BY_WARP=True)


@gluon.jit
def make_few_rings(dtype: gl.constexpr, gates, S: gl.constexpr, P: gl.constexpr):
    """Make the rings of the consumer of few rows."""
    queries = make_queries(dtype, gates, S, P)
    keys = make_read_ring(dtype, S.TILE, S.DIM, P.KEY_STAGES, P.LOADERS, gates, KEYS, P)
    values = make_read_ring(dtype, S.TILE, S.VALUE_PADDED, P.VALUE_STAGES, P.LOADERS, gates, VALUES, P)
    return Rings(keys, values, queries, make_weights(queries, dtype, S, P), make_flags(P))


@gluon.jit
def scratch_behind(scratch, slots, S: gl.constexpr, P: gl.constexpr):
    """Addresses (states, counters) for blocks, behind the even shares' states and counters (`coverage.need_of`)."""
    # Each program has a counter for pieces of a block and, if pieces are joined in groups, two for pieces of groups.
    COUNTERS: gl.constexpr = 3 if P.GROUPED > 0 else 1
    counters = scratch.counters + COUNTERS_PER_LAUNCH + COUNTERS * gl.num_programs(0)
    return scratch.states + slots * S.LIVE * (S.VALUE_PADDED + 2), counters


@gluon.jit(
    do_not_specialize=[
        "num_seqs", "num_tokens", "page_table_stride", "least", "slots", "few_shortest", "few_least", "few_slots",
    ]
)  # fmt: skip
def mixed_kernel(
    out, lse, scratch, query, key_box, value_box, new_key_box, new_value_box, query_box, few_key_box, few_value_box,
    few_new_key_box, few_new_value_box, few_query_box, query_starts, seq_lens, page_table, page_table_stride, num_seqs,
    num_tokens, shortest, longest, least, slots, page_starts, few_shortest, few_least, few_slots, mods, scales,
    S: gl.constexpr, P: gl.constexpr, F: gl.constexpr, G: gl.constexpr,
):  # fmt: skip
    """Attention of blocks of long queries (Shape S, Pipe P), and of even shares of shorter queries (Shape F, Pipe G).

    Blocks serve sequences of shortest..longest query tokens, and shares serve few_shortest..shortest - 1, inclusive.
    The other arguments are those of `blocks_kernel`; names of the shares' own arguments begin with `few_`.
    """
    gdc_wait()
    batch = Batch(
        query_starts, seq_lens, page_table, page_table_stride, num_seqs, num_tokens, shortest, longest, least, slots,
        page_starts,
    )  # fmt: skip
    few_batch = Batch(
        query_starts, seq_lens, page_table, page_table_stride, num_seqs, num_tokens, few_shortest, shortest - 1,
        few_least, few_slots, page_starts,
    )  # fmt: skip
    if S.CLEAR:
        live = tokens_of(batch)  # loaded early: barriers are made while memory answers
    bring_lengths(batch, P)
    bring_queries(query, num_tokens, S, P)
    dtype: gl.constexpr = key_box.dtype
    gates = make_gates(P, G)
    queries = make_queries(dtype, gates, S, P)
    rings, _ = make_rings(dtype, queries, gates, dtype, S, P)
    few_rings = make_few_rings(dtype, gates, F, G)
    mail, few_mail = make_mail(gates, P), make_mail(gates, G)
    fence_async_shared()  # makes the initial state of barriers visible
    few_results = Results(lse, partial_of(scratch, few_slots * F.LIVE), told_in(scratch, few_slots, F), scales)
    few_jobs = Jobs(few_mail, scratch.counters, few_batch, mods)
    states, counters = scratch_behind(scratch, few_slots, F, G)
    behind = Scratch(states, counters)
    results = Results(lse, partial_of(behind, slots * S.LIVE), told_in(behind, slots, S), scales)
    jobs = Jobs(mail, counters, batch, mods)
    if S.CLEAR:
        dim = gl.arange(0, S.VALUE_PADDED, layout=line_layout(P.ROWS // 16))
        clear_padding(out, lse, batch, live, dim, S)
    start_with(gates, P, G)
    K: gl.constexpr = P.KEY_STAGES
    V: gl.constexpr = P.VALUE_STAGES
    FK: gl.constexpr = G.KEY_STAGES
    FV: gl.constexpr = G.VALUE_STAGES
    keys, values = Loader(key_box, new_key_box, rings.key, 0), Loader(value_box, new_value_box, rings.value, 0)
    few_keys = Loader(few_key_box, few_new_key_box, few_rings.key, 0)
    few_values = Loader(few_value_box, few_new_value_box, few_rings.value, 0)
    gl.warp_specialize([
        (consume_items, (out, results, query, rings, jobs, 0, S, P)),
        (consume_few, (out, few_results, query, few_rings, few_jobs, F, G)),
        (load_items, (keys, query_box, queries, jobs, True, 0, K, S, P)),
        (hand_out_blocks, (values, jobs, V, S, P)),
        (hand_out_share, (few_keys, few_query_box, few_rings.queries, few_jobs, FK, F, G)),
        (load_items, (few_values, few_query_box, few_rings.queries, few_jobs, False, 0, FV, F, G)),
    ], [4, 1, 1, 1, 1], [
        REGISTERS_OF_FEW_ROWS, REGISTERS_OF_LOADERS, REGISTERS_OF_LOADERS, REGISTERS_OF_LOADERS, REGISTERS_OF_LOADERS
    ])  # fmt: skip
