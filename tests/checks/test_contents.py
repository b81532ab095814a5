"""The checked mode of paged_attention: what only the device knows, and that it changes nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import paged_attn
from paged_attn.launching.platform import Device
from tests.support.bad_input import Change, Inputs, as_bytes, refuses, value
from tests.support.cases import BAD_PAGE, Case, build, run

# The cache has 12 pages of 8 (9 where the window frees some), the table 7 columns (6 beside new keys), q 8 tokens.
CHECKED = Case("checked", (1, 4, 2, 0), (20, 4, 33, 0), page_size=8, padding=1)
CHECKED_NEW = Case("checked new", (1, 4, 2, 0), (20, 4, 33, 0), page_size=8, padding=1, new=True)
CHECKED_WINDOW = Case("checked window", (1, 4, 2, 0), (20, 4, 33, 0), page_size=8, padding=1, window_size=(8, -1))

CHECKED_SPANS = Case("checked spans", (1, 4, 2, 0), (20, 4, 33, 0), page_size=8, padding=1, spans=1)

CHECKED_HEADS = Case("by head", (1, 4), (20, 4), page_size=8, integers=torch.int64, head_windows=((8, -1), (-1, 0)))


def put(name: str, index: Any, number: int) -> Change:
    def change(inputs: Inputs) -> Inputs:
        changed = inputs[name].clone()
        changed[index] = number
        return {name: changed}

    return change


CHECKED_RAGGED = dataclasses.replace(CHECKED, table="ragged")  # rows of 3, 1, 5 and 0 pages


def put_ragged(part: int, index: int, number: int) -> Change:
    """Into indptr, 0, or indices, 1."""

    def change(inputs: Inputs) -> Inputs:
        changed = [x.clone() for x in inputs["page_table"]]
        changed[part][index] = number
        return {"page_table": tuple(changed)}

    return change


CONTENTS: list[tuple[Case, Change, str]] = [
    (CHECKED, put("cu_seqlens_q", 0, 1), "cu_seqlens_q[0] = 1, but it must be 0"),
    (
        CHECKED,
        put("cu_seqlens_q", 2, 0),
        "cu_seqlens_q[2] = 0 is less than cu_seqlens_q[1] = 1 (sequence 1)",
    ),
    (
        CHECKED,
        put("cu_seqlens_q", 3, 4),
        "cu_seqlens_q[3] = 4 is less than cu_seqlens_q[2] = 5 (sequence 2)",
    ),
    (CHECKED, put("cu_seqlens_q", 4, 9), "cu_seqlens_q[4] = 9, but q has tokens = 8"),
    (CHECKED, value(max_seqlen_q=3), "sequence 1 has 4 query tokens, but max_seqlen_q = 3"),
    (CHECKED, value(max_seqlen_k=32), "seq_lens[2] = 33, but max_seqlen_k = 32"),
    (CHECKED, put("seq_lens", 1, 3), "seq_lens[1] = 3, but sequence 1 has 4 query tokens, which count too"),
    (
        CHECKED,
        put("seq_lens", 0, 57),
        "seq_lens[0] = 57 needs 57 keys in the cache, but page_table[0] holds max_pages = 7 pages of 8",
    ),
    (
        CHECKED_NEW,
        put("seq_lens", 0, 50),
        "seq_lens[0] = 50 needs 49 keys in the cache, but page_table[0] holds max_pages = 6 pages of 8",
    ),
    (
        CHECKED_SPANS,
        put("spans", (1, 0), -2),
        "spans[1, 0] = [-2, -2], but a span begins at 0 or later and ends no earlier, or is [-1, -1]",
    ),
    (
        CHECKED_HEADS,
        put("window_size", (1, 0), -2),
        "window_size[1, 0] = -2, but it must be at least -1 and less than 2^31",
    ),
    (
        CHECKED_HEADS,
        put("window_size", (0, 1), 2**31),
        "window_size[0, 1] = 2147483648, but it must be at least -1 and less than 2^31",
    ),
    (CHECKED, put("page_table", (2, 4), BAD_PAGE), "page_table[2, 4] = 2147483647, but the cache has 12 pages"),
    (CHECKED, put("page_table", (0, 0), 12), "page_table[0, 0] = 12, but the cache has 12 pages"),
    (CHECKED, put("page_table", (1, 0), -1), "page_table[1, 0] = -1, but the cache has 12 pages"),
    (CHECKED, put("seq_lens", 0, 25), "page_table[0, 3] = 2147483647, but the cache has 12 pages"),
    (
        CHECKED_RAGGED,
        put_ragged(0, 0, -1),
        "indptr[0] = -1 and indptr[1] = 3 of page_table must ascend within its 12 indices",
    ),
    (
        CHECKED_RAGGED,
        put_ragged(0, 2, 2),
        "indptr[1] = 3 and indptr[2] = 2 of page_table must ascend within its 12 indices",
    ),
    (
        CHECKED_RAGGED,
        put_ragged(0, 3, 13),
        "indptr[2] = 4 and indptr[3] = 13 of page_table must ascend within its 12 indices",
    ),
    (
        CHECKED_RAGGED,
        put("seq_lens", 0, 25),
        "seq_lens[0] = 25 needs 25 keys in the cache, but row 0 of page_table holds 3 pages of 8",
    ),
    (
        CHECKED_RAGGED,
        put_ragged(1, 5, BAD_PAGE),
        "indices[5] = 2147483647 of page_table (sequence 2, page 1) is no page of the cache, which has 12",
    ),
    (
        CHECKED_RAGGED,
        put_ragged(1, 3, -1),
        "indices[3] = -1 of page_table (sequence 1, page 0) is no page of the cache, which has 12",
    ),
    (CHECKED_WINDOW, put("page_table", (2, 2), BAD_PAGE), "page_table[2, 2] = 2147483647, but the cache has 9 pages"),
]


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize("case, change, text", CONTENTS, ids=[text for *_, text in CONTENTS])
def test_the_checked_call_refuses(case: Case, change: Change, text: str, checked: Inputs, device: str) -> None:
    inputs = build(case, device)
    refuses(paged_attn.paged_attention, inputs | change(inputs) | checked, ValueError, text)


# What the checked call must not mind; `build` puts 2^31 - 1 in table tails and in pages left of every query's window.
FINE: list[Case] = [
    CHECKED,
    CHECKED_NEW,
    CHECKED_WINDOW,
    Case("window of one", (1, 3), (40, 30), page_size=8, window_size=(0, 0)),
    Case("window and new", (1, 3), (40, 30), page_size=8, window_size=(4, -1), new=True),
    Case("context out of the window", (1, 3), (40, 30), page_size=8, window_size=(0, 0), new=True),
    Case("look ahead", (2, 3), (40, 30), page_size=8, window_size=(9, 2), causal=False),
    Case("empty", (1, 0, 2), (0, 0, -7), page_size=8),
    Case("decode", (1, 1), (40, 8), page_size=8, decode_form=True),
    *[dataclasses.replace(CHECKED_WINDOW, name=f"window, {table}", table=table) for table in ("gaps", "views")],
]


@pytest.mark.parametrize("case", FINE, ids=str)
def test_the_checked_call_changes_nothing(case: Case, checked: Inputs, device: str) -> None:
    plain, plain_lse = paged_attn.paged_attention(**build(case, device), check=False)
    out, lse = paged_attn.paged_attention(**build(case, device), **checked)
    assert torch.equal(as_bytes(out), as_bytes(plain))
    assert torch.equal(as_bytes(lse), as_bytes(plain_lse))


@pytest.mark.parametrize("only, kept", [("decode", 0), ("prefill", 1)])
def test_sequences_that_only_leaves_out_are_not_checked(only: str, kept: int, device: str) -> None:
    case = Case("mixed", (1, 3), (20, 30), page_size=8, only=only)
    inputs = build(case, device)
    inputs["page_table"][1 - kept] = BAD_PAGE
    paged_attn.paged_attention(**inputs, check=True)
    inputs["page_table"][kept] = BAD_PAGE
    with pytest.raises(ValueError, match=rf"page_table\[{kept}, 0\]"):
        paged_attn.paged_attention(**inputs, check=True)


@pytest.mark.parametrize("only, lengths, kept", [("prefill", (1, 2), 1), ("decode", (2, 1), 2)])
def test_positions_of_sequences_that_only_leaves_out_are_not_checked_and_others_are_at_their_own_tokens(
    only: str, lengths: tuple[int, int], kept: int, device: str
) -> None:
    """`build` puts 2^31 - 1 where nobody asks.  kept: the first token of the other sequence, which is number 1."""
    case = Case("found", lengths, lengths, positions="tree", only=only, check=True)
    run(case, device)
    inputs = build(case, device)
    inputs["query_positions"][kept] = 7
    with pytest.raises(ValueError, match=rf"query_positions\[{kept}\] = 7 \(sequence 1, query 0\)"):
        paged_attn.paged_attention(**inputs)


@pytest.mark.parametrize("only, left", [("decode", 1), ("prefill", 0)])
def test_lengths_and_bounds_of_sequences_that_only_leaves_out_are_not_checked(
    only: str, left: int, device: str
) -> None:
    case = Case("mixed", (1, 3), (20, 30), page_size=8, only=only, integers=torch.int64)
    for number in (2, 31, 2**40, -(2**40)):  # fewer than queries, above max_seqlen_k, beyond 32 bits
        inputs = build(case, device)
        inputs["seq_lens"][left] = number
        paged_attn.paged_attention(**inputs, max_seqlen_q=3, max_seqlen_k=30, check=True)


@pytest.mark.parametrize(
    "word, interpreted, on",
    [
        ("1", False, True), ("true", False, True), ("ON", True, True), ("0", True, False), ("off", True, False),
        ("", False, False), (None, False, False), ("", True, True), (None, True, True),
    ],
)  # fmt: skip
def test_the_environment_decides_where_check_is_none(
    word: str | None, interpreted: bool, on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paged_attn.calls import checked

    if word is None:
        monkeypatch.delenv("PAGED_ATTN_CHECK", raising=False)
    else:
        monkeypatch.setenv("PAGED_ATTN_CHECK", word)
    monkeypatch.setattr(checked, "INTERPRET", interpreted)
    monkeypatch.setattr(checked, "ALWAYS", checked.asked())
    monkeypatch.setattr(checked, "IN_TORCH", checked.ALWAYS or not checked.said())
    device, cpu = Device("interpreter" if interpreted else "sm90", 2), Device("cpu", 2)
    assert checked.enabled(None, device) is on
    assert checked.enabled(None, cpu) is (on or not word), "in plain torch, unless it is said"
    assert checked.enabled(True, device) is True
    assert checked.enabled(False, cpu) is False


@pytest.mark.parametrize("least", [1, 2])
def test_a_bound_of_queries_that_is_too_small_leaves_rows_but_harms_no_other_sequence(least: int, device: str) -> None:
    """What the docstring says of max_seqlen_q: rows of a longer sequence may be unwritten, and only these."""
    case = Case("bound", (1, 40, 2), (9, 40, 20), page_size=8, heads=8, dtype=torch.float16)
    inputs = build(case, device)
    want, _ = paged_attn.paged_attention(**build(case, device))
    out, _ = paged_attn.paged_attention(**inputs, max_seqlen_q=least)
    served = torch.tensor([0, 41, 42]) if least > 1 else torch.tensor([0])
    torch.testing.assert_close(out[served], want[served], rtol=2e-3, atol=2e-3)
    with pytest.raises(ValueError, match=f"sequence 1 has 40 query tokens, but max_seqlen_q = {least}"):
        paged_attn.paged_attention(**inputs, max_seqlen_q=least, check=True)
