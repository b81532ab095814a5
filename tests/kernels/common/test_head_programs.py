"""Programs of KV heads whose heads have windows of their own: in proportion to what these see, none with much more."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl

import paged_attn
from paged_attn.kernels.common.head_programs import programs_by_work, share_by_work
from paged_attn.kernels.common.records import Batch, Modifiers
from paged_attn.launching import platform
from paged_attn.planning import planner
from tests.support.cases import Case, build, problem_of


def programs_of(units: list[int], programs: int, step: int = 1) -> list[int]:
    """So many equal shares as whole programs suffice for, less `step` at a time; of a KV head the last may be cut."""
    for equal in (*range(programs, 0, -step), 0):
        found = [max(1, math.ceil(Fraction(n * equal, sum(units)) - Fraction(1, 1000))) for n in units]
        if sum(found) <= programs:
            return found
    raise AssertionError(units)


@triton.jit
def counted_by_program(score, query_pos, key_pos, head, counts):
    tl.atomic_add(counts + tl.program_id(0), 1)
    return score


@pytest.mark.skipif(not platform.INTERPRET, reason="a GPU may have other kernels, whose programs are others")
@pytest.mark.parametrize("seqs", [4, 6])
@pytest.mark.parametrize("invariant", [False, True])
def test_programs_share_evenly_what_heads_see(
    invariant: bool, seqs: int, device: str, cut: Callable[..., None]
) -> None:
    """A KV head of streaming heads has fewer programs than a full one if there are more than a few sequences."""
    cut(4)
    keys = (900, 33, 700, 330, 64, 500)[:seqs]
    case = Case("even", (1,) * seqs, keys, heads=4, kv_heads=2, head_dim=16, batch_invariant=invariant)
    windows = torch.tensor([[-1, -1], [9, -1], [200, -1], [9, -1]], dtype=torch.int32, device=device)
    inputs = build(case, device) | dict(window_size=windows)
    counts = torch.zeros(64, dtype=torch.int32, device=device)
    paged_attn.paged_attention(**inputs, score_mod=counted_by_program, score_mod_args=(counts,))
    (launch,) = planner.plan(problem_of(inputs)).launches
    assert launch.shape.SPLIT
    assert (seqs > 4) == launch.shape.BY_HEAD
    of_programs = counts[: 2 * launch.programs].tolist()
    tile = launch.shape.TILE
    ends = [-(-n // tile) for n in keys]
    seen = [sum(ends), sum(end - max(0, n - 201) // tile for end, n in zip(ends, keys))]
    assert sum(of_programs) == sum(seen)
    if not invariant:  # whose pieces are whole
        of_each = programs_of(seen, 2 * launch.programs) if seqs > 4 else [launch.programs] * 2
        shares = [n // count + (i < n % count) for n, count in zip(seen, of_each) for i in range(count)]
        assert sorted(of_programs) == sorted(shares)


@triton.jit
def share_kernel(out, seq_lens, windows, num_seqs, HEADS: tl.constexpr, LANES: tl.constexpr, S: tl.constexpr):
    """Of sequences of one query token, and windows of KV heads that have one head each."""
    batch = Batch(None, seq_lens, None, 0, num_seqs, num_seqs, 0, 1 << 30, 1, 2)
    head = tl.arange(0, HEADS)
    lane, mods = tl.arange(0, LANES), Modifiers(left=1 << 30, head_windows=windows)
    found = share_by_work(programs_by_work(batch, head, lane, mods, S), head, S)
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
    step = -(-(heads + 1) // lanes)
    wanted = programs_of(seen, programs, step)
    found, left = out[: sum(wanted)].tolist(), out[sum(wanted) :].tolist()
    assert sorted(found) == sorted(
        [i, kv_head, n, sum(wanted[:kv_head])] for kv_head, n in enumerate(wanted) for i in range(n)
    )  # each share is one program's
    ends = [(share + 1) / count for share, _, count, _ in found]
    assert all(before < end + 1e-6 for before, end in itertools.pairwise(ends)), "neighbours end together"
    assert left == [[wanted[0] + i, 0, wanted[0], 0] for i in range(len(left))], "behind the last share of a KV head"
    assert len(left) < heads + step
    if len({*units}) == 1:
        assert {*wanted} == {programs // heads} or lanes < heads, "as many as without windows of their own"


def test_kv_heads_have_a_program_each_of_a_batch_that_is_not_served(device: str) -> None:
    out = torch.full((9, 4), -1, dtype=torch.int32, device=device)
    windows = torch.zeros(3, 2, dtype=torch.int32, device=device)
    lens = torch.zeros(1, dtype=torch.int32, device=device)
    share_kernel[(9,)](out, lens, windows, 0, 4, 4, Heads(3))
    assert out.tolist() == [[0, 0, 1, 0], [0, 1, 1, 1], [0, 2, 1, 2], *[[1 + i, 0, 1, 0] for i in range(6)]]
