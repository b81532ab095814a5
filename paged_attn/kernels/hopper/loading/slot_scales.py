"""Scales of cached tokens: loader warps bring them into shared memory, beside the tiles of keys and of values.

Scores are multiplied by the scales of keys.  Base-2 logarithms of the scales of values are added to the exponents of
weights, so that each weight contains its value's scale.  A row's sum must not contain these scales, so for the sum each
weight is multiplied by the inverse scale.  A sink's weight has no scale, so a sink joins a row's finished state.

int4 has zero points, the lowest four bits of a scale: keys and values are (stored number - zero point) * scale.
Products multiply stored numbers.  The key's zero point times the sum of the query's dims is then subtracted from each
score, and the sum of weights times zero points of values from the results.
"""

import triton

from ...common.blocking import page_at
from ...common.decoding import split_scale
from ..args import Ring, is_int4
from ..asm.instructions import inverse, log2
from ..shim import gl, gluon, mbarrier, thread_barrier
from .ring import wait_tile

MIN_SCALE, MAX_SCALE = gl.constexpr(2.0**-100), gl.constexpr(2.0**100)


@triton.constexpr_function
def kinds_of(OF_VALUES, P):
    """Number of floats for each token: a key's scale, or log and inverse of a value's, and with int4 its zero point."""
    return (2 if OF_VALUES else 1) + (P.FP8 == 4)


@gluon.jit
def beside_scales(ring, OF_VALUES: gl.constexpr, S: gl.constexpr, P: gl.constexpr):
    """Return the ring with memory for the numbers of each tile's tokens, float32 [kinds * STAGES, TILE]."""
    TILES: gl.constexpr = ring.slots.shape[0] * kinds_of(OF_VALUES, P)
    scales = gl.allocate_shared_memory(gl.float32, [TILES, S.TILE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return Ring(ring.slots, ring.full, ring.empty, 0, 0, 0, scales)


@gluon.jit
def numbers_beside(ring, turn, KIND: gl.constexpr):
    """Return the memory [TILE] of one kind of numbers beside the turn's slot."""
    return ring.scales.index(turn.stage + KIND * ring.slots.shape[0])


@gluon.jit
def places(tile, first, end, S: gl.constexpr):
    """(page of the sequence, slot in the page, whether it is in [first, end)) of each of a tile's keys, in one warp."""
    key = gl.arange(0, S.TILE, layout=gl.BlockedLayout([1], [32], [1], [0]))
    pos = tile * S.TILE + key
    live = (pos >= first) & (pos < end)
    if S.TILE % S.PAGE == 0:  # slots are the same in all tiles
        return tile * (S.TILE // S.PAGE) + key // S.PAGE, key % S.PAGE, live
    else:
        return pos // S.PAGE, pos % S.PAGE, live


@gluon.jit
def load_pages(table, batch, tile, first, end, S: gl.constexpr):
    """Page ids [TILE], as stored, of a tile's keys; 0 for keys outside [first, end)."""
    page, _, live = places(tile, first, end, S)
    return gl.load(page_at(table, page, batch.page_starts), mask=live, other=0)


@gluon.jit
def load_from(ptr, stride_page, stride_slot, stride_head, pages, kv_head, tile, first, end, S: gl.constexpr):
    """Scales [TILE], as stored, of a tile's keys or values; 1 for keys outside [first, end), all 1 if ptr is None."""
    _, slot, live = places(tile, first, end, S)
    if ptr is None:
        return gl.full([S.TILE], 1.0, gl.float32, slot.type.layout)
    else:
        in_page = slot.to(gl.int64) * stride_slot + kv_head.to(gl.int64) * stride_head
        return gl.load(ptr + pages.to(gl.int64) * stride_page + in_page, mask=live, other=1.0)


@gluon.jit
def load_scales(x, pages, kv_head, tile, first, end, OF_VALUES: gl.constexpr, S: gl.constexpr):
    """Do `load_from` for the scales of values or of keys.  x: Scales.  pages: `load_pages` of the tile."""
    if OF_VALUES:
        return load_from(
            x.slot_value_ptr, x.slot_value_stride_page, x.slot_value_stride_slot, x.slot_value_stride_head, pages,
            kv_head, tile, first, end, S,
        )  # fmt: skip
    else:
        return load_from(
            x.slot_key_ptr, x.slot_key_stride_page, x.slot_key_stride_slot, x.slot_key_stride_head, pages, kv_head,
            tile, first, end, S,
        )  # fmt: skip


@gluon.jit
def store_scales(ring, turn, scales, OF_VALUES: gl.constexpr, P: gl.constexpr):
    """Store the numbers of a tile's scales [TILE] beside the turn's slot, and arrive at its full barrier.

    Scales of values are clamped to 2^-100 ... 2^100; NaN stays.
    """
    scales = scales.to(gl.float32)
    if is_int4(P):
        scales, zeros = split_scale(scales)
        numbers_beside(ring, turn, kinds_of(OF_VALUES, P) - 1).store(zeros.to(gl.float32))
    if OF_VALUES:
        scales = gl.where(scales < MIN_SCALE, MIN_SCALE, gl.where(scales > MAX_SCALE, MAX_SCALE, scales))
        # approximations take fewer instructions: tiles arrive so soon that loaders may be too slow
        numbers_beside(ring, turn, 0).store(log2(scales))
        numbers_beside(ring, turn, 1).store(inverse(scales))
    else:
        numbers_beside(ring, turn, 0).store(scales)
    thread_barrier()
    mbarrier.arrive(ring.full.index(turn.stage), count=1)


@gluon.jit
def scales_of_keys(keys, turn, LAYOUT: gl.constexpr):
    """Scales [TILE] of the keys in the turn's slot, which have arrived."""
    return numbers_beside(keys, turn, 0).load(LAYOUT)


@gluon.jit
def zeros_beside(ring, turn, LAYOUT: gl.constexpr, OF_VALUES: gl.constexpr, P: gl.constexpr):
    """Zero points [TILE], float32, of the int4 keys or values in the turn's slot, which have arrived."""
    return numbers_beside(ring, turn, kinds_of(OF_VALUES, P) - 1).load(LAYOUT)


@gluon.jit
def scales_of_values(values, turn, LAYOUT: gl.constexpr, P: gl.constexpr):
    """(logarithms, inverses), each [TILE], of the scales of the values in the turn's slot; waits for the values."""
    wait_tile(values, turn, P)
    return numbers_beside(values, turn, 0).load(LAYOUT), numbers_beside(values, turn, 1).load(LAYOUT)
