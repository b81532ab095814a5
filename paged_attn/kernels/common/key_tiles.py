"""Tiles of a sequence's keys, counted from position 0: which tile holds a position, and what a tile's slots hold.

Where new keys are APART a sequence's tiles are two runs: of the cache, and of the call's own keys.  The cache ends
somewhere in the last tile of the first run, and new keys begin with the next: what is left of that tile is the gap.
"""

import triton
import triton.language as tl


@triton.jit
def in_cache(tile, context_len, S: tl.constexpr):
    """Whether a tile is of the first run."""
    return tile * S.TILE < context_len


@triton.jit
def gap(context_len, S: tl.constexpr):
    """Slots between the last key of the cache and the first new one; fewer keys than queries are a negative context."""
    cached = tl.maximum(context_len, 0)
    return tl.cdiv(cached, S.TILE) * S.TILE - cached


@triton.jit
def tile_of(pos, context_len, S: tl.constexpr):
    """The tile that holds a position."""
    if S.APART:
        pos += tl.where(pos >= context_len, gap(context_len, S), 0)
    return pos // S.TILE


@triton.jit
def tiles_before(end, context_len, S: tl.constexpr):
    """Tiles of the positions before `end`."""
    if S.APART:
        end += tl.where(end > context_len, gap(context_len, S), 0)
    return tl.cdiv(end, S.TILE)


@triton.jit
def gap_before(tile, context_len, S: tl.constexpr):
    """Slots of earlier tiles that hold no key: slot i of this one is position tile * TILE + i, less these."""
    if S.APART:
        return tl.where(in_cache(tile, context_len, S), 0, gap(context_len, S))
    else:
        return 0


@triton.jit
def end_in(tile, end, context_len, S: tl.constexpr):
    """`end`, or the cache's where a tile's keys end with it."""
    if S.APART:
        return tl.where(in_cache(tile, context_len, S), tl.minimum(end, context_len), end)
    else:
        return end
