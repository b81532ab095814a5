"""A run of the benchmark, without a GPU: what it prints, keeps and draws, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__ as bench
from benchmarks import cliffs, options, traces
from benchmarks.peers import OURS
from benchmarks.work import traffic
from tests.benchmarks.stand_ins import EVEN, SMALL, absent, broken, truth, wrong


@pytest.mark.usefixtures("timeless")
def test_a_run_prints_keeps_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "SUITES", {"one": (SMALL, EVEN)})
    monkeypatch.setattr(options, "ALL", ("one",))
    peers = {OURS: truth, "cudnn paged": truth, "vllm triton": absent, "flashinfer fa2": wrong}
    monkeypatch.setattr(bench, "PEERS", peers)
    bench.main(["one", "--output", str(tmp_path), "--rounds", "3"])
    said = capsys.readouterr().out
    for words in ("one 2/2", "20.0 2.00x", "vllm triton left out: not installed", "relative error 0.05", "2 of 2"):
        assert words in said
    kept = json.loads((tmp_path / "one.json").read_text())
    assert set(kept) >= {"suite", "device", "versions", "commit", "ceilings", "rounds", "results", "losses", "totals"}
    assert [result["seconds"] for result in kept["results"]] == [{OURS: 1e-5, "cudnn paged": 2e-5}] * 2
    assert kept["results"][0]["bytes"] == traffic(SMALL)
    assert kept["totals"]["cudnn paged"]["factor"] == pytest.approx(2.0)
    assert (tmp_path / "roofline.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("timeless")
def test_a_failure_of_the_library_is_the_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SUITES", {"one": (SMALL,)})
    monkeypatch.setattr(options, "ALL", ("one",))
    monkeypatch.setattr(bench, "PEERS", {OURS: broken})
    with pytest.raises(SystemExit, match="failed 1 cases"):
        bench.main(["--output", str(tmp_path)])
    assert json.loads((tmp_path / "one.json").read_text())["results"][0]["skipped"][OURS].startswith("RuntimeError")


@pytest.mark.usefixtures("timeless")
def test_the_trace_is_one_suite_per_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuts = [traces.Cut(budget, (SMALL,), 7, 1) for budget in traces.BUDGETS]
    monkeypatch.setattr(traces, "cuts", lambda *args: cuts)
    monkeypatch.setattr(bench, "PEERS", {OURS: truth})
    bench.main(["trace", "--output", str(tmp_path)])
    kept = json.loads((tmp_path / "trace-2048.json").read_text())
    assert (kept["steps"], kept["dropped_requests"]) == (7, 1)
    assert kept["trace"].startswith("synthetic")


@pytest.mark.usefixtures("timeless")
def test_the_cliff_map_is_kept_a_cell_a_line_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fake(axes: dict[str, Any], ceilings: dict[str, float], rounds: int) -> tuple[dict[cliffs.Cell, float], int]:
        cells = cliffs.grid(axes, ceilings)
        return {c: (3 if c.batch == 16 else 1) * (5e-6 + cliffs.least(*cliffs.work(c), ceilings)) for c in cells}, 2

    monkeypatch.setattr(cliffs, "measure_map", fake)
    bench.main(["--cliffs", "--quick", "--output", str(tmp_path)])
    text = (tmp_path / "cliffs.json").read_text()
    kept = json.loads(text)
    assert len(kept["cells"]) == 12
    assert sum('"seconds"' in line for line in text.splitlines()) == 12
    assert kept["model"]["allowed"] == cliffs.ALLOWED
    assert (tmp_path / "cliffs.png").read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert "12 cells, 2 left out" in said
    assert "b4 q1 x 256 -> b16 q1 x 256: " in said
    assert not list(tmp_path.glob("decode.json"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_benchmark_says_so() -> None:
    with pytest.raises(SystemExit, match="needs a GPU"):
        bench.main(["decode"])


@pytest.mark.usefixtures("timeless")
def test_with_json_standard_output_holds_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "SUITES", {"one": (SMALL,)})
    monkeypatch.setattr(options, "ALL", ("one",))
    monkeypatch.setattr(bench, "PEERS", {OURS: truth})
    bench.main(["--json", "--output", str(tmp_path)])
    (one,) = json.loads(capsys.readouterr().out)
    assert one == json.loads((tmp_path / "one.json").read_text())
