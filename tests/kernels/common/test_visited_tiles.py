"""Masks cost no more than they show: which tiles are visited, which need no mask, and where a sequence's line begins.

A tile that is visited for nothing, or masked for nothing, changes no result.  So each is counted here against a mask in
plain Python: a mask is a line of MASKS, and whatever bound of it bounds.py forgets fails by its name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl

import paged_attn
from paged_attn.kernels.common.bounds import visible_range
from paged_attn.kernels.common.records import Block, Modifiers, Source
from paged_attn.kernels.common.schedule import first_tile
from paged_attn.kernels.portable.attention import may_hide
from paged_attn.launching import backend
from paged_attn.planning import plan
from tests.cases import Case, build, problem_of

TILE, BLOCK_Q = 4, 4


class Mask(NamedTuple):
    """What kernels are given of a mask, the arguments of a call for it, and what it shows."""

    mods: dict[str, Any]  # a list is a tensor of one sequence
    call: dict[str, Any]
    sees: Callable[[int, int], bool]  # (position of a query, position of a key)


# Within a tile of 4 and across some; beside each other, and across tiles of 64; none; behind all keys.
SPANS = [[2, 4], [5, 14], [14, 15], [-1, -1], [20, 37], [50, 140], [1000, 2000]]
COUNT: dict[str, Any] = dict(spans_count=len(SPANS), spans_stride=2 * len(SPANS), spans_step=2)


def together(q: int, k: int) -> bool:
    return any(a <= q < b and a <= k < b for a, b in SPANS)


MASKS = {
    "causal": Mask(dict(right=0), {}, lambda q, k: k <= q),
    "all": Mask({}, dict(causal=False), lambda q, k: True),
    "left": Mask(dict(left=5, right=0), dict(window_size=(5, -1)), lambda q, k: q - 5 <= k <= q),
    "left, not causal": Mask(dict(left=5), dict(window_size=(5, -1), causal=False), lambda q, k: q - 5 <= k),
    "right": Mask(dict(right=6), dict(window_size=(-1, 6), causal=False), lambda q, k: k <= q + 6),
    "both": Mask(
        dict(left=9, right=2), dict(window_size=(9, 2), causal=False), lambda q, k: q - 9 <= k <= q + 2
    ),
    "chunk": Mask(dict(left=5, right=0, chunk=6), dict(chunk=6), lambda q, k: q // 6 * 6 <= k <= q),
    "chunk, not causal": Mask(dict(left=5, chunk=6), dict(chunk=6, causal=False), lambda q, k: q // 6 == k // 6),
    "chunk, window": Mask(
        dict(left=3, right=0, chunk=70), dict(chunk=70, window_size=(3, -1)),
        lambda q, k: max(q - 3, q // 70 * 70) <= k <= q,
    ),
    "chunk, window both ways": Mask(
        dict(left=3, right=2, chunk=7), dict(chunk=7, window_size=(3, 2), causal=False),
        lambda q, k: q // 7 == k // 7 and q - 3 <= k <= q + 2,
    ),
    "spans": Mask(
        dict(right=0, spans=[SPANS], **COUNT), dict(spans=[SPANS]), lambda q, k: k <= q or together(q, k)
    ),
    "spans beyond a window": Mask(
        dict(left=3, right=0, spans=[SPANS], **COUNT), dict(spans=[SPANS], window_size=(3, -1)),
        lambda q, k: q - 3 <= k <= q or together(q, k),
    ),
    "spans in a window": Mask(
        dict(left=3, right=0, spans=[SPANS], CLIP_SPANS=tl.constexpr(True), spans_right=2, **COUNT),
        dict(spans=[SPANS], window_size=(3, 2), clip_spans=True),
        lambda q, k: q - 3 <= k <= q + 2 and (k <= q or together(q, k)),
    ),
    "spans in chunks": Mask(
        dict(left=8, right=0, chunk=9, spans=[SPANS], CLIP_SPANS=tl.constexpr(True), **COUNT),
        dict(spans=[SPANS], chunk=9, clip_spans=True),
        lambda q, k: q // 9 == k // 9 and (k <= q or together(q, k)),
    ),
    "prefix": Mask(dict(right=0, prefix_lens=[6]), dict(prefix_lens=[6]), lambda q, k: k <= q or k < 6),
    "prefix, right": Mask(
        dict(right=1, prefix_lens=[70]), dict(prefix_lens=[70], window_size=(-1, 1), causal=False),
        lambda q, k: k <= q + 1 or k < 70,
    ),
    "causal by sequence": Mask(dict(right=1 << 30, causal=[True]), dict(causal=[True]), lambda q, k: k <= q),
    "not causal by sequence": Mask(dict(right=3, causal=[False]), dict(causal=[False], window_size=(-1, 3)),
        lambda q, k: k <= q + 3,
    ),
    "itself": Mask(dict(left=0, right=0), dict(window_size=(0, 0)), lambda q, k: k == q),
}  # fmt: skip
# Masks that may leave a gap, of keys that nobody sees, between those that somebody sees.
GAPS = {
    "prefix, window": Mask(
        dict(left=5, right=0, prefix_lens=[6]), dict(prefix_lens=[6], window_size=(5, -1)),
        lambda q, k: q - 5 <= k <= q or k < 6,
    ),
    "prefix of a tile, window": Mask(
        dict(left=2, right=0, prefix_lens=[4]), dict(prefix_lens=[4], window_size=(2, -1)),
        lambda q, k: q - 2 <= k <= q or k < 4,
    ),
    "prefix of one, chunk": Mask(
        dict(left=6, right=0, chunk=7, prefix_lens=[1]), dict(prefix_lens=[1], chunk=7),
        lambda q, k: q // 7 * 7 <= k <= q or k < 1,
    ),
    "prefix, spans beyond a window": Mask(
        dict(left=3, right=0, prefix_lens=[3], spans=[SPANS], **COUNT),
        dict(spans=[SPANS], prefix_lens=[3], window_size=(3, -1)),
        lambda q, k: q - 3 <= k <= q or k < 3 or together(q, k),
    ),
    "no prefix, window": Mask(
        dict(left=5, right=0, prefix_lens=[0]), dict(prefix_lens=[0], window_size=(5, -1)), lambda q, k: q - 5 <= k <= q
    ),
    "long prefix, window both ways": Mask(
        dict(left=2, right=2, prefix_lens=[67]), dict(prefix_lens=[67], window_size=(2, 2), causal=False),
        lambda q, k: q - 2 <= k <= q + 2 or k < 67,
    ),
}  # fmt: skip
# (queries, keys): ends of tiles and of blocks, one before and one behind, with and without keys before the queries.
LENGTHS = [(q, q + context) for q in (1, 3, 4, 5, 8, 11) for context in (0, 1, 3, 4, 5, 12, 31)]


class Shape(NamedTuple):
    """What these helpers ask of a kernel's shape."""

    TILE: int
    APART: bool


def tensors(values: dict[str, Any], seqs: int, device: str) -> dict[str, Any]:
    """Lists are tensors, alike for all sequences."""
    dtypes = {bool: torch.bool, int: torch.int32, list: torch.int32}
    as_tensor = lambda x: torch.tensor(x * seqs, dtype=dtypes[type(x[0])], device=device)  # noqa: E731
    return {name: as_tensor(x) if isinstance(x, list) else x for name, x in values.items()}


@triton.jit
def ask_kernel(out, query_len, seq_len, first, mods, TOKENS: tl.constexpr, S: tl.constexpr):
    span = visible_range(Block(0, 0, query_len, seq_len, first), mods, TOKENS)
    tl.store(out, span.lo)
    tl.store(out + 1, span.hi)
    tl.store(out + 2, span.full_lo)
    tl.store(out + 3, span.full_hi)
    tl.store(out + 4, first_tile(0, None, seq_len - query_len, mods, S))


@pytest.mark.parametrize("name", MASKS)
def test_bounds_of_a_block_are_those_of_its_mask(name: str, device: str) -> None:
    mask, out = MASKS[name], torch.zeros(5, dtype=torch.int32, device=device)
    for queries, keys in LENGTHS:
        context = keys - queries
        seen = [[k for k in range(keys) if mask.sees(context + q, k)] for q in range(queries)]
        for first in range(0, queries, BLOCK_Q):
            rows = seen[first : first + BLOCK_Q]
            mods = Modifiers(**tensors(mask.mods, 1, device))
            ask_kernel[(1,)](out, queries, keys, first, mods, BLOCK_Q, Shape(TILE, False))
            lo, hi, full_lo, full_hi, tile = out.tolist()
            where = f"{queries} queries, {keys} keys, block at {first}"
            assert lo == min(row[0] for row in rows), f"lo: {where}"
            assert hi == max(row[-1] for row in rows) + 1, f"hi: {where}"
            assert full_lo == max(row[0] for row in rows), f"full_lo: {where}"
            assert full_hi == min(row[-1] for row in rows) + 1, f"full_hi: {where}"
            assert tile == seen[0][0] // TILE, f"first_tile: {where}"


@triton.jit
def hide_kernel(out, query_len, seq_len, first, mods, TILES: tl.constexpr, TOKENS: tl.constexpr, S: tl.constexpr):
    span = visible_range(Block(0, 0, query_len, seq_len, first), mods, TOKENS)
    prefix = None if mods.prefix_lens is None or mods.left is None else span.prefix
    source = Source(None, 0, span.lo, seq_len, 1.0, None, prefix)
    for tile in range(TILES):
        tl.store(out + tile, may_hide(tile * S.TILE, source, span, S).to(tl.int32))


@pytest.mark.parametrize("name", MASKS | GAPS)
def test_a_tile_is_masked_where_it_hides_a_key_from_a_row_and_nowhere_else(name: str, device: str) -> None:
    mask, tiles = (MASKS | GAPS)[name], 12
    out = torch.zeros(tiles, dtype=torch.int32, device=device)
    for queries, keys in LENGTHS:
        context = keys - queries
        for first in range(0, queries, BLOCK_Q):
            mods = Modifiers(**tensors(mask.mods, 1, device))
            hide_kernel[(1,)](out, queries, keys, first, mods, tiles, BLOCK_Q, Shape(TILE, False))
            rows = range(context + first, context + min(first + BLOCK_Q, queries))
            for tile in range(-(-keys // TILE)):
                of_tile = range(tile * TILE, (tile + 1) * TILE)
                whole = all(k < keys and mask.sees(q, k) for k in of_tile for q in rows)
                assert bool(out[tile]) == (not whole), f"{queries} queries, {keys} keys, block at {first}, tile {tile}"


@triton.jit
def counted(score, query_pos, key_pos, head, count):
    tl.atomic_add(count, 1)
    return score


# lengths of several tiles of up to 64 keys, both ends beside their borders
CALLS = {
    "prefills": ((70, 33, 16, 1), (200, 33, 145, 129)),
    "decodes": ((1, 1, 1), (64, 65, 300)),
    "decode and long": ((1, 5), (257, 320)),
}


@pytest.mark.skipif(not backend.INTERPRET, reason="counts what the portable kernels visit; a GPU may have others")
@pytest.mark.parametrize("lengths", CALLS)
@pytest.mark.parametrize("name", MASKS | GAPS)
def test_a_call_visits_the_tiles_that_its_mask_shows_and_no_other(name: str, lengths: str, device: str) -> None:
    mask, (queries, keys) = (MASKS | GAPS)[name], CALLS[lengths]
    inputs = build(Case(name, queries, keys, heads=2, kv_heads=1, head_dim=16), device)
    inputs |= tensors(mask.call, len(queries), device)
    count = torch.zeros(1, dtype=torch.int32, device=device)
    inputs |= dict(score_mod=counted, score_mod_args=(count,))
    paged_attn.paged_attention(**inputs)
    assert int(count) == sum(visited(mask, x, queries, keys) for x in plan.plan(problem_of(inputs)).launches)


def visited(mask: Mask, launch: Any, queries: tuple[int, ...], keys: tuple[int, ...]) -> int:
    """Tiles with a key that a row of a block sees, of all blocks that a launch serves."""
    found, shape = 0, launch.shape
    for query_len, seq_len in zip(queries, keys):
        if not launch.shortest <= query_len <= launch.longest:
            continue
        for first in range(0, query_len, shape.BLOCK_Q):
            block = range(first, min(first + shape.BLOCK_Q, query_len))
            seen = [k for k in range(seq_len) if any(mask.sees(seq_len - query_len + q, k) for q in block)]
            found += len({k // shape.TILE for k in seen})
    return found * shape.KV_HEADS
