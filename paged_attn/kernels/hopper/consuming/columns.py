"""A consumer of few query rows, which are the columns of its products; keys are the rows.

A product has at least 64 rows, but any multiple of 8 columns.  Few queries as columns take a fraction of the time of 64
rows, nearly all of which would be empty.  Scores [N, TILE] and results [N, DIM] are transposed views of products, so
masks and modifiers work as for rows.  N is COLUMNS.

wgmma reads 16-bit keys and values from shared memory.  x-packed, fp8, int8 and int4 tiles pass through registers, where
fp8, int8 and int4 numbers become float16.
"""

import triton

from ...common.bounds import row_tile, visible_range
from ...common.records import State
from ...common.scores import scale_by_token
from ...common.shards import own_before
from ...common.softmax import start
from ..args import Turn, Turns, in_one_ring, is_int4, is_shared
from ..asm.conversions import (
    INT4_UNIT,
    widen_bytes_apart,
    widen_halves_apart,
    widen_int4_apart,
    widen_int4_bytes,
    widen_int4_halves,
    widen_pairs_apart,
)
from ..asm.registers import anew
from ..layouts import key_words_layout, operand_layout, product_layout, value_words_layout
from ..loading.latent_queries import queries_of, take_parts
from ..loading.packed import packed_key_words, packed_keys, packed_values
from ..loading.queries import leave_queries, rows_in, take_queries
from ..loading.ring import tile_in, wait_tile, words_of
from ..loading.slot_scales import scales_of_keys, scales_of_values, zeros_beside
from ..shim import gl, gluon, warpgroup_mma, warpgroup_mma_wait
from .column_softmax import (
    judge_columns,
    no_sums,
    raise_by_power,
    sums_together,
    weigh_columns,
    with_sink,
    without_zeros,
)
from .epilogue import store
from .latent_columns import attend_latent
from .tile_scores import clear_dead, leave, multiply_keys_by_columns, score_scale, value_scale

MAX_COLUMNS_BESIDE_NEXT_TILE = gl.constexpr(16)  # with more columns, registers cannot hold the next keys or values


@triton.constexpr_function
def is_early(S, P):
    """Whether the next keys or values are loaded into registers while a product runs.

    True for x-packed, fp8, int8 and int4 tiles, if registers hold the running product's operand and the next one.
    """
    return (
        S.DIM + S.VALUE_PADDED <= 256 if P.PACKED else P.FP8 > 0 and S.REST is None
    ) and MAX_COLUMNS_BESIDE_NEXT_TILE.value >= P.COLUMNS


@triton.constexpr_function
def is_made_anew(S):
    """Whether addresses of operands are computed anew for each tile; with wide heads, kept addresses would spill."""
    return S.DIM > 256 or S.VALUE_PADDED > 256


@triton.constexpr_function
def is_turned(S, P):
    """Whether even shares transpose results in shared memory before they store them.

    Always for up to 8 columns.  For more columns, only where shared memory has room: not in the mixed kernel (BESIDE),
    not with more than 256 value dims, and not with two consumers.
    """
    return P.SHARES and (P.COLUMNS <= 8 or not (P.BESIDE or S.VALUE_PADDED > 256 or P.CONSUMERS > 1))


@gluon.jit
def make_weights(queries, dtype: gl.constexpr, S: gl.constexpr, P: gl.constexpr):
    """Allocate shared memory for the weights [N, TILE] of a tile, whose transpose is a right operand.

    A consumer of two warpgroups (`is_shared`) needs no memory for weights alone.  Its weights lie in the query slots,
    behind the few query rows (`weights_room`).

    With `is_early`, there is memory for two tiles, because one warp's next weights must not overwrite weights that
    another warp's product still reads.  Triton's barrier between that product and the next weights does not suffice:
    Triton puts the barrier before the load of the next keys, which begins while the product still runs.
    """
    SHAPE: gl.constexpr = [P.COLUMNS, S.TILE]
    if is_early(S, P):
        layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(SHAPE, dtype)
        return gl.allocate_shared_memory(dtype, [2, P.COLUMNS, S.TILE], layout)
    elif is_shared(P):
        return queries.slots
    elif S.REST is not None:
        of_each: gl.constexpr = gl.NVMMASharedLayout.get_default_for(SHAPE, dtype)
        return gl.allocate_shared_memory(dtype, [P.CONSUMERS, P.COLUMNS, S.TILE], of_each)
    else:
        return gl.allocate_shared_memory(dtype, SHAPE, gl.NVMMASharedLayout.get_default_for(SHAPE, dtype))


@gluon.jit
def weights_room(rings, done, i, S: gl.constexpr, P: gl.constexpr):
    """Return the shared memory for the weights [N, TILE] of a tile.

    i: number of the tile in the order of visits, from the item's last tile on.  done: number of blocks before the item.
    """
    if is_shared(P):
        gl.static_assert(S.DIM == S.TILE and S.TILE == P.ROWS)
        return rows_in(rings.queries, done, 0, S, P).parts[0].slice(64, P.COLUMNS, dim=0)
    elif is_early(S, P):
        return rings.room.index(i % 2)
    else:
        return rings.room


@gluon.jit
def widened_keys(keys, turn, S: gl.constexpr, P: gl.constexpr):
    """Return fp8 or int8 keys as a left operand [TILE, DIM] in float16, with dims in the order of `queries.scatter`.

    In that order, a thread's fragment of the left operand is 16 neighbouring dims of a key.  Otherwise, the fragment
    would be pairs of dims that are far apart.
    """
    LAYOUT: gl.constexpr = key_words_layout(S.TILE, S.DIM // 4)
    if P.PACKED:
        words = packed_key_words(keys, turn, LAYOUT, S, P)
    else:
        words = words_of(keys, turn, S.TILE, S.DIM).load(LAYOUT)
    x0, x1, x2, x3 = widen_bytes_apart(words, P.FP8)
    x = gl.join(gl.join(x0, x1), gl.join(x2, x3))  # [TILE, word, b, h]: byte 2 h + b
    x = x.reshape([S.TILE, S.DIM // 64, 4, 4, 2, 2]).permute((0, 1, 3, 5, 2, 4)).reshape([S.TILE, S.DIM])
    return gl.convert_layout(x, operand_layout(P.COLUMNS, False), assert_trivial=True)


@gluon.jit
def widened_values(values, turn, tile, lo, end, S: gl.constexpr, P: gl.constexpr):
    """Return fp8 or int8 values as a left operand [DIM, TILE] in float16, zero outside the keys [lo, end).

    Dims are permuted, and `gather_columns` restores their order in the results.  A thread's fragment of the left
    operand is four neighbouring dims of a key (two with 64 dims).  Otherwise, its dims would be eight apart.
    """
    HALVES: gl.constexpr = S.VALUE_PADDED == 64  # the dims are the 64 rows of a product, of which each thread has two
    dtype: gl.constexpr = gl.int16 if HALVES else gl.int32
    WORDS: gl.constexpr = S.VALUE_PADDED * 8 // dtype.primitive_bitwidth
    LAYOUT: gl.constexpr = value_words_layout(S.TILE, WORDS)
    words = words_of(values, turn, S.TILE, S.VALUE_PADDED, dtype).load(LAYOUT)
    first = tile * S.TILE
    if (first < lo) | (first + S.TILE > end):
        key = first + gl.arange(0, S.TILE, layout=gl.SliceLayout(1, LAYOUT))
        words = gl.where(gl.expand_dims((key >= lo) & (key < end), 1), words, 0)
    even, odd = gl.split(words.reshape([S.TILE // 2, 2, WORDS]).permute((0, 2, 1)))
    if HALVES:
        z = widen_halves_apart(even, odd, P.FP8)  # two dims x two keys
        x = gl.join(gl.join(z[0], z[1]), gl.join(z[2], z[3])).reshape([S.TILE // 2, 4, 8, 2, 2])
        x = x.permute((1, 4, 2, 0, 3))
    else:
        z = widen_pairs_apart(even, odd, P.FP8)  # four dims x two keys
        lower = gl.join(gl.join(z[0], z[1]), gl.join(z[2], z[3]))  # [pair of keys, word, key of the pair, dim]
        upper = gl.join(gl.join(z[4], z[5]), gl.join(z[6], z[7]))
        x = gl.join(lower, upper).reshape([S.TILE // 2, S.VALUE_PADDED // 128, 4, 8, 2, 2, 2])
        x = x.permute((1, 6, 2, 5, 3, 0, 4))
    return gl.convert_layout(x.reshape([S.VALUE_PADDED, S.TILE]), operand_layout(P.COLUMNS, False), assert_trivial=True)


@gluon.jit
def widened_int4_keys(keys, turn, S: gl.constexpr, P: gl.constexpr):
    """Return stored int4 keys as a left operand [TILE, DIM] in float16, with dims in the order of `scatter_int4`.

    Units are those of `conversions.widen_int4_apart`.  A thread's fragment of the left operand is 32 neighbouring dims
    of a key (16 with 64 dims).
    """
    LAYOUT: gl.constexpr = key_words_layout(S.TILE, S.DIM // 8)
    z = widen_int4_apart(words_of(keys, turn, S.TILE, S.DIM // 2).load(LAYOUT))
    lower = gl.join(gl.join(z[0], z[1]), gl.join(z[2], z[3]))
    upper = gl.join(gl.join(z[4], z[5]), gl.join(z[6], z[7]))
    x = gl.join(lower, upper)  # [TILE, word, e, h, b]: number 4 e + 2 b + h
    WORDS: gl.constexpr = 4 if S.DIM > 64 else 2
    x = x.reshape([S.TILE, S.DIM // (32 * WORDS), 4, WORDS, 2, 2, 2]).permute((0, 1, 3, 6, 5, 2, 4))
    return gl.convert_layout(x.reshape([S.TILE, S.DIM]), operand_layout(P.COLUMNS, False), assert_trivial=True)


@gluon.jit
def widened_int4_values(values, turn, S: gl.constexpr, P: gl.constexpr):
    """Return stored int4 values as a left operand [DIM, TILE] in float16, with dims in the order of `widened_values`.

    Units are those of `conversions.widen_int4_apart`.  Any byte is two finite numbers, so values of keys that no row
    sees need not become zeros: their weights are zero.
    """
    HALVES: gl.constexpr = S.VALUE_PADDED == 64
    dtype: gl.constexpr = gl.uint8 if HALVES else gl.int16
    WORDS: gl.constexpr = S.VALUE_PADDED * 4 // dtype.primitive_bitwidth
    words = words_of(values, turn, S.TILE, S.VALUE_PADDED // 2, dtype).load(value_words_layout(S.TILE, WORDS))
    if HALVES:
        z = widen_int4_bytes(words.to(gl.int16))
        x = gl.join(z[0], z[1]).reshape([S.TILE, 4, 8, 2]).permute((1, 3, 2, 0))
    else:
        z = widen_int4_halves(words)
        x = gl.join(gl.join(z[0], z[1]), gl.join(z[2], z[3]))  # [TILE, word, h, m]: dim 2 m + h
        x = x.reshape([S.TILE, S.VALUE_PADDED // 128, 4, 8, 2, 2]).permute((1, 5, 2, 4, 3, 0))
    return gl.convert_layout(x.reshape([S.VALUE_PADDED, S.TILE]), operand_layout(P.COLUMNS, False), assert_trivial=True)


@gluon.jit
def gather_columns(acc, S: gl.constexpr, P: gl.constexpr):
    """Return results acc [DIM, N], permuted as `widened_values`, with dims in order; nothing moves between threads."""
    if S.VALUE_PADDED == 64:
        x = acc.reshape([4, 2, 8, P.COLUMNS]).permute((0, 2, 1, 3))
    else:
        x = acc.reshape([S.VALUE_PADDED // 128, 2, 4, 2, 8, P.COLUMNS]).permute((0, 2, 4, 1, 3, 5))
    return x.reshape([S.VALUE_PADDED, P.COLUMNS])


@gluon.jit
def take_keys(keys, turn, there, S: gl.constexpr, P: gl.constexpr):
    """Wait for the next tile's keys; return a left operand [TILE, DIM].  there: as in `ring.wait_full`."""
    wait_tile(keys, turn, P, there)
    if is_int4(P):
        return widened_int4_keys(keys, turn, S, P)
    elif keys.slots.dtype.primitive_bitwidth == 8:
        return widened_keys(keys, turn, S, P)
    elif P.PACKED:
        return packed_keys(keys, turn, S, P)
    else:
        return tile_in(keys, turn, S.DIM, S)


@gluon.jit
def take_values(values, turn, tile, lo, end, context_len, S: gl.constexpr, P: gl.constexpr):
    """Wait for the next tile's values; return a left operand [DIM, TILE].

    Values outside the keys [lo, end) become zeros, except int4 values, which are always finite.
    """
    wait_tile(values, turn, P)
    if is_int4(P):
        return widened_int4_values(values, turn, S, P)
    elif P.PACKED:
        return packed_values(values, turn, tile, lo, end, S, P)
    elif values.slots.dtype.primitive_bitwidth == 8:
        return widened_values(values, turn, tile, lo, end, S, P)
    else:
        ROWS: gl.constexpr = S.TILE if S.VALUE_PADDED <= 256 else 16  # wide heads leave few registers
        clear_dead(values, turn, tile, lo, end, context_len, ROWS, S, P)
        return tile_in(values, turn, S.VALUE_PADDED, S).permute((1, 0))


@gluon.jit
def attend_columns(
    q, rings, turns, item, lo, rows, span, state, scale, mods, S: gl.constexpr, P: gl.constexpr, total=None
):
    """(turns, state) after the tiles of an item, the last tile first; the state's acc is [VALUE_PADDED, N].

    lo: first key that some row of the block sees, inclusive.
    total [N]: the sum of each query's dims (`take_queries`) with int4 keys, otherwise None.
    """
    EARLY: gl.constexpr = is_early(S, P)
    IN_ONE: gl.constexpr = in_one_ring(S, P)
    VALUE_STAGES: gl.constexpr = P.KEY_STAGES if IN_ONE else P.VALUE_STAGES
    keys, values = rings.key, rings.value
    k_turn, v_turn = turns.key, turns.value
    ROWS: gl.constexpr = state.max.type.layout
    count = (item.block.query_len - item.block.first) * S.GROUP
    KEYS: gl.constexpr = gl.SliceLayout(0, ROWS.parent)
    key = gl.arange(0, S.TILE, layout=KEYS)
    sums = no_sums(state, S, P)
    if is_int4(P):
        below = sums
    end_key = own_before(item.block.seq_len, mods, S)
    k_at, v_at = k_turn, v_turn
    if EARLY:
        k = take_keys(keys, k_turn, None, S, P)
    for i in range(item.end - item.begin):
        tile = item.end - 1 - i
        if is_made_anew(S):
            k_at = Turn(anew(k_turn.stage), k_turn.phase)
            q = queries_of(rings.queries, anew(0), P)
        else:
            k_at = k_turn
        if not EARLY:
            k = take_keys(keys, k_at, None, S, P)
        scores = multiply_keys_by_columns(k, q, S, P)
        if EARLY:
            v = take_values(values, v_turn, tile, lo, end_key, rows.context_len, S, P)
        if P.SLOT_SCALES:
            of_keys = scales_of_keys(keys, k_turn, KEYS)
            powers, inverse = scales_of_values(values, v_turn, KEYS, P)
        if is_int4(P):
            zeros_of_keys = zeros_beside(keys, k_turn, KEYS, False, P)
            zeros = zeros_beside(values, v_turn, KEYS, True, P)
        scores = warpgroup_mma_wait(0, deps=(scores,)).permute((1, 0))
        k_turn = leave(keys, k_turn, P.KEY_STAGES, P)
        if IN_ONE:
            v_turn = k_turn
        if is_int4(P):
            scores -= gl.expand_dims(total, 1) * gl.expand_dims(zeros_of_keys, 0)
        if P.SLOT_SCALES:
            scores *= gl.expand_dims(of_keys, 0)
        scores, unit = judge_columns(scores, rows, span, key, tile, scale, mods, S)
        if is_made_anew(S):
            v_at = Turn(anew(v_turn.stage), v_turn.phase)
        else:
            v_at = v_turn
        room = weights_room(rings, turns.query, i, S, P)
        if is_int4(P):
            scores, unit = raise_by_power(scores, unit, powers, rows, S)
            state, sums, below = weigh_columns(
                scores, unit, state, sums, i == 0, count, room, rings.extra, S, P, inverse, zeros, below
            )
        elif P.SLOT_SCALES:
            scores, unit = raise_by_power(scores, unit, powers, rows, S)
            state, sums = weigh_columns(scores, unit, state, sums, i == 0, count, room, rings.extra, S, P, inverse)
        else:
            state, sums = weigh_columns(scores, unit, state, sums, i == 0, count, room, rings.extra, S, P)
        if not EARLY:
            v = take_values(values, v_at, tile, lo, end_key, rows.context_len, S, P)
        acc = warpgroup_mma(v, room.permute((1, 0)), state.acc, is_async=True)
        if EARLY:
            k = take_keys(keys, k_turn, tile > item.begin, S, P)
        state = State(warpgroup_mma_wait(0, deps=(acc,)), state.max, state.sum)
        v_turn = leave(values, v_turn, VALUE_STAGES, P)
        if IN_ONE:
            k_turn = v_turn
    if is_int4(P):
        state = State(without_zeros(state.acc, below, INT4_UNIT), state.max, state.sum)
    return Turns(k_turn, v_turn, turns.query), sums_together(state, sums)


@gluon.jit
def consume_columns(
    out, results, query, rings, turns, item, mods, S: gl.constexpr, P: gl.constexpr, NUMBER: gl.constexpr = 0
):
    """Compute a consumer's rows of an item, and store results or a state; return the turns.

    If there are two consumers, both read every tile.  Each has half of the rows, even if that separates heads of one
    token.
    """
    N: gl.constexpr = P.COLUMNS
    TOKENS: gl.constexpr = P.CONSUMERS * N // S.GROUP if P.SHARES else N // S.GROUP
    LAYOUT: gl.constexpr = product_layout(N, False, P.ROWS)
    queries, scales, done = rings.queries, results.scales, turns.query
    block = item.block
    acc = gl.full([S.VALUE_PADDED, N], 0.0, gl.float32, LAYOUT)
    S_ROWS: gl.constexpr = gl.SliceLayout(1, gl.full([S.TILE, N], 0.0, gl.float32, LAYOUT).permute((1, 0)).type.layout)
    rows = row_tile(block, NUMBER * N + gl.arange(0, N, layout=S_ROWS), mods, TOKENS, S)
    # Weights may contain the scales of values.  Then a sink joins at the end, because beside it small weights would be
    # subnormal float16.
    row_max, row_sum = start(None if P.SLOT_SCALES else mods.sinks, rows, item.first > 0, S)
    if item.begin < item.end:
        scale = score_scale(scales, block, P)
        if S.REST is None:
            taken = take_queries(query, queries, block, scale, done, mods, 0, N, S, P, S_ROWS)
            scale = taken[0] if is_int4(P) else taken
        else:
            scale = take_parts(query, queries, rings.extra.rest, block, scale, mods, NUMBER, S, P, S_ROWS)
        scale = scale_by_token(scale, scales, rows, P.PARTS)
        span = visible_range(block, mods, TOKENS, S)
        if S.REST is None:
            state = State(acc, row_max, row_sum)
            q = rows_in(queries, done, NUMBER, S, P).parts[0].slice(0, N, dim=0)
            total = taken[1] if is_int4(P) else None
            turns, state = attend_columns(q, rings, turns, item, span.lo, rows, span, state, scale, mods, S, P, total)
        else:
            turns, state = attend_latent(
                rings, turns, item, span.lo, rows, span, row_max, row_sum, scale, mods, NUMBER, S, P
            )
        leave_queries(queries, done, S, P)
        done += 1
        acc = state.acc * value_scale(scales, block, P)
        row_max, row_sum = state.max, state.sum
    if P.SLOT_SCALES and mods.sinks is not None:
        acc, row_max, row_sum = with_sink(acc, row_max, row_sum, *start(mods.sinks, rows, item.first > 0, S))
    if rings.value.slots.dtype.primitive_bitwidth == 8 and not P.PACKED:
        acc = gather_columns(acc, S, P)
    acc = acc.permute((1, 0))
    if is_turned(S, P):
        acc = gl.convert_layout(acc, gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0]))
    O_ROWS: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    out_rows = row_tile(block, NUMBER * N + gl.arange(0, N, layout=O_ROWS), mods, TOKENS, S)
    state = State(acc, gl.convert_layout(row_max, O_ROWS), gl.convert_layout(row_sum, O_ROWS))
    count = gl.minimum(block.query_len - block.first, TOKENS) * S.GROUP
    store(out, results, item, out_rows, count, state, NUMBER, S, P)
    return Turns(turns.key, turns.value, done)
