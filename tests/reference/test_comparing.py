"""The comparison of results with the reference's."""

from __future__ import annotations

import pytest
import torch

from paged_attn import reference
from tests.support import comparing
from tests.support.cases import E4M3, Case, build, compare


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


def test_compare_accepts_zeros_of_fp8_where_no_row_of_many_sees_a_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(comparing, "rounds_weights", lambda problem: True)  # as some of Hopper's kernels do
    case = Case("blind", (1,), (0,), heads=8, head_dim=64, dtype=E4M3, cache_dtype=E4M3, out_dtype=E4M3, padding=130)
    inputs = build(case)
    inputs["out"] = torch.zeros_like(inputs["out"])
    _, lse = reference.paged_attention(**inputs)
    assert compare(case, inputs["out"], lse.float(), inputs) <= 1


def test_results_of_subnormal_weights_may_be_off_by_some_subnormals_and_larger_results_may_not() -> None:
    """A value under a subnormal float32 weight shows where all values of larger weights are zero."""
    want = torch.tensor([2.0**-145, 2.0**-100])
    bound = comparing.bound_of(want, want, *comparing.TOLERANCES[torch.float32][:1], torch.float32)
    assert 2 * 2.0**-149 < bound[0] < 2.0**-130
    assert bound[1] < 2.0**-114
