"""The persistent kernel for many rows: blocks of 64 rows for each of two to four warpgroups, items from a counter.

Two or four consumer warpgroups share one code, or two or three have a copy each.  Two to four single warps load, and
the last of them also hands out items.  One more warpgroup converts tiles of an fp8 cache.
"""

import triton

from ..common.merge import partial_of
from ..common.output import clear_padding, tokens_of
from ..common.records import Batch
from .args import Jobs, Loader, Results, Rings
from .block_roles import beside_first, consume_items, hand_out_items, load_items
from .consuming.column_softmax import make_flags
from .consuming.columns import make_weights
from .consuming.epilogue import dims_from
from .consuming.fold import make_bank
from .consuming.fp8 import make_ones
from .layouts import lanes_layout
from .loading.convert import NONE, TRANSPOSE
from .loading.gates import KEYS, VALUES, WIDEN, make_gates, start_with
from .loading.queries import bring_queries, make_queries
from .loading.ring import WARPGROUP, make_read_ring, make_ring
from .schedule.arrival import told_in
from .schedule.items import bring_lengths
from .schedule.lists import make_lists
from .schedule.mail import make_mail
from .shim import fence_async_shared, gdc_wait, gl, gluon, replaced


@triton.constexpr_function
def registers_of(P):
    """Registers of a thread, for each partition but the first, which gets the remaining registers."""
    convert = [P.CONVERT_REGISTERS] * (P.CONVERT != 0)
    consumers = {1: [], 2: [(472 - sum(convert)) // 16 * 8], 3: [152, 152]}[P.CONSUMERS]
    loader = 32 if P.ROWS == 256 else 40  # 32 leave 112 to each of four warpgroups
    return consumers + convert + [loader] * (2 * P.LOADERS)


@gluon.jit
def make_rings(dtype: gl.constexpr, queries, gates, stored: gl.constexpr, S: gl.constexpr, P: gl.constexpr):
    """(Rings that consumers read, Rings that loaders fill): equal, except for tiles that a converter changes."""
    room = queries.slots  # never used: a record with a None cannot be returned
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
    """Attention of blocks of queries x KV heads; at most one persistent program for each multiprocessor.

    Arguments are those of `launch_arguments.attention`: records with tensors, boxes (TMA descriptors), int32 tensors of
    the batch, and bounds.  shortest, longest: query tokens of the sequences served, inclusive.
    """
    if not P.FOLLOWS:
        gdc_wait()
    batch = Batch(
        query_starts, seq_lens, page_table, page_table_stride, num_seqs, num_tokens, shortest, longest, least, slots,
        page_starts,
    )  # fmt: skip
    if S.CLEAR:
        live = tokens_of(batch)  # memory answers while barriers are made
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
        dim = dims_from(gl.arange(0, S.VALUE_PADDED, layout=gl.BlockedLayout([1], [32], [P.ROWS // 16], [0])), P)
        clear_padding(out, lse, batch, live, dim, S)
    start_with(gates, P)
    keys, values = Loader(key_box, new_key_box, raw.key), Loader(value_box, new_value_box, raw.value)
    LAST: gl.constexpr = P.LOADERS - 1
    BESIDE: gl.constexpr = P.CONSUMERS - 1 + (P.CONVERT != NONE)  # warpgroups
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
