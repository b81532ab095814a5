"""Tiles gathered row by row: pages of any number of tokens, where boxes would bring a few rows each.

Each thread of a loading warp copies 16 bytes at a time (cp.async), to where the copy engine would have put them.  A
slot's barrier hears of each thread when all that it has sent for is there.  Unlike boxes such copies are ordinary
writes: whoever waits for a tile fences them before tensor cores read it (`ring.wait_tile`).
"""

from ...common.page_tables import page_at
from ..asm.prefetch import bring_line
from ..layouts import rows_layout
from ..shim import async_copy, copy_by_threads, gl, gluon
from .ring import wait_empty

STEP = gl.constexpr(16)  # rows whose ids are loaded while those before them are copied; with 8 loaders spill more


@gluon.jit
def ids_of(table, starts, pos, first, end, S: gl.constexpr):
    """(page ids of some positions, which of these hold live keys); pages without one are not followed."""
    page = pos // S.PAGE
    live = (page >= first // S.PAGE) & (pos < end)
    return gl.load(page_at(table, page, starts), mask=live, other=0), live


@gluon.jit
def bring_ids(table, starts, begin, first, ROWS: gl.constexpr, S: gl.constexpr):
    """Have the L2 fetch the page ids of so many positions from begin on, which come next."""
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    page = (begin + lane * (ROWS // 32)) // S.PAGE
    bring_line(page_at(table, page, starts).to(gl.int64), (begin >= 0) & (page >= first // S.PAGE))


@gluon.jit
def gather_tile(
    kv, ring, turn, table, starts, kv_head, tile, first, end, PART: gl.constexpr, S: gl.constexpr, P: gl.constexpr
):
    """One loader's part of a tile of the cache into the next slot; rows without a live key become zeros."""
    ROWS: gl.constexpr = S.TILE // P.LOADERS
    LAYOUT: gl.constexpr = rows_layout(8, S.DIM, 1)
    TOGETHER: gl.constexpr = 1 + S.PAIRED
    row = gl.arange(0, STEP, layout=gl.SliceLayout(1, LAYOUT))
    dim = gl.arange(0, S.DIM, layout=gl.SliceLayout(0, LAYOUT))
    begin = tile * S.TILE + PART * ROWS
    head = kv.ptr + (kv_head * TOGETHER).to(gl.int64) * kv.stride_head
    ids, live = ids_of(table, starts, begin + row, first, end, S)  # before a slot is free: memory takes as long
    bring_ids(table, starts, begin - S.TILE, first, ROWS, S)  # tiles come last one first
    wait_empty(ring, turn)
    slot = ring.slots.index(turn.stage).reshape([S.TILE, S.DIM])
    for i in gl.static_range(ROWS // STEP):
        pos = begin + i * STEP + row
        at = ids.to(gl.int64) * kv.stride_page + (pos % S.PAGE).to(gl.int64) * kv.stride_slot
        asked = gl.expand_dims(live, 1)
        if TOGETHER * S.HEAD_DIM < S.DIM:
            asked = asked & gl.expand_dims(dim < TOGETHER * S.HEAD_DIM, 0)
        if i + 1 < ROWS // STEP:
            ids, live = ids_of(table, starts, begin + (i + 1) * STEP + row, first, end, S)
        part = slot.slice(PART * ROWS + i * STEP, STEP, dim=0)
        copy_by_threads(part, head + gl.expand_dims(at, 1) + gl.expand_dims(dim, 0), mask=asked)
    async_copy.mbarrier_arrive(ring.full.index(turn.stage), increment_count=False)
