"""Tables and pictures of results."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import cliffs, plots, report
from benchmarks.peers import OURS
from tests.benchmarks.stand_ins import CEILINGS, results


def test_pictures_of_full_size_are_drawn(tmp_path: Path) -> None:
    made = cliffs.report_of(dict.fromkeys(cliffs.grid(cliffs.AXES, CEILINGS), 1e-05), cliffs.AXES, CEILINGS)
    plots.cliff_map({"device": "a card", **made}, tmp_path / "cliffs.png")
    one = {"suite": "s", "device": "a card", "ceilings": CEILINGS, "results": results()}
    plots.roofline([one, one | {"suite": "t"}], tmp_path / "roofline.png")
    assert len(list(tmp_path.glob("*.png"))) == 2


def test_a_table_tells_a_failed_case(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    failed = {"case": "bad", "bytes": 1, "operations": 1, "seconds": {}, "errors": {}, "skipped": {OURS: "why"}}
    Console(width=160).print(report.table({"ceilings": CEILINGS, "results": [*results(), failed]}))
    said = capsys.readouterr().out
    assert "failed" in said
    assert "10.0 10.0 20.0" in " ".join(said.split()), "least, quartiles"
    assert said.count("two modes") == 3
    assert report.left_out([*results(), failed]) == ["paged-attn left out: why (bad)"]
