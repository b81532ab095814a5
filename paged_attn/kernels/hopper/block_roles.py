"""Roles of the warps of `blocks_kernel`: load items, hand them out, multiply, convert."""

from ..common.bounds import visible_range
from ..common.records import Block
from ..common.shards import own_before
from .args import Turn, Turns, queries_leave_early
from .consuming import pingpong
from .consuming.ahead import consume_items_ahead
from .consuming.columns import consume_columns
from .consuming.consumer import consume
from .loading.convert import convert_tiles
from .loading.loader import begin_item, load_tile, load_tiles
from .loading.queries import load_queries
from .schedule.items import ask, begin_lists, item_from, leave_lists, settle
from .schedule.lists import first_of_many
from .schedule.mail import publish, read
from .shim import gdc_launch_dependents, gdc_wait, gl, gluon

# Value tiles of an item that are not yet loaded when the next item is published.  The next queries and first keys have
# that long to arrive.  A larger number would bind a program to an item long before the program is free.
TILES_LEFT_AT_NEXT_ITEM = gl.constexpr(4)


@gluon.jit
def load_items(
    loader, query_box, queries, jobs, FIRST: gl.constexpr, PART: gl.constexpr, STAGES: gl.constexpr, S: gl.constexpr,
    P: gl.constexpr,
):  # fmt: skip
    """One loader warp: load part PART of every item's tiles and, if FIRST, the queries."""
    mail, batch, mods = jobs.mail, jobs.batch, jobs.mods
    turn = Turn(0, 0)
    number, done = 0, 0
    item = read(mail, number, 1)
    while item.block.kv_head >= 0:
        if item.begin < item.end:
            block, table, kv_head, lo = begin_item(batch, item, mods, S, P)
            end = item.end
            if FIRST and queries_leave_early(P):  # a slot for keys is free sooner than the one for queries
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
    """The scheduling warp: publish the next item, taken late for balance, and load part PART of the value tiles.

    A single consumer has no other consumer whose products run while its next keys arrive.  Its next item is published
    before the last TILES_LEFT_AT_NEXT_ITEM value tiles are loaded.  Several consumers gain nothing by that.
    """
    ALONE: gl.constexpr = P.CONSUMERS == 1
    mail, counters, batch, mods = jobs.mail, jobs.counters, jobs.batch, jobs.mods
    turn = Turn(0, 0)
    number = batch.num_seqs * 0
    next_many = first_of_many(gl.num_programs(0), lists)  # the first item with which no program begins
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
                for i in range(gl.maximum(end - TILES_LEFT_AT_NEXT_ITEM - tile, 1)):  # all but the rest
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
    """A consumer: compute its rows of every item, and store them."""
    pingpong.begin(P)
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
    if S.MERGE == 0:  # as in `share_roles.consume_share`
        gdc_launch_dependents()


@gluon.jit
def convert_items(raw, rings, jobs, S: gl.constexpr, P: gl.constexpr):
    """The converter warpgroup: convert fp8 tiles of every item into operands of the consumers."""
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
    """Warpgroup NUMBER, beside the first consumer: another consumer or, last, the converter."""
    if NUMBER < P.CONSUMERS:
        consume_items(out, results, query, rings, jobs, NUMBER, S, P)
    else:
        convert_items(raw, rings, jobs, S, P)
