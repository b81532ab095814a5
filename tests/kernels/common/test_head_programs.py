"""Programs of KV heads whose heads have windows of their own: in proportion to what these see, none with much more."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl

import paged_attn
from paged_attn.kernels.common.head_programs import programs_by_work, share_by_work, units_of_heads
from paged_attn.kernels.common.records import Batch, Modifiers
from paged_attn.launching import backend
from paged_attn.planning import plan
from tests.cases import Case, build, problem_of


@triton.jit
def counted_by_program(score, query_pos, key_pos, head, counts):
    tl.atomic_add(counts + tl.program_id(0), 1)
    return score


@pytest.mark.skipif(not backend.INTERPRET, reason="a GPU may have other kernels, whose programs are others")
@pytest.mark.parametrize("invariant", [False, True])
def test_programs_share_evenly_what_all_heads_see(invariant: bool, device: str, cut: Callable[..., None]) -> None:
    """A KV head of streaming heads has fewer programs than a full one, and none of them has much more to do."""
    cut(4)
    case = Case("even", (1,) * 4, (900, 33, 700, 330), heads=4, kv_heads=2, head_dim=16, batch_invariant=invariant)
    windows = torch.tensor([[-1, -1], [9, -1], [200, -1], [9, -1]], dtype=torch.int32, device=device)
    inputs = build(case, device) | dict(window_size=windows)
    counts = torch.zeros(64, dtype=torch.int32, device=device)
    paged_attn.paged_attention(**inputs, score_mod=counted_by_program, score_mod_args=(counts,))
    (launch,) = plan.plan(problem_of(inputs)).launches
    assert launch.shape.SPLIT
    of_programs = counts[: 2 * launch.programs].tolist()
    tile = launch.shape.TILE
    ends = [-(-n // tile) for n in case.seq_lens]
    wanted = [sum(ends), sum(end - max(0, n - 201) // tile for end, n in zip(ends, case.seq_lens))]
    assert sum(of_programs) == sum(wanted)
    if not invariant:  # whose pieces are whole
        assert wanted == [64, 24]
        # 23 programs for 64 of the tiles and 9 for 24
        assert sorted(of_programs) == [2] * 8 + [3] * 24


@triton.jit
def share_kernel(out, seq_lens, windows, num_seqs, HEADS: tl.constexpr, LANES: tl.constexpr, S: tl.constexpr):
    """Of sequences of one query token, and windows of KV heads that have one head each."""
    batch = Batch(None, seq_lens, None, 0, num_seqs, num_seqs, 0, 1 << 30, 1, 2)
    head = tl.arange(0, HEADS)
    lane, mods = tl.arange(0, LANES), Modifiers(left=1 << 30, head_windows=windows)
    units = units_of_heads(batch, 0, head, lane, mods, S)
    found = share_by_work(programs_by_work(batch, units, head, lane, mods, S), head, S)
    for i in tl.static_range(4):
        tl.store(out + 4 * tl.program_id(0) + i, found[i])


class Heads(NamedTuple):
    """What these helpers ask of a kernel's shape."""

    KV_HEADS: int
    GROUP: int = 1
    BLOCK_Q: int = 1
    TILE: int = 1
    APART: bool = False


@pytest.mark.parametrize("lanes", [1, 4, 64])
@pytest.mark.parametrize("programs, units", [
    (4, [7]),
    (8, [64, 34]),
    (132, [32768] * 4 + [4096] * 4),
    (132, [4096, 32768] * 4),
    (132, [17] * 8),
    (16, [5, 5, 5]),
    (132, [2_000_000] + [1] * 6),
    (7, [1, 2, 3, 4, 5, 6, 7]),
    (9, [100, 1, 1, 1, 1, 1, 1, 1]),
    (264, [3000] * 3 + [70] * 29),
    (132, [1 + 37 * i % 101 for i in range(40)]),
    (132, list(range(1, 129))),
])  # fmt: skip
def test_kv_heads_have_programs_by_what_they_see(programs: int, units: list[int], lanes: int, device: str) -> None:
    """Three sequences, of all keys that the widest window sees and of a few."""
    heads, seq_lens = len(units), [max(units), 1, 5]
    out = torch.full((programs, 4), -1, dtype=torch.int32, device=device)
    windows = torch.tensor([[n - 1, -1] for n in units], dtype=torch.int32, device=device)
    lens = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    share_kernel[(programs,)](out, lens, windows, 3, 1 << (heads - 1).bit_length(), lanes, Heads(heads))
    seen = [sum(min(n, length) for length in seq_lens) for n in units]
    step, wanted = -(-(heads + 1) // lanes), [1] * heads
    for i in range(lanes + 1):  # so many equal shares, of which each KV head's last may be cut
        equal = max(0, programs - i * step)
        wanted = [max(1, math.ceil(Fraction(n * equal, sum(seen)) - Fraction(1, 1000))) for n in seen]
        if sum(wanted) <= programs:
            break
    shares = [
        (Fraction(i + 1, wanted[kv_head]), kv_head, i) for kv_head in range(heads) for i in range(wanted[kv_head])
    ]
    expected = [[i, kv_head, wanted[kv_head], sum(wanted[:kv_head])] for _, kv_head, i in sorted(shares)]
    spare = programs - len(expected)
    # behind the last share of the last KV head, where nothing is
    expected += [[wanted[-1], heads - 1, wanted[-1], sum(wanted[:-1])]] * spare
    assert out.tolist() == expected
    assert spare < heads + step
    if len({*units}) == 1:
        assert {*wanted} == {programs // heads} or lanes < heads, "as many as without windows of their own"


def test_kv_heads_have_a_program_each_of_a_batch_that_is_not_served(device: str) -> None:
    out = torch.full((9, 4), -1, dtype=torch.int32, device=device)
    windows, lens = (
        torch.zeros(3, 2, dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
    )
    share_kernel[(9,)](out, lens, windows, 0, 4, 4, Heads(3))
    assert out.tolist() == [[0, 0, 1, 0], [0, 1, 1, 1], [0, 2, 1, 2], *[[1, 2, 1, 2]] * 6]
