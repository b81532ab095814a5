"""Where keys of the cache and new ones share no tile: what holds a position, what a tile holds."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl

from paged_attn.kernels.common.blocking import end_in, gap_before, tile_of, tiles_before

TILE = 4


class Shape(NamedTuple):
    """What these helpers ask of a kernel's shape."""

    TILE: int
    APART: bool


@triton.jit
def ask_kernel(of, before, first, end, context_len, seq_len, tiles, S: tl.constexpr):
    """The tile of every position, the tiles before every end, the first position and the end of every tile."""
    for pos in range(seq_len):
        tl.store(of + pos, tile_of(pos, context_len, S))
        tl.store(before + pos, tiles_before(pos + 1, context_len, S))
    for tile in range(tiles):
        tl.store(first + tile, tile * S.TILE - gap_before(tile, context_len, S))
        tl.store(end + tile, end_in(tile, seq_len, context_len, S))


def asked(context_len: int, seq_len: int, tiles: int, apart: bool, device: str) -> list[list[int]]:
    out = torch.full((4, max(seq_len, tiles)), -1, dtype=torch.int32, device=device)
    ask_kernel[(1,)](*out, context_len, seq_len, tiles, Shape(TILE, apart))
    of, before, first, end = out.tolist()
    return [of[:seq_len], before[:seq_len], first[:tiles], end[:tiles]]


# negative: fewer keys than queries
@pytest.mark.parametrize("context_len", [-3, 0, 1, 3, 4, 5, 8, 11])
@pytest.mark.parametrize("new", [0, 1, 3, 4, 5, 9])
def test_runs_of_the_cache_and_of_new_keys_have_tiles_of_their_own(context_len: int, new: int, device: str) -> None:
    cached = max(context_len, 0)
    runs = [*range(0, cached, TILE), *range(cached, cached + new, TILE)]
    ends = [cached] * len(range(0, cached, TILE)) + [cached + new] * len(range(0, new, TILE))
    of = [tile for tile, (first, end) in enumerate(zip(runs, ends, strict=True)) for _ in range(first, end)[:TILE]]
    got = asked(context_len, cached + new, len(runs), True, device)
    assert got == [of, [tile + 1 for tile in of], runs, ends]


def test_together_a_tile_begins_at_every_multiple_of_its_size(device: str) -> None:
    of, before, first, end = asked(5, 10, 3, False, device)
    assert of == [pos // TILE for pos in range(10)]
    assert before == [pos // TILE + 1 for pos in range(10)]
    assert (first, end) == ([0, 4, 8], [10, 10, 10])
