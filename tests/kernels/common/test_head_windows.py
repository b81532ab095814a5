"""Windows by head cost what a KV head's own heads see, and not what others do: tiles visited, masked, on the line.

Tiles are counted as in test_visited_tiles.py, and compared with each mask in plain Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl

import paged_attn
from paged_attn.kernels.common.bounds import row_tile, visible_range
from paged_attn.kernels.common.records import Block, Modifiers, Source
from paged_attn.kernels.common.schedule import first_tile
from paged_attn.kernels.portable.tiles import may_hide
from paged_attn.launching import platform
from paged_attn.planning import planner
from tests.kernels.common.test_visited_tiles import BLOCK_Q, CALLS, LENGTHS, TILE, counted, modifiers, tensors
from tests.support.cases import Case, build, problem_of
from tests.support.masks import COUNT, SPANS, blocks_of, together

FAR = 1 << 30
GROUP = 3
# Windows of the heads of two KV heads: a full head beside streaming ones, streaming ones alone, and heads that see to
# both sides.
WINDOWS: dict[str, list[tuple[int, int]]] = {
    "one full": [(5, -1), (-1, -1), (0, -1), (3, -1), (9, -1), (5, -1)],
    "all stream": [(0, -1), (0, -1), (0, -1), (5, -1), (13, -1), (2, -1)],
    "to both sides": [(9, 2), (3, 6), (-1, 0), (0, 0), (5, 9), (4, 1)],
}


class Shape(NamedTuple):
    """What these helpers ask of a kernel's shape."""

    TILE: int
    APART: bool
    GROUP: int


class Beside(NamedTuple):
    """A mask that windows by head meet: what kernels are given, arguments of a call, and what a head sees."""

    mods: dict[str, Any]
    call: dict[str, Any]
    sees: Callable[[int, int, int, int], bool]  # keys before and behind that a head sees, positions of query and key


MASKS = {
    "causal": Beside(dict(right=0), {}, lambda a, b, q, k: q - a <= k <= q),
    "not causal": Beside(dict(right=FAR), dict(causal=False), lambda a, b, q, k: q - a <= k <= q + b),
    "not causal by sequence": Beside(
        dict(right=FAR, causal=[False]), dict(causal=[False]), lambda a, b, q, k: q - a <= k <= q + b
    ),
    "chunk": Beside(dict(right=0, chunk=6), dict(chunk=6), lambda a, b, q, k: max(q - a, q // 6 * 6) <= k <= q),
    "spans": Beside(
        dict(right=0, spans=[SPANS], **COUNT), dict(spans=[SPANS]), lambda a, b, q, k: q - a <= k <= q or together(q, k)
    ),
    "spans in windows": Beside(
        dict(right=0, spans=[SPANS], CLIP_SPANS=True, spans_right=FAR, **COUNT),
        dict(spans=[SPANS], clip_spans=True),
        lambda a, b, q, k: q - a <= k <= q + b and (k <= q or together(q, k)),
    ),
}  # fmt: skip
GAPS = {
    "prefix": Beside(dict(right=0, prefix_lens=[6]), dict(prefix_lens=[6]), lambda a, b, q, k: q - a <= k <= q or k < 6)
}
every = pytest.mark.parametrize("windows", WINDOWS)


def seen_by(mask: Beside, windows: str, kv_head: int, query: int, keys: int) -> list[list[int]]:
    """For each head of a KV head, the keys that a query at a position sees."""
    heads = WINDOWS[windows][kv_head * GROUP :][:GROUP]
    sides = [[FAR if n < 0 else n for n in window] for window in heads]
    return [[k for k in range(keys) if mask.sees(before, behind, query, k)] for before, behind in sides]


def windowed(mask: Beside, windows: str, device: str) -> Modifiers:
    table = torch.tensor(WINDOWS[windows], dtype=torch.int32, device=device)
    to_the_right = tl.constexpr(True) if mask.mods["right"] else None
    return modifiers(mask.mods, device, left=FAR, head_windows=table, BY_HEAD_TO_THE_RIGHT=to_the_right)


def blocks() -> Iterator[tuple[int, int, int, range]]:
    """(queries, keys, a block's first query, positions of its queries)."""
    for queries, keys in LENGTHS:
        for first in range(0, queries, BLOCK_Q):
            context = keys - queries
            yield queries, keys, first, range(context + first, context + min(first + BLOCK_Q, queries))


@triton.jit
def ask_kernel(out, query_len, seq_len, first, kv_head, mods, TOKENS: tl.constexpr, S: tl.constexpr):
    span = visible_range(Block(0, 0, query_len, seq_len, first, kv_head), mods, TOKENS, S)
    tl.store(out, span.lo)
    tl.store(out + 1, span.hi)
    tl.store(out + 2, span.full_lo)
    tl.store(out + 3, span.full_hi)
    tl.store(out + 4, first_tile(0, None, seq_len - query_len, mods, S, kv_head))
    tl.store(out + 5, first_tile(0, None, seq_len - query_len, mods, S))


@every
@pytest.mark.parametrize("name", MASKS)
def test_bounds_of_a_block_are_those_of_the_heads_of_its_kv_head(name: str, windows: str, device: str) -> None:
    mask, out = MASKS[name], torch.zeros(6, dtype=torch.int32, device=device)
    mods = windowed(mask, windows, device)
    for queries, keys, first, block in blocks():
        for kv_head in (0, 1):
            rows = [row for q in block for row in seen_by(mask, windows, kv_head, q, keys)]
            ask_kernel[(1,)](out, queries, keys, first, kv_head, mods, BLOCK_Q, Shape(TILE, False, GROUP))
            lo, hi, full_lo, full_hi, tile, tile_of_all = out.tolist()
            where = f"{queries} queries, {keys} keys, block at {first}, KV head {kv_head}"
            assert lo == min(row[0] for row in rows), f"lo: {where}"
            assert hi == max(row[-1] for row in rows) + 1, f"hi: {where}"
            assert full_lo == max(row[0] for row in rows), f"full_lo: {where}"
            assert full_hi == min(row[-1] for row in rows) + 1, f"full_hi: {where}"
            begin = min(row[0] for row in seen_by(mask, windows, kv_head, keys - queries, keys))
            assert tile == begin // TILE, f"first_tile: {where}"
            assert tile_of_all <= tile, f"first_tile of a line that all KV heads share: {where}"


@triton.jit
def rows_kernel(out, query_len, seq_len, kv_head, mods, TOKENS: tl.constexpr, ROWS: tl.constexpr, S: tl.constexpr):
    row = tl.arange(0, ROWS)
    rows = row_tile(Block(0, 0, query_len, seq_len, 0, kv_head), row, mods, TOKENS, S)
    tl.store(out + row, tl.where(rows.valid, rows.first_key, -1))
    tl.store(out + ROWS + row, rows.last_key)


@every
@pytest.mark.parametrize("name", MASKS)
def test_bounds_of_a_row_are_those_of_its_head(name: str, windows: str, device: str) -> None:
    mask, out = MASKS[name], torch.zeros(2, 16, dtype=torch.int32, device=device)
    mods = windowed(mask, windows, device)
    for queries, keys in LENGTHS:
        for kv_head in (0, 1):
            rows_kernel[(1,)](out, queries, keys, kv_head, mods, BLOCK_Q, 16, Shape(TILE, False, GROUP))
            block = range(keys - queries, keys - queries + min(queries, BLOCK_Q))
            wanted = [(row[0], row[-1]) for q in block for row in seen_by(mask, windows, kv_head, q, keys)]
            got = list(zip(*out.tolist()))
            assert got == wanted + [(-1, -1)] * (16 - len(wanted)), f"{queries} queries, {keys} keys, {kv_head}"


@triton.jit
def hide_kernel(
    out, query_len, seq_len, first, kv_head, mods, TILES: tl.constexpr, TOKENS: tl.constexpr, S: tl.constexpr
):  # fmt: skip
    span = visible_range(Block(0, 0, query_len, seq_len, first, kv_head), mods, TOKENS, S)
    prefix = None if mods.prefix_lens is None else span.prefix
    source = Source(None, 0, span.lo, seq_len, 1.0, None, prefix)
    for tile in range(TILES):
        tl.store(out + tile, may_hide(tile * S.TILE, source, span, S).to(tl.int32))


@every
@pytest.mark.parametrize("name", MASKS | GAPS)
def test_a_tile_is_masked_where_a_head_does_not_see_all_of_it(name: str, windows: str, device: str) -> None:
    mask, tiles = (MASKS | GAPS)[name], 12
    out = torch.zeros(tiles, dtype=torch.int32, device=device)
    mods = windowed(mask, windows, device)
    for queries, keys, first, block in blocks():
        for kv_head in (0, 1):
            hide_kernel[(1,)](out, queries, keys, first, kv_head, mods, tiles, BLOCK_Q, Shape(TILE, False, GROUP))
            rows = [{*row} for q in block for row in seen_by(mask, windows, kv_head, q, keys)]
            for tile in range(-(-keys // TILE)):
                whole = all({*range(tile * TILE, (tile + 1) * TILE)} <= row for row in rows)
                where = f"{queries} queries, {keys} keys, block at {first}, KV head {kv_head}, tile {tile}"
                assert bool(out[tile]) == (not whole), where


@pytest.mark.skipif(not platform.INTERPRET, reason="counts what the portable kernels visit; a GPU may have others")
@every
@pytest.mark.parametrize("lengths", CALLS)
@pytest.mark.parametrize("name", MASKS | GAPS)
def test_a_call_visits_the_tiles_that_a_kv_heads_own_heads_see(
    name: str, lengths: str, windows: str, device: str
) -> None:
    """A KV head of streaming heads alone visits its windows, whatever others see."""
    mask, (queries, keys) = (MASKS | GAPS)[name], CALLS[lengths]
    inputs = build(Case(name, queries, keys, heads=2 * GROUP, kv_heads=2, head_dim=16), device)
    inputs |= tensors(mask.call, len(queries), device)
    count = torch.zeros(1, dtype=torch.int32, device=device)
    inputs |= dict(score_mod=counted, score_mod_args=(count,))
    inputs["window_size"] = torch.tensor(WINDOWS[windows], dtype=torch.int32, device=device)
    paged_attn.paged_attention(**inputs)
    launches = planner.plan(problem_of(inputs)).launches
    assert int(count) == sum(visited(mask, windows, x, queries, keys) for x in launches)


def visited(mask: Beside, windows: str, launch: Any, queries: tuple[int, ...], keys: tuple[int, ...]) -> int:
    """Tiles with a key that a row of a block sees, of all blocks of both KV heads that a launch serves."""
    found, shape = 0, launch.shape
    for positions, seq_len in blocks_of(launch, queries, keys):
        for kv_head in (0, 1):
            rows = [row for q in positions for row in seen_by(mask, windows, kv_head, q, seq_len)]
            found += len({k // shape.TILE for row in rows for k in row})
    return found
