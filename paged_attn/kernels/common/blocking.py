"""Numbering of a sequence's query blocks, key tiles and pages.

Tiles are counted from position 0.  With Shape.APART a sequence's tiles are two runs: tiles of cached keys, then tiles
of new keys.  The first new key begins a tile, so the last tile of cached keys may have fewer than TILE keys.  This file
calls the number of missing keys the gap, which is not the gap between a prefix and a window.

A sequence has cdiv(query_len, BLOCK_Q) blocks.  A launch serves the sequences with shortest..longest query tokens,
inclusive.

A dense page table has a row of page ids for each sequence.  A ragged page table has all page ids in one row, and each
sequence's ids begin at an entry of its own.
"""

import triton
import triton.language as tl

from .numerics import load_int
from .records import Block


@triton.jit
def in_cache(tile, context_len, S: tl.constexpr):
    """Whether a tile is in the first run, the tiles of cached keys."""
    return tile * S.TILE < context_len


@triton.jit
def gap(context_len, S: tl.constexpr):
    """Number of keys that the last tile of cached keys lacks; a negative context_len counts as 0."""
    cached = tl.maximum(context_len, 0)
    return tl.cdiv(cached, S.TILE) * S.TILE - cached


@triton.jit
def tile_of(pos, context_len, S: tl.constexpr):
    """Number of the tile that holds a position."""
    if S.APART:
        pos += tl.where(pos >= context_len, gap(context_len, S), 0)
    return pos // S.TILE


@triton.jit
def tiles_before(end, context_len, S: tl.constexpr):
    """Number of tiles with positions below `end`."""
    if S.APART:
        end += tl.where(end > context_len, gap(context_len, S), 0)
    return tl.cdiv(end, S.TILE)


@triton.jit
def gap_before(tile, context_len, S: tl.constexpr):
    """Number of keys that earlier tiles lack: key i of this tile is at position tile * TILE + i - gap_before."""
    if S.APART:
        return tl.where(in_cache(tile, context_len, S), 0, gap(context_len, S))
    else:
        return 0


@triton.jit
def end_in(tile, end, context_len, S: tl.constexpr):
    """End position, exclusive, of a tile's keys: `end`; with APART, at most context_len in a tile of cached keys."""
    if S.APART:
        return tl.where(in_cache(tile, context_len, S), tl.minimum(end, context_len), end)
    else:
        return end


@triton.jit
def block_of(batch, seq, index, kv_head, S: tl.constexpr):
    """Return block `index` of a sequence; block 0 is the sequence's last block.

    The block's query_len is 0 if the sequence has no such block, or if another launch serves the sequence.
    """
    if batch.query_starts is None:
        return Block(seq, seq, 1, load_int(batch.seq_lens + seq), 0, kv_head)
    else:
        first_token = load_int(batch.query_starts + seq)
        query_len = load_int(batch.query_starts + seq + 1) - first_token
        num_blocks = tl.cdiv(query_len, S.BLOCK_Q)
        served = (query_len >= batch.shortest) & (query_len <= batch.longest) & (index < num_blocks)
        # the last block comes first, because it sees the most keys of a causal sequence
        first = (num_blocks - 1 - index) * S.BLOCK_Q
        query_len = tl.where(served, query_len, 0)
        return Block(seq, first_token, query_len, load_int(batch.seq_lens + seq), first, kv_head)


@triton.jit
def last_at_most(query_starts, num_seqs, value, BLOCK_Q: tl.constexpr):
    """Last sequence i with query_starts[i] // BLOCK_Q + i <= value, by bisection."""
    left = 0
    right = num_seqs
    while left < right:
        middle = (left + right) // 2
        if load_int(query_starts + middle) // BLOCK_Q + middle <= value:
            left = middle + 1
        else:
            right = middle
    return left - 1


@triton.jit
def find_block(batch, block, kv_head, S: tl.constexpr):
    """Return block number `block` of a launch, counted over all sequences; query_len is 0 if there is no such block."""
    if S.ONE_BLOCK:
        return block_of(batch, block, 0, kv_head, S)
    else:
        # numbers of sequence i begin at query_starts[i] // BLOCK_Q + i; a sequence may have one number without a block
        seq = last_at_most(batch.query_starts, batch.num_seqs, block, S.BLOCK_Q)
        return block_of(batch, seq, block - (load_int(batch.query_starts + seq) // S.BLOCK_Q + seq), kv_head, S)


@triton.jit
def pages_of(batch, seq):
    """Address of a sequence's first page id."""
    if batch.page_starts is None:
        return batch.page_table + tl.cast(seq, tl.int64) * batch.page_table_stride
    else:
        first = tl.load(batch.page_starts.starts + tl.cast(seq, tl.int64) * batch.page_starts.stride)
        return batch.page_table + tl.cast(first, tl.int64) * batch.page_starts.step


@triton.jit
def page_at(pages, column, page_starts):
    """Address of entry `column`, a scalar or [N], of a sequence's page ids, which begin at `pages`."""
    if page_starts is None:
        return pages + column
    else:
        return pages + tl.cast(column, tl.int64) * page_starts.step
