"""What is compiled before anything is timed, by several processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import paged_attn
from benchmarks import __main__ as bench
from benchmarks import cliffs, options, suites, warm
from benchmarks.peers import OURS
from benchmarks.work import traffic
from tests.benchmarks.stand_ins import SMALL, truth


def test_processes_that_compile_share_the_cases_and_cells() -> None:
    names = ["decode", "prefill", "fp8", "cliffs"]
    parts = [warm.work(names, part, 5) for part in range(5)]
    cases = [case.name for found, _ in parts for case in found]
    small = {x.name for name in names[:3] for x in suites.SUITES[name] if traffic(x) < warm.LARGEST}
    assert len(cases) == len(small)
    assert set(cases) == small
    cells = [cell for _, found in parts for cell in found]
    assert sorted(cells) == sorted(set(cliffs.grid(cliffs.AXES, warm.CEILINGS)))
    assert warm.work(["decode"], 0, 1)[1] == []


@pytest.mark.usefixtures("timeless")
def test_many_processes_compile_before_one_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[list[str], int]] = []
    monkeypatch.setattr(warm, "warm", lambda names, number: asked.append((names, number)))
    monkeypatch.setattr(bench, "SUITES", {"one": (SMALL,)})
    monkeypatch.setattr(options, "ALL", ("one",))
    monkeypatch.setattr(bench, "PEERS", {OURS: truth})
    for words in ([], ["--processes", "3"], ["--processes", "3", "--quick"]):
        bench.main(["one", "--output", str(tmp_path), *words])
    assert asked[-1:] == [(["one"], 3)]
    assert len(asked) == 1 + torch.cuda.is_available()


def test_a_process_that_compiles_calls_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[object] = []
    monkeypatch.setattr(paged_attn, "paged_attention", lambda **inputs: called.append(inputs))
    monkeypatch.setattr(warm, "inputs_of", lambda case, device: {"case": case.name, "device": device})
    monkeypatch.setattr(warm, "work", lambda names, part, parts: ([SMALL], [cliffs.Cell(part, parts, len(names))]))
    monkeypatch.setattr(cliffs, "shared", lambda cells: lambda cell: lambda: called.append(cell))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    warm.main(["1", "4", "decode", "cliffs"])
    assert called == [{"case": "small", "device": "cuda"}, cliffs.Cell(1, 4, 2)]
