"""Grids of cases: each is counted, and a sample of those that run is the same again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.suites import flash_attention, grids


@grids.grid("kind", ["a", "b"])
@grids.grid("m,n", [(1, 2), (3, 4), (5, 6)])
def made(m: int, n: int, kind: str) -> None:
    if m == 3 and kind == "b":
        pytest.skip()
    torch.random.manual_seed(0)
    raise AssertionError("its work begins")


def reason(test: str, case: dict[str, Any]) -> str | None:
    return "five" if case["m"] == 5 else None


def test_cases_are_counted_by_what_leaves_them_out() -> None:
    assert grids.names_of(made) == ["m", "n", "kind"]
    assert sorted(grids.case_at(made, i) for i in range(grids.size_of(made))) == sorted(
        (m, n, kind) for m, n in ((1, 2), (3, 4), (5, 6)) for kind in "ab"
    )
    count = grids.counted(made, reason)
    assert count == {None: 3, "five": 2, grids.ITSELF: 1}
    *_, last = grids.lines({"made": count}, {"made": 2}, {"dropout"})
    assert last == "left out, but for dropout: 2 of 5 cases (40.00%)"
    assert grids.left_out([count], {"five"}) == (0, 3)


def test_a_sample_has_cases_that_run_and_is_the_same_again() -> None:
    def any_fits(case: dict[str, Any]) -> bool:
        return True

    all_of_them = {(1, 2, "a"), (1, 2, "b"), (3, 4, "a")}
    for count, found in ((2, 2), (3, 3), (9, 3)):
        first, again = (grids.sample([made], count, 5, reason, any_fits)["made"] for _ in range(2))
        assert first == again
        assert len(first) == found
        assert {*first} <= all_of_them
    assert grids.sample([made], 9, 5, reason, lambda case: case["kind"] == "b")["made"] == [(1, 2, "b")]
    assert torch.random.manual_seed(3).initial_seed() == 3  # as it was


def test_a_test_that_never_seeds_torch_cannot_be_asked() -> None:
    with pytest.raises(AssertionError, match="ends before it seeds torch"):
        grids.counted(lambda: None, lambda test, case: None)


def test_less_than_a_twentieth_of_flash_attentions_cases_is_left_out(counted: dict[str, dict[str, Any]]) -> None:
    left, runs = grids.left_out([x for tests in counted.values() for x in tests.values()], flash_attention.ASIDE)
    assert left < 0.05 * (left + runs), f"{left:,} of {left + runs:,} cases"
