"""Batches at the sizes of a CUDA graph: what pads them is not seen, written or attended to."""

from __future__ import annotations

import warnings
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import paged_attn
from benchmarks import measure
from tests.steps.test_step import PAGE, QUERY_LENS, SEQ_LENS, batch, by_loop, ragged


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
    (
        lambda: paged_attn.pad_batch([[1], [2, 3]], [40, 20], page_size=16),
        "seq_lens[0] = 40 needs 40 keys in the cache, but row 0 of page_table holds 1 pages of 16",
    ),
    (
        lambda: paged_attn.pad_batch([[1], [2, 3]], torch.tensor([16, 33]), page_size=16),
        "seq_lens[1] = 33 needs 33 keys in the cache, but row 1 of page_table holds 2 pages of 16",
    ),
    (
        lambda: paged_attn.pad_batch(TABLE, torch.tensor([0, 2**33]), page_size=16),
        "seq_lens[1] = 8589934592 needs 8589934592 keys in the cache, but row 1 of page_table holds 3 pages of 16",
    ),
    (
        lambda: paged_attn.pad_batch((torch.tensor([0, 1, 3]), torch.arange(3)), [17, 3], page_size=16),
        "seq_lens[0] = 17 needs 17 keys in the cache, but row 0 of page_table holds 1 pages of 16",
    ),
    (
        lambda: paged_attn.pad_batch((torch.tensor([0, 3, 2]), torch.arange(3)), [17, 3]),
        "indptr[1] = 3 and indptr[2] = 2 of page_table must ascend within its 3 indices",
    ),
    (lambda: paged_attn.pad_batch([[1], [2]], [9, 9], [1, 5, 7]), "cu_seqlens_q[0] = 1, but it must be 0"),
    (
        lambda: paged_attn.pad_batch([[1], [2]], torch.tensor([9, 9]), torch.tensor([0, 5, 3])),
        "cu_seqlens_q[2] = 3 is less than cu_seqlens_q[1] = 5 (sequence 1)",
    ),
    (
        lambda: paged_attn.pad_batch([[1], [2]], numpy.array([9, 9]), numpy.array([0, 5, 3])),
        "cu_seqlens_q[2] = 3 is less than cu_seqlens_q[1] = 5 (sequence 1)",
    ),
    (lambda: paged_attn.pad_batch(TABLE, I32, page_size=0), "page_size must be None or an int >= 1 and < 2^31, got 0"),
]


def test_lengths_that_fill_their_pages_fit(device: str) -> None:
    for lens in ([16, 32, 0], [1, 17, -3]):
        table, *_ = paged_attn.pad_batch([[1], [2, 3], []], lens, page_size=16, device=device)
        assert table.tolist() == [[1, 0], [2, 3], [0, 0]]


@pytest.mark.gpu
def test_nothing_on_a_device_is_looked_at(device: str) -> None:
    """Reading it back would wait, and an error would say what a checked call says."""
    table = torch.zeros(2, 1, dtype=torch.int32, device=device)
    lens, starts = torch.tensor([40, 1], device=device), torch.tensor([1, 7, 5], device=device)
    parents = torch.zeros(8, dtype=torch.int64, device=device)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the mode is a prototype, says torch
            torch.cuda.set_sync_debug_mode("error")
        paged_attn.pad_batch(table, lens, starts, page_size=16)
        paged_attn.positions(lens, starts, tokens=8)
        paged_attn.tree(parents, lens, starts)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("call, message", REFUSED, ids=[message.split(",")[0] for _, message in REFUSED])
def test_what_does_not_fit_is_refused_by_name(call: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        call()
    assert message == str(error.value)
