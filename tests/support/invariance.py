"""What `batch_invariant` promises of one sequence, for tests of features."""

from __future__ import annotations

import torch

import paged_attn
from tests.support.cases import Case, build


def assert_the_same_bits_alone(case: Case, device: str) -> None:
    """Sequence 1 has equal bits alone and in a batch whose sequence 0 has one query; without log-sum-exps."""
    inputs = build(case, device)
    both = paged_attn.paged_attention(**inputs)
    count = case.query_lens[1]
    rows = slice(1, 1 + count)
    alone = inputs | {name: inputs[name][rows] for name in ("q", "out")}
    alone |= {name: inputs[name][1:2] for name in ("page_table", "seq_lens")}
    alone["cu_seqlens_q"] = torch.tensor([0, count], dtype=torch.int32, device=device)
    want = both[rows].clone()  # type: ignore[index]
    assert torch.equal(paged_attn.paged_attention(**alone), want)  # type: ignore[arg-type]
