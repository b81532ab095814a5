"""The kernel for few rows: each program has an even share of the tiles of one KV head.

Every program computes its share from the sequences' lengths, as in the portable kernel.  `common/schedule.py` cuts the
line into shares.  Neighbouring programs have the same share of different KV heads, so they read the same pages at the
same time.  If windows differ by head (Shape.BY_HEAD), each KV head has a line and a number of programs of its own.

There are one or two consumers of four warps each.  Each consumer, each loader warp and the converter, if there is one,
walks along the share by itself.
"""

import triton

from ..common.merge import partial_of
from ..common.output import clear_padding, tokens_of
from ..common.records import Batch, Walk
from ..common.schedule import find_share, next_seq, next_unit, room_of, unflatten, work
from .args import (
    LatentRoom,
    Loader,
    Results,
    Rings,
    Turn,
    Turns,
    dims_of_element,
    has_latent_rows,
    in_one_ring,
    raw_slots_of_rest,
    slots_of_tile,
)
from .consuming.column_softmax import make_flags, make_flags_of_each
from .consuming.columns import consume_columns, make_weights
from .consuming.consumer import consume
from .consuming.fold import make_bank, tiles_of_item
from .consuming.latent_rows import consume_latent_rows, make_numbers
from .layouts import lanes_layout, line_layout
from .loading.convert import widen_tiles
from .loading.gates import start_together
from .loading.latent_queries import find_addresses
from .loading.loader import begin_item, fetch_descriptors, load_both, load_scaled_tiles, load_tiles
from .loading.packed import make_boxes
from .loading.queries import make_queries
from .loading.ring import WARPGROUP, make_matrices, make_meeting, make_ring, ring_of
from .loading.slot_scales import beside_scales
from .schedule.join import told_in
from .schedule.walk import bring_heads, item_at, share_of_heads
from .shim import fence_async_shared, gdc_launch_dependents, gdc_wait, gl, gluon, mbarrier

# ---- roles of warps ------------------------------------------------------------------------------


@gluon.jit
def load_share(
    loader, batch, share, walk, ahead, mods, STAGES: gl.constexpr, S: gl.constexpr, P: gl.constexpr,
    BOTH: gl.constexpr = False, values=None, FROM: gl.constexpr = 0, OF_VALUES: gl.constexpr = False,
):  # fmt: skip
    """Run one loader warp: load the tiles of a share into a ring, each item's last tile first.

    BOTH: load the tiles of `values`, a second Loader, too.  FROM: first dim that is loaded.
    OF_VALUES: the tiles hold values, not keys; this matters only with SLOT_SCALES.
    """
    turn = Turn(0, 0)
    at = walk
    while at.unit < share.end:
        blocks, tiles = room_of(batch, share, at, mods, S)
        seq_end = at.before + blocks * tiles
        if at.unit >= seq_end:
            at = next_seq(at, at.seq + 1, seq_end)
        else:
            item, count = item_at(batch, share, at, ahead, blocks, tiles, mods, S, P)
            block, table, head, lo = begin_item(batch, item, mods, S, P)
            begin, end = tiles_of_item(item, mods, S)
            if BOTH:
                for i in range(end - begin):
                    turn = load_both(loader, values, turn, table, batch, block, head, end - 1 - i, lo, STAGES, S, P)
            elif P.SLOT_SCALES:
                turn = load_scaled_tiles(
                    loader, turn, table, batch, block, head, begin, end, lo, STAGES, OF_VALUES, S, P
                )
            else:
                turn = load_tiles(loader, turn, table, batch, block, head, begin, end, lo, 0, STAGES, S, P, FROM)
            at = next_unit(at, at.unit + count)


@gluon.jit
def load_values_of_share(
    loader, batch, share, walk, ahead, mods, STAGES: gl.constexpr, S: gl.constexpr, P: gl.constexpr
):
    """Run one loader warp: load the values of a share.

    Latents have no values of their own: then the warp loads the key dims behind the values, if there are any.
    """
    FROM: gl.constexpr = 0 if S.REST is None else S.VALUE_DIM
    if S.REST != 0:
        load_share(loader, batch, share, walk, ahead, mods, STAGES, S, P, False, None, FROM, True)


@gluon.jit
def consume_share(
    out, results, query, rings, batch, share, walk, ahead, mods, NUMBER: gl.constexpr, S: gl.constexpr,
    P: gl.constexpr,
):  # fmt: skip
    """Run consumer NUMBER: compute and store all blocks, and pieces of blocks, of a share.

    With P.FOLLOWS, the launch ahead copies keys for the next launch.  All programs of the copy have begun by then, and
    each has waited for earlier launches, so loaders need not wait.  The next launch may begin once copies are complete.
    """
    if P.FOLLOWS:
        gdc_wait()
        if S.LEADS:
            gdc_launch_dependents()
    if P.PREFETCH and NUMBER == 0:
        mbarrier.wait(rings.queries.full.index(0), 0)
    turns = Turns(Turn(0, 0), Turn(0, 0), 0)
    at = walk
    while at.unit < share.end:
        blocks, tiles = room_of(batch, share, at, mods, S)
        seq_end = at.before + blocks * tiles
        if at.unit >= seq_end:
            at = next_seq(at, at.seq + 1, seq_end)
        else:
            item, count = item_at(batch, share, at, ahead, blocks, tiles, mods, S, P)
            if S.PIECE is not None:
                if item.begin < item.end:
                    turns = consume(out, results, query, rings, turns, item, mods, NUMBER, S, P)
            elif has_latent_rows(S, P):
                turns = consume_latent_rows(out, results, query, rings, turns, item, mods, NUMBER, S, P)
            elif P.COLUMNS > 0:
                turns = consume_columns(out, results, query, rings, turns, item, mods, S, P, NUMBER)
            else:
                turns = consume(out, results, query, rings, turns, item, mods, NUMBER, S, P)
            at = next_unit(at, at.unit + count)
    # if the merge launch began earlier, the first multiprocessors with room would get all of its programs
    if S.MERGE == 0:
        gdc_launch_dependents()
    if P.PREFETCH:
        mbarrier.invalidate(rings.queries.full.index(NUMBER))  # see ring.make_barriers


@gluon.jit
def convert_share(raw, rings, batch, share, walk, ahead, mods, S: gl.constexpr, P: gl.constexpr):
    """Run the converter warpgroup: widen a share's latents from fp8 or int8 between loaders and consumers."""
    raw_turns = Turns(Turn(0, 0), Turn(0, 0), 0)
    turns = raw_turns
    at = walk
    while at.unit < share.end:
        blocks, tiles = room_of(batch, share, at, mods, S)
        seq_end = at.before + blocks * tiles
        if at.unit >= seq_end:
            at = next_seq(at, at.seq + 1, seq_end)
        else:
            item, count = item_at(batch, share, at, ahead, blocks, tiles, mods, S, P)
            raw_turns, turns = widen_tiles(raw, raw_turns, rings, turns, item.end - item.begin, S, P)
            at = next_unit(at, at.unit + count)


@gluon.jit
def beside_first(
    out,
    results,
    query,
    raw,
    rings,
    batch,
    share,
    walk,
    ahead,
    mods,
    NUMBER: gl.constexpr,
    S: gl.constexpr,
    P: gl.constexpr,
):
    """Run a warpgroup beside consumer 0: consumer NUMBER or, if NUMBER is the number of consumers, the converter."""
    if NUMBER < P.CONSUMERS:
        consume_share(out, results, query, rings, batch, share, walk, ahead, mods, NUMBER, S, P)
    else:
        convert_share(raw, rings, batch, share, walk, ahead, mods, S, P)


# ---- the kernel ----------------------------------------------------------------------------------


@triton.constexpr_function
def loaders_of(S, P):
    """Number of loader warps: 1 if one warp loads keys and values, or if keys alone are loaded and not converted.

    Otherwise 2.  With a converter, the second warp may have nothing to load.
    """
    keys_alone = S.REST == 0 and P.CONVERT == 0
    both = S.REST is None and P.CONSUMERS == 1 and (P.VALUE_STAGES == 0 or P.BRIEF)
    return 1 if keys_alone or both else 2


@triton.constexpr_function
def registers_of(P, loaders):
    """Registers of a thread, for each partition except the first, which gets the remaining registers."""
    convert = [P.CONVERT_REGISTERS] * (P.CONVERT != 0)
    consumers = [(464 + 8 * len(convert) - sum(convert)) // 16 * 8] * (P.CONSUMERS - 1)
    crowded = P.SLOT_SCALES and P.COLUMNS > 16  # consumers would spill
    loader = 40 if P.CONVERT or P.CONSUMERS == 2 or crowded else 64
    return consumers + convert + [loader] * loaders


@gluon.jit(do_not_specialize=["num_seqs", "num_tokens", "page_table_stride", "least", "slots"])
def shares_kernel(
    out, lse, scratch, query, key_box, value_box, new_key_box, new_value_box, query_starts, seq_lens, page_table,
    page_table_stride, num_seqs, num_tokens, shortest, longest, least, slots, page_starts, mods,
    scales, S: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """Attention of one even share of the tiles of one KV head.

    Arguments are those of `launch_arguments.attention`: records with tensors, boxes (TMA descriptors), tensors of the
    batch (int32 or int64), and bounds.  shortest, longest: query tokens of the sequences served, inclusive.
    """
    if not P.FOLLOWS:
        gdc_wait()  # an earlier launch may have written any tensor that this kernel reads
        if S.LEADS:
            gdc_launch_dependents()
    index, kv_head = unflatten(S)
    batch = Batch(
        query_starts, seq_lens, page_table, page_table_stride, num_seqs, num_tokens, shortest, longest, least, slots,
        page_starts,
    )  # fmt: skip
    if S.CLEAR:
        dim = gl.arange(0, S.VALUE_PADDED, layout=line_layout(P.ROWS // 16))
        clear_padding(out, lse, batch, tokens_of(batch), dim, S)
    lane = gl.arange(0, S.SCAN, layout=lanes_layout(S.SCAN, P.ROWS, S.REST is not None))
    if not S.BY_HEAD:
        first = work(batch, lane, lane < batch.num_seqs, mods, S, kv_head)  # memory answers while barriers are made
    else:
        bring_heads(batch, mods, S, P)
    READERS: gl.constexpr = P.CONSUMERS * WARPGROUP
    DIMS: gl.constexpr = S.DIM // slots_of_tile(P)
    if P.PACKED:
        keys = ring_of(make_boxes(key_box, P.KEY_STAGES, S, P), P.KEY_STAGES, P.LOADERS, READERS)
        values = ring_of(make_boxes(value_box, P.VALUE_STAGES, S, P), P.VALUE_STAGES, P.LOADERS, READERS)
    elif P.CONVERT:
        gl.static_assert(S.REST is not None and P.LOADERS == 1)
        keys = make_ring(gl.float16, S.TILE, DIMS, P.KEY_STAGES, 1, READERS)
        # consumers of latent rows take tiles in turn, so only one consumer reads a tile's rest
        REST_READERS: gl.constexpr = WARPGROUP if has_latent_rows(S, P) else READERS
        values = make_ring(gl.float16, S.TILE, S.REST, P.VALUE_STAGES, 1, REST_READERS) if S.REST > 0 else keys
        RESTS: gl.constexpr = raw_slots_of_rest(P)
        raw_keys = make_ring(key_box.dtype, S.TILE, DIMS, P.RAW_STAGES, 1, WARPGROUP)
        raw_values = make_ring(key_box.dtype, S.TILE, S.REST, RESTS, 1, WARPGROUP) if S.REST > 0 else raw_keys
    else:
        FILLERS: gl.constexpr = P.LOADERS + P.SLOT_SCALES
        TOGETHER: gl.constexpr = dims_of_element(P.FP8)
        keys = make_ring(key_box.dtype, S.TILE, DIMS // TOGETHER, P.KEY_STAGES, FILLERS, READERS)
        if in_one_ring(S, P) or S.REST == 0:
            values = keys
        elif S.REST is not None:
            ONCE: gl.constexpr = WARPGROUP if has_latent_rows(S, P) else READERS  # as REST_READERS
            values = make_ring(value_box.dtype, S.TILE, S.REST, P.VALUE_STAGES, P.LOADERS, ONCE)
        else:
            values = make_ring(value_box.dtype, S.TILE, S.VALUE_PADDED // TOGETHER, P.VALUE_STAGES, FILLERS, READERS)
        if P.SLOT_SCALES:
            keys, values = beside_scales(keys, False, S, P), beside_scales(values, True, S, P)
    dtype: gl.constexpr = key_box.dtype if P.FP8 == 0 else gl.float16
    queries = make_queries(dtype, 0, S, P)
    if S.REST is not None:
        gl.static_assert(P.CONSUMERS == 1 or S.MERGE == 0)
        if has_latent_rows(S, P):
            room, numbers = make_matrices(dtype, P.CONSUMERS, P.ROWS, S.TILE), make_numbers(P)
            rest = make_matrices(dtype, 1, P.ROWS, S.REST) if S.REST > 0 else numbers
            keys, values, queries, rest_at = find_addresses(keys, values, queries, rest, S, P)
            extra = LatentRoom(numbers, rest, numbers, rest_at)
        else:
            flags = make_flags_of_each(P)
            rest = make_matrices(dtype, P.CONSUMERS, P.COLUMNS, S.REST) if S.REST > 0 else flags
            room = make_weights(queries, dtype, S, P)
            extra = LatentRoom(flags, rest, make_meeting(READERS) if P.CONSUMERS > 1 else flags, 0)
        rings = Rings(keys, values, queries, room, extra)
    elif P.COLUMNS > 0:
        rings = Rings(keys, values, queries, make_weights(queries, dtype, S, P), make_flags(P))
    elif S.PIECE is not None:
        rings = Rings(keys, values, queries, make_bank(S, P), queries.slots)
    else:
        rings = Rings(keys, values, queries, queries.slots, queries.slots)
    fence_async_shared()  # makes the initial state of barriers visible
    fetch_descriptors(key_box, value_box, queries, S, P)
    if not S.BY_HEAD:
        num_shares, ahead = gl.num_programs(0) // S.KV_HEADS, None
    else:
        index, kv_head, num_shares, ahead = share_of_heads(batch, mods, P.ROWS // 16, S)
        first = work(batch, lane, lane < batch.num_seqs, mods, S, kv_head)
    if not P.CONVERT:
        raw_keys, raw_values = keys, values
    raw = Rings(raw_keys, raw_values, queries, queries.slots, queries.slots)
    share, seq, before = find_share(batch, first, index, num_shares, lane, mods, S, kv_head)
    walk = Walk(share.begin, seq, before, kv_head)
    results = Results(lse, partial_of(scratch, slots * S.LIVE), told_in(scratch, slots, S), scales)
    start_together()
    K: gl.constexpr = P.RAW_STAGES if P.CONVERT else P.KEY_STAGES
    V: gl.constexpr = raw_slots_of_rest(P) if P.CONVERT else P.VALUE_STAGES
    load_keys = Loader(key_box, new_key_box, raw_keys, scales)
    load_values = Loader(value_box, new_value_box, raw_values, scales)
    LOADERS: gl.constexpr = loaders_of(S, P)
    BOTH: gl.constexpr = LOADERS == 1 and S.REST is None
    BESIDE: gl.constexpr = P.CONSUMERS - 1 + (P.CONVERT != 0)  # warpgroups beside the first consumer
    if BESIDE == 2:
        gl.warp_specialize([
            (consume_share, (out, results, query, rings, batch, share, walk, ahead, mods, 0, S, P)),
            (beside_first, (out, results, query, raw, rings, batch, share, walk, ahead, mods, 1, S, P)),
            (beside_first, (out, results, query, raw, rings, batch, share, walk, ahead, mods, 2, S, P)),
            (load_share, (load_keys, batch, share, walk, ahead, mods, K, S, P)),
            (load_values_of_share, (load_values, batch, share, walk, ahead, mods, V, S, P)),
        ], [4, 4, 1, 1], registers_of(P, LOADERS))  # fmt: skip
    elif BESIDE == 1 and LOADERS == 2:
        gl.warp_specialize([
            (consume_share, (out, results, query, rings, batch, share, walk, ahead, mods, 0, S, P)),
            (beside_first, (out, results, query, raw, rings, batch, share, walk, ahead, mods, 1, S, P)),
            (load_share, (load_keys, batch, share, walk, ahead, mods, K, S, P)),
            (load_values_of_share, (load_values, batch, share, walk, ahead, mods, V, S, P)),
        ], [4, 1, 1], registers_of(P, LOADERS))  # fmt: skip
    elif BESIDE == 1:
        gl.warp_specialize([
            (consume_share, (out, results, query, rings, batch, share, walk, ahead, mods, 0, S, P)),
            (beside_first, (out, results, query, raw, rings, batch, share, walk, ahead, mods, 1, S, P)),
            (load_share, (load_keys, batch, share, walk, ahead, mods, K, S, P)),
        ], [4, 1], registers_of(P, LOADERS))  # fmt: skip
    elif LOADERS == 2:
        gl.warp_specialize([
            (consume_share, (out, results, query, rings, batch, share, walk, ahead, mods, 0, S, P)),
            (load_share, (load_keys, batch, share, walk, ahead, mods, K, S, P)),
            (load_values_of_share, (load_values, batch, share, walk, ahead, mods, V, S, P)),
        ], [1, 1], registers_of(P, LOADERS))  # fmt: skip
    else:
        gl.static_assert(not BOTH or K == V or V == 0)
        gl.warp_specialize([
            (consume_share, (out, results, query, rings, batch, share, walk, ahead, mods, 0, S, P)),
            (load_share, (load_keys, batch, share, walk, ahead, mods, K, S, P, BOTH, load_values)),
        ], [1], registers_of(P, LOADERS))  # fmt: skip
