"""A changed choice for a benchmark case is seen in review."""

from __future__ import annotations

import difflib

import pytest

from paged_attn.planning.dialects import dialect
from tests.planning.choices import TABLE, choices
from tests.planning.problems import H200, problem_of_case
from tests.support.cases import E4M3, Case, build, problem_of


@pytest.mark.skipif(dialect("hopper").why_not_on(H200) is not None, reason="the table has Hopper's kernels")
def test_each_benchmark_case_is_planned_as_the_table_says() -> None:
    was, is_now = TABLE.read_text(encoding="utf-8").splitlines(), list(choices())
    changed = list(difflib.unified_diff(was, is_now, "table", "planner", lineterm="", n=1))
    assert not changed, "\n".join(["python -m tests.planning.choices writes the table anew:", *changed[:60]])


@pytest.mark.parametrize(
    "case",
    [
        Case("ragged", (3, 1), (20, 33), heads=4, kv_heads=2, head_dim=64, bounds=True, lse=False),
        Case("decode, HND", (1, 1), (20, 33), head_dim=64, layout="HND", decode_form=True, bounds=True),
        Case("x-packed, new", (3,), (20,), head_dim=64, layout="x", new=True, bounds=True, softcap=30.0),
        Case("e4m3", (3,), (20,), head_dim=64, cache_dtype=E4M3, scales="per_head", bounds=True, sinks=True),
        Case("window, bias", (3,), (20,), head_dim=64, window_size=(4, -1), qq_bias=3, alibi=True, bounds=True),
        Case("invariant", (3, 2), (20, 30), head_dim=64, batch_invariant=True, softmax_scale=-0.1, bounds=True),
        Case("chunk, width", (3, 2), (20, 30), head_dim=64, value_dim=128, chunk=16, gate=True, bounds=True),
        Case(
            "latent", (3, 2), (20, 30), heads=72, head_dim=96, value_dim=64, latent=True, cache_dtype=E4M3, bounds=True
        ),
        Case("scales of tokens", (3, 2), (20, 30), head_dim=64, token_scales=True, bounds=True),
        Case("prefix, spans", (3, 2), (20, 30), head_dim=64, prefix=4, spans=2, window_size=(3, -1), bounds=True),
        Case("causal by sequence", (3, 2), (20, 30), head_dim=64, causal_by_seq=True, bounds=True),
        Case("function", (3, 2), (20, 30), head_dim=64, score_mod="alibi", bounds=True),
    ],
    ids=str,
)
def test_a_case_without_tensors_is_told_as_with_them(case: Case) -> None:
    with_tensors = problem_of(build(case), H200)
    without = problem_of_case(case)
    assert without._replace(compute=with_tensors.compute) == with_tensors  # which the interpreter decides


def test_a_case_that_says_more_than_a_model_can_fails() -> None:
    with pytest.raises(ValueError, match="not told of strided"):
        problem_of_case(Case("strided", (3,), (20,), strided=True, bounds=True))
    with pytest.raises(ValueError, match="without bounds"):
        problem_of_case(Case("no bounds", (3,), (20,)))
