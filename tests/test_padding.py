"""Batches at the sizes of a CUDA graph: what pads them is not seen, written or attended to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import paged_attn
from benchmarks import measure
from tests.test_step import PAGE, QUERY_LENS, SEQ_LENS, batch, by_loop, ragged


@pytest.mark.parametrize("kind", ["rows", "ragged"])
def test_a_padded_batch_attends_and_writes_as_the_batch_does(kind: str, device: str) -> None:
    """Rows of padding are zeros, and no slot of theirs is written."""
    table, lens, starts = batch(device)
    tokens = sum(QUERY_LENS)
    given = table if kind == "rows" else ragged(table)
    padded = paged_attn.pad_batch(given, lens, starts, seqs=9, max_pages=5 if kind == "rows" else 20)
    flat = padded[0] if isinstance(padded[0], tuple) else (padded[0],)
    shapes = [[9, 5]] if kind == "rows" else [[10], [20]]
    assert [list(x.shape) for x in (*flat, *padded[1:]) if x is not None] == [*shapes, [9], [10]]
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


def test_a_ragged_batch_goes_into_ragged_tensors_and_so_do_lists(device: str) -> None:
    table, lens, starts = batch(device)
    given = ragged(table)
    out = paged_attn.pad_batch(given, lens, starts, seqs=8, max_pages=13)
    assert isinstance(out[0], tuple)
    indptr, indices = out[0]
    assert indptr.tolist() == [*given[0].tolist(), 11, 11]
    assert indices.tolist() == [*given[1].tolist(), 0, 0]
    small = ragged(table[:2])
    for pages in (small, [row[row >= 0].tolist() for row in table[:2]]):
        indptr.fill_(-7)
        again = paged_attn.pad_batch(pages, lens[:2], starts[:3], out=out)
        assert all(a is b for a, b in zip(again, out))
        assert indptr.tolist() == [0, 3, 5, 5, 5, 5, 5, 5, 5]
        assert indices.tolist() == [*given[1].tolist(), 0, 0]  # what lies behind the batch's own stays
    assert out[1].tolist() == [9, 6, 0, 0, 0, 0, 0, 0]


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


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["rows", "ragged"])
def test_a_captured_step_follows_its_lengths(kind: str, device: str) -> None:
    pages, *rest = batch(device)
    table, lens, starts = paged_attn.pad_batch(pages if kind == "rows" else ragged(pages), *rest, seqs=8)
    assert starts is not None
    got: list[Tensor] = []

    def step() -> None:
        places = paged_attn.positions(lens, starts, tokens=16)
        got[:] = [places, paged_attn.slots(table, places, PAGE, starts)]

    graph = measure.capture(step)
    pages, *rest = (x[:n].contiguous() for x, n in zip(batch(device), (2, 2, 3)))
    paged_attn.pad_batch(pages if kind == "rows" else ragged(pages), *rest, out=(table, lens, starts))
    graph.replay()
    wanted, wanted_slots = by_loop(batch(device)[0])
    assert got[0].tolist() == wanted[:7] + [-1] * 9
    assert got[1].tolist() == wanted_slots[:7] + [-1] * 9


I32 = torch.zeros(2, dtype=torch.int32)
TABLE = torch.zeros(2, 3, dtype=torch.int32)
REFUSED: list[tuple[Any, str]] = [
    (
        lambda: paged_attn.pad_batch((TABLE[0], I32), I32, max_pages=1),
        "max_pages must be at least 2, the indices in page_table, got 1",
    ),
    (
        lambda: paged_attn.pad_batch((TABLE[0], I32), I32, seqs=1),
        "seqs must be at least 2, the sequences in page_table, got 1",
    ),
    (
        lambda: paged_attn.pad_batch((TABLE[0], TABLE[0]), I32, out=((TABLE[0], I32), I32, None)),
        "indices of out[0] must be at least [3] like those of page_table, got [2]",
    ),
    (
        lambda: paged_attn.pad_batch((TABLE[0], I32), I32, out=((I32, I32), I32[:1], None)),
        "indptr of out[0] must be at least [3] like those of page_table, got [2]",
    ),
    (
        lambda: paged_attn.pad_batch(TABLE, I32, out=((TABLE[0], I32), I32, None)),
        "page_table must be of the kind of out[0], (indptr, indices), got Tensor",
    ),
    (
        lambda: paged_attn.pad_batch((TABLE[0], I32), I32, out=(TABLE, I32, None)),
        "page_table must be of the kind of out[0], Tensor, got (indptr, indices)",
    ),
    (
        lambda: paged_attn.pad_batch(TABLE, TABLE[0]),
        "seq_lens must be [seqs] with seqs = 2 from page_table, got [3]: seq_lens.diff(), if these are sums of lengths",
    ),
    (lambda: paged_attn.pad_batch(TABLE, I32, seqs=3, out=(TABLE, I32, None)), "seqs must be 2, which out has, got 3"),
    (
        lambda: paged_attn.pad_batch((TABLE[0], I32), I32, max_pages=3, out=((TABLE[0], I32), I32, None)),
        "max_pages must be 2, which out has, got 3",
    ),
    (
        lambda: paged_attn.pad_batch(TABLE, I32, out=(TABLE, I32[:1], None)),
        "out[1] must be [2] beside out[0] of 2 sequences, got [1]",
    ),
    (
        lambda: paged_attn.pad_batch((TABLE[0], I32), I32, TABLE[0], out=((TABLE[0], I32), I32, I32)),
        "out[2] must be [3] beside out[0] of 2 sequences, got [2]",
    ),
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
        "cu_seqlens_q and out[2] must be given together, got out[2] without cu_seqlens_q: pass both, or neither",
    ),
]


@pytest.mark.parametrize("call, message", REFUSED, ids=[message.split(",")[0] for _, message in REFUSED])
def test_what_does_not_fit_is_refused_by_name(call: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        call()
    assert message == str(error.value)
