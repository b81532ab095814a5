"""Roles of the warps of `shares_kernel`: load the tiles of a share, multiply, convert."""

from ..common.blocking import pages_of
from ..common.bounds import visible_range
from ..common.schedule import room_of
from ..common.shards import own_block
from .args import (
    Turn,
    Turns,
    has_latent_rows,
    raw_slots_of_rest,
)
from .consuming.columns import consume_columns
from .consuming.consumer import consume
from .consuming.fold import tiles_of_item
from .consuming.latent_rows import consume_latent_rows
from .loading.latent_fp8 import widen_tiles
from .loading.loader import load_both, load_in_turn, load_tiles
from .schedule.walk import Walk, item_at
from .shim import gdc_launch_dependents, gl, gluon, mbarrier


@gluon.jit
def load_share(
    box, new_box, ring, batch, share, walk, mods, STAGES: gl.constexpr, S: gl.constexpr, P: gl.constexpr,
    value_box=None, new_value_box=None, values=None, FROM: gl.constexpr = 0,
):  # fmt: skip
    """One loader warp: load the tiles of a share into a ring, last tile of an item first.

    value_box: load keys and values, in turn into `ring` or, with `values`, each into its own ring.  FROM: first dim.
    """
    turn = Turn(0, 0)
    unit, seq, before, kv_head = walk.unit, walk.seq, walk.before, walk.kv_head
    head = kv_head
    if P.PARTS > 1:
        head = kv_head // P.PARTS  # the cache's head
    while unit < share.end:
        blocks, tiles = room_of(batch, share, seq, mods, S, kv_head)
        if unit >= before + blocks * tiles:
            before += blocks * tiles
            seq += 1
        else:
            several = blocks if has_latent_rows(S, P) and not S.ONE_BLOCK else None
            item, count = item_at(batch, share, Walk(unit, seq, before, kv_head, walk.ahead), tiles, mods, S, several)
            table = pages_of(batch, item.block.seq)
            lo = visible_range(item.block, mods, S.BLOCK_Q, S).lo
            block = own_block(item.block, mods, S)
            begin, end = tiles_of_item(item, mods, S)
            if value_box is None:
                turn = load_tiles(
                    box, new_box, ring, turn, table, batch, block, head, begin, end, lo, 0, STAGES, S, P, FROM
                )
            elif values is None:
                for i in range(end - begin):
                    turn = load_in_turn(
                        box, value_box, new_box, new_value_box, ring, turn, table, batch, block, head,
                        end - 1 - i, lo, STAGES, S, P,
                    )  # fmt: skip
            else:
                for i in range(end - begin):
                    turn = load_both(
                        box, value_box, new_box, new_value_box, ring, values, turn, table, batch, block, head,
                        end - 1 - i, lo, STAGES, S, P,
                    )  # fmt: skip
            unit += count


@gluon.jit
def load_rests(box, new_box, ring, batch, share, walk, mods, S: gl.constexpr, P: gl.constexpr):
    """One loader warp: load the dims of fp8 latents behind the values, if any."""
    if S.REST > 0:
        RESTS: gl.constexpr = raw_slots_of_rest(P)
        FROM: gl.constexpr = S.VALUE_DIM
        load_share(box, new_box, ring, batch, share, walk, mods, RESTS, S, P, None, None, None, FROM)


@gluon.jit
def consume_share(
    out, results, query, rings, batch, share, walk, mods, NUMBER: gl.constexpr, S: gl.constexpr,
    P: gl.constexpr,
):  # fmt: skip
    """A consumer: compute and store all blocks, and pieces of blocks, of a share."""
    if P.PREFETCH and NUMBER == 0:
        mbarrier.wait(rings.queries.full.index(0), 0)
    turns = Turns(Turn(0, 0), Turn(0, 0), 0)
    unit, seq, before, kv_head = walk.unit, walk.seq, walk.before, walk.kv_head
    while unit < share.end:
        blocks, tiles = room_of(batch, share, seq, mods, S, kv_head)
        if unit >= before + blocks * tiles:
            before += blocks * tiles
            seq += 1
        else:
            several = blocks if has_latent_rows(S, P) and not S.ONE_BLOCK else None
            item, count = item_at(batch, share, Walk(unit, seq, before, kv_head, walk.ahead), tiles, mods, S, several)
            if S.PIECE is not None:
                if item.begin < item.end:
                    turns = consume(out, results, query, rings, turns, item, mods, NUMBER, S, P)
            elif has_latent_rows(S, P):
                turns = consume_latent_rows(out, results, query, rings, turns, item, mods, NUMBER, S, P)
            elif P.COLUMNS > 0:
                turns = consume_columns(out, results, query, rings, turns, item, mods, S, P, NUMBER)
            else:
                turns = consume(out, results, query, rings, turns, item, mods, NUMBER, S, P)
            unit += count
    if S.MERGE == 0:  # launched sooner, all programs of the merge would go to the first multiprocessors with room
        gdc_launch_dependents()
    if P.PREFETCH:
        mbarrier.invalidate(rings.queries.full.index(NUMBER))  # Triton may reuse its memory, see ring.make_barriers


@gluon.jit
def convert_share(raw, rings, batch, share, walk, mods, S: gl.constexpr, P: gl.constexpr):
    """The converter warpgroup: widen the fp8 tiles of a share between loaders and consumers."""
    raw_turns = Turns(Turn(0, 0), Turn(0, 0), 0)
    turns = raw_turns
    unit, seq, before, kv_head = walk.unit, walk.seq, walk.before, walk.kv_head
    while unit < share.end:
        blocks, tiles = room_of(batch, share, seq, mods, S, kv_head)
        if unit >= before + blocks * tiles:
            before += blocks * tiles
            seq += 1
        else:
            several = blocks if has_latent_rows(S, P) and not S.ONE_BLOCK else None
            item, count = item_at(batch, share, Walk(unit, seq, before, kv_head, walk.ahead), tiles, mods, S, several)
            raw_turns, turns = widen_tiles(raw, raw_turns, rings, turns, item.end - item.begin, S, P)
            unit += count
