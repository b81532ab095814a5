from __future__ import annotations

import pytest

from benchmarks import measure, runner
from tests.benchmarks.stand_ins import CEILINGS


@pytest.fixture
def timeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU: names stand for graphs, and every peer takes a time by its place, the library 10 us."""
    monkeypatch.setattr(runner, "device", lambda: "cpu")
    monkeypatch.setattr(measure, "capture", lambda call: call)
    monkeypatch.setattr(measure, "ceilings", lambda: dict(CEILINGS))
    monkeypatch.setattr(
        measure, "samples", lambda graphs, rounds: {n: [1e-5 * (i + 1)] * rounds for i, n in enumerate(graphs)}
    )
