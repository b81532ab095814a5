"""Scores between q @ k^T and the softmax: scale, modifiers in their fixed order, masks.

Portable and Hopper kernels use these functions.

key [N]: number of each key within a tile, from 0, in any layout.

tile: position of the tile's first key; with a shard, the number of this key among the rank's own keys.
"""

import triton
import triton.language as tl
from triton.language.target_info import is_hip

from .bounds import LEFT, RIGHT, shows_position, side_of_rows
from .numerics import INTERPRET, LOG2E
from .shards import own_before, place_of_key


@triton.jit
def softcap(scores, cap, FAR: tl.constexpr):
    """cap * tanh(scores / cap); exponents beyond 64 change nothing, and are clamped.

    Exponentials are off by about 2^-23 of the cap, however small a score is.  FAR: the cap is too large for that error,
    so scores below 0.4 * cap in magnitude take tanh's series, which is off by 2^-23 of the score.
    """
    if FAR:
        x = scores * (1.0 / cap)
        is_near = tl.abs(x) < 0.4
        small = tl.where(is_near, x, 0.0)
        square = small * small
        series = 2 / 15 + square * (-17 / 315 + square * (62 / 2835 - square * (1382 / 155925)))
        near = scores + scores * square * (square * series - 1 / 3)
        power = tl.minimum(x * (2 * LOG2E), 64.0, propagate_nan=tl.PropagateNan.ALL)
        return tl.where(is_near, near, cap * (1 - 2 / (1 + tl.exp2(power))))
    else:
        power = tl.minimum(scores * (2 * LOG2E / cap), 64.0, propagate_nan=tl.PropagateNan.ALL)
        return cap - 2 * cap / (1 + tl.exp2(power))


@triton.jit
def scale_by_token(scale, scales, rows, PARTS: tl.constexpr = 1):
    """The scale of scores, a scalar or [R], times the scale of each row's token, [R], if tokens have scales.

    PARTS: KV heads of the kernel for each KV head of the cache.
    """
    if scales.token_ptr is None:
        return scale
    else:
        token = rows.token + rows.index
        ptr = scales.token_ptr + token * scales.token_stride + rows.kv_head // PARTS * scales.token_stride_head
        return scale * tl.load(ptr, mask=rows.valid, other=1.0)


@triton.jit
def load_slopes(rows, mods, S: tl.constexpr):
    """ALiBi slope of every row, [R]."""
    slopes = mods.alibi_slopes
    if mods.alibi_stride_seq is not None:
        slopes += tl.cast(rows.seq, tl.int64) * mods.alibi_stride_seq
    return tl.load(slopes + rows.kv_head * S.GROUP + rows.member, mask=rows.valid, other=0.0)


@triton.jit
def reaches_own(tile, rows, mods, S: tl.constexpr):
    """Whether a tile may hold the call's own keys."""
    return tile + S.TILE > own_before(rows.context_len, mods, S)


@triton.jit
def add_qq_bias(scores, rows, key, tile, mods, S: tl.constexpr):
    """Scores plus the query-query bias, which is loaded only if the tile may hold the call's own keys."""
    if mods.qq_bias is not None:  # noqa: SIM102 (one is decided at compile time)
        if reaches_own(tile, rows, mods, S):
            scores = _add_entries(scores, rows, place_of_key(tile + key, mods, S), mods)
    return scores


@triton.jit
def hides_between(mods, S: tl.constexpr):
    """Whether `modify` or `cut_own` may hide keys between a row's bounds, so that a row may see nothing of a tile."""
    return (
        mods.qq_bias is not None
        or mods.qq_mask is not None
        or mods.query_positions is not None
        or S.SCORE_MOD is not None
    )


@triton.jit
def cut_by_mask(scores, rows, key, tile, mods, S: tl.constexpr, BY_SCORE: tl.constexpr = False):
    """Scores with minus infinity where a query's bits (qq_mask) hide the call's own keys; a word has 32 keys.

    BY_SCORE: each score loads its word.  A loop over words takes fewer registers, but Triton fails to lay out the
    scores of a portable kernel with this loop, spans and a window.
    """
    if mods.qq_mask is not None:
        # bounds that are the same for all tiles, so that a tile takes two comparisons
        end = own_before(rows.context_len + 32 * mods.qq_words, mods, S)
        if reaches_own(tile, rows, mods, S) & (tile < end):
            ptr = mods.qq_mask + (rows.token + rows.index) * mods.qq_mask_stride
            if BY_SCORE:
                bit = place_of_key(tile + key, mods, S) - rows.context_len
                own = (bit >= 0) & (bit < 32 * mods.qq_words)
                word = tl.load(ptr[:, None] + (bit // 32)[None, :], mask=rows.valid[:, None] & own[None, :], other=-1)
                scores = tl.where((word >> (bit & 31)[None, :]) & 1 == 0, float("-inf"), scores)
            else:
                for i in range(mods.qq_words):
                    word = tl.load(ptr + i, mask=rows.valid, other=-1)
                    bit = place_of_key(tile + key, mods, S) - rows.context_len - 32 * i
                    hides = (word[:, None] >> (bit & 31)[None, :]) & 1 == 0
                    scores = tl.where(hides & ((bit >= 0) & (bit < 32))[None, :], float("-inf"), scores)
    return scores


@triton.jit
def _add_entries(scores, rows, slot, mods):
    """Scores plus the bias matrix's entries for the call's own keys; keys and queries outside the matrix get 0."""
    row = rows.slot - rows.context_len
    column = slot - rows.context_len
    inside = (rows.valid & (row < mods.qq_bias_size))[:, None]
    inside &= ((column >= 0) & (column < mods.qq_bias_size))[None, :]
    base = mods.qq_bias
    if mods.qq_bias_stride_seq is not None:
        base += tl.cast(rows.seq, tl.int64) * mods.qq_bias_stride_seq
    ptr = base + row.to(tl.int64)[:, None] * mods.qq_bias_stride + column[None, :]
    return scores + tl.load(ptr, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def position_of(slot, rows, mods):
    """Positions of the keys at places `slot` [N]: query_positions for the call's own keys, places for earlier keys."""
    index = slot - rows.context_len
    own = (index >= 0) & (index < rows.query_len)
    pos = tl.load(mods.query_positions + rows.first_token + index, mask=own, other=0)
    return tl.where(own, pos.to(tl.int32), slot)


@triton.jit
def move_own(scores, rows, slope, key, tile, mods, S: tl.constexpr):
    """Scores with ALiBi, which `modify` computes by places, corrected to the positions of the call's own keys."""
    if mods.query_positions is not None:  # noqa: SIM102 (one is decided at compile time)
        if reaches_own(tile, rows, mods, S):
            slot = place_of_key(tile + key, mods, S)
            pos = position_of(slot, rows, mods)
            if mods.ALIBI_SYMMETRIC is not None:
                by_slot = tl.abs(slot[None, :] - rows.pos[:, None])
                step = by_slot - tl.abs(pos[None, :] - rows.pos[:, None])
            else:
                step = (pos - slot)[None, :]
            scores += slope[:, None] * step.to(tl.float32)
    return scores


@triton.jit
def cut_by_position(scores, rows, key, tile, mods, S: tl.constexpr):
    """Scores with minus infinity where a window or chunk by query_positions hides keys of a tile.

    The call's own keys have positions of their own.  `mask` has hidden cached keys already, by the same rule.
    """
    place = place_of_key(tile + key, mods, S)
    pos = position_of(place, rows, mods)
    before = scores
    if mods.left is not None:
        left = side_of_rows(mods.left, rows.kv_head, rows.member, LEFT, mods, S)
        scores = tl.where(shows_position(pos, rows.pos, left, mods), scores, float("-inf"))
    if mods.position_right is not None:
        right = side_of_rows(mods.position_right, rows.kv_head, rows.member, RIGHT, mods, S)
        seen = pos[None, :] <= (rows.pos + right)[:, None]
        scores = tl.where(seen, scores, float("-inf"))
    if mods.spans is not None and mods.CLIP_SPANS is None:
        slot = place[None, :]
        together = (slot >= rows.span_begin[:, None]) & (slot < rows.span_end[:, None])
        scores = tl.where(together, before, scores)
    if mods.prefix_lens is not None:
        of_prefix = tile + key < rows.prefix
        scores = tl.where(of_prefix[None, :], before, scores)
    return scores


@triton.jit
def cut_own(scores, rows, key, tile, mods, S: tl.constexpr, BY_SCORE: tl.constexpr = False):
    """Scores with minus infinity where qq_mask, or a window or chunk by positions, hides the call's own keys.

    `mask`, whose bounds are places, cannot hide these keys.  BY_SCORE: see `cut_by_mask`.
    """
    scores = cut_by_mask(scores, rows, key, tile, mods, S, BY_SCORE)
    if mods.query_positions is not None and (mods.left is not None or mods.position_right is not None):
        # cut_by_mask has a branch, too; for gfx942 Triton fails to lay out the scores of some kernels with both
        if mods.qq_mask is not None and not INTERPRET and is_hip():  # noqa: SIM114 (one is decided at compile time)
            scores = cut_by_position(scores, rows, key, tile, mods, S)
        elif reaches_own(tile, rows, mods, S):
            scores = cut_by_position(scores, rows, key, tile, mods, S)
    return scores


@triton.jit
def call_score_mod(scores, rows, key, tile, mods, S: tl.constexpr, FULL: tl.constexpr = False):
    """Scores [R, N] from the user's function; FULL: all keys of the tile are keys of the sequence.

    Positions are clamped to the sequence, so the function's loads by position stay in bounds.
    """
    if S.SCORE_MOD is not None:
        last = rows.context_len + rows.query_len - 1
        key_pos = place_of_key(tile + key, mods, S)
        if mods.query_positions is not None:
            # No branch here: Triton would join a branch with the branch of the bias.  The function's loads by these
            # positions would then depend on the scores, and Triton's pipeliner fails at such loads up to 3.8.
            key_pos = tl.maximum(position_of(key_pos, rows, mods), 0)
        if not FULL or mods.query_positions is not None:
            key_pos = tl.minimum(key_pos, last)
        query_pos = tl.minimum(tl.maximum(rows.pos, 0), last)
        head = rows.kv_head * S.GROUP + rows.member
        scores = S.SCORE_MOD(scores, query_pos[:, None], key_pos[None, :], head[:, None], *mods.score_mod_args)
        scores = scores.to(tl.float32)
    return scores


@triton.jit
def modify(scores, rows, key, tile, mods, S: tl.constexpr, FULL: tl.constexpr = False):
    """Scaled scores [R, N] of a tile with softcap, ALiBi, query-query bias and the user's function, in this order."""
    if mods.softcap is not None:
        scores = softcap(scores, mods.softcap, S.FAR_CAP)
    if mods.alibi_slopes is not None:
        slope = load_slopes(rows, mods, S)
        if mods.shard_rank is None:
            distance = key[None, :] + (tile - rows.pos)[:, None]
        else:
            distance = place_of_key(tile + key, mods, S)[None, :] - rows.pos[:, None]
        if mods.ALIBI_SYMMETRIC is not None:
            distance = -tl.abs(distance)
        scores += slope[:, None] * distance.to(tl.float32)
        scores = move_own(scores, rows, slope, key, tile, mods, S)
    scores = add_qq_bias(scores, rows, key, tile, mods, S)
    return call_score_mod(scores, rows, key, tile, mods, S, FULL)


@triton.jit
def mask(scores, rows, key, tile, end, mods):
    """Scores with minus infinity where a row must not see a key: outside its bounds and prefix, or from `end` on."""
    # bounds are moved instead of keys, which are constants and need no registers
    visible = key[None, :] <= (tl.minimum(rows.last_key, end - 1) - tile)[:, None]
    if mods.left is not None:
        visible &= key[None, :] >= (rows.first_key - tile)[:, None]
    if mods.prefix_lens is not None and mods.left is not None:
        visible |= key[None, :] < tl.minimum(rows.prefix, end) - tile
    return tl.where(visible, scores, float("-inf"))
