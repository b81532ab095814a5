"""Keys over ranks: which keys of a sequence are this rank's own, and their positions.

Stripes of Shape.STRIPE consecutive positions go to ranks 0, 1, ... in turn.  A rank's caches hold its own keys one
after another, numbered from 0.  Own keys are in the order of their positions, so the own keys between two positions
have consecutive numbers.  Bounds are converted once for each row, and masks by these bounds need no key's position.
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
    """Number of own keys before position `pos`, a scalar or [N]; without a shard, `pos` itself."""
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
    """Position of rank 0's own key number `key`, a scalar or [N]."""
    STRIPE: tl.constexpr = S.STRIPE
    BETWEEN: tl.constexpr = STRIPE * (S.WORLD - 1)
    return key + key // STRIPE * BETWEEN


@triton.jit
def place_of_key(key, mods, S: tl.constexpr):
    """Position of this rank's own key number `key`, a scalar or [N]; without a shard, `key` itself."""
    if mods.shard_rank is None:
        return key
    else:
        return spread(key, S) + rank_of(mods) * S.STRIPE


@triton.constexpr_function
def added_apart(stripe, tile):
    """Whether the position of key i of a tile is a sum of two terms, one for the tile and one for i."""
    return stripe & (stripe - 1) == 0 or stripe % tile == 0


@triton.jit
def own_block(block, mods, S: tl.constexpr):
    """Return the block for loaders: with a shard, seq_len is the number of own keys."""
    if mods.shard_rank is None:
        return block
    else:
        return Block(
            block.seq, block.first_token, block.query_len, own_before(block.seq_len, mods, S), block.first,
            block.kv_head,
        )  # fmt: skip
