"""Which calls gather their tiles, told by the plan alone: none that nobody has asked for."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from paged_attn.kernels.hopper import words
from paged_attn.kernels.hopper.planning import gathering, plan
from paged_attn.launching.backend import Device
from tests.cases import E4M3, Case, build, problem_of

SMALL = Case(
    "small pages", (1, 100), (700, 900), heads=8, kv_heads=2, head_dim=128, page_size=4, dtype=torch.bfloat16, lse=False
)
WORDS = "pages of other than a multiple of 8 tokens"


def problem(**changes: Any) -> Any:
    """As on a GPU, where operands are of 16 bits."""
    given = build(dataclasses.replace(SMALL, **changes), filled=False)
    return problem_of(given, Device("sm90", 132))._replace(compute=torch.bfloat16)


def test_small_pages_are_portable_by_default() -> None:
    assert plan.uncovered(problem()) == [WORDS]


@pytest.mark.parametrize("page_size", [1, 2, 4, 7, 12, 9])
def test_pages_of_any_size_are_gathered_by_who_asks(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "ASKED", True)
    small = problem(page_size=page_size)
    assert plan.uncovered(small) == []
    for launch in plan.launches(small):
        for part in launch.parts:
            assert part.dialect == "portable" or part.pipe.GATHER
            assert part.dialect == "portable" or not part.pipe.PREFETCH
            assert part.dialect == "portable" or "rows gathered one by one" in words.tiles_of(part)


def test_pages_of_whole_boxes_are_not_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = problem(page_size=16)
    before = plan.launches(whole)
    monkeypatch.setattr(gathering, "ASKED", True)
    assert plan.launches(whole) == before
    assert not any(part.pipe.GATHER for launch in before for part in launch.parts)


@pytest.mark.parametrize(
    "changes", [dict(new=True), dict(cache_dtype=E4M3), dict(batch_invariant=True), dict(layout="x")], ids=str
)
def test_what_cannot_be_gathered_is_portable(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "ASKED", True)
    assert WORDS in plan.uncovered(problem(**changes))
