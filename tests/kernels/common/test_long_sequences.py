"""Copies find the sequences of many query tokens on the device, among any number of sequences."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from paged_attn.kernels.common.copying import long_sequence

SHORTEST = 3


@triton.jit
def found_kernel(query_starts, seqs, shortest, found):
    number = tl.program_id(0)
    tl.store(found + number, long_sequence(query_starts, seqs, number, shortest))


@pytest.mark.parametrize("integers", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("seqs", [1, 5, 255, 256, 257, 700])
def test_long_sequences_are_numbered_in_order_and_no_other_is(seqs: int, integers: torch.dtype, device: str) -> None:
    """Some have no tokens.  Numbers beyond the last long sequence are of none."""
    lengths = torch.randint(0, 2 * SHORTEST, (seqs,), generator=torch.Generator().manual_seed(seqs))
    lengths[-1] = SHORTEST
    starts = torch.cat([torch.zeros(1, dtype=lengths.dtype), lengths.cumsum(0)]).to(device, integers)
    wanted = (lengths >= SHORTEST).nonzero().flatten().tolist()
    found = torch.full((len(wanted) + 2,), -7, dtype=torch.int32, device=device)
    found_kernel[(len(found),)](starts, seqs, SHORTEST, found)
    assert found.tolist() == [*wanted, -1, -1]
