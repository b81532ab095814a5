"""How a launch cuts a batch, as `explain` tells it: what the schedules do on the device."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from paged_attn.explain import host_schedule
from paged_attn.explain.host_schedule import cut
from paged_attn.kernels.common.records import Batch, Modifiers
from paged_attn.kernels.common.schedule import find_share, share_of, work
from paged_attn.planning import planner
from tests.explain.asked import ask


@triton.jit
def shares_of(shares, begins, sequences, ends, batch, mods, S: tl.constexpr, NUM: tl.constexpr, SEQS: tl.constexpr):
    """Borders of all shares; blocks and tiles of each sequence; the first and the last share of each block."""
    lane = tl.arange(0, S.SCAN)
    before = 0
    ahead = work(batch, lane, lane < batch.num_seqs, mods, S)
    share, _, _ = find_share(batch, ahead, 0, NUM, lane, mods, S)
    for seq in range(SEQS):
        blocks, tiles = work(batch, seq, True, mods, S)
        tl.store(sequences + 2 * seq, blocks)
        tl.store(sequences + 2 * seq + 1, tiles)
        room = tl.maximum(tiles, share.tiles)
        for block in range(blocks):
            first = before + block * room
            last = first + room - 1
            tl.store(ends + 2 * (16 * seq + block), share_of(first, share))
            tl.store(ends + 2 * (16 * seq + block) + 1, share_of(last, share))
        before += blocks * room
    for index in range(NUM):
        own, seq, units = find_share(batch, ahead, index, NUM, lane, mods, S)
        tl.store(shares + 2 * index, own.begin)
        tl.store(shares + 2 * index + 1, own.end)
        tl.store(begins + 3 * index, seq)
        tl.store(begins + 3 * index + 1, units)
        tl.store(begins + 3 * index + 2, own.tiles)


@pytest.mark.parametrize("queries, keys, window, blocks", [
    ("5x1", "7,1000,64,65,3000", (-1, -1), False),
    ("3x1", "5000", (100, -1), False),
    ("1,9,3,1", "700,9,300,64", (-1, -1), False),
    ("1,30,2", "5000,900,2", (70, -1), False),
    ("1", "9", (-1, -1), False),
    ("5x1", "300,256,310,1,290", (-1, -1), True),  # a share each
    ("3x1", "1000,900,950", (-1, -1), True),  # two shares each
    ("14x1", ",".join(["250", "130"] * 7), (-1, -1), True),  # two to a share
    ("2x9", "600", (-1, -1), True),  # of more than one block
    ("3x40", "3000", (-1, -1), True),  # a share each, an eighth larger than even ones
    ("16x1", "1500", (-1, -1), False),  # 72 tiles to a share, where 55 will do
])  # fmt: skip
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("apart", "shard"), [(False, None), (True, None), (False, (1, 2, 40))])
def test_shares_and_pieces_are_those_of_the_device(
    queries: str, keys: str, window: tuple[int, int], blocks: bool, whole: bool, apart: bool,
    shard: tuple[int, int, int] | None, device: str,
) -> None:  # fmt: skip
    """`blocks`: all are about as long, so shares begin with them."""
    asked = ask(queries=queries, keys=keys, window=window, shard=shard, device="sm80:20")
    launch = planner.plan(asked.problem).launches[-1]
    shape = launch.shape._replace(SPLIT=True, APART=apart, ONE_SCAN=True, WHOLE=whole)
    launch = launch._replace(shape=shape, programs=7, least=2)
    done = cut(launch, asked.batch)
    starts = torch.tensor((0, *asked.query_lens), dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    lens = torch.tensor(asked.seq_lens, dtype=torch.int32, device=device)
    seqs = len(lens)
    batch = Batch(starts, lens, None, 0, seqs, 0, launch.shortest, launch.longest, launch.least, 2)
    mods = Modifiers(*(window[0] if window[0] >= 0 else None, 0, *[None] * 6))
    mods = mods._replace(shard_rank=None if shard is None else 16 * shard[0] + 2)
    shares, sequences = (torch.zeros(n, 2, dtype=torch.int32, device=device) for n in (launch.programs, seqs))
    ends = torch.full((16 * seqs, 2), -1, dtype=torch.int32, device=device)
    begins = torch.zeros(launch.programs, 3, dtype=torch.int32, device=device)
    shares_of[(1,)](shares, begins, sequences, ends, batch, mods, launch.shape, launch.programs, seqs)
    sizes = (shares[:, 1] - shares[:, 0]).clamp(min=0)
    assert done.parts == int((sizes > 0).sum())
    assert (done.least, done.most) == (int(sizes[sizes > 0].min()), int(sizes.max()))
    assert done.blocks == int(sequences[:, 0].sum())
    tiles = [x for blocks, tiles in sequences.tolist() for x in [tiles] * blocks]
    assert [block.tiles for block in host_schedule.blocks_of(launch, asked.batch)] == tiles
    pieces = [last - first + 1 for first, last in ends.tolist() if first >= 0]
    assert (done.cut, done.pieces) == (sum(x > 1 for x in pieces), sum(x for x in pieces if x > 1))
    (room,) = {room for _, _, room in begins.tolist()}
    assert shard or not blocks or not whole or room >= max(tiles)
    assert room == 0 or whole
    line = [(seq, max(n, room)) for seq, (count, n) in enumerate(sequences.tolist()) for _ in range(count)]
    for (begin, end), (seq, before, _) in zip(shares.tolist(), begins.tolist(), strict=True):
        if begin < end:
            assert before == sum(n for other, n in line if other < seq)
            assert before <= begin < before + sum(n for other, n in line if other == seq)


def test_a_block_of_its_own_program_visits_the_triangle() -> None:
    """256 queries in blocks of 32 over tiles of 64: 1, 1, 2, 2, 3, 3, 4, 4."""
    asked = ask(queries="256", keys="256", batch=64, device="sm80")
    (launch,) = planner.plan(asked.problem).launches
    done = cut(launch, asked.batch)
    assert (done.schedule, done.blocks, done.tiles, done.least, done.most) == ("blocks", 64 * 8, 64 * 20, 1, 4)


def test_pieces_of_a_fixed_size_are_kept_where_their_block_is_cut() -> None:
    """32768 keys are 32 pieces; 100 keys are one, which is nobody's to cut."""
    asked = ask(queries="2x1", keys="32768,100", batch_invariant=True)
    (launch,) = planner.plan(asked.problem).launches
    done = cut(launch, asked.batch)
    assert (done.blocks, done.cut, done.pieces, done.rows) == (2, 1, 32, 32 * 4)
