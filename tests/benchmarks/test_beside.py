"""Versions of the project beside one another: each runs its own code, and what differs is told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent

import pytest
import torch

from benchmarks import beside


def version(folder: Path, value: float, microseconds: float) -> Path:
    """A version whose results are all `value`, after so long."""
    files = {
        "paged_attn/__init__.py": f"""
            import torch
            def paged_attention(size): return torch.full((size,), {value})
            """,
        "benchmarks/__init__.py": "",
        "benchmarks/suites.py": """
            from collections import namedtuple
            Case = namedtuple("Case", "name size")
            SUITES = {"decode": [Case("decode b1 x 512", 600000), Case("mine", 4)]}
            def uniform(name, *numbers): return Case(name, sum(numbers))
            """,
        "benchmarks/measure.py": f"""
            def measure(calls, rounds): return {{name: rounds * {microseconds} * 1e-6 for name in calls}}
            """,
        "benchmarks/inputs.py": """
            def build(case, device):
                assert device == "cuda"
                return {"size": case.size}
            """,
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(dedent(text), encoding="utf-8")
    return folder


@pytest.mark.thorough
def test_each_version_runs_its_own_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    versions = [version(tmp_path / "old", 1.0, 20.0), version(tmp_path / "new", 1.5, 10.0)]
    words = [*map(str, versions), "decode", "--only", "b1 x 512", "131072", "--cells", "3x64x16384"]
    beside.main([*words, "--rounds", "2", "--processes", "1"])
    told = capsys.readouterr().out
    rows = {line.split("  ")[0]: line for line in told.splitlines()}
    assert "40.0 40.0" in rows["decode b1 x 512"]
    assert "20.0 20.0  0.500x" in rows["decode b1 x 512"]
    assert "0.500x" in rows["3x64x16384"]
    assert "20.0" not in rows["decode b1 x 131072"], "neither version has it"
    for name in ("decode b1 x 512", "3x64x16384"):
        assert f"{versions[1]} differs from {versions[0]} in {name}: 0.5" in told.replace("\n", "")


def test_a_version_may_bring_packages_and_is_reported_as_json(tmp_path: Path) -> None:
    folder, packages = version(tmp_path / "mine", 1.0, 20.0), tmp_path / "packages"
    packages.mkdir()
    (packages / "rate.py").write_text("TIMES = 3", encoding="utf-8")
    measure = "from rate import TIMES\ndef measure(calls, rounds): return {name: TIMES * 1e-6 for name in calls}"
    (folder / "benchmarks" / "measure.py").write_text(measure, encoding="utf-8")
    (folder / "benchmarks" / "runner.py").write_text('def versions(): return {"commit": "abc"}', encoding="utf-8")
    output = tmp_path / "beside.json"
    beside.main(
        [f"{folder}:{packages}", "--cells", "1x1x16", "--processes", "1", "--turns", "1", "--output", str(output)]
    )
    (report,) = json.loads(output.read_text(encoding="utf-8"))["versions"]
    assert report == {"version": f"{folder}:{packages}", "commit": "abc", "seconds": {"1x1x16": [3e-6]}}


def test_a_run_that_is_stopped_tells_what_it_has(tmp_path: Path) -> None:
    slow = version(tmp_path / "slow", 1.5, 10.0)
    sleep = "import pathlib, time\ndef measure(calls, rounds): pathlib.Path('begun').touch(); time.sleep(3600)"
    (slow / "benchmarks" / "measure.py").write_text(sleep, encoding="utf-8")
    words = [str(version(tmp_path / "old", 1.0, 20.0)), str(slow), "decode", "--rounds", "2", "--turns", "1"]
    command = [sys.executable, beside.__file__, *words, "--only", "b1 x 512", "--processes", "1"]
    root = Path(beside.__file__).parents[1]
    with subprocess.Popen(command, cwd=root, env=os.environ | {"PYTHONPATH": str(root)}, stdout=subprocess.PIPE) as run:
        while not (slow / "begun").exists() and run.poll() is None:
            time.sleep(0.1)
        run.send_signal(signal.SIGTERM)
        told = run.communicate(timeout=1800)[0].decode()
    assert "decode b1 x 512" in told
    assert "40.0" in told
    assert run.returncode == 128 + signal.SIGTERM


def test_a_version_that_fails_is_told(tmp_path: Path) -> None:
    broken = version(tmp_path / "broken", 1.0, 1.0)
    (broken / "benchmarks" / "measure.py").write_text("raise RuntimeError", encoding="utf-8")
    with pytest.raises(SystemExit, match="failed with status 1"):
        beside.main([str(broken), "--cells", "1x1x16", "--processes", "1"])


def test_what_is_neither_a_version_nor_a_suite_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        beside.main([str(version(tmp_path / "old", 1.0, 1.0)), "../nowhere"])
    assert "'../nowhere' is neither" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        beside.main(["decode"])


def test_results_that_are_rounded_otherwise_are_the_same(tmp_path: Path) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    torch.save({"rounded": x, "wrong": x, "lost": x, "only here": x}, tmp_path / "a")
    torch.save({"rounded": x.bfloat16().float(), "wrong": x * 1.01, "lost": x * torch.nan}, tmp_path / "b")
    assert {name for name, _ in beside.differences(tmp_path / "a", tmp_path / "b")} == {"wrong", "lost"}
