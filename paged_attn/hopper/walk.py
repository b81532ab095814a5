"""Along the line of units: which piece of which block lies where in a share."""

from typing import Any, NamedTuple

from ..kernels.schedule import block_of, first_tile, share_of, tile_of, tiles_before, visible_range
from .args import Item
from .shim import gl, gluon


class Walk(NamedTuple):
    """Where on the line of units a loader or consumer is."""

    unit: Any
    seq: Any
    before: Any  # units before seq


@gluon.jit
def piece_at(batch, share, walk, tiles, kv_head, mods, S: gl.constexpr):
    """(item, units of it) at a unit of a sequence whose blocks have so many tiles each."""
    at = walk.unit - walk.before
    index, columns, column = at // tiles, S.KV_HEADS, kv_head
    if S.SIDE:
        index, columns, column = batch.block, S.KV_HEADS * batch.side, batch.block * S.KV_HEADS + kv_head
    block = block_of(batch, walk.seq, index, S)
    tile = at % tiles
    count = gl.minimum(tiles - tile, share.end - walk.unit)
    span = visible_range(block, mods, S.BLOCK_Q)
    context_len = block.seq_len - block.query_len
    from_tile = first_tile(context_len, mods, S) + tile
    begin = gl.maximum(tile_of(span.lo, context_len, S), from_tile)
    end = gl.maximum(begin, gl.minimum(tiles_before(span.hi, context_len, S), from_tile + count))
    here = share_of(walk.unit, share)
    first_share = share_of(walk.unit - tile, share)
    pieces = share_of(walk.unit - tile + tiles - 1, share) - first_share + 1
    # every share has two slots: 0 for a piece that began in an earlier share, 1 for one that goes on in the next
    first_row = ((2 * first_share + 1) * columns + column) * S.ROWS
    row = ((2 * here + gl.where(tile == 0, 1, 0)) * columns + column) * S.ROWS
    counter = first_share * columns + column
    item = Item(block, kv_head, begin, end, gl.where(tile == 0, 1, 0), pieces, first_row, row, counter)
    return item, count
