"""Keys and values in memory: page ids, addresses, loads that never let a dead slot into a result."""

import triton
import triton.language as tl

from ..common.blocking import page_at


@triton.jit
def chunks(tile, S: tl.constexpr):
    """First positions [N // CHUNK] of the tile's chunks: each lies in one page."""
    if S.CHUNK == S.TILE:
        return tile
    else:
        return tile + tl.arange(0, S.TILE // S.CHUNK) * S.CHUNK


@triton.jit
def lives(pos, source):
    """Whether keys at positions [N] are there, and visible to somebody."""
    live = pos >= source.first
    if source.prefix is not None:
        live |= pos < source.prefix
    return live & (pos < source.end)


@triton.jit
def load_ids(source, tile, S: tl.constexpr):
    """Page ids of the tile's chunks, int32 until locate.

    Loading them one tile ahead keeps the loads of keys and values direct, so that the pipeliner gives them every stage.
    """
    if source.pages is None:
        return 0
    else:
        column = chunks(tile, S) // S.PAGE
        # ids outside may be anything: page 0 stands in for them, and load_kv drops what it reads there
        inside = column >= source.first // S.PAGE
        if source.prefix is not None:
            inside &= source.first < source.end  # else nobody sees more than the prefix, of whatever page first lies in
            inside |= column * S.PAGE < source.prefix
        inside &= column * S.PAGE < source.end
        return tl.load(page_at(source.pages, column, source.page_starts), mask=inside, other=0).to(tl.int32)


@triton.jit
def per_key(x, S: tl.constexpr):
    """One value per chunk [N // CHUNK] to one per key [N]."""
    if S.CHUNK == S.TILE:
        return x + tl.full([S.TILE], 0, tl.int32)
    else:
        return tl.reshape(tl.broadcast_to(x[:, None], (S.TILE // S.CHUNK, S.CHUNK)), (S.TILE,))


@triton.jit
def locate(source, ids, tile, S: tl.constexpr):
    """(page, slot) of the tile's positions, int64 [N]."""
    CHUNK: tl.constexpr = S.CHUNK
    key = tl.arange(0, S.TILE)
    if source.pages is None:
        row = tl.minimum(tile + key, source.end - 1) + source.shift
        return tl.full([S.TILE], 0, tl.int64), row.to(tl.int64)
    else:
        page = per_key(ids, S)
        if S.TILE % S.PAGE == 0:
            slot = key % S.PAGE
        else:
            slot = per_key(chunks(tile, S) % S.PAGE, S) + key % CHUNK
        return page.to(tl.int64), slot.to(tl.int64)


@triton.jit
def load_box(box, page, slot, kv_head, DIM: tl.constexpr, S: tl.constexpr):
    """Rows [N, D] of one page through the copy engine, which computes the addresses and writes shared memory itself."""
    return box.load([page, slot, kv_head, 0]).reshape([S.TILE, DIM])


@triton.jit
def load_kv(
    kv, page, slot, kv_head, live, WIDTH: tl.constexpr, PADDED: tl.constexpr, S: tl.constexpr, BEGIN: tl.constexpr = 0
):  # fmt: skip
    """Rows [N, PADDED / PARTS] of stored elements, of WIDTH dims from BEGIN on.

    Rows that are not live (None: all are) are zeros.
    """
    HEAD_DIM: tl.constexpr = WIDTH // kv.PARTS
    DIM: tl.constexpr = PADDED // kv.PARTS
    dim = tl.arange(0, DIM)
    head = kv.ptr + tl.cast(kv_head, tl.int64) * kv.stride_head
    row = page * kv.stride_page + slot * kv.stride_slot
    if kv.PARTS == 2:
        head = tl.multiple_of(head, 2 * kv.ALIGN)  # bytes
        row = tl.multiple_of(row, kv.ALIGN)
    if kv.RUN == 1:
        # wide loads go along the slots here, but the compiler cannot see through locate's reshape
        WIDE: tl.constexpr = min(kv.ALIGN, S.CHUNK)
        row = tl.max_contiguous(tl.multiple_of(row, WIDE), WIDE)
    if BEGIN > 0:  # of keys that lie in one run
        head += BEGIN // kv.PARTS
    ptr = head + row[:, None] + (dim // kv.RUN * kv.stride_run + dim % kv.RUN)[None, :]
    if kv.RUN == 1 or live is None:
        # along the slots a mask would cut wide loads into single elements: garbage is loaded, and dropped below
        x = tl.load(ptr) if DIM == HEAD_DIM else tl.load(ptr, mask=(dim < HEAD_DIM)[None, :], other=0)
    elif DIM == HEAD_DIM:
        x = tl.load(ptr, mask=live[:, None], other=0)
    else:
        x = tl.load(ptr, mask=live[:, None] & (dim < HEAD_DIM)[None, :], other=0)
    if kv.RUN == 1 and live is not None:
        x = tl.where(live[:, None], x, 0)  # no bits: zero in every format
    return x
