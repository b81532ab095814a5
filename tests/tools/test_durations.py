"""Seconds of a suite's workers, by file."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import triton

from tests.support import durations


def test_compilations_of_a_test_are_counted_unless_somebody_else_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    def counted() -> dict[str, float]:
        item: Any = SimpleNamespace(user_properties=[])
        with durations.compiling(item):
            for hit, total in ((False, 2_000_000), (True, 50), (False, 500_000)):
                times = SimpleNamespace(total=total)
                triton.knobs.compilation.listener(src=None, metadata={}, times=times, cache_hit=hit)
        return dict(item.user_properties)

    monkeypatch.setattr(triton.knobs.compilation, "listener", None)
    assert counted() == {"kernels": 2, "compiling": 2.5}
    assert counted() == {"kernels": 2, "compiling": 2.5}, "each test its own"
    heard: list[bool] = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda cache_hit, **_: heard.append(cache_hit))
    assert counted() == {}
    assert heard == [False, True, False]


def test_phases_of_tests_are_summed_by_file() -> None:
    def report(test: str, when: str, seconds: float, **properties: float) -> Any:
        return SimpleNamespace(nodeid=test, when=when, duration=seconds, user_properties=[*properties.items()])

    found = durations.by_file(
        [
            report("tests/a.py::one", "setup", 1.0),
            report("tests/a.py::one", "call", 4.0, kernels=2, compiling=3.0),
            report("tests/a.py::one", "teardown", 0.5, kernels=2, compiling=3.0),
            report("tests/b.py::two[x]", "call", 1.0),
            report("tests/a.py::three", "call", 2.0, kernels=1, compiling=1.5),
        ]
    )
    assert found == {
        "tests/a.py": dict(seconds=7.5, tests=2, kernels=3, compiling=4.5),
        "tests/b.py": dict(seconds=1.0, tests=1),
    }
