"""Tiles of an x-packed cache: boxes of 8 dims x neighbouring keys, and of dims x neighbouring keys, one behind another.

No descriptor of a product describes them, but a thread's numbers of a left operand lie side by side in either, so they
pass through registers, as fp8 numbers do.
"""

import triton

from .layouts import packed_keys_layout, packed_values_layout, product_layout
from .shim import fence_async_shared, gl, gluon, reinterpret, thread_barrier

X = gl.constexpr(8)  # dims side by side: 16 bytes


@gluon.jit
def make_boxes(box, STAGES: gl.constexpr, S: gl.constexpr, P: gl.constexpr):
    """Slots of a ring, each the boxes of a tile."""
    BOX: gl.constexpr = box.block_shape
    return gl.allocate_shared_memory(box.dtype, [STAGES, S.TILE // P.BOX, 1, BOX[2], BOX[3]], box.layout)


@triton.constexpr_function
def rows_of_slot(shape, box):
    """Places along a box's last axis from slot to slot; boxes of whole pages begin at none but the first."""
    return max(1, shape[3] // box)


@gluon.jit
def packed_keys(ring, turn, S: gl.constexpr, P: gl.constexpr):
    """A tile's keys as a left operand [TILE, DIM]."""
    LAYOUT: gl.constexpr = packed_keys_layout(S.TILE, S.DIM, P.BOX)
    PLACES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    slot = ring.slots.index(turn.stage)
    x = reinterpret(slot, slot.dtype, [S.TILE // P.BOX, S.DIM // X, P.BOX, X], PLACES).load(LAYOUT)
    x = x.permute((0, 2, 1, 3)).reshape([S.TILE, S.DIM])
    return gl.convert_layout(x, gl.DotOperandLayout(0, product_layout(P.COLUMNS, False), 2), assert_trivial=True)


@gluon.jit
def packed_values(ring, turn, tile, lo, end, S: gl.constexpr, P: gl.constexpr):
    """A tile's values as a left operand [DIM, TILE], zero outside [lo, end)."""
    LAYOUT: gl.constexpr = packed_values_layout(S.TILE, S.DIM, P.BOX)
    PLACES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    slot = ring.slots.index(turn.stage)
    places = reinterpret(slot, slot.dtype, [S.TILE // P.BOX, S.DIM, P.BOX], PLACES)
    first = tile * S.TILE
    if (first < lo) | (first + S.TILE > end):  # where they lie: in registers every tile would take its words apart
        WHERE: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT))
        BOXES: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))
        box = gl.arange(0, S.TILE // P.BOX, layout=BOXES)
        place = gl.arange(0, P.BOX, layout=WHERE)
        key = gl.expand_dims(gl.expand_dims(first + box * P.BOX, 1), 2)
        key += gl.expand_dims(gl.expand_dims(place, 0), 0)
        places.store(gl.where((key >= lo) & (key < end), places.load(LAYOUT), 0.0))
        fence_async_shared()  # before the next box
        thread_barrier()
    x = places.load(LAYOUT).permute((1, 0, 2)).reshape([S.DIM, S.TILE])
    return gl.convert_layout(x, gl.DotOperandLayout(0, product_layout(P.COLUMNS, False), 2), assert_trivial=True)
