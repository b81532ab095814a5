"""Blocks that a share's border cuts: who joins the pieces, and the counters by which the last to arrive is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import paged_attn
from paged_attn.kernels.portable import launches as portable_plan
from paged_attn.launching import scratch
from tests.support.cases import Case, build

CUT = Case("cut", (1, 1, 3), (70, 9, 33), heads=4, kv_heads=2, head_dim=16, dtype=torch.float16, sinks=True)


def test_the_last_piece_joins_as_a_launch_of_its_own_would(
    device: str, cut: Callable[..., None], monkeypatch: Any
) -> None:
    cut(3, tile=16)
    inputs = build(CUT, device)
    merged = paged_attn.paged_attention(**inputs)[0].clone()
    cut(3, tile=16)
    monkeypatch.setattr(portable_plan, "MIN_JOIN_STEPS_WORTH_A_LAUNCH", 0)
    # other maxima on the way, and so other roundings
    torch.testing.assert_close(paged_attn.paged_attention(**inputs)[0], merged, rtol=2**-9, atol=2**-12)


def test_counters_are_zero_after_every_launch(device: str, cut: Callable[..., None]) -> None:
    cut(3, tile=16)
    inputs = build(CUT, device)
    first = paged_attn.paged_attention(**inputs)[0].clone()
    rooms = [room.counters for room in scratch._rooms.values() if room.counters_size]
    assert rooms
    assert not any(counters.any() for counters in rooms)
    assert torch.equal(paged_attn.paged_attention(**inputs)[0], first)


def test_captured_calls_never_share_counters() -> None:
    arena = scratch.Arena(torch.device("cpu"))
    arena.grow(10)
    taken = [arena.take(4) for _ in range(4)]  # the arena holds two of them
    for number, counters in enumerate(taken, 1):
        assert not counters.any()
        counters.fill_(number)
    assert [counters.tolist() for counters in taken] == [[n] * 4 for n in (1, 2, 3, 4)]
    assert arena.low


def test_what_a_second_launch_reads_is_its_own_and_counters_are_the_streams(monkeypatch: Any) -> None:
    monkeypatch.setattr(scratch, "_rooms", {})
    device, need = torch.device("cpu"), scratch.Need(64, 4, two=True)
    first, second = (scratch.take(need, device, 0) for _ in range(2))
    assert first.states_at != second.states_at
    assert (first.states_at, first.states.numel()) == (first.states.data_ptr(), 64)
    assert first.counters_at == second.counters_at != 0
    assert not first.counters.any()
    assert scratch.take(need._replace(two=False), device, 0).states_at not in (first.states_at, second.states_at)


def test_an_arena_that_never_grew_has_no_counters_to_give() -> None:
    assert scratch.Arena(torch.device("cpu")).take(0).numel() == 0


def test_an_arena_that_grows_keeps_what_it_gave_away() -> None:
    arena = scratch.Arena(torch.device("cpu"))
    arena.grow(4)
    first = arena.take(4).fill_(1)
    arena.grow(4)
    assert not arena.take(4).any()
    assert first.data_ptr() == arena.chunks[0].data_ptr()
