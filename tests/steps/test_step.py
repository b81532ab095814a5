"""Pages, positions and slots of a step, beside the loops over host integers that they stand for."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import paged_attn

INTEGERS = pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
PAGE = 4
# Sequences that decode, prefill, go on with a chunk over a page's edge, are empty, and have no query in this step.
QUERY_LENS, SEQ_LENS = (1, 6, 5, 0, 0, 1), (9, 6, 11, 0, 7, 1)


def batch(device: str, dtype: torch.dtype = torch.int32) -> tuple[Tensor, Tensor, Tensor]:
    """(page_table, seq_lens, cu_seqlens_q) of these sequences, whose pages are scattered; table tails are -1."""
    pages = random.Random(0).sample(range(100), 6 * 3)
    rows = [pages[3 * i : 3 * i + paged_attn.pages_needed(n, PAGE)] for i, n in enumerate(SEQ_LENS)]
    table = torch.tensor([row + [-1] * (3 - len(row)) for row in rows], dtype=dtype, device=device)
    starts = torch.tensor((0, *QUERY_LENS), device=device).cumsum(0).to(dtype)
    return table, torch.tensor(SEQ_LENS, dtype=dtype, device=device), starts


def by_loop(table: Tensor) -> tuple[list[int], list[int]]:
    """(positions, slots) of every token, by the definitions."""
    places = [(s, p) for s, (q, n) in enumerate(zip(QUERY_LENS, SEQ_LENS)) for p in range(n - q, n)]
    rows = table.tolist()
    return [p for _, p in places], [rows[s][p // PAGE] * PAGE + p % PAGE for s, p in places]


def ragged(table: Tensor) -> tuple[Tensor, Tensor]:
    """The same pages as (indptr, indices)."""
    indptr = (table >= 0).sum(1).cumsum(0)
    return torch.nn.functional.pad(indptr, (1, 0)).to(table.dtype), table[table >= 0]


@INTEGERS
@pytest.mark.parametrize("padding", [0, 3])
def test_positions_and_slots_are_those_of_a_loop_and_padding_has_none(
    dtype: torch.dtype, padding: int, device: str
) -> None:
    table, lens, starts = batch(device, dtype)
    wanted, wanted_slots = by_loop(table)
    places = paged_attn.positions(lens, starts, tokens=len(wanted) + padding)
    assert places.dtype == torch.int64
    assert places.tolist() == wanted + [-1] * padding
    slots = paged_attn.slots(table, places, PAGE, starts)
    assert slots.dtype == torch.int64
    assert slots.tolist() == wanted_slots + [-1] * padding
    assert paged_attn.slots(ragged(table), places, PAGE, starts).tolist() == slots.tolist()


@INTEGERS
def test_of_decodes_positions_are_the_last_and_empty_sequences_have_none(dtype: torch.dtype, device: str) -> None:
    table, lens, _ = batch(device, dtype)
    places = paged_attn.positions(lens)
    assert places.tolist() == [n - 1 for n in SEQ_LENS]
    rows = table.tolist()
    wanted = [rows[s][(n - 1) // PAGE] * PAGE + (n - 1) % PAGE if n else -1 for s, n in enumerate(SEQ_LENS)]
    assert paged_attn.slots(table, places, PAGE).tolist() == wanted
    assert paged_attn.slots(ragged(table), places, PAGE).tolist() == wanted


def test_a_negative_length_is_an_empty_sequence(device: str) -> None:
    assert paged_attn.positions(torch.tensor([-3, 2], device=device)).tolist() == [-1, 1]
    lens, starts = torch.tensor([-3, 2], device=device), torch.tensor([0, 1, 3], device=device)
    assert paged_attn.positions(lens, starts, tokens=3).tolist() == [-1, 0, 1]


def test_positions_without_a_page_have_no_slot(device: str) -> None:
    """Past the last column, or of a negative entry: a token is left out rather than written into another's page."""
    table = torch.tensor([[7, -1]], dtype=torch.int32, device=device)
    places = torch.tensor([3, 4, 7, 8, 1000], device=device)
    starts = torch.tensor([0, 5], device=device)
    assert paged_attn.slots(table, places, PAGE, starts).tolist() == [31, -1, -1, -1, -1]
    # Of a ragged table neither the next row's pages nor those behind a list that ends early.
    places, starts = torch.tensor([3, 4, 0, 4, 8], device=device), torch.tensor([0, 2, 5], device=device)
    for indptr in ([0, 1, 4], [5, 6, 9]):
        table = torch.tensor([8] * indptr[0] + [7, 3, -1], device=device)
        got = paged_attn.slots((torch.tensor(indptr, device=device), table), places, PAGE, starts)
        assert got.tolist() == [31, -1, 12, -1, -1]


def test_ragged_tables_may_have_any_strides(device: str) -> None:
    indptr, indices = ragged(batch(device)[0])
    apart = torch.stack([indptr, indptr], 1)[:, 0], torch.stack([indices, indices], 1)[:, 0]
    places = paged_attn.positions(batch(device)[1])
    wanted = paged_attn.slots((indptr, indices), places, PAGE)
    assert torch.equal(paged_attn.slots(apart, places, PAGE), wanted)
    padded = paged_attn.pad_batch(apart, batch(device)[1])
    assert torch.equal(paged_attn.slots(padded[0], places, PAGE), wanted)


def test_slots_of_pages_beyond_2_31_tokens_do_not_overflow(device: str) -> None:
    table = torch.tensor([[2**31 - 1]], dtype=torch.int32, device=device)
    place, indptr = torch.tensor([5], device=device), torch.tensor([0, 1], dtype=torch.int32, device=device)
    assert paged_attn.slots(table, place, 16).tolist() == [(2**31 - 1) * 16 + 5]
    assert paged_attn.slots((indptr, table[0]), place, 16).tolist() == [(2**31 - 1) * 16 + 5]


@pytest.mark.parametrize("seqs, max_pages", [(0, 3), (2, 0)])
def test_no_sequences_and_no_pages_are_padding(seqs: int, max_pages: int, device: str) -> None:
    table = torch.zeros(seqs, max_pages, dtype=torch.int32, device=device)
    lens, starts = torch.zeros(seqs, dtype=torch.int32, device=device), torch.zeros(seqs + 1, dtype=torch.int32)
    starts = starts.to(device)
    places = paged_attn.positions(lens, starts, tokens=2)
    assert places.tolist() == [-1, -1]
    assert paged_attn.slots(table, places, 16, starts).tolist() == [-1, -1]
    assert paged_attn.slots((starts, table.flatten()), places, 16, starts).tolist() == [-1, -1]


@pytest.mark.parametrize("length, pages", [(-5, 0), (0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_the_last_page_may_be_filled_in_part(length: int, pages: int) -> None:
    assert paged_attn.pages_needed(length, 16) == pages
    assert paged_attn.pages_needed(torch.tensor([[length]], dtype=torch.int32), 16).tolist() == [[pages]]
    assert paged_attn.pages_needed(torch.tensor([length], dtype=torch.int32), 16).dtype == torch.int32


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64])
def test_pages_are_counted_to_the_end_of_a_dtype(dtype: torch.dtype) -> None:
    most = torch.iinfo(dtype).max
    pages = paged_attn.pages_needed(torch.tensor([most], dtype=dtype), 64)
    assert (pages.dtype, pages.tolist()) == (dtype, [-(-most // 64)])


def test_compiled_they_are_one_graph_for_all_batches(device: str) -> None:
    def both(table: Any, lens: Tensor, starts: Tensor, tokens: int) -> Tensor:
        return paged_attn.slots(table, paged_attn.positions(lens, starts, tokens=tokens), PAGE, starts)

    compiled = torch.compile(both, fullgraph=True, dynamic=True, backend="eager")
    table, lens, starts = batch(device)
    for tokens in (13, 20):
        for pages in (table, ragged(table)):
            assert torch.equal(compiled(pages, lens, starts, tokens), both(pages, lens, starts, tokens))


I32 = torch.zeros(2, dtype=torch.int32)
TABLE = torch.zeros(2, 3, dtype=torch.int32)
REFUSED: list[tuple[Any, str]] = [
    (lambda: paged_attn.pages_needed(3, 0), "page_size must be an int >= 1 and < 2^31, got 0"),
    (
        lambda: paged_attn.positions(I32.float()),
        "seq_lens must be int32 | int64, got float32: seq_lens.to(torch.int32)",
    ),
    (lambda: paged_attn.positions(TABLE), "seq_lens must be [seqs], got [2, 3]"),
    (
        lambda: paged_attn.positions(I32, I32, tokens=3),
        "cu_seqlens_q must be [seqs + 1] with seqs + 1 = 3 from seq_lens, "
        "got [2]: torch.nn.functional.pad(lengths.cumsum(0), (1, 0)), if these are lengths",
    ),
    (
        lambda: paged_attn.positions(I32, TABLE[0]),
        "tokens and cu_seqlens_q must be given together, got cu_seqlens_q without tokens: pass both, or neither",
    ),
    (
        lambda: paged_attn.positions(I32, tokens=2),
        "tokens and cu_seqlens_q must be given together, got tokens without cu_seqlens_q: pass both, or neither",
    ),
    (lambda: paged_attn.positions(I32, TABLE[0], tokens=-1), "tokens must be an int >= 0 and < 2^31, got -1"),
    (lambda: paged_attn.slots(I32, I32, 16), "page_table must be [seqs, max_pages], got [2]: page_table.unsqueeze(0)"),
    (lambda: paged_attn.slots(TABLE, TABLE[0], 16), "positions must be [seqs] with seqs = 2 from page_table, got [3]"),
    (
        lambda: paged_attn.slots((TABLE[0], TABLE[0]), TABLE[0], 16),
        "positions must be [seqs] with seqs = 2 from indptr of page_table, got [3]",
    ),
    (
        lambda: paged_attn.slots((TABLE[0, :0], TABLE[0]), I32, 16),
        "indptr of page_table must be [seqs + 1], got [0]",
    ),
    (
        lambda: paged_attn.slots((TABLE[0], TABLE[0].float()), I32, 16),
        "indices of page_table must be int32 | int64, got float32: indices.to(torch.int32)",
    ),
    (
        lambda: paged_attn.slots((TABLE[0], TABLE), I32, 16),
        "indices of page_table must be [all pages], got [2, 3]",
    ),
    (
        lambda: paged_attn.slots([[1], [2]], I32, 16),  # type: ignore[arg-type]
        "page_table must be a tensor of int32 | int64, got list: pad_batch makes a tensor of rows",
    ),
    (lambda: paged_attn.slots(TABLE, I32, 0), "page_size must be an int >= 1 and < 2^31, got 0"),
    (
        lambda: paged_attn.positions(torch.tensor([9, 9]), torch.tensor([1, 5, 7]), tokens=7),
        "cu_seqlens_q[0] = 1, but it must be 0",
    ),
    (
        lambda: paged_attn.positions(torch.tensor([9, 9]), torch.tensor([0, 5, 7]), tokens=6),
        "cu_seqlens_q[2] = 7, but q has tokens = 6",
    ),
    (
        lambda: paged_attn.positions(torch.tensor([9, 0]), torch.tensor([0, 2, 8]), tokens=8),
        "seq_lens[1] = 0, but sequence 1 has 6 query tokens, which count too",
    ),
    (
        lambda: paged_attn.slots(TABLE, torch.arange(4), 16, torch.tensor([0, 3, 2])),
        "cu_seqlens_q[2] = 2 is less than cu_seqlens_q[1] = 3 (sequence 1)",
    ),
]


@pytest.mark.parametrize("call, message", REFUSED, ids=[message.split(",")[0] for _, message in REFUSED])
def test_what_does_not_fit_is_refused_by_name(call: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        call()
    assert message == str(error.value)
