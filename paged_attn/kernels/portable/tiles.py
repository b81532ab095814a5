"""The mainloop: one tile of keys, and all tiles of one source (the cache, or the new keys)."""

import triton
import triton.language as tl

from ..common.decoding import scale_and_zero, unpack
from ..common.numerics import LOG2E, products
from ..common.scores import cut_own, hides_between, mask, modify
from ..common.softmax import update
from .loads import lives, load_box, load_ids, load_kv, load_latent, load_scales, locate


@triton.jit
def may_hide(tile, source, span, S: tl.constexpr):
    """Whether a tile may have keys outside the bounds of some row."""
    hides = (tile < span.full_lo) | (tile + S.TILE > tl.minimum(span.full_hi, source.end))
    if source.prefix is not None:
        hides &= tile + S.TILE > tl.minimum(source.prefix, source.end)
    return hides


@triton.jit
def step(state, q, rows, kv, boxes, source, ids, tile, span, mods, S: tl.constexpr, FULL: tl.constexpr):
    """Fold one tile, the keys from position `tile` on, into the state; FULL: the tile lies inside all rows' bounds."""
    page, slot = locate(source, ids, tile, S)
    of_keys, of_values, zeros = None, None, None
    if kv.key.SCALED:
        of_keys = load_scales(kv.key, page, slot, rows.kv_head, tile, source, S, FULL)
    if kv.value.SCALED:
        of_values = load_scales(kv.value, page, slot, rows.kv_head, tile, source, S, FULL)
    if kv.value.PARTS == 4:
        of_values, zeros = scale_and_zero(of_values, S)
    # Values of keys that are not live become zeros, because 0 * NaN is NaN.  live None: all keys are live.
    if S.REST is not None:
        live = None if FULL else lives(tile + tl.arange(0, S.TILE), source)
        k, v = load_latent(kv.key, page, slot, rows.kv_head, live, S)
    else:
        if boxes is not None:
            k = (load_box(boxes.key, ids, tile % S.PAGE, rows.kv_head, S.DIM, S).T,)
        else:
            k = unpack(load_kv(kv.key, page, slot, rows.kv_head, None, S.HEAD_DIM, S.DIM, S).T, kv.key, S)
        if FULL and boxes is not None:
            v = (load_box(boxes.value, ids, tile % S.PAGE, rows.kv_head, S.VALUE_PADDED, S),)
        else:
            live = None if FULL else lives(tile + tl.arange(0, S.TILE), source)
            v = unpack(load_kv(kv.value, page, slot, rows.kv_head, live, S.VALUE_DIM, S.VALUE_PADDED, S), kv.value, S)
    key = tl.arange(0, S.TILE)
    scores = products(q.parts, k, S)
    if kv.key.PARTS == 4:
        of_keys, zeros_of_keys = scale_and_zero(of_keys, S)
        scores -= q.total[:, None] * zeros_of_keys[None, :]
    if of_keys is not None:
        scores *= of_keys[None, :]
    unit = q.unit * (source.scale * LOG2E)
    if S.SCALE_FIRST:
        scores = modify(scores * (q.unit * source.scale)[:, None], rows, key, tile, mods, S, FULL)
        unit = tl.full([S.ROWS], LOG2E, tl.float32)
    if not FULL:
        # qq_mask has a branch, too; Triton fails to lay out the scores of some kernels with both
        if S.PEEL or mods.qq_mask is not None:  # noqa: SIM114 (one is decided at compile time)
            scores = mask(scores, rows, key, tile, source.end, mods)
        elif may_hide(tile, source, span, S):
            scores = mask(scores, rows, key, tile, source.end, mods)
    scores = cut_own(scores, rows, key, tile, mods, S, BY_SCORE=True)
    # every row sees all keys of a full tile, unless a modifier hides some
    HIDES: tl.constexpr = hides_between(mods, S)
    return update(state, scores, unit, v, S, FULL and not HIDES, of_values, zeros)


@triton.jit
def attend_tiles(state, q, rows, kv, boxes, source, begin, end, span, mods, S: tl.constexpr, FULL: tl.constexpr):
    """Fold the tiles of positions [begin, end) into the state, with page ids loaded one tile ahead."""
    ids = load_ids(source, begin, S)
    for tile in tl.range(begin, end, S.TILE, num_stages=S.STAGES):
        ahead = load_ids(source, tile + S.TILE, S)
        state = step(state, q, rows, kv, boxes, source, ids, tile, span, mods, S, FULL)
        ids = ahead
    return state


@triton.jit
def attend_around_gap(state, q, rows, kv, boxes, source, begin, end, span, mods, S: tl.constexpr):
    """Fold the tiles of a prefix, and then the tiles from the window's first key on, into the state."""
    head = begin + tl.cdiv(tl.maximum(source.prefix - begin, 0), S.TILE) * S.TILE
    skipped = tl.maximum(begin + tl.maximum(source.first - begin, 0) // S.TILE * S.TILE - head, 0)
    if source.first >= source.end:  # the window has no keys here
        end = tl.maximum(tl.minimum(source.prefix, end), begin)
        skipped = skipped * 0
    ids = load_ids(source, begin + tl.where(begin < head, 0, skipped), S)
    for at in tl.range(begin, end - skipped, S.TILE, num_stages=S.STAGES):
        tile = at + tl.where(at < head, 0, skipped)
        ahead = load_ids(source, at + S.TILE + tl.where(at + S.TILE < head, 0, skipped), S)
        state = step(state, q, rows, kv, boxes, source, ids, tile, span, mods, S, False)
        ids = ahead
    return state


@triton.jit
def attend_keys(state, q, rows, kv, boxes, source, begin, span, mods, S: tl.constexpr):
    """Fold the keys of one source from position begin on into the state."""
    # A source without a visible key gets an empty range: `begin` was rounded down to a tile, so [begin, source.end) may
    # hold dead slots.
    end = tl.where(source.first < source.end, source.end, begin)
    if source.prefix is not None:
        return attend_around_gap(state, q, rows, kv, boxes, source, begin, source.end, span, mods, S)
    elif S.PEEL:
        full = begin
        if mods.left is not None:
            full += tl.cdiv(tl.maximum(span.full_lo - begin, 0), S.TILE) * S.TILE
            full = tl.minimum(full, tl.maximum(begin, end))
            state = attend_tiles(state, q, rows, kv, boxes, source, begin, full, span, mods, S, False)
        rest = full + tl.maximum(tl.minimum(span.full_hi, end) - full, 0) // S.TILE * S.TILE
        state = attend_tiles(state, q, rows, kv, boxes, source, full, rest, span, mods, S, True)
        return attend_tiles(state, q, rows, kv, boxes, source, rest, end, span, mods, S, False)
    else:
        return attend_tiles(state, q, rows, kv, boxes, source, begin, end, span, mods, S, False)
