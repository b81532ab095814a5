"""Into how many pieces the device cuts long blocks: by hand, as the host says that it does, and within bounds."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl

from paged_attn.explain import host_schedule
from paged_attn.explain.host_schedule import cut
from paged_attn.kernels.common.pieces import PIECES_PER_PROGRAM, PieceSizes, piece_size
from paged_attn.kernels.common.records import Batch, Modifiers
from paged_attn.kernels.hopper.planning.block_launches import MIN_TILES_PER_PIECE, blocks_launch
from paged_attn.kernels.hopper.planning.block_tiles import MAX_KEYS_OF_HALF_TILES
from paged_attn.records.plan import Launch
from tests.kernels.hopper.planned import CALL

TILE, TOKENS, HEADS, PROGRAMS = 128, 32, 8, 132


class Shape(NamedTuple):
    """What these helpers ask of a kernel's shape."""

    TILE: int = TILE
    BLOCK_Q: int = TOKENS
    KV_HEADS: int = HEADS
    SCAN: int = 32
    APART: bool = False


@triton.jit
def ask_kernel(size, batch, num_programs, mods, PIECES_PER_PROGRAM: tl.constexpr, S: tl.constexpr, ALIKE: tl.constexpr):
    found = piece_size(batch, tl.arange(0, S.SCAN), num_programs, mods, PIECES_PER_PROGRAM, S, ALIKE)
    tl.store(size, found.size)
    tl.store(size + 1, found.least)
    tl.store(size + 2, found.uncut)
    tl.store(size + 3, found.sharers)
    tl.store(size + 4, found.total)


def asked(lengths: list[tuple[int, int]], device: str, alike: bool = False) -> PieceSizes:
    """How sequences of (query_len, seq_len) are cut, as the device says."""
    starts = torch.tensor([0, *(q for q, _ in lengths)], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    lens = torch.tensor([k for _, k in lengths], dtype=torch.int32, device=device)
    size = torch.zeros(5, dtype=torch.int32, device=device)
    batch = Batch(starts, lens, lens, 0, len(lengths), int(starts[-1]), 0, 1 << 30, MIN_TILES_PER_PIECE, 0)
    ask_kernel[(1,)](size, batch, PROGRAMS, Modifiers(), PIECES_PER_PROGRAM, Shape(), alike)
    return PieceSizes(*size.tolist())


def launch_of(lengths: list[tuple[int, int]]) -> Launch:
    """What the planner would ask the device about them, if it were to choose a counter and cut."""
    longest, keys = (max(x) for x in zip(*lengths))
    keys = max(keys, MAX_KEYS_OF_HALF_TILES + 1)  # for as few it would not
    call = CALL._replace(tokens=sum(q for q, _ in lengths), seqs=len(lengths), max_seqlen_q=longest, max_seqlen_k=keys)
    launch = blocks_launch(call, 0, False)
    return launch._replace(shape=launch.shape._replace(SPLIT=True), programs=PROGRAMS)


BY_HAND = {
    "two rounds of 128 blocks": ([(64, 8192)] * 16, (64, 0)),
    "32 blocks for 132 programs, in four": ([(64, 8192)] * 2, (16, 0)),
    "64 blocks, in two": ([(256, 16384)], (64, 0)),
    "128 blocks": ([(512, 16384)], (128, 0)),
    "a quarter of the programs would idle, but a piece costs more": ([(64, 4096)] * 6, (32, 0)),
    "short ones": ([(64, 512)] * 2, (4, 0)),
    "one long among short ones, in fifteen": ([(64, 131072)] + [(64, 512)] * 15, (69, 0)),
    "8 blocks, a piece for each program": ([(16, 16384)], (8, 0)),
    "8 long ones": ([(16, 131072)], (64, 0)),
    "192 blocks: 128 whole, 64 in two": ([(64, 4096)] * 12, (16, 16)),
    "192 short blocks: 128 whole, 64 in two": ([(64, 2000)] * 12, (8, 16)),
    "192 shorter ones, whose pieces would cost more than half a round": ([(64, 1100)] * 12, (9, 0)),
    "136 blocks: 128 whole, 8 in four; all in three would be 408 pieces, a fourth round": ([(32, 8192)] * 17, (17, 16)),
    "272 blocks: 264 whole, 8 in two": ([(64, 8192)] * 17, (33, 33)),
    "nobody asks": ([(0, 5000), (0, 0)], (1, 0)),
}


def told(lengths: list[tuple[int, int]], alike: bool = False) -> PieceSizes:
    """`asked`, as the host says it."""
    launch = launch_of(lengths)
    launch = launch._replace(pipe=launch.pipe._replace(MIXED=alike))
    batch = host_schedule.KnownBatch([q for q, _ in lengths], [k for _, k in lengths])
    found = host_schedule.piece_size(list(host_schedule.blocks_of(launch, batch)), launch)
    # plan.many has so many states for each program
    assert cut(launch, batch).pieces * HEADS <= 2 * PIECES_PER_PROGRAM * PROGRAMS
    return found


@pytest.mark.parametrize("name", BY_HAND)
def test_blocks_are_cut_where_programs_would_wait_for_them(name: str, device: str) -> None:
    lengths, chosen = BY_HAND[name]
    assert asked(lengths, device) == told(lengths)
    assert (told(lengths).size, told(lengths).uncut) == chosen
    assert not told(lengths).sharers


# Blocks that even shares of a line of all KV heads suit, and how many programs have one.
LINES = {
    "one block each, of any length": (
        [(32, 9000), (20, 9500), (0, 50), (32, 9200), (31, 8000), (17, 9900), (32, 9999), (32, 7000)],
        132,
    ),
    "12 blocks for 132 programs, 11 for each 8 heads": ([(32, 16384)] * 12, 132),
    "10 blocks of pairs, 13 for each 8 heads": ([(64, 16384)] * 5, 130),
}
OTHERS = {
    "pairs of blocks whose keys would not be read together": [(64, 16384)] * 5 + [(64, 12000)],
    "a block for each program": [(32, 16384)] * 16,
    "more blocks than programs": [(32, 16384)] * 24,
    "whole prompts, whose blocks see less and less": [(512, 4096)],
    "short ones": [(32, 2048)] * 12,
}


@pytest.mark.parametrize("name", LINES)
def test_too_few_blocks_are_laid_end_to_end(name: str, device: str) -> None:
    """The shares are as even as whole tiles can be, and every tile is in one of them."""
    lengths, sharers = LINES[name]
    assert asked(lengths, device) == told(lengths)
    chosen = told(lengths)
    assert chosen.sharers == sharers
    assert chosen.total == sum(-(-k // TILE) for q, k in lengths if q) * HEADS * -(-lengths[0][0] // TOKENS)
    done = cut(launch_of(lengths), host_schedule.KnownBatch([q for q, _ in lengths], [k for _, k in lengths]))
    assert (done.schedule, done.parts) == ("line", sharers)
    assert done.least == chosen.total // sharers
    assert done.most <= done.least + 1


@pytest.mark.parametrize("name", OTHERS)
def test_other_blocks_are_not(name: str, device: str) -> None:
    assert asked(OTHERS[name], device) == told(OTHERS[name])
    assert not told(OTHERS[name]).sharers


@pytest.mark.parametrize("seed", range(20))
def test_states_of_a_line_lie_side_by_side_and_apart(seed: int) -> None:
    """The number of a share and that of a block and KV head, added: schedule.part_of_share numbers pieces by it."""
    rng = random.Random(seed)
    tiles = [rng.randint(1, 90) for _ in range(rng.randint(1, PROGRAMS - 1))]
    total, sharers = sum(tiles), rng.randint(1, PROGRAMS)
    seen, unit = [], 0
    for line, count in enumerate(tiles):
        holders = [((at + 1) * sharers - 1) // total for at in range(unit, unit + count)]
        assert all(
            share * total // sharers <= at < (share + 1) * total // sharers for at, share in enumerate(holders, unit)
        )
        if holders[-1] > holders[0] and total >= sharers:
            seen += [line + share for share in range(holders[0], holders[-1] + 1)]
        unit += count
    assert len(set(seen)) == len(seen)
    assert max(seen, default=0) < 2 * PIECES_PER_PROGRAM * PROGRAMS


@pytest.mark.parametrize("seed", range(12))
def test_the_device_chooses_as_the_host_says_and_scratch_holds_what_it_chooses(seed: int, device: str) -> None:
    rng = random.Random(seed)
    lengths = []
    for _ in range(rng.randint(1, rng.choice([1, 3, 40]))):
        query_len = round(2048 ** rng.random())
        lengths.append((query_len, query_len + round(131072 ** rng.random())))
    assert asked(lengths, device) == told(lengths)
    alike = told(lengths, alike=True)
    assert asked(lengths, device, alike=True) == alike
    assert (alike.uncut, alike.sharers) == (0, 0)


@pytest.mark.parametrize("seed", range(12))
def test_what_is_left_of_whole_rounds_is_cut(seed: int, device: str) -> None:
    """Blocks about as long, a few more than there are programs."""
    rng = random.Random(seed)
    blocks = PROGRAMS // HEADS + rng.randint(1, 5)
    lengths = [(TOKENS, rng.randint(12500, 13000)) for _ in range(blocks)]
    size, _, uncut, sharers, _ = told(lengths)
    assert asked(lengths, device) == told(lengths)
    assert uncut == PROGRAMS // HEADS
    assert size < 12500 // TILE
    assert not sharers
    kept = cut(launch_of(lengths), host_schedule.KnownBatch([q for q, _ in lengths], [k for _, k in lengths]))
    assert kept.cut == blocks - uncut
    assert asked(lengths, device, alike=True) == told(lengths, alike=True)
    assert not told(lengths, alike=True).uncut, "in mixed batches"


def test_few_queries_of_mixed_batches_are_cut_by_a_size_of_their_own() -> None:
    """Decodes into as many pieces as there is room for, where no long block is cut."""
    lengths = [(600, 3000)] + [(1, 5000)] * 10 + [(1, 1500)] * 38
    call = CALL._replace(tokens=648, seqs=49, max_seqlen_q=600, max_seqlen_k=5000)
    launch = blocks_launch(call, 0, True)._replace(programs=PROGRAMS)
    batch = host_schedule.KnownBatch([q for q, _ in lengths], [k for _, k in lengths])
    chosen = host_schedule.piece_size(list(host_schedule.blocks_of(launch, batch)), launch)
    assert launch.pipe.MIXED
    assert chosen.size == 40, "as long as the longest"
    assert chosen.least == 20
    done = cut(launch, batch)
    assert (done.cut, done.pieces) == (10, 20)
