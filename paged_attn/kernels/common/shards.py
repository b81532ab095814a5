"""Keys over ranks: which keys of a sequence lie with this rank, and at which positions these stand.

Stripes of Shape.STRIPE consecutive positions go to ranks 0, 1, ... in turn.  A rank's caches hold its own keys one
after another.  A later position never has fewer own keys before it, so the own keys between two positions are those
between two numbers: bounds of rows and of tiles cost two numbers a row, and nothing a key.
"""

import triton
import triton.language as tl

from .records import Block


@triton.jit
def rank_of(mods):
    """The number of this rank."""
    return mods.shard_rank // 16


@triton.jit
def own_before(pos, mods, S: tl.constexpr):
    """How many own keys stand before a position, of one or of [N]; without a shard all do."""
    if mods.shard_rank is None:
        return pos
    else:
        STRIPE: tl.constexpr = S.STRIPE
        CYCLE: tl.constexpr = STRIPE * S.WORLD
        pos = tl.maximum(pos, 0)
        cycles = pos // CYCLE
        rest = pos - cycles * CYCLE - rank_of(mods) * STRIPE
        return cycles * STRIPE + tl.minimum(tl.maximum(rest, 0), STRIPE)


@triton.jit
def spread(key, S: tl.constexpr):
    """The position of an own key of rank 0 by its number, of one or of [N]."""
    STRIPE: tl.constexpr = S.STRIPE
    BETWEEN: tl.constexpr = STRIPE * (S.WORLD - 1)
    return key + key // STRIPE * BETWEEN


@triton.jit
def place_of_key(key, mods, S: tl.constexpr):
    """The position of an own key by its number, of one or of [N]; without a shard they are the same."""
    if mods.shard_rank is None:
        return key
    else:
        return spread(key, S) + rank_of(mods) * S.STRIPE


@triton.constexpr_function
def added_apart(stripe, tile):
    """Whether a key's position is that of its tile plus what its number within the tile adds, whatever the tile."""
    return stripe & (stripe - 1) == 0 or stripe % tile == 0


@triton.jit
def own_block(block, mods, S: tl.constexpr):
    """A block as loaders of a shard's keys have it: seq_len counts these keys."""
    if mods.shard_rank is None:
        return block
    else:
        return Block(
            block.seq, block.first_token, block.query_len, own_before(block.seq_len, mods, S), block.first,
            block.kv_head,
        )  # fmt: skip
