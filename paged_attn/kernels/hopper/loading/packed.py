"""Tiles of an x-packed cache, as operands.

For few rows, boxes are [dims / x, keys, x] for keys, and [dims, keys] for values.  Keys and values are left operands,
which pass through registers: a thread's neighbouring elements are neighbours in memory, too.

For blocks, keys and values are right operands, which wgmma reads from shared memory: boxes of keys are core matrices of
8 keys, and boxes of values have rows of 32 bytes.
"""

import triton

from ..asm.conversions import widen_pair_apart
from ..layouts import (
    operand_layout,
    packed_key_words_layout,
    packed_keys_layout,
    packed_value_pairs_layout,
    packed_values_layout,
)
from ..shim import fence_async_shared, gl, gluon, reinterpret, thread_barrier
from .ring import as_words

# Layouts of a slot's elements in the order of memory.
IN_ORDER_3, IN_ORDER_4 = (gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [*range(n)][::-1])) for n in (3, 4))


@gluon.jit
def make_boxes(box, STAGES: gl.constexpr, S: gl.constexpr, P: gl.constexpr):
    """Allocate the slots of a ring, [STAGES, boxes of a tile, 1, rows of a box, elements of a row]."""
    BOX: gl.constexpr = box.block_shape
    return gl.allocate_shared_memory(box.dtype, [STAGES, S.TILE // P.BOX, 1, BOX[2], BOX[3]], box.layout)


@triton.constexpr_function
def places_of_slot(shape, box):
    """Number of elements along a box's last axis from one key to the next.

    A box of a whole page begins with the page's first key, so the number does not matter for such a box.
    """
    return max(1, shape[3] // box)


@gluon.jit
def boxes_of(slot, box, S: gl.constexpr, P: gl.constexpr):
    """Return a slot [TILE, 1, DIM] as the boxes of a tile, [boxes, 1, *last three axes of a box]."""
    SHAPE: gl.constexpr = box.block_shape
    return reinterpret(slot, slot.dtype, [S.TILE // P.BOX, 1, SHAPE[2], SHAPE[3], SHAPE[4]], box.layout)


@gluon.jit
def value_tile(ring, turn, S: gl.constexpr):
    """Return the slot's values, rows of 16 keys for each dim, as a right operand [TILE, DIM] of wgmma."""
    slot = ring.slots.index(turn.stage)
    boxes = reinterpret(slot, slot.dtype, [S.TILE // 16, S.VALUE_PADDED, 16], gl.NVMMASharedLayout(32, 16, 3))
    return boxes.permute((1, 0, 2)).reshape([S.VALUE_PADDED, S.TILE]).permute((1, 0))


@gluon.jit
def zero_values_outside(values, turn, first, first_key, end_key, S: gl.constexpr, P: gl.constexpr):
    """Zero a tile's 16-bit values outside positions [first_key, end_key); first: position of the tile's first key."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [16, 2], [P.ROWS // 16, 1], [1, 0])
    words = as_words(values.slots.index(turn.stage), S.TILE // 16 * S.VALUE_PADDED, 32)
    row = gl.arange(0, S.TILE // 16 * S.VALUE_PADDED, layout=gl.SliceLayout(1, LAYOUT))
    pair = gl.arange(0, 8, layout=gl.SliceLayout(0, LAYOUT))
    pos = first + gl.expand_dims(row // S.VALUE_PADDED * 16, 1) + gl.expand_dims(2 * pair, 0)
    lower = gl.where((pos >= first_key) & (pos < end_key), 0xFFFF, 0)
    upper = gl.where((pos + 1 >= first_key) & (pos + 1 < end_key), 0xFFFF, 0)
    words.store(words.load(LAYOUT) & (lower | (upper << 16)))


@gluon.jit
def packed_keys(ring, turn, S: gl.constexpr, P: gl.constexpr):
    """Return a tile's 16-bit keys as a left operand [TILE, DIM] in registers."""
    places = reinterpret(
        ring.slots.index(turn.stage), ring.slots.dtype, [S.TILE // P.BOX, S.DIM // 8, P.BOX, 8], IN_ORDER_4
    )
    x = places.load(packed_keys_layout(S.TILE, S.DIM, P.BOX)).permute((0, 2, 1, 3)).reshape([S.TILE, S.DIM])
    return gl.convert_layout(x, operand_layout(P.COLUMNS, False), assert_trivial=True)


@gluon.jit
def packed_key_words(ring, turn, LAYOUT: gl.constexpr, S: gl.constexpr, P: gl.constexpr):
    """Return a tile's fp8 or int8 keys as int32 words [TILE, DIM / 4] of four dims, in LAYOUT."""
    places = reinterpret(ring.slots.index(turn.stage), gl.int32, [S.TILE // P.BOX, S.DIM // 16, P.BOX, 4], IN_ORDER_4)
    x = places.load(packed_key_words_layout(S.TILE, S.DIM, P.BOX)).permute((0, 2, 1, 3))
    return gl.convert_layout(x.reshape([S.TILE, S.DIM // 4]), LAYOUT, assert_trivial=True)


@gluon.jit
def clear_outside(ring, turn, tile, lo, end, S: gl.constexpr, P: gl.constexpr):
    """Zero a tile's values outside keys [lo, end) in shared memory; zeroing in registers would slow down every tile."""
    first = tile * S.TILE
    if (first < lo) | (first + S.TILE > end):
        dtype: gl.constexpr = gl.int8 if P.FP8 > 0 else gl.int16
        LAYOUT: gl.constexpr = packed_values_layout(S.TILE, S.VALUE_PADDED, P.BOX)
        places = reinterpret(ring.slots.index(turn.stage), dtype, [S.TILE // P.BOX, S.VALUE_PADDED, P.BOX], IN_ORDER_3)
        box = gl.arange(0, S.TILE // P.BOX, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
        slot = gl.arange(0, P.BOX, layout=gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)))
        key = gl.expand_dims(gl.expand_dims(first + box * P.BOX, 1), 2)
        key += gl.expand_dims(gl.expand_dims(slot, 0), 0)
        places.store(gl.where((key >= lo) & (key < end), places.load(LAYOUT), 0))
        fence_async_shared()  # before TMA writes the slot's next box
        thread_barrier()


@gluon.jit
def packed_values(ring, turn, tile, lo, end, S: gl.constexpr, P: gl.constexpr):
    """Return values as a left operand [DIM, TILE], zero outside keys [lo, end); fp8 and int8 become float16."""
    clear_outside(ring, turn, tile, lo, end, S, P)
    slot = ring.slots.index(turn.stage)
    if P.FP8 > 0:
        places = reinterpret(slot, gl.int16, [S.TILE // P.BOX, S.VALUE_PADDED, P.BOX // 2], IN_ORDER_3)
        even, odd = widen_pair_apart(places.load(packed_value_pairs_layout(S.TILE, S.VALUE_PADDED, P.BOX)), P.FP8)
        x = gl.join(even, odd).permute((1, 0, 2, 3)).reshape([S.VALUE_PADDED, S.TILE])
    else:
        places = reinterpret(slot, slot.dtype, [S.TILE // P.BOX, S.VALUE_PADDED, P.BOX], IN_ORDER_3)
        x = (
            places.load(packed_values_layout(S.TILE, S.VALUE_PADDED, P.BOX))
            .permute((1, 0, 2))
            .reshape([S.VALUE_PADDED, S.TILE])
        )
    return gl.convert_layout(x, operand_layout(P.COLUMNS, False), assert_trivial=True)
