"""Roles of the warps of `shares_kernel`: load the tiles of a share, multiply, convert."""

from ..common.schedule import room_of
from .args import Turn, Turns, has_latent_rows
from .consuming.columns import consume_columns
from .consuming.consumer import consume
from .consuming.fold import tiles_of_item
from .consuming.latent_rows import consume_latent_rows
from .loading.latent_fp8 import widen_tiles
from .loading.loader import begin_item, load_both, load_tiles
from .schedule.walk import Walk, item_at
from .shim import gdc_launch_dependents, gl, gluon, mbarrier


@gluon.jit
def load_share(
    loader, batch, share, walk, mods, STAGES: gl.constexpr, S: gl.constexpr, P: gl.constexpr,
    BOTH: gl.constexpr = False, values=None, FROM: gl.constexpr = 0,
):  # fmt: skip
    """One loader warp: load the tiles of a share into a ring, last tile of an item first.

    BOTH: load the tiles of `values`, a second Loader, too.  FROM: first dim.
    """
    turn = Turn(0, 0)
    unit, seq, before, kv_head = walk.unit, walk.seq, walk.before, walk.kv_head
    while unit < share.end:
        blocks, tiles = room_of(batch, share, seq, mods, S, kv_head)
        if unit >= before + blocks * tiles:
            before += blocks * tiles
            seq += 1
        else:
            at = Walk(unit, seq, before, kv_head, walk.ahead)
            item, count = item_at(batch, share, at, blocks, tiles, mods, S, P)
            block, table, head, lo = begin_item(batch, item, mods, S, P)
            begin, end = tiles_of_item(item, mods, S)
            if BOTH:
                for i in range(end - begin):
                    turn = load_both(loader, values, turn, table, batch, block, head, end - 1 - i, lo, STAGES, S, P)
            else:
                turn = load_tiles(loader, turn, table, batch, block, head, begin, end, lo, 0, STAGES, S, P, FROM)
            unit += count


@gluon.jit
def load_values_of_share(loader, batch, share, walk, mods, STAGES: gl.constexpr, S: gl.constexpr, P: gl.constexpr):
    """One loader warp: load the values of a share, or the dims of latents behind their values, if any."""
    FROM: gl.constexpr = 0 if S.REST is None else S.VALUE_DIM
    if S.REST != 0:
        load_share(loader, batch, share, walk, mods, STAGES, S, P, False, None, FROM)


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
            at = Walk(unit, seq, before, kv_head, walk.ahead)
            item, count = item_at(batch, share, at, blocks, tiles, mods, S, P)
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
            at = Walk(unit, seq, before, kv_head, walk.ahead)
            item, count = item_at(batch, share, at, blocks, tiles, mods, S, P)
            raw_turns, turns = widen_tiles(raw, raw_turns, rings, turns, item.end - item.begin, S, P)
            unit += count


@gluon.jit
def beside_first(
    out, results, query, raw, rings, batch, share, walk, mods, NUMBER: gl.constexpr, S: gl.constexpr, P: gl.constexpr
):
    """A warpgroup beside the first consumer: the second one, or the converter, which comes last."""
    if NUMBER < P.CONSUMERS:
        consume_share(out, results, query, rings, batch, share, walk, mods, NUMBER, S, P)
    else:
        convert_share(raw, rings, batch, share, walk, mods, S, P)
