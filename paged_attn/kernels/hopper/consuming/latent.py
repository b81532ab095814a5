"""Few rows of queries, as columns, against keys that hold their values: a tile is multiplied twice where it lies.

Its slot has the dims that are the values; what keys have behind these comes in a ring of its own, and is free sooner.
"""

from ...common.records import State
from ..args import Turn, Turns
from ..asm.registers import anew
from ..loading.ring import tile_of, wait_tile
from ..shim import gl, gluon, warpgroup_mma, warpgroup_mma_wait
from .column_softmax import judge_columns, no_sums, sums_together, weigh_columns
from .tiles import clear_dead, leave, multiply_keys_by_columns

ROWS_CLEARED_AT_ONCE = gl.constexpr(16)  # whose words leave room for results in registers


@gluon.jit
def queries_of(rings, number, P: gl.constexpr):
    """A consumer's queries against the dims that are values."""
    slot = rings.queries.slots.index(number)
    return slot.reshape([slot.shape[0] * slot.shape[1], slot.shape[2]]).slice(0, P.COLUMNS, dim=0)


@gluon.jit
def attend_latent(
    rings, turns, item, lo, rows, span, state, scale, mods, NUMBER: gl.constexpr, S: gl.constexpr, P: gl.constexpr
):
    """(turns, state) after the tiles of an item, the last one first; acc is [VALUE_DIM, N].

    Values outside [lo, end) are cleared behind the barriers of `weigh_columns`: no warp multiplies their keys any more.
    """
    keys, rests = rings.key, rings.value
    turn, rest_turn = turns.key, turns.value
    ROWS: gl.constexpr = state.max.type.layout
    count = (item.block.query_len - item.block.first) * S.GROUP - NUMBER * P.COLUMNS
    key = gl.arange(0, S.TILE, layout=gl.SliceLayout(0, ROWS.parent))
    sums = no_sums(state, S, P)
    room, flags = rings.room.index(NUMBER), rings.extra.flags.index(NUMBER)
    for i in range(item.end - item.begin):
        tile = item.end - 1 - i
        # made before they are waited for, and anew for values, so that nothing of an operand lives longer than it
        slot, rest_slot, nothing = anew(turn.stage), anew(rest_turn.stage), anew(0)
        wait_tile(keys, turn, P)
        q = queries_of(rings, NUMBER + nothing, P)
        scores = multiply_keys_by_columns(tile_of(keys, Turn(slot, turn.phase), S.DIM, S), q, S, P)
        if S.REST > 0:
            wait_tile(rests, rest_turn, P)
            k = tile_of(rests, Turn(rest_slot, rest_turn.phase), S.REST, S)
            q = rings.extra.rest.index(NUMBER + nothing)
            scores = warpgroup_mma(k, q.permute((1, 0)), scores, use_acc=True, is_async=True)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        if S.REST > 0:
            rest_turn = leave(rests, rest_turn, P.VALUE_STAGES, P)
        scores, unit = judge_columns(scores.permute((1, 0)), rows, span, key, tile, scale, mods, S)
        slot, nothing = anew(turn.stage), anew(0)
        state, sums = weigh_columns(scores, unit, state, sums, i == 0, count, room, flags, S, P)
        end = item.block.seq_len
        if P.CONSUMERS == 1:
            clear_dead(keys, turn, tile, lo, end, rows.context_len, ROWS_CLEARED_AT_ONCE, S, P)
        else:
            clear_dead(keys, turn, tile, lo, end, rows.context_len, ROWS_CLEARED_AT_ONCE, S, P, rings.extra.both)
        v = tile_of(keys, Turn(slot, turn.phase), S.DIM, S).permute((1, 0))
        weights = rings.room.index(NUMBER + nothing).permute((1, 0))
        acc = warpgroup_mma(v, weights, state.acc, is_async=True)
        state = State(warpgroup_mma_wait(0, deps=(acc,)), state.max, state.sum)
        turn = leave(keys, turn, P.KEY_STAGES, P)
    return Turns(turn, rest_turn, turns.query), sums_together(state, sums)
