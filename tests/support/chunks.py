"""Calls for chunks of a case's queries, alone or beside other chunks, whose results are compared bit by bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from paged_attn import paged_attention
from paged_attn.launching import scratch
from tests.support.cases import Case, bits

Inputs = dict[str, Any]
Chunk = tuple[int, int, int]  # (sequence, position of the first query, end position, exclusive)
Result = tuple[Tensor, Tensor]  # out, lse


@pytest.fixture(autouse=True)
def counters() -> Iterator[None]:
    """Assert that calls leave the counters of joined pieces at zero for the next call."""
    yield
    assert not any(room.counters.any() for room in scratch._rooms.values() if room.counters is not None)


@pytest.fixture(autouse=True)
def in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the interpreter's products sum in order: numpy's bits depend on a row's place in its tile, a GPU's don't."""

    def dot(_: Any, a: Any, b: Any, acc: Any, *__: Any) -> interpreter.TensorHandle:
        total = acc.data
        for k in range(a.data.shape[1]):
            total = total + a.data[:, k, None] * b.data[k]
        return interpreter.TensorHandle(total, acc.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


def whole(case: Case) -> list[Chunk]:
    """Return a chunk for each sequence, with all its queries."""
    return [(seq, *span) for seq, span in enumerate(zip(case.context_lens, case.seq_lens))]


def take(tensor: Tensor, rows: Any) -> Tensor:
    """Return some rows of a tensor, which may be fp8."""
    return bits(tensor)[rows].view(tensor.dtype)


def attend(case: Case, inputs: Inputs, chunks: Sequence[Chunk], **changes: Any) -> list[Result]:
    """Return (out, lse) of each chunk, from one call for all chunks."""
    device = inputs["q"].device
    at = [sum(case.query_lens[:seq]) - context_len for seq, context_len in enumerate(case.context_lens)]
    rows = torch.cat([torch.arange(at[seq] + begin, at[seq] + end) for seq, begin, end in chunks]).to(device)
    lens = [end - begin for _, begin, end in chunks]
    int32 = dict(dtype=torch.int32, device=device)
    given = dict(
        q=take(inputs["q"], rows),
        out=take(inputs["out"], rows),
        page_table=inputs["page_table"][[seq for seq, *_ in chunks]],
        seq_lens=torch.tensor([end for *_, end in chunks], **int32),
        cu_seqlens_q=torch.tensor([0, *lens]).cumsum(0).to(device, torch.int32),
    )
    out, lse = paged_attention(**{**inputs, **given, "max_seqlen_q": max(lens), **changes})
    return list(zip(out.split(lens), lse.split(lens)))


def decode(case: Case, inputs: Inputs, positions: Sequence[tuple[int, int]], **changes: Any) -> list[Any]:
    """Attend with single queries (sequence, position), without cu_seqlens_q."""
    return attend(case, inputs, [(seq, pos, pos + 1) for seq, pos in positions], **{"cu_seqlens_q": None, **changes})


def same(case: Case, got: Sequence[Result], chunks: Sequence[Chunk], want: Sequence[Result]) -> None:
    """Assert that results of chunks are, bit by bit, those in `want`, which has all queries of each sequence."""
    for (seq, begin, end), result in zip(chunks, got, strict=True):
        context_len = case.context_lens[seq]
        for name, one, other in zip(("out", "lse"), result, want[seq], strict=True):
            other = other[begin - context_len : end - context_len]
            assert torch.equal(bits(one), bits(other)), f"{name} of queries {begin} ... {end - 1} of sequence {seq}"


def chunked(case: Case, size: int) -> Iterator[list[Chunk]]:
    """Yield the chunks of one step after another, if every sequence is prefilled in chunks of `size` queries."""
    for done in range(0, max(case.query_lens), size):
        live = [(seq, begin + done, end) for seq, begin, end in whole(case) if begin + done < end]
        yield [(seq, begin, min(begin + size, end)) for seq, begin, end in live]
