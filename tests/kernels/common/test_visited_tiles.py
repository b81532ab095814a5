"""Masks cost no more than they show: which tiles are visited, which need no mask, and where a sequence's line begins.

A tile that is visited for nothing, or masked for nothing, changes no result.  So each is counted here against a mask in
plain Python: a mask is a line of MASKS, and whatever bound of it bounds.py forgets fails by its name.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl

import paged_attn
from paged_attn.kernels.common.bounds import visible_range
from paged_attn.kernels.common.records import Block, Modifiers, Source
from paged_attn.kernels.common.schedule import first_tile
from paged_attn.kernels.portable.tiles import may_hide
from paged_attn.launching import platform
from paged_attn.planning import planner
from tests.support.cases import Case, build, problem_of
from tests.support.masks import BOUNDS as MASKS
from tests.support.masks import GAPS, Mask, blocks_of

TILE, BLOCK_Q = 4, 4


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


def modifiers(mods: dict[str, Any], device: str, **more: Any) -> Modifiers:
    """What kernels are given of a mask for one sequence."""
    given = {name: tl.constexpr(True) if x is True else x for name, x in mods.items()}
    return Modifiers(**tensors(given, 1, device), **more)


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
            mods = modifiers(mask.mods, device)
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
            mods = modifiers(mask.mods, device)
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


@pytest.mark.skipif(not platform.INTERPRET, reason="counts what the portable kernels visit; a GPU may have others")
@pytest.mark.parametrize("lengths", CALLS)
@pytest.mark.parametrize("name", MASKS | GAPS)
def test_a_call_visits_the_tiles_that_its_mask_shows_and_no_other(name: str, lengths: str, device: str) -> None:
    mask, (queries, keys) = (MASKS | GAPS)[name], CALLS[lengths]
    inputs = build(Case(name, queries, keys, heads=2, kv_heads=1, head_dim=16), device)
    inputs |= tensors(mask.call, len(queries), device)
    count = torch.zeros(1, dtype=torch.int32, device=device)
    inputs |= dict(score_mod=counted, score_mod_args=(count,))
    paged_attn.paged_attention(**inputs)
    assert int(count) == sum(visited(mask, x, queries, keys) for x in planner.plan(problem_of(inputs)).launches)


def visited(mask: Mask, launch: Any, queries: tuple[int, ...], keys: tuple[int, ...]) -> int:
    """Tiles with a key that a row of a block sees, of all blocks that a launch serves."""
    found, shape = 0, launch.shape
    for positions, seq_len in blocks_of(launch, queries, keys):
        found += len({k // shape.TILE for k in range(seq_len) if any(mask.sees(q, k) for q in positions)})
    return found * shape.KV_HEADS
