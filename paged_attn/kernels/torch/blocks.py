"""Attention with any features: each block of queries loops over tiles of keys, and updates a state.

Shapes: T queries of each of B sequences, N keys of a tile, G KV heads, M query heads of each, D dims.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import cache, scores, state
from .cache import Span, sources
from .call import Call, Seq, of_group, per_head
from .visible import Sight, mask_of, runs_of, seen_by_all

TILE = 512  # keys
SCORES = 1 << 21  # maximum scores of a block and a tile, unless one query of each sequence has more
# All products of a batch_invariant call have one shape.  A query's place in its sequence decides its row of a block,
# and a key's place decides its column of a tile, wherever the call begins.
INVARIANT_QUERIES, INVARIANT_TILE = 16, 256


class Block(NamedTuple):
    """Queries [first, end) of each sequence, in `rows` rows; `lead` rows come before the first query."""

    first: int
    end: int
    lead: int
    rows: int


class Queries(NamedTuple):
    """The queries of a block, ready for products."""

    block: Block
    parts: Tensor  # float32 [B, G, M * T, D]
    tokens: Tensor  # int64 [B, T], indices into q
    slots: Tensor  # int64 [B, T], places in the sequence
    pos: Tensor  # int64 [B, T], positions
    scale: Tensor | float  # scale of scores: [B, G, 1, T, 1], or one number for all


class Tile(NamedTuple):
    """A tile of gathered keys and values of each sequence."""

    spans: list[Span]  # keys of each sequence
    key: Tensor  # int64 [B, N], places of the keys; with a shard, `key` and `spans` are numbers of own keys
    live: Tensor  # bool [B, N]; keys where it is False are padding, and must not count
    keys: Tensor  # float32 [B, N, G, D]
    values: Tensor  # float32 [B, N, G, D]
    of_cache: bool  # True: cached keys; False: new keys


def tile_of(call: Call) -> int:
    """Number of keys of a tile."""
    return INVARIANT_TILE if call.options.batch_invariant else TILE


def blocks_of(call: Call, group: Sequence[Seq]) -> Iterator[Block]:
    """The blocks of queries of `group`, whose sequences have equally many queries."""
    count, context = group[0].query_len, group[0].context_len
    if call.options.batch_invariant:
        step = INVARIANT_QUERIES
        for begin in range(context // step * step - context, count, step):
            first = max(begin, 0)
            yield Block(first, min(begin + step, count), first - begin, step)
        return
    step = max(1, SCORES // (len(group) * call.sizes.heads * TILE))
    for first in range(0, count, step):
        end = min(first + step, count)
        yield Block(first, end, 0, end - first)


def attend(call: Call, sight: Sight, group: Sequence[Seq], block: Block) -> tuple[Tensor, Tensor]:
    """(results [B, G, M, T, D], log-sum-exps [B, G, M, T]) of a block, float32."""
    sizes, infinite = call.sizes, scores.biased(call)
    queries = _queries(call, sight, group, block)
    shape = (len(group), sizes.kv_heads, sizes.group, block.rows)
    acc = queries.parts.new_zeros((*shape[:2], sizes.group * block.rows, sizes.value_dim))
    found = state.start(acc, _sinks(call, block))
    rows = slice(block.lead, block.lead + block.end - block.first)
    for tile in (_fixed_tiles if call.options.batch_invariant else _tiles)(call, sight, group, block):
        key, live, of_cache, values = tile.key, tile.live, tile.of_cache, tile.values.transpose(1, 2)
        # contiguous: products of one shape and one layout round alike
        weights = queries.parts @ tile.keys.transpose(1, 2).contiguous().transpose(2, 3)
        _scale(call, group, weights.view(*shape, -1), queries.scale, of_cache)
        view = weights.view(shape[0], sizes.heads, block.rows, -1)
        key = sight.widest.place_of(key)
        key_pos = _positions_of_keys(sight, group, key)
        view = scores.modify(call, view, group, queries.slots, key, queries.pos, key_pos)
        if (
            not all(seen_by_all(sight, seq, block.first, block.end, *x) for seq, x in zip(group, tile.spans))
            or not live.all()
        ):
            mask = mask_of(sight, group, queries.tokens, queries.slots, key, key_pos, queries.pos)
            mask = mask & live[:, None, None, :]
            view = view.masked_fill_(~mask, float("-inf"))
            if sight.windows is not None:  # values that no row of a KV head sees may be NaN
                seen = mask[:, :, rows].reshape(shape[0], sizes.kv_heads, -1, key.shape[1]).any(2)
                values = values.masked_fill(~seen[..., None], 0.0)
        scale = of_group(per_head(call.v_scale, sizes.kv_heads), group) if of_cache else 1.0
        scale = scale[..., None, None] if isinstance(scale, Tensor) else scale
        found = state.update(found, view.view_as(weights), values.contiguous(), scale, infinite)
    out, lse = state.finish(found)
    return out.view(*shape, -1)[:, :, :, rows], lse.view(shape)[..., rows]


def _queries(call: Call, sight: Sight, group: Sequence[Seq], block: Block) -> Queries:
    """The queries of a block; a row without a query is a copy of the block's first or last query."""
    sizes, device = call.sizes, call.device
    starts = torch.tensor([seq.start for seq in group], device=device)[:, None]
    contexts = torch.tensor([seq.context_len for seq in group], device=device)[:, None]
    places = torch.arange(block.rows, device=device) + (block.first - block.lead)
    tokens = starts + places.clamp(block.first, block.end - 1)
    rows = call.given.q[tokens].float().view(*tokens.shape, sizes.kv_heads, sizes.group, sizes.head_dim)
    parts = rows.permute(0, 2, 3, 1, 4).reshape(len(group), sizes.kv_heads, -1, sizes.head_dim)
    slots = contexts + places
    pos = slots if sight.positions is None else sight.positions[tokens]
    scale: Tensor | float = call.scale
    if call.by_token:
        of_tokens = call.given.q_scale.view(len(call.given.q), -1)[tokens]  # [B, T, G or 1]
        scale = (of_tokens * call.scale).transpose(1, 2)[:, :, None, :, None]
    return Queries(block, parts, tokens, slots, pos, scale)


def _sinks(call: Call, block: Block) -> Tensor | None:
    """The sinks of all rows, float32 [G, M * T, 1]."""
    if call.given.sinks is None:
        return None
    by_head = call.given.sinks.float().view(call.sizes.kv_heads, call.sizes.group, 1, 1)
    return by_head.expand(-1, -1, block.rows, 1).flatten(1, 2)


def _tiles(call: Call, sight: Sight, group: Sequence[Seq], block: Block) -> Iterator[Tile]:
    """Tiles of the keys that a block's queries may see: of the prefix, then of the other run (`visible.Runs`)."""
    runs = [runs_of(sight, seq, block.first, block.end) for seq in group]
    for whole in ([Span(0, x.prefix) for x in runs], [Span(x.first, x.end) for x in runs]):
        for begin in range(0, max(x.end - x.first for x in whole), TILE):
            piece = [Span(x.first + begin, min(x.first + begin + TILE, x.end)) for x in whole]
            for source, spans in sources(call, group, piece):
                count = max(x.end - x.first for x in spans)
                first, end = torch.tensor(spans, device=call.device).T[..., None]
                key = first + torch.arange(count, device=call.device)
                found = cache.scaled if source is cache.cached else source
                keys, values = (x.float() for x in found(call, group, spans))
                yield Tile(spans, key, key < end, keys, values, source is cache.cached)


def _fixed_tiles(call: Call, sight: Sight, group: Sequence[Seq], block: Block) -> Iterator[Tile]:
    """Tiles of a batch_invariant call: tiles at multiples of INVARIANT_TILE that hold a key of a run (`visible.Runs`).

    One update folds in all keys of a tile, wherever the runs end.  Zeros stand for keys outside the runs.
    """
    (seq,), size = group, INVARIANT_TILE
    runs = runs_of(sight, seq, block.first, block.end)
    both = [x for x in (Span(0, runs.prefix), Span(runs.first, runs.end)) if x.end > x.first]
    for first in sorted({begin for x in both for begin in range(x.first // size * size, x.end, size)}):
        live = torch.zeros(1, size, dtype=torch.bool, device=call.device)
        keys = torch.zeros(1, size, call.sizes.kv_heads, call.sizes.head_dim, device=call.device)
        values = keys.new_zeros(*keys.shape[:3], call.sizes.value_dim)
        for run in both:
            span = Span(max(first, run.first), min(first + size, run.end))
            if span.end > span.first:
                places = slice(span.first - first, span.end - first)
                keys[:, places], values[:, places] = cache.scaled(call, group, [span])
                live[:, places] = True
        key = torch.arange(first, first + size, device=call.device)[None]
        yield Tile([Span(first, first + size)], key, live, keys, values, True)


def _scale(call: Call, group: Sequence[Seq], weights: Tensor, scale: Tensor | float, of_cache: bool) -> None:
    """Multiply products [B, G, M, T, N], in place, by the scales of softmax, queries and keys."""
    given, kv_heads = call.given, call.sizes.kv_heads
    factors = [scale] if call.by_token else [scale, of_group(per_head(given.q_scale, kv_heads), group)]
    factors += [of_group(per_head(given.k_scale, kv_heads), group)] if of_cache else []
    number, tensor = 1.0, None
    for x in factors:
        if isinstance(x, float):
            number *= x
        else:
            x = x if x.ndim > 2 else x[..., None, None, None]
            tensor = x if tensor is None else tensor * x
    weights.mul_(number if tensor is None else tensor * number)


def _positions_of_keys(sight: Sight, group: Sequence[Seq], key: Tensor) -> Tensor:
    """Positions [B, N] of keys at places `key`.  query_positions, if given, are those of the call's own keys."""
    if sight.positions is None:
        return key
    contexts, starts, ends = torch.tensor(
        [(seq.context_len, seq.start, seq.start + seq.query_len - 1) for seq in group], device=key.device
    ).T[..., None]
    token = (starts + key - contexts).maximum(starts).minimum(ends)
    return torch.where(key < contexts, key, sight.positions[token])
