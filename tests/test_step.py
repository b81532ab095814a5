"""Pages, positions, slots and padding of a step, beside the loops over host integers that they stand for."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import paged_attn
from benchmarks import measure

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


@INTEGERS
def test_of_decodes_positions_are_the_last_and_empty_sequences_have_none(dtype: torch.dtype, device: str) -> None:
    table, lens, _ = batch(device, dtype)
    places = paged_attn.positions(lens)
    assert places.tolist() == [n - 1 for n in SEQ_LENS]
    rows = table.tolist()
    wanted = [rows[s][(n - 1) // PAGE] * PAGE + (n - 1) % PAGE if n else -1 for s, n in enumerate(SEQ_LENS)]
    assert paged_attn.slots(table, places, PAGE).tolist() == wanted


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


def test_slots_of_pages_beyond_2_31_tokens_do_not_overflow(device: str) -> None:
    table = torch.tensor([[2**31 - 1]], dtype=torch.int32, device=device)
    assert paged_attn.slots(table, torch.tensor([5], device=device), 16).tolist() == [(2**31 - 1) * 16 + 5]


@pytest.mark.parametrize("seqs, max_pages", [(0, 3), (2, 0)])
def test_no_sequences_and_no_pages_are_padding(seqs: int, max_pages: int, device: str) -> None:
    table = torch.zeros(seqs, max_pages, dtype=torch.int32, device=device)
    lens, starts = torch.zeros(seqs, dtype=torch.int32, device=device), torch.zeros(seqs + 1, dtype=torch.int32)
    starts = starts.to(device)
    places = paged_attn.positions(lens, starts, tokens=2)
    assert places.tolist() == [-1, -1]
    assert paged_attn.slots(table, places, 16, starts).tolist() == [-1, -1]


@pytest.mark.parametrize("length, pages", [(-5, 0), (0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_the_last_page_may_be_filled_in_part(length: int, pages: int) -> None:
    assert paged_attn.pages_needed(length, 16) == pages
    assert paged_attn.pages_needed(torch.tensor([[length]], dtype=torch.int32), 16).tolist() == [[pages]]
    assert paged_attn.pages_needed(torch.tensor([length], dtype=torch.int32), 16).dtype == torch.int32


def test_a_padded_batch_attends_and_writes_as_the_batch_does(device: str) -> None:
    """Rows of padding are zeros, and no slot of theirs is written."""
    table, lens, starts = batch(device)
    tokens = sum(QUERY_LENS)
    padded = paged_attn.pad_batch(table, lens, starts, seqs=9, max_pages=5)
    assert [list(x.shape) for x in padded if x is not None] == [[9, 5], [9], [10]]
    torch.manual_seed(0)
    q = torch.randn(tokens + 4, 4, 32, device=device)
    k, v = torch.randn(2, tokens + 4, 2, 32, device=device)
    outs, caches = [], []
    for some, rows in (((table, lens, starts), tokens), (padded, tokens + 4)):
        k_cache, v_cache = torch.zeros(2, 100, PAGE, 2, 32, device=device)
        places = paged_attn.positions(some[1], some[2], tokens=rows)
        slots = paged_attn.slots(some[0], places, PAGE, some[2])
        paged_attn.write_kv(k[:rows], v[:rows], k_cache, v_cache, slots, check=True)
        out = paged_attn.paged_attention(q[:rows], k_cache, v_cache, *some)
        assert isinstance(out, Tensor)
        outs.append(out)
        caches.append((k_cache, v_cache))
    torch.testing.assert_close(outs[1][:tokens], outs[0])
    assert outs[1][tokens:].abs().max() == 0
    for one, other in zip(*caches):
        assert torch.equal(one, other)


def test_a_smaller_batch_overwrites_what_a_larger_one_left(device: str) -> None:
    table, lens, starts = batch(device)
    out = paged_attn.pad_batch(table, lens, starts, seqs=8)
    again = paged_attn.pad_batch(table[:2, :2].contiguous(), lens[:2], starts[:3], out=out)
    assert all(a is b for a, b in zip(again, out))
    assert out[1].tolist() == [9, 6, 0, 0, 0, 0, 0, 0]
    assert out[2] is not None
    assert out[2].tolist() == [0, 1, 7, 7, 7, 7, 7, 7, 7]
    assert torch.equal(out[0][:2, :2], table[:2, :2])


def test_lists_become_the_tensors_of_a_batch(device: str) -> None:
    rows = [[3, 1, 4], [], [1]]
    table, lens, starts = paged_attn.pad_batch(rows, (40, 0, 9), [0, 6, 6, 7], seqs=4, max_pages=4, device=device)
    assert starts is not None
    assert {x.dtype for x in (table, lens, starts)} == {torch.int32}
    assert {x.device.type for x in (table, lens, starts)} == {device}
    assert table.tolist() == [[3, 1, 4, 0], [0] * 4, [1, 0, 0, 0], [0] * 4]
    assert (lens.tolist(), starts.tolist()) == ([40, 0, 9, 0], [0, 6, 6, 7, 7])
    again = paged_attn.pad_batch([[7]], [5], [0, 1], out=(table, lens, starts))
    assert again[0] is table
    assert (table[0, 0].item(), lens.tolist(), starts.tolist()) == (7, [5, 0, 0, 0], [0, 1, 1, 1, 1])
    assert [x.tolist() for x in paged_attn.pad_batch([], [], [0], seqs=2, max_pages=1)] == [[[0], [0]], [0, 0], [0] * 3]


def test_decodes_are_padded_without_starts(device: str) -> None:
    table, lens, _ = batch(device)
    padded = paged_attn.pad_batch(table, lens, seqs=8)
    assert padded[2] is None
    assert paged_attn.positions(padded[1]).tolist() == [n - 1 for n in SEQ_LENS] + [-1, -1]


def test_a_batch_on_the_host_goes_into_tensors_on_the_device(device: str) -> None:
    out = paged_attn.pad_batch(*batch(device), seqs=8)
    got = paged_attn.pad_batch(*batch("cpu"), out=out)
    assert got[1].device.type == device
    assert got[1].tolist() == [*SEQ_LENS, 0, 0]


def test_compiled_they_are_one_graph_for_all_batches(device: str) -> None:
    def both(table: Tensor, lens: Tensor, starts: Tensor, tokens: int) -> Tensor:
        return paged_attn.slots(table, paged_attn.positions(lens, starts, tokens=tokens), PAGE, starts)

    compiled = torch.compile(both, fullgraph=True, dynamic=True, backend="eager")
    table, lens, starts = batch(device)
    for tokens in (13, 20):
        assert torch.equal(compiled(table, lens, starts, tokens), both(table, lens, starts, tokens))


@pytest.mark.gpu
def test_a_captured_step_follows_its_lengths(device: str) -> None:
    table, lens, starts = paged_attn.pad_batch(*batch(device), seqs=8)
    assert starts is not None
    got: list[Tensor] = []

    def step() -> None:
        places = paged_attn.positions(lens, starts, tokens=16)
        got[:] = [places, paged_attn.slots(table, places, PAGE, starts)]

    graph = measure.capture(step)
    paged_attn.pad_batch(*(x[:n].contiguous() for x, n in zip(batch(device), (2, 2, 3))), out=(table, lens, starts))
    graph.replay()
    wanted, wanted_slots = by_loop(batch(device)[0])
    assert got[0].tolist() == wanted[:7] + [-1] * 9
    assert got[1].tolist() == wanted_slots[:7] + [-1] * 9


I32 = torch.zeros(2, dtype=torch.int32)
TABLE = torch.zeros(2, 3, dtype=torch.int32)
REFUSED: list[tuple[Any, str]] = [
    (lambda: paged_attn.pages_needed(3, 0), "page_size must be an int >= 1 and < 2^31, got 0"),
    (lambda: paged_attn.positions(I32.float()), "seq_lens must be int32 | int64, got float32"),
    (lambda: paged_attn.positions(TABLE), "seq_lens must be [seqs], got [2, 3]"),
    (lambda: paged_attn.positions(I32, I32, tokens=3), "cu_seqlens_q must be [seqs + 1] with seqs + 1 = 3, got [2]"),
    (
        lambda: paged_attn.positions(I32, TABLE[0]),
        "tokens and cu_seqlens_q must be given together, got cu_seqlens_q without tokens",
    ),
    (
        lambda: paged_attn.positions(I32, tokens=2),
        "tokens and cu_seqlens_q must be given together, got tokens without cu_seqlens_q",
    ),
    (lambda: paged_attn.positions(I32, TABLE[0], tokens=-1), "tokens must be an int >= 0 and < 2^31, got -1"),
    (lambda: paged_attn.slots(I32, I32, 16), "page_table must be [seqs, max_pages], got [2]"),
    (lambda: paged_attn.slots(TABLE, TABLE[0], 16), "positions must be [seqs] with seqs = 2, got [3]"),
    (lambda: paged_attn.slots(TABLE, I32, 0), "page_size must be an int >= 1 and < 2^31, got 0"),
    (lambda: paged_attn.pad_batch(TABLE, TABLE[0]), "seq_lens must be [seqs] with seqs = 2, got [3]"),
    (lambda: paged_attn.pad_batch(TABLE, I32, seqs=1), "seqs must be at least 2, the sequences in page_table, got 1"),
    (
        lambda: paged_attn.pad_batch(TABLE, I32, max_pages=2),
        "max_pages must be at least 3, the pages of a sequence in page_table, got 2",
    ),
    (
        lambda: paged_attn.pad_batch(TABLE, I32, out=(TABLE[:, :2], I32, None)),
        "out[0] must be at least [2, 3] like page_table, got [2, 2]",
    ),
    (
        lambda: paged_attn.pad_batch(TABLE, I32, out=(TABLE, I32, TABLE[0])),
        "cu_seqlens_q and out[2] must be given together, got out[2] without cu_seqlens_q",
    ),
]


@pytest.mark.parametrize("call, message", REFUSED, ids=[message.split(",")[0] for _, message in REFUSED])
def test_what_does_not_fit_is_refused_by_name(call: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        call()
    assert message == str(error.value)
