"""Masks cost no more than they show: which tiles are visited, which need no mask, and where a sequence's line begins.

A tile that is visited for nothing, or masked for nothing, changes no result.  So each is counted here against a mask in
plain Python: a mask is a line of MASKS, and whatever bound of it schedule.py forgets fails by its name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl

import paged_attn
from paged_attn.kernels.common.records import Block, Modifiers
from paged_attn.kernels.common.schedule import first_tile, visible_range
from paged_attn.launching import backend
from paged_attn.planning import plan
from tests.cases import Case, build, problem_of

TILE, BLOCK_Q = 4, 4


class Mask(NamedTuple):
    """What kernels are given of a mask, the arguments of a call for it, and what it shows."""

    mods: dict[str, int]
    call: dict[str, Any]
    sees: Callable[[int, int], bool]  # (position of a query, position of a key)


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
    "itself": Mask(dict(left=0, right=0), dict(window_size=(0, 0)), lambda q, k: k == q),
}  # fmt: skip
# (queries, keys): ends of tiles and of blocks, one before and one behind, with and without keys before the queries.
LENGTHS = [(q, q + context) for q in (1, 3, 4, 5, 8, 11) for context in (0, 1, 3, 4, 5, 12, 31)]


class Shape(NamedTuple):
    """What these helpers ask of a kernel's shape."""

    TILE: int
    APART: bool


@triton.jit
def ask_kernel(out, query_len, seq_len, first, mods, TOKENS: tl.constexpr, S: tl.constexpr):
    span = visible_range(Block(0, 0, query_len, seq_len, first), mods, TOKENS)
    tl.store(out, span.lo)
    tl.store(out + 1, span.hi)
    tl.store(out + 2, span.full_lo)
    tl.store(out + 3, span.full_hi)
    tl.store(out + 4, first_tile(seq_len - query_len, mods, S))


@pytest.mark.parametrize("name", MASKS)
def test_bounds_of_a_block_are_those_of_its_mask(name: str, device: str) -> None:
    mask, out = MASKS[name], torch.zeros(5, dtype=torch.int32, device=device)
    for queries, keys in LENGTHS:
        context = keys - queries
        seen = [[k for k in range(keys) if mask.sees(context + q, k)] for q in range(queries)]
        for first in range(0, queries, BLOCK_Q):
            rows = seen[first : first + BLOCK_Q]
            ask_kernel[(1,)](out, queries, keys, first, Modifiers(**mask.mods), BLOCK_Q, Shape(TILE, False))
            lo, hi, full_lo, full_hi, tile = out.tolist()
            where = f"{queries} queries, {keys} keys, block at {first}"
            assert lo == min(row[0] for row in rows), f"lo: {where}"
            assert hi == max(row[-1] for row in rows) + 1, f"hi: {where}"
            assert full_lo == max(row[0] for row in rows), f"full_lo: {where}"
            assert full_hi == min(row[-1] for row in rows) + 1, f"full_hi: {where}"
            assert tile == seen[0][0] // TILE, f"first_tile: {where}"


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
@pytest.mark.parametrize("name", MASKS)
def test_a_call_visits_the_tiles_that_its_mask_shows_and_no_other(name: str, lengths: str, device: str) -> None:
    mask, (queries, keys) = MASKS[name], CALLS[lengths]
    case = Case(name, queries, keys, heads=2, kv_heads=1, head_dim=16, **mask.call)
    inputs = build(case, device)
    count = torch.zeros(1, dtype=torch.int32, device=device)
    inputs |= dict(score_mod=counted, score_mod_args=(count,))
    paged_attn.paged_attention(**inputs)
    assert int(count) == sum(visited(mask, x, queries, keys) for x in plan.plan(problem_of(inputs)).launches)


def visited(mask: Mask, launch: Any, queries: tuple[int, ...], keys: tuple[int, ...]) -> int:
    """Tiles from the first key that a block's rows see to the last, of all blocks that a launch serves."""
    found, shape = 0, launch.shape
    for query_len, seq_len in zip(queries, keys):
        if not launch.shortest <= query_len <= launch.longest:
            continue
        for first in range(0, query_len, shape.BLOCK_Q):
            block = range(first, min(first + shape.BLOCK_Q, query_len))
            seen = [k for k in range(seq_len) if any(mask.sees(seq_len - query_len + q, k) for q in block)]
            found += seen[-1] // shape.TILE - seen[0] // shape.TILE + 1
    return found * shape.KV_HEADS
