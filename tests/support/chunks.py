"""Queries of a case asked for in chunks, alone or in any company, whose results are compared bit by bit."""

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
Chunk = tuple[int, int, int]  # queries begin ... end - 1 of a sequence, as positions
Result = tuple[Tensor, Tensor]  # out, lse


@pytest.fixture(autouse=True)
def counters() -> Iterator[None]:
    """Who joins the pieces of a block is counted, and every call leaves all counters at zero for the next."""
    yield
    assert not any(room.counters.any() for room in scratch._rooms.values() if room.counters is not None)


@pytest.fixture(autouse=True)
def in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter a product is numpy's, whose bits depend on where in the tile a row stands; a GPU's do not."""

    def dot(_: Any, a: Any, b: Any, acc: Any, *__: Any) -> interpreter.TensorHandle:
        total = acc.data
        for k in range(a.data.shape[1]):
            total = total + a.data[:, k, None] * b.data[k]
        return interpreter.TensorHandle(total, acc.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


def whole(case: Case) -> list[Chunk]:
    """Every query of the case, sequence by sequence."""
    return [(seq, *span) for seq, span in enumerate(zip(case.context_lens, case.seq_lens))]


def take(tensor: Tensor, rows: Any) -> Tensor:
    """Some rows, of an fp8 tensor too."""
    return bits(tensor)[rows].view(tensor.dtype)


def attend(case: Case, inputs: Inputs, chunks: Sequence[Chunk], **changes: Any) -> list[Result]:
    """(out, lse) of each chunk, all asked for in one call."""
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
    """Bit by bit what the call of all the case's queries gave for these."""
    for (seq, begin, end), result in zip(chunks, got, strict=True):
        context_len = case.context_lens[seq]
        for name, one, other in zip(("out", "lse"), result, want[seq], strict=True):
            other = other[begin - context_len : end - context_len]
            assert torch.equal(bits(one), bits(other)), f"{name} of queries {begin} ... {end - 1} of sequence {seq}"


def chunked(case: Case, size: int) -> Iterator[list[Chunk]]:
    """One step after another of every sequence's prefill by chunks."""
    for done in range(0, max(case.query_lens), size):
        live = [(seq, begin + done, end) for seq, begin, end in whole(case) if begin + done < end]
        yield [(seq, begin, min(begin + size, end)) for seq, begin, end in live]
