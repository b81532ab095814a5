"""The kernel for few rows: even shares of all tiles, the KV heads in lockstep.

What a program does follows from the sequences' lengths alone, as in the portable kernel: `common/schedule.py` cuts the
line of units, here loaders and consumers walk along it each for itself: one consumer of four warps, or two.
"""

from ..common.bounds import visible_range
from ..common.merge import partial_of
from ..common.output import clear_padding, tokens_of
from ..common.page_tables import pages_of
from ..common.records import Batch
from ..common.schedule import find_share, room_of, unflatten, work
from .args import (
    LatentRoom,
    Results,
    Rings,
    Turn,
    Turns,
    has_latent_rows,
    in_one_ring,
    raw_slots_of_rest,
    slots_of_tile,
)
from .consuming.column_softmax import make_flags, make_flags_of_each
from .consuming.columns import consume_columns, make_weights
from .consuming.consumer import consume
from .consuming.fold import make_bank, tiles_of
from .consuming.latent_rows import consume_latent_rows, make_numbers, make_weights_of_both
from .layouts import lanes_layout
from .loading.gates import start_together
from .loading.latent import make_rest
from .loading.latent_fp8 import widen_tiles
from .loading.latent_rows import find_addresses, make_rest_of_rows
from .loading.loader import fetch_descriptors, load_both, load_in_turn, load_tiles
from .loading.packed import make_boxes
from .loading.queries import make_queries
from .loading.ring import WARPGROUP, make_meeting, make_ring, ring_of
from .schedule.arrival import told_in
from .schedule.walk import Walk, item_at
from .shim import fence_async_shared, gdc_launch_dependents, gdc_wait, gl, gluon, mbarrier


@gluon.jit
def load_share(
    box, new_box, ring, batch, share, walk, kv_head, mods, STAGES: gl.constexpr, S: gl.constexpr, P: gl.constexpr,
    value_box=None, new_value_box=None, values=None, FROM: gl.constexpr = 0,
):  # fmt: skip
    """One warp: the tiles of a share for one ring, or for that of keys and that of values, or for both in one."""
    turn = Turn(0, 0)
    head = kv_head
    if P.PARTS > 1:
        head = kv_head // P.PARTS  # of the cache
    unit, seq, before = walk.unit, walk.seq, walk.before
    while unit < share.end:
        blocks, tiles = room_of(batch, share, seq, mods, S)
        if unit >= before + blocks * tiles:
            before += blocks * tiles
            seq += 1
        else:
            several = blocks if has_latent_rows(S, P) and not S.ONE_BLOCK else None
            item, count = item_at(batch, share, Walk(unit, seq, before), tiles, kv_head, mods, S, several)
            table = pages_of(batch, item.block.seq)
            lo = visible_range(item.block, mods, S.BLOCK_Q).lo
            begin, end = tiles_of(item, mods, S)
            if value_box is None:
                turn = load_tiles(
                    box, new_box, ring, turn, table, batch, item.block, head, begin, end, lo, 0, STAGES, S, P, FROM
                )
            elif values is None:
                for i in range(end - begin):
                    turn = load_in_turn(
                        box, value_box, new_box, new_value_box, ring, turn, table, batch, item.block, head,
                        end - 1 - i, lo, STAGES, S, P,
                    )  # fmt: skip
            else:
                for i in range(end - begin):
                    turn = load_both(
                        box, value_box, new_box, new_value_box, ring, values, turn, table, batch, item.block, head,
                        end - 1 - i, lo, STAGES, S, P,
                    )  # fmt: skip
            unit += count


@gluon.jit
def load_rests(box, new_box, ring, batch, share, walk, kv_head, mods, S: gl.constexpr, P: gl.constexpr):
    """One warp: what fp8 latents have behind their values, if anything."""
    if S.REST > 0:
        RESTS: gl.constexpr = raw_slots_of_rest(P)
        FROM: gl.constexpr = S.VALUE_DIM
        load_share(box, new_box, ring, batch, share, walk, kv_head, mods, RESTS, S, P, None, None, None, FROM)


@gluon.jit
def consume_share(
    out, results, query, rings, batch, share, walk, kv_head, mods, NUMBER: gl.constexpr, S: gl.constexpr,
    P: gl.constexpr,
):  # fmt: skip
    """A consumer: all blocks, and pieces of blocks, of a share."""
    if P.PREFETCH and NUMBER == 0:
        mbarrier.wait(rings.queries.full.index(0), 0)
    turns = Turns(Turn(0, 0), Turn(0, 0), 0)
    unit, seq, before = walk.unit, walk.seq, walk.before
    while unit < share.end:
        blocks, tiles = room_of(batch, share, seq, mods, S)
        if unit >= before + blocks * tiles:
            before += blocks * tiles
            seq += 1
        else:
            several = blocks if has_latent_rows(S, P) and not S.ONE_BLOCK else None
            item, count = item_at(batch, share, Walk(unit, seq, before), tiles, kv_head, mods, S, several)
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
    if S.MERGE == 0:  # sooner, all programs of the merge would go to the first multiprocessors that have room
        gdc_launch_dependents()
    if P.PREFETCH:
        mbarrier.invalidate(rings.queries.full.index(NUMBER))  # its memory may be used again, see ring.make_barriers


@gluon.jit
def convert_share(raw, rings, batch, share, walk, kv_head, mods, S: gl.constexpr, P: gl.constexpr):
    """A warpgroup: widens the tiles of a share on their way from loaders to consumers."""
    raw_turns = Turns(Turn(0, 0), Turn(0, 0), 0)
    turns = raw_turns
    unit, seq, before = walk.unit, walk.seq, walk.before
    while unit < share.end:
        blocks, tiles = room_of(batch, share, seq, mods, S)
        if unit >= before + blocks * tiles:
            before += blocks * tiles
            seq += 1
        else:
            item, count = item_at(batch, share, Walk(unit, seq, before), tiles, kv_head, mods, S)
            raw_turns, turns = widen_tiles(raw, raw_turns, rings, turns, item.end - item.begin, S, P)
            unit += count


@gluon.jit(do_not_specialize=["num_seqs", "num_tokens", "page_table_stride", "least", "slots"])
def shares_kernel(
    out, lse, scratch, query, key_box, value_box, new_key_box, new_value_box, query_starts, seq_lens, page_table,
    page_table_stride, num_seqs, num_tokens, shortest, longest, least, slots, page_starts, mods,
    scales, S: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """Attention of one even share of all tiles x one KV head."""
    gdc_wait()  # for the launch before, which may have written anything that is read here
    if S.LEADS:
        gdc_launch_dependents()
    index, kv_head = unflatten(S)
    batch = Batch(
        query_starts, seq_lens, page_table, page_table_stride, num_seqs, num_tokens, shortest, longest, least, slots,
        page_starts,
    )  # fmt: skip
    if S.CLEAR:
        dim = gl.arange(0, S.VALUE_PADDED, layout=gl.BlockedLayout([1], [32], [P.ROWS // 16], [0]))
        clear_padding(out, lse, batch, tokens_of(batch), dim, S)
    lane = gl.arange(0, S.SCAN, layout=lanes_layout(S.SCAN, P.ROWS, S.REST is not None))
    first = work(batch, lane, lane < batch.num_seqs, mods, S)  # memory answers while barriers are made
    READERS: gl.constexpr = P.CONSUMERS * WARPGROUP
    DIMS: gl.constexpr = S.DIM // slots_of_tile(P)
    if P.PACKED:
        keys = ring_of(make_boxes(key_box, P.KEY_STAGES, S, P), P.KEY_STAGES, P.LOADERS, READERS)
        values = ring_of(make_boxes(value_box, P.VALUE_STAGES, S, P), P.VALUE_STAGES, P.LOADERS, READERS)
    elif P.CONVERT:
        gl.static_assert(S.REST is not None and P.COLUMNS > 0 and P.LOADERS == 1)
        keys = make_ring(S.COMPUTE, S.TILE, DIMS, P.KEY_STAGES, 1, READERS)
        values = make_ring(S.COMPUTE, S.TILE, S.REST, P.VALUE_STAGES, 1, READERS) if S.REST > 0 else keys
        RESTS: gl.constexpr = raw_slots_of_rest(P)
        raw_keys = make_ring(key_box.dtype, S.TILE, DIMS, P.RAW_STAGES, 1, WARPGROUP)
        raw_rests = make_ring(key_box.dtype, S.TILE, S.REST, RESTS, 1, WARPGROUP) if S.REST > 0 else raw_keys
    else:
        keys = make_ring(key_box.dtype, S.TILE, DIMS, P.KEY_STAGES, P.LOADERS, READERS)
        if in_one_ring(S, P) or S.REST == 0:
            values = keys
        elif S.REST is not None:
            ONCE: gl.constexpr = WARPGROUP if has_latent_rows(S, P) else READERS  # read by whose tile it is
            values = make_ring(value_box.dtype, S.TILE, S.REST, P.VALUE_STAGES, P.LOADERS, ONCE)
        else:
            values = make_ring(value_box.dtype, S.TILE, S.VALUE_PADDED, P.VALUE_STAGES, P.LOADERS, READERS)
    dtype: gl.constexpr = key_box.dtype if P.FP8 == 0 else gl.float16 if S.REST is None else S.COMPUTE
    queries = make_queries(dtype, 0, S, P)
    if S.REST is not None:
        gl.static_assert(P.CONSUMERS == 1 or S.MERGE == 0)
        if has_latent_rows(S, P):
            room, numbers = make_weights_of_both(dtype, S, P), make_numbers(P)
            rest = make_rest_of_rows(dtype, S, P) if S.REST > 0 else numbers
            keys, values, queries, rest_at = find_addresses(keys, values, queries, rest, S, P)
            extra = LatentRoom(numbers, rest, numbers, rest_at)
        else:
            flags = make_flags_of_each(P)
            rest = make_rest(dtype, S, P) if S.REST > 0 else flags
            room = make_weights(queries, dtype, S, P)
            extra = LatentRoom(flags, rest, make_meeting(READERS) if P.CONSUMERS > 1 else flags, 0)
        rings = Rings(keys, values, queries, room, extra)
    elif P.COLUMNS > 0:
        rings = Rings(keys, values, queries, make_weights(queries, dtype, S, P), make_flags(P))
    elif S.PIECE is not None:
        rings = Rings(keys, values, queries, make_bank(S, P), queries.slots)
    else:
        rings = Rings(keys, values, queries, queries.slots, queries.slots)
    fence_async_shared()  # what the barriers start with
    fetch_descriptors(key_box, value_box, queries, S, P)
    share, seq, before = find_share(batch, first, index, gl.num_programs(0) // S.KV_HEADS, lane, mods, S)
    walk = Walk(share.begin, seq, before)
    results = Results(lse, partial_of(scratch, slots * S.LIVE), told_in(scratch, slots, S), scales)
    K: gl.constexpr = P.KEY_STAGES
    V: gl.constexpr = P.VALUE_STAGES
    FROM: gl.constexpr = S.VALUE_DIM
    start_together()
    if P.CONSUMERS == 2 and S.REST is None:
        gl.warp_specialize([
            (consume_share, (out, results, query, rings, batch, share, walk, kv_head, mods, 0, S, P)),
            (consume_share, (out, results, query, rings, batch, share, walk, kv_head, mods, 1, S, P)),
            (load_share, (key_box, new_key_box, keys, batch, share, walk, kv_head, mods, K, S, P)),
            (load_share, (value_box, new_value_box, values, batch, share, walk, kv_head, mods, V, S, P)),
        ], [4, 1, 1], [232, 40, 40])  # fmt: skip
    elif P.CONVERT:
        raw = Rings(raw_keys, raw_rests, queries, queries.slots, queries.slots)
        R: gl.constexpr = P.RAW_STAGES
        if P.CONSUMERS == 2:
            gl.warp_specialize([
                (consume_share, (out, results, query, rings, batch, share, walk, kv_head, mods, 0, S, P)),
                (consume_share, (out, results, query, rings, batch, share, walk, kv_head, mods, 1, S, P)),
                (convert_share, (raw, rings, batch, share, walk, kv_head, mods, S, P)),
                (load_share, (key_box, new_key_box, raw_keys, batch, share, walk, kv_head, mods, R, S, P)),
                (load_rests, (value_box, new_value_box, raw_rests, batch, share, walk, kv_head, mods, S, P)),
            ], [4, 4, 1, 1], [(472 - P.CONVERT_REGISTERS) // 16 * 8, P.CONVERT_REGISTERS, 40, 40])  # fmt: skip
        else:
            gl.warp_specialize([
                (consume_share, (out, results, query, rings, batch, share, walk, kv_head, mods, 0, S, P)),
                (convert_share, (raw, rings, batch, share, walk, kv_head, mods, S, P)),
                (load_share, (key_box, new_key_box, raw_keys, batch, share, walk, kv_head, mods, R, S, P)),
                (load_rests, (value_box, new_value_box, raw_rests, batch, share, walk, kv_head, mods, S, P)),
            ], [4, 1, 1], [P.CONVERT_REGISTERS, 40, 40])  # fmt: skip
    elif S.REST is not None:
        if P.CONSUMERS == 2 and S.REST == 0:
            gl.warp_specialize([
                (consume_share, (out, results, query, rings, batch, share, walk, kv_head, mods, 0, S, P)),
                (consume_share, (out, results, query, rings, batch, share, walk, kv_head, mods, 1, S, P)),
                (load_share, (key_box, new_key_box, keys, batch, share, walk, kv_head, mods, K, S, P)),
            ], [4, 1], [232, 40])  # fmt: skip
        elif P.CONSUMERS == 2:
            gl.warp_specialize([
                (consume_share, (out, results, query, rings, batch, share, walk, kv_head, mods, 0, S, P)),
                (consume_share, (out, results, query, rings, batch, share, walk, kv_head, mods, 1, S, P)),
                (load_share, (key_box, new_key_box, keys, batch, share, walk, kv_head, mods, K, S, P)),
                (load_share, (
                    value_box, new_value_box, values, batch, share, walk, kv_head, mods, V, S, P, None, None, None,
                    FROM
                )),
            ], [4, 1, 1], [232, 40, 40])  # fmt: skip
        elif S.REST == 0:
            gl.warp_specialize([
                (consume_share, (out, results, query, rings, batch, share, walk, kv_head, mods, 0, S, P)),
                (load_share, (key_box, new_key_box, keys, batch, share, walk, kv_head, mods, K, S, P)),
            ], [1], [64])  # fmt: skip
        else:
            gl.warp_specialize([
                (consume_share, (out, results, query, rings, batch, share, walk, kv_head, mods, 0, S, P)),
                (load_share, (key_box, new_key_box, keys, batch, share, walk, kv_head, mods, K, S, P)),
                (load_share, (
                    value_box, new_value_box, values, batch, share, walk, kv_head, mods, V, S, P, None, None, None,
                    FROM
                )),
            ], [1, 1], [64, 64])  # fmt: skip
    elif in_one_ring(S, P):
        gl.static_assert(S.DIM == S.VALUE_PADDED)
        gl.warp_specialize([
            (consume_share, (out, results, query, rings, batch, share, walk, kv_head, mods, 0, S, P)),
            (load_share, (
                key_box, new_key_box, keys, batch, share, walk, kv_head, mods, K, S, P, value_box, new_value_box
            )),
        ], [1], [64])  # fmt: skip
    elif P.BRIEF:
        gl.static_assert(K == V)
        gl.warp_specialize([
            (consume_share, (out, results, query, rings, batch, share, walk, kv_head, mods, 0, S, P)),
            (load_share, (
                key_box, new_key_box, keys, batch, share, walk, kv_head, mods, K, S, P, value_box, new_value_box, values
            )),
        ], [1], [64])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume_share, (out, results, query, rings, batch, share, walk, kv_head, mods, 0, S, P)),
            (load_share, (key_box, new_key_box, keys, batch, share, walk, kv_head, mods, K, S, P)),
            (load_share, (value_box, new_value_box, values, batch, share, walk, kv_head, mods, V, S, P)),
        ], [1, 1], [64, 64])  # fmt: skip
