"""Keys and values in memory: page ids, addresses, loads that never let a dead slot into a result."""

import triton
import triton.language as tl

from .numerics import decode


@triton.jit
def columns(tile, S: tl.constexpr):
    """Columns of the page table that the tile at position tile needs, as few as its pages."""
    if S.PAGE % S.TILE == 0:
        return tile // S.PAGE
    elif S.TILE % S.PAGE == 0:
        return tile // S.PAGE + tl.arange(0, S.TILE // S.PAGE)
    else:
        return (tile + tl.arange(0, S.TILE)) // S.PAGE


@triton.jit
def load_ids(source, tile, S: tl.constexpr):
    """Page ids of the tile at position tile, kept raw (int32) until locate.

    Loading them one tile ahead keeps the loads of keys and values direct, so that the pipeliner gives them every stage.
    """
    if source.pages is None:
        return 0
    else:
        column = columns(tile, S)
        # ids outside may be anything: page 0 stands in for them, and load_kv drops what it reads there
        inside = (column >= source.first // S.PAGE) & (column * S.PAGE < source.end)
        return tl.load(source.pages + column, mask=inside, other=0)


@triton.jit
def locate(source, ids, tile, S: tl.constexpr):
    """(page, slot) of the tile's positions, int64 [N]."""
    pos = tile + tl.arange(0, S.TILE)
    if source.pages is None:
        return tl.zeros_like(pos).to(tl.int64), (tl.minimum(pos, source.end - 1) + source.shift).to(tl.int64)
    elif S.PAGE % S.TILE == 0:
        page = tl.zeros_like(pos) + ids
        return page.to(tl.int64), (tile % S.PAGE + tl.arange(0, S.TILE)).to(tl.int64)
    elif S.TILE % S.PAGE == 0:
        page = tl.reshape(tl.broadcast_to(ids[:, None], (S.TILE // S.PAGE, S.PAGE)), (S.TILE,))
        return page.to(tl.int64), (tl.arange(0, S.TILE) % S.PAGE).to(tl.int64)
    else:
        return ids.to(tl.int64), (pos % S.PAGE).to(tl.int64)


@triton.jit
def load_kv(kv, page, slot, kv_head, live, S: tl.constexpr):
    """Rows [N, D] in the compute type; rows that are not live (None: all are) come back as zeros."""
    dim = tl.arange(0, S.DIM)
    row = page * kv.stride_page + slot * kv.stride_slot + kv_head * kv.stride_head
    ptr = kv.ptr + row[:, None] + (dim // kv.RUN * kv.stride_run + dim % kv.RUN)[None, :]
    if live is None and S.DIM == S.HEAD_DIM:
        x = tl.load(ptr)
    elif live is None:
        x = tl.load(ptr, mask=(dim < S.HEAD_DIM)[None, :], other=0)
    elif S.DIM == S.HEAD_DIM:
        x = tl.load(ptr, mask=live[:, None], other=0)
    else:
        x = tl.load(ptr, mask=live[:, None] & (dim < S.HEAD_DIM)[None, :], other=0)
    return decode(x, kv.FP8, S.COMPUTE, S.NATIVE_FP8)
