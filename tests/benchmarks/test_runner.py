"""The runner checks peers before it times them, says who is left out, and sums up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from benchmarks import measure, runner
from benchmarks.inputs import inputs_of
from benchmarks.peers import OURS
from tests.benchmarks.stand_ins import SMALL, absent, broken, modest, nan, results, truth, wrong


def test_peers_that_differ_fail_or_are_missing_are_named_with_the_reason() -> None:
    peers = {OURS: truth, "good": truth, "wrong": wrong, "nan": nan, "modest": modest, "absent": absent}
    calls, errors, skipped = runner.agreeing(SMALL, peers | {"broken": broken}, inputs_of(SMALL, "cpu"))
    assert list(calls) == [OURS, "good"]
    assert errors["good"] == 0
    assert errors["wrong"] == pytest.approx(0.05)
    assert skipped == {
        "wrong": "differs from paged-attn: relative error 0.05",
        "nan": "differs from paged-attn: relative error nan",
        "modest": "no Tuesdays",
        "absent": "not installed: No module named 'a_package_that_does_not_exist'",
        "broken": "RuntimeError: first line second line",
    }


def test_nobody_is_timed_where_the_library_fails() -> None:
    calls, _, skipped = runner.agreeing(SMALL, {OURS: broken, "good": truth}, inputs_of(SMALL, "cpu"))
    assert calls == {}
    assert list(skipped) == [OURS, "good"]


def test_a_call_that_cannot_be_captured_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(call: Callable[[], Tensor]) -> str:
        if call() is None:
            raise RuntimeError("a host sync")
        return "graph"

    monkeypatch.setattr(measure, "capture", capture)
    skipped: dict[str, str] = {}
    calls: dict[str, Any] = {"good": lambda: 1, "bad": lambda: None}
    assert runner.captured(SMALL, calls, skipped) == {"good": "graph"}
    assert skipped == {"bad": "not captured: RuntimeError: a host sync"}


def test_losses_are_to_competitors_not_to_bounds() -> None:
    assert runner.losses(results()) == [{"case": "case 1", "peer": "a", "factor": 1.25}]


def test_factors_compare_the_same_cases() -> None:
    totals = runner.totals(results())
    assert totals["a"] == pytest.approx({"seconds": 28e-6, "ours": 30e-6, "cases": 2, "factor": 28 / 30})
    assert totals["b"]["factor"] == pytest.approx(1.5)
    assert totals["best rival"]["seconds"] == pytest.approx(28e-6)
    assert totals[OURS]["seconds"] == pytest.approx(60e-6)


def test_results_are_kept_by_gpu() -> None:
    assert runner.folder("NVIDIA H200").parts[-3:] == ("benchmarks", "results", "h200")
    assert runner.folder("NVIDIA A100-SXM4-80GB").name == "a100-sxm4-80gb"
