"""The comparison of results with the reference's."""

from __future__ import annotations

import pytest
import torch

from paged_attn import reference
from tests.cases import Case, build, compare


def test_compare_accepts_the_rounded_reference_and_rejects_a_wrong_weight() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        case = Case("long", (1,), (900,), dtype=dtype, padding=1)
        inputs = build(case)
        out, lse = reference.paged_attention(**inputs)
        assert compare(case, out, lse.float(), inputs) <= 1
        short = {**inputs, "seq_lens": inputs["seq_lens"] - 40, "causal": False}  # forty keys forgotten
        wrong, wrong_lse = reference.paged_attention(**{**short, "out": torch.empty_like(out)})
        with pytest.raises(AssertionError, match="long: out"):
            compare(case, wrong, lse.float(), inputs)
        with pytest.raises(AssertionError, match="long: lse"):
            compare(case, out, wrong_lse.float(), inputs)
