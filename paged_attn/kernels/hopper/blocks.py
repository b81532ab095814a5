"""The persistent kernel for many rows: a block has 64 rows for each of its two to four consumer warpgroups.

Programs take items from counters or, if blocks are few, along their even shares of a line (`schedule/items.py`).

Either one consumer partition has two or four warpgroups, or each of two or three partitions has one warpgroup.  Two or
four loader warps load tiles, and the last loader warp is also the tile scheduler.  For fp8 and int8 caches, one more
warpgroup may convert tiles.
"""

import triton

from ..common.bounds import visible_range
from ..common.merge import partial_of
from ..common.output import clear_padding, tokens_of
from ..common.records import Batch, Block
from ..common.shards import own_before
from .args import Jobs, Loader, Results, Rings, Turn, Turns, queries_leave_early
from .asm.barriers import begin_turns
from .consuming.column_softmax import make_flags
from .consuming.columns import consume_columns, make_weights
from .consuming.consumer import consume, consume_items_ahead
from .consuming.epilogue import dims_from
from .consuming.fold import make_bank
from .consuming.fp8 import make_ones
from .layouts import lanes_layout, line_layout
from .loading.convert import NONE, TRANSPOSE, convert_tiles
from .loading.gates import KEYS, VALUES, WIDEN, make_gates, start_with
from .loading.loader import begin_item, load_tile, load_tiles
from .loading.queries import bring_queries, load_queries, make_queries
from .loading.ring import WARPGROUP, make_read_ring, make_ring
from .schedule.items import ask, begin_lists, bring_lengths, item_from, leave_lists, settle
from .schedule.join import told_in
from .schedule.lists import first_of_many, make_lists
from .schedule.mail import make_mail, publish, read
from .shim import fence_async_shared, gdc_launch_dependents, gdc_wait, gl, gluon, replaced

# Value tiles of an item that are not yet loaded when a single consumer's next item is published.  The next queries and
# first keys arrive while these tiles are used.  With a larger number, a program would take its next item long before
# the program is free.
TILES_LEFT_AT_NEXT_ITEM = gl.constexpr(4)


# ---- roles of warps ------------------------------------------------------------------------------


@gluon.jit
def load_items(
    loader, query_box, queries, jobs, FIRST: gl.constexpr, PART: gl.constexpr, STAGES: gl.constexpr, S: gl.constexpr,
    P: gl.constexpr,
):  # fmt: skip
    """Run one loader warp: load part PART (of LOADERS) of every item's tiles and, if FIRST, queries by TMA."""
    mail, batch, mods = jobs.mail, jobs.batch, jobs.mods
    turn = Turn(0, 0)
    number, done = 0, 0
    item = read(mail, number, 1)
    while item.block.kv_head >= 0:
        if item.begin < item.end:
            block, table, kv_head, lo = begin_item(batch, item, mods, S, P)
            end = item.end
            if FIRST and queries_leave_early(P):  # a key slot is free sooner than the query slot
                end -= 1
                turn = load_tile(loader, turn, table, batch, block, kv_head, end, lo, PART, STAGES, S, P)
            if FIRST and P.QUERY_BOX:
                load_queries(query_box, queries, done, loader.ring, turn, item, S, P)
                done += 1
            turn = load_tiles(
                loader, turn, table, batch, block, kv_head, item.begin, end, lo, PART, STAGES, S, P
            )  # fmt: skip
        number += 1
        item = read(mail, number, 1)


@gluon.jit
def hand_out_items(loader, jobs, lists, PART: gl.constexpr, STAGES: gl.constexpr, S: gl.constexpr, P: gl.constexpr):
    """Run the scheduling warp: publish items, and load part PART of each item's value tiles.

    The warp takes the next item only near the end of the present item, because that balances the programs' work.

    While a single consumer waits for the next item's first keys, the tensor cores idle.  So a single consumer's next
    item is published before the last TILES_LEFT_AT_NEXT_ITEM value tiles of an item are loaded.  Several consumers
    would gain nothing from that.
    """
    ALONE: gl.constexpr = P.CONSUMERS == 1
    mail, counters, batch, mods = jobs.mail, jobs.counters, jobs.batch, jobs.mods
    turn = Turn(0, 0)
    number = batch.num_seqs * 0
    next_many = first_of_many(gl.num_programs(0), lists)  # number of the first item that no program begins with
    taken, from_many = begin_lists(lists, S, P)
    table, tile, end, lo, kv_head = batch.page_table, 0, number, number, number  # no item yet
    block = Block(number, number, number, number, number, number)
    answer = number
    working = number == 0
    while working:
        taken, item = item_from(batch, taken, from_many, lists, mods, S, P)
        publish(mail, number, item)
        if ALONE:
            rest_end = gl.minimum(end, tile + TILES_LEFT_AT_NEXT_ITEM)
            turn = load_tiles(loader, turn, table, batch, block, kv_head, tile, rest_end, lo, PART, STAGES, S, P)
        number += 1
        working = item.block.kv_head >= 0
        if working:
            block, table, kv_head, lo = begin_item(batch, item, mods, S, P)
            tile, end = item.begin, item.end
            if ALONE:
                for i in range(gl.maximum(end - TILES_LEFT_AT_NEXT_ITEM - tile, 1)):  # all except the tiles left
                    at = end - 1 - i
                    if at <= tile + TILES_LEFT_AT_NEXT_ITEM:
                        from_many, answer = ask(counters, taken, lists, P)
                    if at >= tile + TILES_LEFT_AT_NEXT_ITEM:
                        turn = load_tile(loader, turn, table, batch, block, kv_head, at, lo, PART, STAGES, S, P)
            else:
                turn = load_tiles(
                    loader, turn, table, batch, block, kv_head, tile + 1, end, lo, PART, STAGES, S, P
                )  # fmt: skip
                from_many, answer = ask(counters, taken, lists, P)
                if tile < end:
                    turn = load_tile(loader, turn, table, batch, block, kv_head, tile, lo, PART, STAGES, S, P)
            taken, from_many = settle(counters, taken, from_many, answer, next_many, lists, P)
    leave_lists(counters)
    if P.FOLLOWS:
        gdc_wait()


@gluon.jit
def consume_items(out, results, query, rings, jobs, NUMBER: gl.constexpr, S: gl.constexpr, P: gl.constexpr):
    """Run consumer NUMBER: compute and store its rows of every item."""
    if P.IN_TURN:
        begin_turns()
    if P.AHEAD:
        consume_items_ahead(out, results, rings, jobs, S, P)
    else:
        turns = Turns(Turn(0, 0), Turn(0, 0), 0)
        number = 0
        item = read(jobs.mail, number, P.ROWS // 16)
        while item.block.kv_head >= 0:
            if NUMBER == 0 and P.COLUMNS > 0:
                if item.block.query_len * S.GROUP <= P.COLUMNS:
                    turns = consume_columns(out, results, query, rings, turns, item, jobs.mods, S, P)
                else:
                    turns = consume(out, results, query, rings, turns, item, jobs.mods, NUMBER, S, P)
            else:
                turns = consume(out, results, query, rings, turns, item, jobs.mods, NUMBER, S, P)
            number += 1
            item = read(jobs.mail, number, P.ROWS // 16)
    if S.MERGE == 0:  # as in `shares.consume_share`
        gdc_launch_dependents()


@gluon.jit
def convert_items(raw, rings, jobs, S: gl.constexpr, P: gl.constexpr):
    """Run the converter warpgroup: convert fp8 or int8 tiles of every item into operands of the consumers."""
    raw_turns = Turns(Turn(0, 0), Turn(0, 0), 0)
    turns = raw_turns
    number = 0
    item = read(jobs.mail, number, 4)
    while item.block.kv_head >= 0:
        lo = visible_range(item.block, jobs.mods, S.BLOCK_Q, S).lo
        raw_turns, turns = convert_tiles(
            raw, raw_turns, rings, turns, item.begin, item.end, lo, own_before(item.block.seq_len, jobs.mods, S), S, P
        )  # fmt: skip
        number += 1
        item = read(jobs.mail, number, 4)


@gluon.jit
def beside_first(out, results, query, raw, rings, jobs, NUMBER: gl.constexpr, S: gl.constexpr, P: gl.constexpr):
    """Run a warpgroup beside consumer 0: consumer NUMBER or, if NUMBER is the number of consumers, the converter."""
    if NUMBER < P.CONSUMERS:
        consume_items(out, results, query, rings, jobs, NUMBER, S, P)
    else:
        convert_items(raw, rings, jobs, S, P)


# ---- the kernel ----------------------------------------------------------------------------------


@triton.constexpr_function
def registers_of(P):
    """Registers of a thread, for each partition except the first, which gets the remaining registers."""
    convert = [P.CONVERT_REGISTERS] * (P.CONVERT != 0)
    consumers = {1: [], 2: [(472 - sum(convert)) // 16 * 8], 3: [152, 152]}[P.CONSUMERS]
    loader = 32 if P.ROWS == 256 else 40  # with 32, each of 512 consumer threads gets 112
    return consumers + convert + [loader] * (2 * P.LOADERS)


@gluon.jit
def make_rings(dtype: gl.constexpr, queries, gates, stored: gl.constexpr, S: gl.constexpr, P: gl.constexpr):
    """(Rings that consumers read, Rings that loaders fill); the two differ where a converter stands between them."""
    room = queries.slots  # placeholder for an unused field, because a record with a None cannot be returned
    extra = room
    if P.COARSE:
        extra = make_ones(dtype, S, P)
    elif P.COLUMNS > 0:
        extra = make_flags(P)
    if P.FP8_PRODUCTS or S.PIECE is not None:
        room = make_bank(S, P)
    elif P.COLUMNS > 0:
        room = make_weights(queries, dtype, S, P)
    if P.CONVERT == NONE:
        keys = make_read_ring(dtype, S.TILE, S.DIM, P.KEY_STAGES, P.LOADERS, gates, KEYS, P)
        values = make_read_ring(dtype, S.TILE, S.VALUE_PADDED, P.VALUE_STAGES, P.LOADERS, gates, VALUES, P)
        rings = Rings(keys, values, queries, room, extra)
        return rings, rings
    elif P.CONVERT == WIDEN:
        keys = make_read_ring(dtype, S.TILE, S.DIM, P.KEY_STAGES, 1, gates, KEYS, P)
        values = make_read_ring(dtype, S.TILE, S.VALUE_PADDED, P.VALUE_STAGES, 1, gates, VALUES, P)
        raw_keys = make_ring(stored, S.TILE, S.DIM, P.RAW_STAGES, P.LOADERS, WARPGROUP)
        raw_values = make_ring(stored, S.TILE, S.VALUE_PADDED, P.RAW_STAGES, P.LOADERS, WARPGROUP)
        return Rings(keys, values, queries, room, extra), Rings(raw_keys, raw_values, queries, room, extra)
    else:
        keys = make_read_ring(stored, S.TILE, S.DIM, P.KEY_STAGES, P.LOADERS, gates, KEYS, P)
        if P.CONVERT == TRANSPOSE:
            values = make_read_ring(stored, S.VALUE_PADDED, S.TILE, P.VALUE_STAGES, 1, gates, VALUES, P)
        else:
            values = make_read_ring(gl.float16, S.TILE, S.VALUE_PADDED, P.VALUE_STAGES, 1, gates, VALUES, P)
        raw_values = make_ring(stored, S.TILE, S.VALUE_PADDED, P.RAW_STAGES, P.LOADERS, WARPGROUP)
        return Rings(keys, values, queries, room, extra), Rings(keys, raw_values, queries, room, extra)


@gluon.jit(do_not_specialize=["num_seqs", "num_tokens", "page_table_stride", "least", "slots"])
def blocks_kernel(
    out, lse, scratch, query, key_box, value_box, new_key_box, new_value_box, query_box, query_starts,
    seq_lens, page_table, page_table_stride, num_seqs, num_tokens, shortest, longest, least, slots, page_starts, mods,
    scales, S: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """Attention of every block for every KV head; at most one persistent program runs on each multiprocessor.

    Arguments are those of `launch_arguments.attention`: records with tensors, boxes (TMA descriptors), tensors of the
    batch (int32 or int64), and bounds.  shortest, longest: query tokens of the sequences served, inclusive.
    """
    if not P.FOLLOWS:
        gdc_wait()
    batch = Batch(
        query_starts, seq_lens, page_table, page_table_stride, num_seqs, num_tokens, shortest, longest, least, slots,
        page_starts,
    )  # fmt: skip
    if S.CLEAR:
        live = tokens_of(batch)  # loaded early: barriers are made while memory answers
    bring_lengths(batch, P)
    bring_queries(query, num_tokens, S, P)
    dtype: gl.constexpr = gl.float16 if P.CONVERT == WIDEN else key_box.dtype
    gates = make_gates(P)
    queries = make_queries(dtype, gates, S, P)
    rings, raw = make_rings(dtype, queries, gates, key_box.dtype, S, P)
    mail = make_mail(gates, P)
    fence_async_shared()  # makes the initial state of barriers visible
    lane = gl.arange(0, S.SCAN, layout=lanes_layout(S.SCAN, P.ROWS))
    lists = make_lists(batch, lane, mods, S, P)
    results = Results(lse, partial_of(scratch, slots * S.LIVE), told_in(scratch, slots, S), scales)
    jobs = Jobs(mail, scratch.counters, batch, mods)
    K: gl.constexpr = P.RAW_STAGES if P.CONVERT == WIDEN else P.KEY_STAGES
    V: gl.constexpr = P.VALUE_STAGES if P.CONVERT == NONE else P.RAW_STAGES
    if S.CLEAR:
        dim = dims_from(gl.arange(0, S.VALUE_PADDED, layout=line_layout(P.ROWS // 16)), P)
        clear_padding(out, lse, batch, live, dim, S)
    start_with(gates, P)
    keys, values = Loader(key_box, new_key_box, raw.key, 0), Loader(value_box, new_value_box, raw.value, 0)
    LAST: gl.constexpr = P.LOADERS - 1
    BESIDE: gl.constexpr = P.CONSUMERS - 1 + (P.CONVERT != NONE)  # warpgroups beside the first consumer
    gl.static_assert(P.FROM_DIM == 0 or (BESIDE == 0 and P.LOADERS == 1))
    OF_KEYS: gl.constexpr = replaced(P, FROM_DIM=0)  # every launch reads all dims of the keys
    if BESIDE == 0 and P.LOADERS == 1:
        gl.warp_specialize([
            (consume_items, (out, results, query, rings, jobs, 0, S, P)),
            (load_items, (keys, query_box, queries, jobs, True, 0, K, S, OF_KEYS)),
            (hand_out_items, (values, jobs, lists, LAST, V, S, P)),
        ], [1, 1], registers_of(P))  # fmt: skip
    elif BESIDE == 0 and P.LOADERS == 2:
        gl.warp_specialize([
            (consume_items, (out, results, query, rings, jobs, 0, S, P)),
            (load_items, (keys, query_box, queries, jobs, True, 0, K, S, P)),
            (load_items, (keys, query_box, queries, jobs, False, 1, K, S, P)),
            (load_items, (values, query_box, queries, jobs, False, 0, V, S, P)),
            (hand_out_items, (values, jobs, lists, LAST, V, S, P)),
        ], [1, 1, 1, 1], registers_of(P))  # fmt: skip
    elif BESIDE == 1 and P.LOADERS == 1:
        gl.warp_specialize([
            (consume_items, (out, results, query, rings, jobs, 0, S, P)),
            (beside_first, (out, results, query, raw, rings, jobs, 1, S, P)),
            (load_items, (keys, query_box, queries, jobs, True, 0, K, S, P)),
            (hand_out_items, (values, jobs, lists, LAST, V, S, P)),
        ], [4, 1, 1], registers_of(P))  # fmt: skip
    elif BESIDE == 1 and P.LOADERS == 2:
        gl.warp_specialize([
            (consume_items, (out, results, query, rings, jobs, 0, S, P)),
            (beside_first, (out, results, query, raw, rings, jobs, 1, S, P)),
            (load_items, (keys, query_box, queries, jobs, True, 0, K, S, P)),
            (load_items, (keys, query_box, queries, jobs, False, 1, K, S, P)),
            (load_items, (values, query_box, queries, jobs, False, 0, V, S, P)),
            (hand_out_items, (values, jobs, lists, LAST, V, S, P)),
        ], [4, 1, 1, 1, 1], registers_of(P))  # fmt: skip
    elif BESIDE == 2 and P.LOADERS == 1:
        gl.warp_specialize([
            (consume_items, (out, results, query, rings, jobs, 0, S, P)),
            (beside_first, (out, results, query, raw, rings, jobs, 1, S, P)),
            (beside_first, (out, results, query, raw, rings, jobs, 2, S, P)),
            (load_items, (keys, query_box, queries, jobs, True, 0, K, S, P)),
            (hand_out_items, (values, jobs, lists, LAST, V, S, P)),
        ], [4, 4, 1, 1], registers_of(P))  # fmt: skip
    else:
        gl.warp_specialize([
            (consume_items, (out, results, query, rings, jobs, 0, S, P)),
            (beside_first, (out, results, query, raw, rings, jobs, 1, S, P)),
            (beside_first, (out, results, query, raw, rings, jobs, 2, S, P)),
            (load_items, (keys, query_box, queries, jobs, True, 0, K, S, P)),
            (load_items, (keys, query_box, queries, jobs, False, 1, K, S, P)),
            (load_items, (values, query_box, queries, jobs, False, 0, V, S, P)),
            (hand_out_items, (values, jobs, lists, LAST, V, S, P)),
        ], [4, 4, 1, 1, 1, 1], registers_of(P))  # fmt: skip
