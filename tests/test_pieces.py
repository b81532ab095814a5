"""Into how many pieces the device cuts long blocks: by hand, as the host says that it does, and within bounds."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl

from paged_attn import cuts
from paged_attn.hopper import plan as hopper
from paged_attn.hopper.pieces import piece_size
from paged_attn.hopper.plan import LEAST, PIECES
from paged_attn.kernels.args import Batch, Modifiers
from paged_attn.plan import Launch
from tests.test_hopper_plan import CALL

TILE, TOKENS, HEADS, PROGRAMS = 128, 32, 8, 132


class Shape(NamedTuple):
    """What these helpers ask of a kernel's shape."""

    TILE: int = TILE
    BLOCK_Q: int = TOKENS
    KV_HEADS: int = HEADS
    SCAN: int = 32
    APART: bool = False


@triton.jit
def ask_kernel(size, batch, num_programs, mods, PIECES: tl.constexpr, S: tl.constexpr):
    tiles, uncut = piece_size(batch, tl.arange(0, S.SCAN), num_programs, mods, PIECES, S)
    tl.store(size, tiles)
    tl.store(size + 1, uncut)


def asked(lengths: list[tuple[int, int]], device: str) -> tuple[int, int]:
    """(tiles of a piece, blocks before those cut) for sequences of (query_len, seq_len), as the device says."""
    starts = torch.tensor([0, *(q for q, _ in lengths)], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    lens = torch.tensor([k for _, k in lengths], dtype=torch.int32, device=device)
    size = torch.zeros(2, dtype=torch.int32, device=device)
    batch = Batch(starts, lens, lens, 0, len(lengths), int(starts[-1]), 0, 1 << 30, LEAST, 0)
    ask_kernel[(1,)](size, batch, PROGRAMS, Modifiers(), PIECES, Shape())
    return int(size[0]), int(size[1])


def launch_of(lengths: list[tuple[int, int]]) -> Launch:
    """What the planner would ask the device about them, if it were to choose a counter and cut."""
    longest, keys = (max(x) for x in zip(*lengths))
    call = CALL._replace(tokens=sum(q for q, _ in lengths), seqs=len(lengths), max_seqlen_q=longest, max_seqlen_k=keys)
    launch = hopper.many(call, 0, False)
    return launch._replace(shape=launch.shape._replace(SPLIT=True), programs=PROGRAMS)


BY_HAND = {
    "two rounds of 128 blocks": ([(64, 8192)] * 16, (64, 0)),
    "32 blocks for 132 programs, in four": ([(64, 8192)] * 2, (16, 0)),
    "64 blocks, in two": ([(256, 16384)], (64, 0)),
    "128 blocks": ([(512, 16384)], (128, 0)),
    "a quarter of the programs would idle, but a piece costs more": ([(64, 8192)] * 6, (64, 0)),
    "short ones": ([(64, 512)] * 2, (4, 0)),
    "one long among short ones, in fifteen": ([(64, 131072)] + [(64, 512)] * 15, (69, 0)),
    "8 blocks, a piece for each program": ([(16, 16384)], (8, 0)),
    "8 long ones": ([(16, 131072)], (64, 0)),
    "192 blocks: 128 whole, 64 in two": ([(64, 4096)] * 12, (16, 16)),
    "192 short blocks, whose pieces would cost more than half a round": ([(64, 2000)] * 12, (16, 0)),
    "272 blocks: 264 whole, 8 in two": ([(64, 8192)] * 17, (33, 33)),
    "nobody asks": ([(0, 5000), (0, 0)], (1, 0)),
}


def told(lengths: list[tuple[int, int]]) -> tuple[int, int]:
    """`asked`, as the host says it."""
    launch = launch_of(lengths)
    batch = cuts.Batch([q for q, _ in lengths], [k for _, k in lengths], -1, 0)
    size, uncut = cuts.piece_size(list(cuts.blocks_of(launch, batch)), launch)
    # plan.many has so many states for each program
    assert cuts.cut(launch, batch).pieces * HEADS <= 2 * PIECES * PROGRAMS
    return size, uncut


@pytest.mark.parametrize("name", BY_HAND)
def test_blocks_are_cut_where_programs_would_wait_for_them(name: str, device: str) -> None:
    lengths, chosen = BY_HAND[name]
    assert asked(lengths, device) == told(lengths) == chosen


@pytest.mark.parametrize("seed", range(12))
def test_the_device_chooses_as_the_host_says_and_scratch_holds_what_it_chooses(seed: int, device: str) -> None:
    rng = random.Random(seed)
    lengths = []
    for _ in range(rng.randint(1, rng.choice([1, 3, 40]))):
        query_len = round(2048 ** rng.random())
        lengths.append((query_len, query_len + round(131072 ** rng.random())))
    assert asked(lengths, device) == told(lengths)


@pytest.mark.parametrize("seed", range(12))
def test_what_is_left_of_whole_rounds_is_cut(seed: int, device: str) -> None:
    """Blocks about as long, a few more than there are programs."""
    rng = random.Random(seed)
    blocks = PROGRAMS // HEADS + rng.randint(1, 5)
    lengths = [(TOKENS, rng.randint(12500, 13000)) for _ in range(blocks)]
    size, uncut = told(lengths)
    assert asked(lengths, device) == (size, uncut)
    assert uncut == PROGRAMS // HEADS
    assert size < 12500 // TILE
    kept = cuts.cut(launch_of(lengths), cuts.Batch([q for q, _ in lengths], [k for _, k in lengths], -1, 0))
    assert kept.cut == blocks - uncut
