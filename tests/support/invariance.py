"""The assertion of `batch_invariant`'s promise, for tests of features."""

from __future__ import annotations

import torch

import paged_attn
from tests.support.cases import Case, build


def assert_the_same_bits_alone(case: Case, device: str) -> None:
    """Assert that sequence 1 has the same bits alone as behind a sequence 0 with one query; the case has no lse."""
    inputs = build(case, device)
    both = paged_attn.paged_attention(**inputs)
    count = case.query_lens[1]
    rows = slice(1, 1 + count)
    alone = inputs | {name: inputs[name][rows] for name in ("q", "out")}
    alone |= {name: inputs[name][1:2] for name in ("page_table", "seq_lens")}
    alone["cu_seqlens_q"] = torch.tensor([0, count], dtype=torch.int32, device=device)
    want = both[rows].clone()  # type: ignore[index]
    assert torch.equal(paged_attn.paged_attention(**alone), want)  # type: ignore[arg-type]
