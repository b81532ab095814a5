"""Integers at their ends, in both widths: each is what the docstring says, or a checked call finds it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import paged_attn
from paged_attn import reference
from paged_attn.arguments import BY_ROWS, PLACES, WITHIN
from tests.support.cases import BAD_PAGE, Case, build, compare
from tests.support.masks import MASKS

LEAST, MOST = -(2**31), 2**31 - 1
NUMBERS = {
    torch.int32: (0, -1, 3, MOST, LEAST),
    torch.int64: (-1, MOST, LEAST, MOST + 1, LEAST - 1, 2**32 + 3, -(2**32) + 3, 2**63 - 1, -(2**63)),
}
WIDTHS = pytest.mark.parametrize("dtype", NUMBERS, ids=str)
Cut = Callable[..., None]
Index = tuple[int, ...]

LENGTHS: dict[str, Any] = dict(query_lens=(1, 5, 3), seq_lens=(40, 21, 50), heads=2, head_dim=16, page_size=8)
# Each argument's numbers that calls look at in different places, and the cases that have it.
PLACES_OF: dict[str, tuple[dict[str, dict[str, Any]], tuple[Index, ...]]] = {
    "page_table": ({"": {}, "new": dict(new=True), "window": dict(window_size=(9, -1))}, ((0, 0), (1, 2), (0, -1))),
    "indptr": ({"": dict(table="ragged")}, ((0,), (1,), (3,))),
    "indices": ({"": dict(table="gaps")}, ((0,), (4,), (-1,))),
    "seq_lens": (
        {"": {}, "new": dict(new=True), "chunk": dict(chunk=16), "window, alibi": dict(window_size=(9, 3), alibi=True),
         "not causal": dict(causal=False), "prefix": dict(prefix=5), "spans": dict(spans=2)},
        ((0,), (1,), (2,)),
    ),
    "cu_seqlens_q": ({"": {}, "new": dict(new=True)}, ((0,), (1,), (2,), (3,))),
    "prefix_lens": (
        {name: MASKS[name] for name in ("prefix", "prefix, window", "prefix, chunk", "prefix, to the right")}
        | {"new": dict(prefix=5, new=True)},
        ((0,), (1,), (2,)),
    ),
    "spans": (
        {name: MASKS[name] for name in ("spans", "spans beyond a window", "spans in a window", "spans in chunks")},
        ((0, 0, 0), (1, 0, 1), (2, -1, 0)),
    ),
    "window_size": (
        {"": dict(head_windows=((9, -1), (-1, 3)), causal=False), "causal": dict(head_windows=((9, -1), (2, -1)))},
        ((0, 0), (1, 1)),
    ),
    "query_positions": (
        {"window": dict(positions="tree", window_size=(9, -1)), "alibi": dict(positions="slots", alibi=True)},
        ((0,), (3,), (8,)),
    ),
}  # fmt: skip
CALLS = [
    pytest.param(name, LENGTHS | of, index, id=f"{name}{list(index)} {case}")
    for name, (cases, places) in PLACES_OF.items()
    for case, of in cases.items()
    for index in places
]


def finite(inputs: dict[str, Any]) -> dict[str, Any]:
    """The call with numbers and pages in place of those it must not look at, for other integers may lead there."""
    for name, x in inputs.items():
        if isinstance(x, Tensor) and x.is_floating_point():
            inputs[name] = x.nan_to_num(0.5)
        elif name == "page_table":
            ids = x if isinstance(x, Tensor) else x[1]
            ids[ids == BAD_PAGE] = 0
    return inputs


def changed(inputs: dict[str, Any], name: str, index: Index, number: int, dtype: torch.dtype) -> dict[str, Any]:
    """The call with one number of an argument, in this width, in place of its own."""

    def put(x: Tensor) -> Tensor:
        x = x.to(dtype, copy=True)
        x[index] = number
        return x

    if name not in ("indptr", "indices"):
        return inputs | {name: put(inputs[name])}
    starts, ids = inputs["page_table"]
    return inputs | {"page_table": (put(starts), ids) if name == "indptr" else (starts, put(ids))}


@WIDTHS
@pytest.mark.parametrize("name, of, index", CALLS)
def test_a_number_at_its_ends_is_right_or_found(
    name: str, of: dict[str, Any], index: Index, dtype: torch.dtype, device: str, cut: Cut
) -> None:
    for number in NUMBERS[dtype]:
        case = Case(name, **of)
        inputs = changed(finite(build(case, device)), name, index, number, dtype)
        cut(1)
        try:
            out, lse = paged_attn.paged_attention(**inputs, check=True)
        except ValueError as error:
            found(name, number, str(error))
            continue
        compare(case, out, lse, inputs)
        if name not in MOVE_BOUNDS:
            continue
        cut(3)
        inputs["out"].fill_(torch.nan)
        out, lse = paged_attn.paged_attention(**inputs)
        compare(case, out, lse, inputs)


def found(name: str, number: int, text: str) -> None:
    """The error tells a number that is far off."""
    assert number == 3 or str(number) in text, text
    assert name not in CLAMPED, text


CLAMPED = ("prefix_lens",)  # any number means something
MOVE_BOUNDS = ("seq_lens", "prefix_lens", "spans", "window_size")  # and schedules with them


@WIDTHS
def test_a_span_may_end_anywhere_behind_its_begin(dtype: torch.dtype, device: str) -> None:
    case = Case("spans", **LENGTHS, spans=1)
    for number in [x for x in NUMBERS[dtype] if x >= MOST]:
        inputs = build(case, device)
        inputs["spans"] = torch.tensor([[[17, number]], [[number, number]], [[0, 50]]], dtype=dtype, device=device)
        out, lse = paged_attn.paged_attention(**inputs, check=True)
        compare(case, out, lse, inputs)


def test_no_argument_of_integers_is_forgotten() -> None:
    named = {WITHIN.get(x.name, x.name) for x in BY_ROWS if x.dtypes == "integer"}
    assert named | {"page_table", "indptr", "indices", "seq_lens", "cu_seqlens_q"} == {*PLACES_OF}
    assert {"page_table", "seq_lens", "cu_seqlens_q"} < {*PLACES}


@WIDTHS
@pytest.mark.parametrize("index", [0, 2])
def test_a_slot_at_its_ends_is_written_skipped_or_found(index: int, dtype: torch.dtype, device: str) -> None:
    k, v = torch.randn(2, 3, 2, 16, device=device)
    for number in NUMBERS[dtype]:
        slots = torch.tensor([9, 5, 17], dtype=dtype, device=device)
        slots[index] = number
        ours, theirs = torch.zeros(2, 2, 3, 8, 2, 16, device=device)
        if number >= 3 * 8:
            with pytest.raises(ValueError, match=rf"slot_mapping\[{index}\] = {number} "):
                paged_attn.write_kv(k, v, *ours, slots, check=True)
            continue
        paged_attn.write_kv(k, v, *ours, slots, check=True)
        reference.write_kv(k, v, *theirs, slots)
        assert torch.equal(ours, theirs)


# ---- integers of a step --------------------------------------------------------------------------


@WIDTHS
def test_positions_of_lengths_at_their_ends(dtype: torch.dtype, device: str) -> None:
    for number in NUMBERS[dtype]:
        lens = torch.tensor([9, number], dtype=dtype, device=device)
        assert paged_attn.positions(lens).tolist() == [8, max(number, 0) - 1]
        starts = torch.tensor([0, 2, 3], dtype=dtype, device=device)
        assert paged_attn.positions(lens, starts, tokens=4).tolist() == [7, 8, max(number, 0) - 1, -1]


@WIDTHS
@pytest.mark.parametrize("ragged", [False, True])
def test_slots_of_positions_and_pages_at_their_ends(ragged: bool, dtype: torch.dtype, device: str) -> None:
    """No position or page that a sequence has not is a slot of a page of the cache."""
    pages, page_size = 12, 4

    def slots_of(position: int, page: int) -> list[int]:
        ids = torch.tensor([3, 7, page], dtype=dtype, device=device)
        starts = torch.tensor([0, 1, 3], dtype=dtype, device=device)
        table: Any = (starts, ids) if ragged else torch.stack([ids[[0, 0]], ids[1:]])
        at = torch.tensor([2, position], dtype=dtype, device=device)
        return list(paged_attn.slots(table, at, page_size).tolist())

    for number in NUMBERS[dtype]:
        first, second = slots_of(number, 5)
        assert first == 3 * page_size + 2
        assert second == (7 * page_size + number if 0 <= number < 4 else -1)
        _, second = slots_of(5, number)
        if 0 <= number < pages:
            assert second == number * page_size + 1
        else:
            assert second == -1 if number < 0 else second >= pages * page_size


@WIDTHS
def test_pages_needed_by_lengths_at_their_ends(dtype: torch.dtype, device: str) -> None:
    for number in NUMBERS[dtype]:
        want = max(0, -(-number // 16))
        assert paged_attn.pages_needed(torch.tensor([number], dtype=dtype, device=device), 16).tolist() == [want]
        assert paged_attn.pages_needed(number, 16) == want
