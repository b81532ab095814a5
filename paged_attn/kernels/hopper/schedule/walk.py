"""Walk along the line of units (tiles): the item at each position of a share, and the share of a program.

If windows differ by head, `common/head_programs.py` finds the share, in the warps of a consumer or in a loader warp.
"""

from ...common.blocking import block_of, tile_of, tiles_before
from ...common.bounds import visible_range
from ...common.head_programs import heads_at_once, programs_by_work, seqs_at_once, share_by_work
from ...common.schedule import first_tile, pieces_of, place_of, share_of, slot_of, slots_between
from ..args import Item, has_latent_rows
from ..asm.instructions import bring_line
from ..layouts import heads_layout, line_layout
from ..shim import gl, gluon
from .items import bring_lengths


@gluon.jit
def item_at(batch, share, walk, ahead, blocks, tiles, mods, S: gl.constexpr, P: gl.constexpr):
    """(item that begins at walk.unit, number of its units); walk.seq has `blocks` blocks of `tiles` units each.

    ahead: with Shape.BY_HEAD, number of programs of the KV heads before walk.kv_head; otherwise None.

    With latent rows, a sequence may have several blocks, and later ones may see more keys.  Then early and late blocks
    alternate along the line, so that all shares have about equally much work.
    """
    if S.PIECE is None:
        return piece_at(
            batch, share, walk, ahead, tiles, mods, S, blocks if has_latent_rows(S, P) and not S.ONE_BLOCK else None
        )
    else:
        return fixed_pieces_at(batch, share, walk, ahead, tiles, mods, S)


@gluon.jit
def piece_at(batch, share, walk, ahead, tiles, mods, S: gl.constexpr, blocks=None):
    """Do `item_at` without fixed pieces: the share's part of a block is one piece.

    blocks: number of the sequence's blocks, if early and late blocks alternate; otherwise None.
    """
    tile = walk.unit - walk.before
    number = 0
    if batch.query_starts is not None:  # sequences may have several blocks
        number, tile = tile // tiles, tile % tiles
    if blocks is not None:
        number = gl.where(number % 2 == 0, number // 2, blocks - 1 - number // 2)
    block = block_of(batch, walk.seq, number, walk.kv_head, S)
    count = gl.minimum(tiles - tile, share.end - walk.unit)
    span = visible_range(block, mods, S.BLOCK_Q, S)
    context_len = block.seq_len - block.query_len
    from_tile = first_tile(block.seq, None, context_len, mods, S, walk.kv_head) + tile
    begin = gl.maximum(tile_of(span.lo, context_len, S), from_tile)
    end = gl.maximum(begin, gl.minimum(tiles_before(span.hi, context_len, S), from_tile + count))
    first_share = share_of(walk.unit - tile, share)
    pieces = share_of(walk.unit - tile + tiles - 1, share) - first_share + 1
    counter = place_of(first_share, walk.kv_head, ahead, S)
    # every share has two slots: 0 for a piece that continues a block, 1 for a piece that begins one
    first_row = slot_of(first_share, 2, 1, walk.kv_head, ahead, S) * S.ROWS
    row = slot_of(share.index, 2, gl.where(tile == 0, 1, 0), walk.kv_head, ahead, S) * S.ROWS
    item = Item(block, begin, end, gl.where(tile == 0, 1, 0), pieces, pieces, first_row, row, counter)
    return item, count


@gluon.jit
def fixed_pieces_at(batch, share, walk, ahead, tiles, mods, S: gl.constexpr):
    """Do `item_at` with pieces of a fixed size: a share has the pieces that begin in the share, maybe none.

    The item's `pieces` is 1 if the share has all pieces of the block.
    """
    PIECE: gl.constexpr = S.PIECE // S.TILE
    block = block_of(batch, walk.seq, (walk.unit - walk.before) // tiles, walk.kv_head, S)
    tile = (walk.unit - walk.before) % tiles
    count = gl.minimum(tiles - tile, share.end - walk.unit)
    from_tile = first_tile(block.seq, None, block.seq_len - block.query_len, mods, S, walk.kv_head)
    first_piece, past_pieces = pieces_of(from_tile, 0, tiles, S)
    begin, end = pieces_of(from_tile, tile, count, S)
    room = batch.slots // gl.num_programs(0)
    # scratch has states for as many pieces as max_seqlen_k and a window allow; later pieces are left out
    pieces = gl.minimum(past_pieces - first_piece, room)
    end = gl.minimum(end, first_piece + pieces)
    begin = gl.minimum(begin, end)
    whole = end - begin == pieces
    unit = walk.unit - tile  # the block's first unit
    first_share = share_of(unit, share)
    second = unit + (first_piece + 1) * PIECE - from_tile  # unit at which the second piece begins
    holders = holders_of(share, first_share, second, pieces, PIECE)
    # states lie in reverse order: the last piece's state comes first
    first_row = slot_of(first_share, room, 0, walk.kv_head, ahead, S) * S.LIVE
    STEP: gl.constexpr = slots_between(S.KV_HEADS, ahead is None)
    row = first_row + (first_piece + pieces - end) * (STEP * S.LIVE)
    counter = place_of(first_share, walk.kv_head, ahead, S)
    item = Item(block, begin * PIECE, end * PIECE, 1, gl.where(whole, 1, pieces), holders, first_row, row, counter)
    return item, count


@gluon.jit
def holders_of(share, first_share, second, pieces, PIECE: gl.constexpr):
    """Number of shares in which pieces of a block begin; second: the unit at which the block's second piece begins.

    With shares of PIECE units or more, a piece begins in every share up to the share in which the last piece begins.
    With smaller shares, each piece begins in a share of its own, with one exception.  The second piece may begin in the
    share of the first, because the first piece may have fewer than PIECE units.
    """
    if pieces == 1:
        holders = pieces
    elif share.size >= PIECE:
        holders = share_of(second + (pieces - 2) * PIECE, share) - first_share + 1
    else:
        holders = pieces - gl.where(share_of(second, share) == first_share, 1, 0)
    return holders


# Limit of KV heads x sequences that a warp reads at once: four for each thread.  More would take more machine code.
MAX_UNITS_OF_A_WARP = gl.constexpr(128)


@gluon.jit
def bring_heads(batch, mods, S: gl.constexpr, P: gl.constexpr):
    """Let the L2 fetch the lengths and windows that `share_of_heads` reads, while barriers are made."""
    bring_lengths(batch, P)
    head = gl.arange(0, 2 * P.ROWS, layout=line_layout(P.ROWS // 16))
    stride = 2 if mods.head_windows_stride is None else mods.head_windows_stride
    bring_line((mods.head_windows + head.to(gl.int64) * stride).to(gl.int64), head < S.KV_HEADS * S.GROUP)


@gluon.jit
def share_of_heads(batch, mods, WARPS: gl.constexpr, S: gl.constexpr):
    """Return `head_programs.share_by_work` of this program, computed by each of WARPS warps by itself."""
    HEADS: gl.constexpr = heads_at_once(S.KV_HEADS)
    SEQS: gl.constexpr = seqs_at_once(HEADS, S.SCAN, MAX_UNITS_OF_A_WARP)
    LAYOUT: gl.constexpr = heads_layout(HEADS, SEQS, WARPS)
    head = gl.arange(0, HEADS, layout=gl.SliceLayout(1, LAYOUT))
    seq = gl.arange(0, SEQS, layout=gl.SliceLayout(0, LAYOUT))
    return share_by_work(programs_by_work(batch, head, seq, mods, S), head, S)
