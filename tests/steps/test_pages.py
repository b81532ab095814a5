"""The free list: nothing is handed out twice, and every misuse is an exact error that changes nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_attn.serving.pages import OutOfPages, Pages


def test_pages_are_handed_out_once_each() -> None:
    pages = Pages(5)
    assert sorted(pages.take(2) + pages.take(3)) == [0, 1, 2, 3, 4]
    assert (pages.free, pages.used) == (0, 5)


def test_taking_more_than_is_free_takes_none() -> None:
    pages = Pages(4)
    pages.take(3)
    with pytest.raises(OutOfPages, match="2 pages wanted, 1 of 4 are free"):
        pages.take(2)
    assert pages.free == 1


@pytest.mark.parametrize(
    ("given_back", "message"),
    [
        ([0, 3], "page 3 is free already"),
        ([0, 4], "page 4 is outside the cache of 4 pages"),
        ([0, -1], "page -1 is outside the cache of 4 pages"),
        ([1, 0, 1], "page 1 is given back twice"),
    ],
)
def test_a_wrong_page_is_named_and_none_is_given_back(given_back: list[int], message: str) -> None:
    pages = Pages(4)
    assert pages.take(3) == [0, 1, 2]
    with pytest.raises(ValueError, match=f"^{message}$"):
        pages.give(given_back)
    assert pages.used == 3


def test_sizes_make_sense() -> None:
    with pytest.raises(ValueError, match="at least 1 page, got 0"):
        Pages(0)
    with pytest.raises(ValueError, match="cannot take -1 pages"):
        Pages(1).take(-1)


@given(st.lists(st.integers(-4, 4), max_size=40))
def test_any_history_keeps_the_count_of_pages(history: list[int]) -> None:
    pages, held = Pages(8), list[int]()
    for change in history:
        if change < 0:
            pages.give(held[change:])
            held = held[:change]
        elif change <= pages.free:
            held += pages.take(change)
        assert len(set(held)) == len(held) == pages.used
        assert pages.used + pages.free == pages.total
