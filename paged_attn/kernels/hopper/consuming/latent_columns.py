"""Few query rows, as columns, against latents: a tile in shared memory is multiplied twice, as keys and as values.

Slots of the ring of keys have the key dims that are values.  The key dims behind the values (the rest) have a ring of
their own, whose slots are released sooner.
"""

from ...common.records import State
from ...common.shards import own_before
from ..args import Turn, Turns, slots_of_tile
from ..asm.registers import anew
from ..layouts import product_layout
from ..loading.latent_queries import queries_of
from ..loading.ring import advance, tile_in, wait_tile
from ..shim import gl, gluon, warpgroup_mma, warpgroup_mma_wait
from .column_softmax import judge_columns, no_sums, sums_together, weigh_columns
from .tile_scores import clear_dead, leave

ROWS_CLEARED_AT_ONCE = gl.constexpr(16)  # few enough to leave registers for results


@gluon.jit
def no_results(S: gl.constexpr, P: gl.constexpr):
    """Return zero results, a tuple of [D, N]: one for each slot of a tile, with the slot's D value dims."""
    SLOTS: gl.constexpr = slots_of_tile(P)
    LAYOUT: gl.constexpr = product_layout(P.COLUMNS, False, P.ROWS)
    acc = ()
    for _ in gl.static_range(SLOTS):
        zero = gl.full([S.VALUE_PADDED // SLOTS, P.COLUMNS], 0.0, gl.float32, LAYOUT)
        acc = acc + (zero,)  # type: ignore[assignment]
    return acc


@gluon.jit
def all_results(acc, P: gl.constexpr):
    """Return results [DIM, N] from the results of each slot of a tile; nothing moves between threads."""
    SLOTS: gl.constexpr = slots_of_tile(P)
    if SLOTS == 1:
        return acc[0]
    else:
        x = gl.join(acc[0], acc[1]).permute((2, 0, 1)).reshape([2 * acc[0].shape[0], P.COLUMNS])
        return gl.convert_layout(x, product_layout(P.COLUMNS, False, P.ROWS), assert_trivial=True)


@gluon.jit
def multiply_latents(rings, turn, rest_turn, NUMBER: gl.constexpr, S: gl.constexpr, P: gl.constexpr):
    """Start k @ q^T of the next tile, float32 [TILE, N], as its slots arrive.

    Addresses of operands are made `anew`, so that their registers are free again before the tile ends.
    """
    SLOTS: gl.constexpr = slots_of_tile(P)
    keys, rests = rings.key, rings.value
    nothing, slot, rest_slot = anew(0), anew(turn.stage), anew(rest_turn.stage)  # before the first wait
    scores = gl.full([S.TILE, P.COLUMNS], 0.0, gl.float32, product_layout(P.COLUMNS, False, P.ROWS))
    for j in gl.static_range(SLOTS):
        if j > 0:
            turn = advance(turn, P.KEY_STAGES)
            slot = anew(turn.stage)
        wait_tile(keys, turn, P)
        k = tile_in(keys, Turn(slot, turn.phase), S.DIM // SLOTS, S)
        q = queries_of(rings.queries, NUMBER * SLOTS + j + nothing, P)
        scores = warpgroup_mma(k, q.permute((1, 0)), scores, use_acc=j > 0, is_async=True)
    if S.REST > 0:
        wait_tile(rests, rest_turn, P)
        k = tile_in(rests, Turn(rest_slot, rest_turn.phase), S.REST, S)
        q = rings.extra.rest.index(NUMBER + nothing)
        scores = warpgroup_mma(k, q.permute((1, 0)), scores, use_acc=True, is_async=True)
    return scores


@gluon.jit
def add_latents(keys, turn, slots, weights, acc, S: gl.constexpr, P: gl.constexpr):
    """(acc, turn) after a tile's values are multiplied by weights [TILE, N] and added to acc, a tuple of [D, N].

    slots: numbers of the tile's slots.  Each slot is released as soon as its product is done.
    """
    SLOTS: gl.constexpr = slots_of_tile(P)
    sent = ()
    for j in gl.static_range(SLOTS):
        v = tile_in(keys, Turn(slots[j], turn.phase), S.DIM // SLOTS, S).permute((1, 0))
        sent = sent + (warpgroup_mma(v, weights, acc[j], is_async=True),)  # type: ignore[assignment]
    done = ()
    for j in gl.static_range(SLOTS):
        done = done + (warpgroup_mma_wait(SLOTS - 1 - j, deps=(sent[j],)),)  # type: ignore[assignment]
        turn = leave(keys, turn, P.KEY_STAGES, P)
    return done, turn


@gluon.jit
def attend_latent(
    rings, turns, item, lo, rows, span, row_max, row_sum, scale, mods, NUMBER: gl.constexpr, S: gl.constexpr,
    P: gl.constexpr,
):  # fmt: skip
    """(turns, state) after the tiles of an item, the last tile first; the state's acc is [VALUE_PADDED, N].

    lo: first key that some row of the block sees, inclusive.  Values before `lo` or behind the sequence's last key are
    zeroed after the barriers of `weigh_columns`, when no warp of the consumer multiplies the tile's keys any more.  Two
    consumers also wait for each other (`clear_dead`).
    """
    SLOTS: gl.constexpr = slots_of_tile(P)
    keys, rests = rings.key, rings.value
    turn, rest_turn = turns.key, turns.value
    state = State(no_results(S, P), row_max, row_sum)
    ROWS: gl.constexpr = row_max.type.layout
    count = (item.block.query_len - item.block.first) * S.GROUP - NUMBER * P.COLUMNS
    key = gl.arange(0, S.TILE, layout=gl.SliceLayout(0, ROWS.parent))
    sums = no_sums(state, S, P)
    room, flags = rings.room.index(NUMBER), rings.extra.flags.index(NUMBER)
    for i in range(item.end - item.begin):
        tile = item.end - 1 - i
        scores = multiply_latents(rings, turn, rest_turn, NUMBER, S, P)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        if S.REST > 0:
            rest_turn = leave(rests, rest_turn, P.VALUE_STAGES, P)
        scores, unit = judge_columns(scores.permute((1, 0)), rows, span, key, tile, scale, mods, S)
        slots, nothing = (anew(turn.stage),), anew(0)
        if SLOTS > 1:
            slots = slots + (anew(advance(turn, P.KEY_STAGES).stage),)  # type: ignore[assignment]
        state, sums = weigh_columns(scores, unit, state, sums, i == 0, count, room, flags, S, P)
        end = own_before(item.block.seq_len, mods, S)
        if P.CONSUMERS == 1:
            clear_dead(keys, turn, tile, lo, end, rows.context_len, ROWS_CLEARED_AT_ONCE, S, P)
        else:
            clear_dead(keys, turn, tile, lo, end, rows.context_len, ROWS_CLEARED_AT_ONCE, S, P, rings.extra.both)
        weights = rings.room.index(NUMBER + nothing).permute((1, 0))
        acc, turn = add_latents(keys, turn, slots, weights, state.acc, S, P)
        state = State(acc, state.max, state.sum)
    state = sums_together(state, sums)
    return Turns(turn, rest_turn, turns.query), State(all_results(state.acc, P), state.max, state.sum)
