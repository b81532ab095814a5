"""A warpgroup that multiplies fp8 queries, keys and weights: twice the rate of 16-bit products.

The tensor cores add fp8 products with 14 bits.  So every tile's products with values start from zero, and are added to
those before in float32: the error does not grow with the number of keys.
"""

from ..kernels.args import State
from .args import Turns
from .layouts import operand_layout, product_layout
from .ring import wait_full
from .shim import gl, gluon, warpgroup_mma, warpgroup_mma_wait
from .softmax import thread_sums
from .tiles import judge, leave, multiply_keys


@gluon.jit
def as_operand(weights, S: gl.constexpr, P: gl.constexpr):
    """Weights [64, TILE], their keys in the places that `transpose` gives them; moves nothing between threads."""
    x = weights.reshape([64, S.TILE // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([64, S.TILE])
    return gl.convert_layout(x, operand_layout(S.DIM, P.FP8_PRODUCTS), assert_trivial=True)


@gluon.jit
def in_order(acc, S: gl.constexpr):
    """Results [64, DIM] of transposed values, their dims in order again; moves nothing between threads."""
    return acc.reshape([64, 4, S.DIM // 4]).permute((0, 2, 1)).reshape([64, S.DIM])


@gluon.jit
def attend_fp8(q, rings, turns, item, rows, span, state, scale, mods, S: gl.constexpr, P: gl.constexpr):
    """(turns, state) after the tiles of an item, the last one first; values lie as `convert.transpose` leaves them."""
    keys, values = rings.key, rings.value
    k_turn, v_turn = turns.key, turns.value
    acc, row_max = state.acc, state.max
    O_LAYOUT: gl.constexpr = product_layout(S.DIM, P.FP8_PRODUCTS)
    key = gl.arange(0, S.TILE, layout=gl.SliceLayout(0, product_layout(S.TILE, P.FP8_PRODUCTS)))
    none = gl.full([64, S.DIM], 0.0, gl.float32, O_LAYOUT)
    sums = thread_sums(gl.full([64, S.TILE], 0.0, gl.float32, product_layout(S.TILE, P.FP8_PRODUCTS)), S)
    for i in range(item.end - item.begin):
        scores = multiply_keys(q, keys, k_turn, S, P)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        k_turn = leave(keys, k_turn, P.KEY_STAGES)
        tile = item.end - 1 - i
        weights, decay, row_max, added = judge(scores, row_max, rows, span, key, tile, scale, mods, S, P)
        sums = sums * gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, sums.type.layout)), 1) + added
        operand = as_operand(weights.to(keys.slots.dtype), S, P)
        wait_full(values, v_turn)
        transposed = values.slots.index(v_turn.stage).reshape([S.DIM, S.TILE])
        part = warpgroup_mma(operand, transposed.permute((1, 0)), none, use_acc=False, is_async=True)
        part = warpgroup_mma_wait(0, deps=(part,))
        v_turn = leave(values, v_turn, P.VALUE_STAGES)
        acc = acc * gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, O_LAYOUT)), 1) + part
    row_sum = gl.convert_layout(gl.sum(sums, axis=1), row_max.type.layout)
    return Turns(k_turn, v_turn, turns.query), State(acc, row_max, row_sum)
