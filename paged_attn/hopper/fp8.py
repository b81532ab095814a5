"""A warpgroup that multiplies fp8 queries, keys and weights: its products take half the time of 16-bit ones.

The tensor cores keep 14 bits of a sum.  So results are added up over a few tiles only, and those sums in float32 in
shared memory, since two sets of them would fill the registers: the error does not grow with the number of keys.
"""

from ..kernels.args import State
from .args import Turns
from .asm import rescale
from .layouts import operand_layout, product_layout
from .queries import release_queries
from .shim import gl, gluon, warpgroup_mma_wait
from .softmax import thread_sums
from .tiles import judge, leave, multiply_keys, multiply_values, slopes_of

TILES = gl.constexpr(16)  # whose products the tensor cores add up


@gluon.jit
def as_operand(weights, dtype: gl.constexpr, S: gl.constexpr):
    """Weights [64, TILE] in fp8, their keys placed as `convert.transpose` does; moves nothing between threads."""
    x = weights.to(dtype).reshape([64, S.TILE // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([64, S.TILE])
    return gl.convert_layout(x, operand_layout(S.DIM, True), assert_trivial=True)


@gluon.jit
def in_order(acc, S: gl.constexpr):
    """Results [64, DIM] of transposed values, their dims in order again; moves nothing between threads."""
    return acc.reshape([64, 4, S.DIM // 4]).permute((0, 2, 1)).reshape([64, S.DIM])


@gluon.jit
def withdraw(bank, acc, decay, NUMBER: gl.constexpr, S: gl.constexpr):
    """acc and what lies in the bank, which has decayed since."""
    LAYOUT: gl.constexpr = product_layout(S.DIM, True)
    factor = gl.convert_layout(decay, gl.SliceLayout(1, LAYOUT))
    return acc + bank.index(NUMBER).load(LAYOUT) * gl.expand_dims(factor, 1)


@gluon.jit
def deposit(bank, acc, decay, first, NUMBER: gl.constexpr, S: gl.constexpr):
    """Add acc to the bank, or put it there if it is the first; what is left is nothing."""
    if not first:
        acc = withdraw(bank, acc, decay, NUMBER, S)
    bank.index(NUMBER).store(acc)
    return gl.full([64, S.DIM], 0.0, gl.float32, product_layout(S.DIM, True))


@gluon.jit
def attend_fp8(
    q, rings, turns, item, rows, span, state, scale, mods, NUMBER: gl.constexpr, S: gl.constexpr, P: gl.constexpr
):
    """(turns, state) after the tiles of an item, at least one, the last one first.

    Weights go from one round of the loop to the next as float32: 8-bit ones ptxas would unpack.
    """
    keys, values = rings.key, rings.value
    k_turn, v_turn = turns.key, turns.value
    acc, row_max = state.acc, state.max
    dtype: gl.constexpr = keys.slots.dtype
    O_ROWS: gl.constexpr = gl.SliceLayout(1, product_layout(S.DIM, True))
    S_LAYOUT: gl.constexpr = product_layout(S.TILE, True)
    slopes = slopes_of(rows, mods, S)
    key = gl.arange(0, S.TILE, layout=gl.SliceLayout(0, S_LAYOUT))
    sums = thread_sums(gl.full([64, S.TILE], 0.0, gl.float32, S_LAYOUT), S, P)
    SUM_ROWS: gl.constexpr = gl.SliceLayout(1, sums.type.layout)
    decays = gl.full([64], 1.0, gl.float32, row_max.type.layout)  # since the last deposit
    count = item.end - item.begin

    scores = multiply_keys(q, keys, k_turn, S, P)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    k_turn = leave(keys, k_turn, P.KEY_STAGES)
    weights, decay, row_max, added = judge(scores, row_max, rows, span, key, item.end - 1, scale, slopes, mods, S, P)
    sums = sums * gl.expand_dims(gl.convert_layout(decay, SUM_ROWS), 1) + added
    for i in range(1, count):
        operand = as_operand(weights, dtype, S)
        scores = multiply_keys(q, keys, k_turn, S, P)
        acc = multiply_values(operand, values, v_turn, acc, S, P)
        scores = warpgroup_mma_wait(1, deps=(scores,))
        k_turn = leave(keys, k_turn, P.KEY_STAGES)
        weights, decay, row_max, added = judge(
            scores, row_max, rows, span, key, item.end - 1 - i, scale, slopes, mods, S, P
        )
        sums = sums * gl.expand_dims(gl.convert_layout(decay, SUM_ROWS), 1) + added
        acc = warpgroup_mma_wait(0, deps=(acc,))
        v_turn = leave(values, v_turn, P.VALUE_STAGES)
        if i % TILES == 0:
            acc = deposit(rings.room, acc, decays, i == TILES, NUMBER, S)
            decays = gl.full([64], 1.0, gl.float32, row_max.type.layout)
        decays *= decay
        acc = rescale(acc, gl.convert_layout(decay, O_ROWS), S.DIM)

    acc = multiply_values(as_operand(weights, dtype, S), values, v_turn, acc, S, P)
    release_queries(rings.queries, True, NUMBER, P)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    v_turn = leave(values, v_turn, P.VALUE_STAGES)
    if count > TILES:
        acc = withdraw(rings.room, acc, decays, NUMBER, S)
    row_sum = gl.convert_layout(gl.sum(sums, axis=1), row_max.type.layout)
    return Turns(k_turn, v_turn, turns.query), State(acc, row_max, row_sum)
