"""A warpgroup that multiplies fp8 queries, keys and weights: its products take half the time of 16-bit ones.

The tensor cores keep 14 bits of a sum.  So results are added up over a few tiles only, and those sums in float32 in
shared memory, since two sets of them would fill the registers: the error does not grow with the number of keys.
"""

from ..kernels.args import State
from .args import Turns
from .asm import pin
from .layouts import operand_layout, product_layout
from .shim import gl, gluon, warpgroup_mma_wait
from .softmax import as_product, beside, by_thread, of_rows, scale_rows, spread
from .tiles import judge, leave, multiply_keys, multiply_values, slopes_of

TILES = gl.constexpr(16)  # whose products the tensor cores add up


@gluon.jit
def as_operand(words, dtype: gl.constexpr, S: gl.constexpr):
    """Packed weights as what the tensor cores take; moves nothing between threads, nor within them."""
    even = gl.join(words.to(gl.int8), (words >> 16).to(gl.int8))
    odd = gl.join((words >> 8).to(gl.int8), (words >> 24).to(gl.int8))
    x = gl.join(even, odd).reshape([64, S.TILE]).to(dtype, bitcast=True)
    return gl.convert_layout(x, operand_layout(S.DIM, True), assert_trivial=True)


@gluon.jit
def in_order(acc, S: gl.constexpr):
    """Results [64, DIM] of transposed values, their dims in order again; moves nothing between threads."""
    return acc.reshape([64, 4, S.DIM // 4]).permute((0, 2, 1)).reshape([64, S.DIM])


@gluon.jit
def withdraw(bank, acc, decay, NUMBER: gl.constexpr):
    """acc and what lies in the bank, which has decayed since."""
    x, before = by_thread(acc), by_thread(bank.index(NUMBER).load(acc.type.layout))
    return as_product(x + before * beside(decay, x), acc)


@gluon.jit
def deposit(bank, acc, decay, first, NUMBER: gl.constexpr):
    """Add acc to the bank, or put it there if it is the first; what is left is nothing."""
    if not first:
        acc = withdraw(bank, acc, decay, NUMBER)
    bank.index(NUMBER).store(acc)
    return gl.full(acc.shape, 0.0, gl.float32, acc.type.layout)


@gluon.jit
def attend_fp8(
    q, rings, turns, item, rows, span, state, scale, mods, NUMBER: gl.constexpr, S: gl.constexpr, P: gl.constexpr
):
    """(turns, state) after the tiles of an item, at least one, the last one first."""
    keys, values = rings.key, rings.value
    k_turn, v_turn = turns.key, turns.value
    acc, row_max = state.acc, spread(state.max, P.ROWS)
    dtype: gl.constexpr = keys.slots.dtype
    slopes = slopes_of(rows, mods, S)
    key = gl.arange(0, S.TILE, layout=gl.SliceLayout(0, product_layout(S.TILE, True)))
    decays = gl.full([64, 4], 1.0, gl.float32, row_max.type.layout)  # since the last deposit
    count = item.end - item.begin

    scores = multiply_keys(q, keys, k_turn, S, P)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    k_turn = leave(keys, k_turn, P.KEY_STAGES)
    words, decay, row_max, sums = judge(
        scores, row_max, rows, span, key, item.end - 1, scale, slopes, mods, False, S, P
    )
    for i in range(1, count):
        operand = as_operand(words, dtype, S)
        scores = multiply_keys(q, keys, k_turn, S, P)
        acc = multiply_values(operand, values, v_turn, acc, S, P)
        scores = warpgroup_mma_wait(1, deps=(scores,))
        k_turn = leave(keys, k_turn, P.KEY_STAGES)
        following, decay, row_max, added = judge(
            scores, row_max, rows, span, key, item.end - 1 - i, scale, slopes, mods, False, S, P
        )
        sums = sums * decay + added
        following = pin(following)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        words = pin(words)
        v_turn = leave(values, v_turn, P.VALUE_STAGES)
        if i % TILES == 0:
            acc = deposit(rings.room, acc, decays, i == TILES, NUMBER)
            decays = gl.full([64, 4], 1.0, gl.float32, row_max.type.layout)
        words = following
        decays *= decay
        acc = scale_rows(acc, decay, S)

    acc = multiply_values(as_operand(words, dtype, S), values, v_turn, acc, S, P)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    v_turn = leave(values, v_turn, P.VALUE_STAGES)
    if count > TILES:
        acc = withdraw(rings.room, acc, decays, NUMBER)
    row_max, row_sum = of_rows(row_max, sums, state.max)
    return Turns(k_turn, v_turn, turns.query), State(acc, row_max, row_sum)
