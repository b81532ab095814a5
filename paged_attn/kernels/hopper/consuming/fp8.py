"""A consumer of e4m3 queries, keys, weights and values, whose products take half the time of 16-bit products.

The tensor cores keep 14 bits of a sum, so they add up results of only TILES_PER_SUM tiles.  Such a sum is then added in
float32 to the bank, which is in shared memory, because registers cannot hold two accumulators.  So the error does not
grow with the number of keys.
"""

from ...common.records import State
from ..args import Turns
from ..asm.registers import pin
from ..layouts import in_order_layout, operand_layout, product_layout, words_layout
from ..loading.queries import leave_queries
from ..shim import gl, gluon, thread_barrier, warpgroup_mma, warpgroup_mma_wait
from .fragments import as_product, beside, by_thread, of_rows, spread
from .row_softmax import scale_rows
from .tile_scores import judge, leave, multiply_keys, multiply_values, slopes_of

TILES_PER_SUM = gl.constexpr(16)  # tiles whose products the tensor cores add up


@gluon.jit
def make_ones(dtype: gl.constexpr, S: gl.constexpr, P: gl.constexpr):
    """Allocate [8, TILE], ones in the first row, zeros below; its transpose is a right operand that adds up weights."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([8, S.TILE], dtype)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [P.ROWS // 16, 1], [1, 0])
    row = gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(1, LAYOUT)), 1)
    one = gl.where(row == 0, gl.full([8, S.TILE], 0x38, gl.int32, LAYOUT), 0)  # 0x38 is 1 in e4m3
    ones = gl.allocate_shared_memory(dtype, [8, S.TILE], layout)
    ones.store(one.to(gl.int8).to(dtype, bitcast=True))  # an allocation with these initial values had wrong bytes
    return ones


@gluon.jit
def words_as_operand(words, dtype: gl.constexpr, S: gl.constexpr, P: gl.constexpr):
    """Return words [R, TILE / 4] of e4m3 weights as a left operand [R, TILE]; all bytes stay in place."""
    even = gl.join(words.to(gl.int8), (words >> 16).to(gl.int8))
    odd = gl.join((words >> 8).to(gl.int8), (words >> 24).to(gl.int8))
    x = gl.join(even, odd).reshape([P.ROWS, S.TILE]).to(dtype, bitcast=True)
    return gl.convert_layout(x, operand_layout(S.VALUE_PADDED, True, P.ROWS), assert_trivial=True)


@gluon.jit
def in_order(acc, bank, NUMBER: gl.constexpr, S: gl.constexpr, P: gl.constexpr):
    """Return results acc [R, DIM] of transposed values with dims in order, eight neighbours in each thread."""
    room = bank.index(NUMBER)
    room.store(acc)
    thread_barrier()
    acc = room.load(in_order_layout(S.VALUE_PADDED, P.ROWS))
    return acc.reshape([P.ROWS, 4, S.VALUE_PADDED // 4]).permute((0, 2, 1)).reshape([P.ROWS, S.VALUE_PADDED])


@gluon.jit
def withdraw(bank, acc, decay, NUMBER: gl.constexpr):
    """Return acc + bank * decay, [R, VALUE_PADDED]; decay [R, 4]: factor of the bank since the last deposit."""
    x, before = by_thread(acc), by_thread(bank.index(NUMBER).load(acc.type.layout))
    return as_product(x + before * beside(decay, x), acc)


@gluon.jit
def deposit(bank, acc, decay, first, NUMBER: gl.constexpr):
    """Store acc + bank * decay in the bank; first: store acc alone.

    The next product replaces the returned acc (`adds_up`).  Returning the old acc would keep its registers alive.
    """
    if not first:
        acc = withdraw(bank, acc, decay, NUMBER)
    bank.index(NUMBER).store(acc)
    return acc


@gluon.jit
def adds_up(number):
    """Whether an item's value product `number` is added to acc; False for numbers up to 0, and after a deposit."""
    return (number > 0) & (number % TILES_PER_SUM != 0)


@gluon.jit
def beside_sums(x, sums):
    """Return x [R, 4], one number for each thread of a row, as [R, 8] in the layout of the product `sums` [R, 8]."""
    like = by_thread(sums)
    return as_product(beside(x, like) + gl.full(like.shape, 0.0, gl.float32, like.type.layout), sums)


@gluon.jit
def sum_up(weights, ones, P: gl.constexpr):
    """Start the sums of a tile's weights [R, TILE]: float32 [R, 8], of which the first column has the sums.

    Sums of several tiles are added in registers: in the tensor cores, sums of many positive numbers lose more bits than
    sums of weighted values.
    """
    zero = gl.full([P.ROWS, 8], 0.0, gl.float32, product_layout(8, True, P.ROWS))
    return warpgroup_mma(weights, ones.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def attend_fp8(
    q, rings, turns, item, rows, span, state, scale, mods, NUMBER: gl.constexpr, S: gl.constexpr, P: gl.constexpr
):
    """(turns, state) after the tiles of an item, at least one, the last tile first; state.acc is [R, VALUE_PADDED]."""
    keys, values = rings.key, rings.value
    k_turn, v_turn = turns.key, turns.value
    acc, row_max = state.acc, spread(state.max, P.ROWS)
    dtype: gl.constexpr = keys.slots.dtype
    slopes = slopes_of(rows, mods, S)
    key = gl.arange(0, S.TILE, layout=gl.SliceLayout(0, product_layout(S.TILE, True, P.ROWS)))
    decays = gl.full([P.ROWS, 4], 1.0, gl.float32, row_max.type.layout)  # products of decays since the last deposit
    count = item.end - item.begin

    # The first value product has zero weights, and its result is dropped.  A peeled first tile would be more code.
    words = gl.full([P.ROWS, S.TILE // 4], 0, gl.int32, words_layout(S.TILE, P.ROWS))
    if P.COARSE:
        sums = gl.full([P.ROWS, 8], 0.0, gl.float32, product_layout(8, True, P.ROWS))
    else:
        sums = gl.full([P.ROWS, 4], 0.0, gl.float32, row_max.type.layout)
    for i in range(count):
        operand = words_as_operand(words, dtype, S, P)
        scores = multiply_keys(q, keys, k_turn, S, P)
        if P.COARSE:
            added = sum_up(operand, rings.extra, P)
        acc = multiply_values(operand, values, v_turn, acc, adds_up(i - 1), S, P)
        scores = warpgroup_mma_wait(1 + P.COARSE, deps=(scores,))
        k_turn = leave(keys, k_turn, P.KEY_STAGES, P)
        following, decay, row_max, following_sums, acc = judge(
            scores, row_max, acc, rows, span, key, item.end - 1 - i, scale, slopes, mods, False, S, P
        )
        following = pin(following)
        if P.COARSE:
            acc, added = warpgroup_mma_wait(0, deps=(acc, added))
            sums = (sums + added) * beside_sums(decay, sums)  # decay is NaN once a maximum is NaN
        else:
            sums = sums * decay + following_sums
            acc = warpgroup_mma_wait(0, deps=(acc,))
        words = pin(words)
        v_turn = leave(values, v_turn, P.VALUE_STAGES, P)
        if (i % TILES_PER_SUM == 0) & (i > 0):
            acc = deposit(rings.room, acc, decays, i == TILES_PER_SUM, NUMBER)
            decays = gl.full([P.ROWS, 4], 1.0, gl.float32, row_max.type.layout)
        words = following
        decays *= decay
        acc = scale_rows(acc, decay, S)

    operand = words_as_operand(words, dtype, S, P)
    if P.COARSE:
        added = sum_up(operand, rings.extra, P)
    acc = multiply_values(operand, values, v_turn, acc, adds_up(count - 1), S, P)
    if P.COARSE:
        acc, added = warpgroup_mma_wait(0, deps=(acc, added))
        sums += added
    else:
        acc = warpgroup_mma_wait(0, deps=(acc,))
    leave_queries(rings.queries, turns.query, S, P)
    row_max, row_sum = of_rows(row_max, sums, state.max)
    v_turn = leave(values, v_turn, P.VALUE_STAGES, P)
    if count > TILES_PER_SUM:
        acc = withdraw(rings.room, acc, decays, NUMBER)
    return Turns(k_turn, v_turn, turns.query), State(acc, row_max, row_sum)
