"""Tiles that slots have no room for yet, on their way into the L2: memory's latency takes no shared memory then."""

from ...common.page_tables import page_at
from ..asm.prefetch import bring_near
from ..shim import gl, gluon


@gluon.jit
def bring_tile_near(kv, table, starts, tile, begin, first_key, end_key, kv_head, S: gl.constexpr):
    """Have the L2 fetch a tile's keys, a row with each lane, if it is one of the item's, from tile `begin` on."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    BYTES: gl.constexpr = S.HEAD_DIM * kv.ptr.dtype.element_ty.primitive_bitwidth // 8
    for i in gl.static_range(S.TILE // 32):
        pos = tile * S.TILE + i * 32 + gl.arange(0, 32, layout=LANES)
        live = (tile >= begin) & (pos >= first_key) & (pos < end_key)
        page = gl.load(page_at(table, pos // S.PAGE, starts), mask=live, other=0).to(gl.int64)
        at = page * kv.stride_page + (pos % S.PAGE).to(gl.int64) * kv.stride_slot + kv_head * kv.stride_head
        bring_near((kv.ptr + at).to(gl.int64), pos * 0 + BYTES, live)
