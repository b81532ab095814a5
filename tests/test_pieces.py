"""Into how many pieces the device cuts long blocks: by hand, against a model in plain Python, and within bounds."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl

from paged_attn.hopper import pieces
from paged_attn.hopper.pieces import piece_size
from paged_attn.hopper.plan import LEAST, PIECES
from paged_attn.kernels.args import Batch, Modifiers

TILE, TOKENS, HEADS, PROGRAMS = 128, 32, 8, 132


class Shape(NamedTuple):
    """What these helpers ask of a kernel's shape."""

    TILE: int = TILE
    BLOCK_Q: int = TOKENS
    KV_HEADS: int = HEADS
    SCAN: int = 32
    SIDE: bool = False
    APART: bool = False


@triton.jit
def ask_kernel(size, batch, num_programs, mods, PIECES: tl.constexpr, S: tl.constexpr):
    tl.store(size, piece_size(batch, tl.arange(0, S.SCAN), num_programs, mods, PIECES, S))


def asked(lengths: list[tuple[int, int]], device: str) -> int:
    """Tiles of a piece for sequences of (query_len, seq_len), as the device says."""
    starts = torch.tensor([0, *(q for q, _ in lengths)], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    lens = torch.tensor([k for _, k in lengths], dtype=torch.int32, device=device)
    size = torch.zeros(1, dtype=torch.int32, device=device)
    batch = Batch(starts, lens, lens, 0, len(lengths), int(starts[-1]), 0, 1 << 30, LEAST, 0)
    ask_kernel[(1,)](size, batch, PROGRAMS, Modifiers(), PIECES, Shape())
    return int(size)


def work_of(lengths: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """(blocks, tiles of each) of every sequence, all KV heads of a block counted."""
    return [(math.ceil(q / TOKENS) * HEADS, max(1, math.ceil(k / TILE))) for q, k in lengths]


def modelled(lengths: list[tuple[int, int]]) -> tuple[float, dict[int, float]]:
    """(the time of whole blocks, of each size of a piece that is worth a thought), in tiles."""
    work = work_of(lengths)
    total, blocks, most = (
        sum(n * t for n, t in work),
        sum(n for n, _ in work),
        max((t for n, t in work if n), default=1),
    )

    def time(size: int, items: float, cut: float) -> float:
        share = total / PROGRAMS * (1 + cut / size) + size + cut
        return min(math.ceil(items / PROGRAMS) * (size + cut), share)

    least = max(LEAST, math.ceil(total / (PIECES * PROGRAMS)))
    sizes = {max(math.ceil(most / n), least) for n in range(2, pieces.MOST.value + 1)}
    cut = pieces.CUT.value
    return time(most, blocks, 0), {s: time(s, max(blocks, total / s), cut) for s in sizes if s < most}


BY_HAND = {
    "two rounds of 128 blocks": ([(64, 8192)] * 16, 64),
    "32 blocks for 132 programs, in four": ([(64, 8192)] * 2, 16),
    "64 blocks, in two": ([(256, 16384)], 64),
    "128 blocks": ([(512, 16384)], 128),
    "a quarter of the programs would idle, but a piece costs more": ([(64, 8192)] * 6, 64),
    "short ones": ([(64, 512)] * 2, 4),
    "one long among short ones": ([(64, 131072)] + [(64, 512)] * 15, 128),
    "nobody asks": ([(0, 5000), (0, 0)], 1),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_blocks_are_cut_where_programs_would_wait_for_them(name: str, device: str) -> None:
    lengths, size = BY_HAND[name]
    assert asked(lengths, device) == size


@pytest.mark.parametrize("seed", range(12))
def test_the_device_chooses_as_the_model_does_and_scratch_holds_what_it_chooses(seed: int, device: str) -> None:
    rng = random.Random(seed)
    most = rng.choice([1, 3, 40])
    lengths = []
    for _ in range(rng.randint(1, most)):
        query_len = round(2048 ** rng.random())
        lengths.append((query_len, query_len + round(131072 ** rng.random())))
    size = asked(lengths, device)
    whole, cut = modelled(lengths)
    longest = max(tiles for _, tiles in work_of(lengths))
    best = min([whole, *cut.values()])
    chosen = whole if size >= longest else cut[size]
    assert chosen <= best * 1.0001, (size, whole, cut)
    # as `schedule._pieces` rounds; plan.many has so many states for each program
    states = sum(n * p for n, t in work_of(lengths) if (p := max((2 * t + size) // (2 * size), 1)) > 1)
    assert states <= 2 * PIECES * PROGRAMS
