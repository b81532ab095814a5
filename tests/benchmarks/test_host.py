"""The host's time for a call: measured in turns, and without a device."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import host


def test_host_calls_are_timed_in_turns_and_as_often_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    calls = {"one": lambda: made.append("1"), "other": lambda: made.append("2")}
    # a call takes a microsecond, the other three, a wait a second
    taken = {"1": 1_000, "2": 3_000, "wait": 10**9}
    monkeypatch.setattr(host, "perf_counter_ns", lambda: sum(taken[x] for x in made))
    assert host.measure(calls, 150, lambda: made.append("wait")) == {"one": 1.0, "other": 3.0}
    runs = [(x, len(list(run))) for x, run in itertools.groupby(made)]
    waited = [run for pair in [("1", 100), ("2", 100), ("1", 50), ("2", 50)] for run in (pair, ("wait", 1))]
    assert runs == [("1", 10), ("2", 10), ("wait", 1), *waited]


def test_host_time_is_measured_without_a_device(tmp_path: Path) -> None:
    """In a process of its own, for it pretends to have one."""
    output = tmp_path / "host.json"
    command = [sys.executable, "-m", "benchmarks.host", "--stub", "--calls", "20", "--output", str(output)]
    subprocess.run(command, cwd=Path(__file__).parents[2], check=True, capture_output=True, timeout=3600)
    found = json.loads(output.read_text())["host_us"]
    assert {name.split()[0] for name in found} == {"eager", "launch", "operator", "write_kv", "write_qkv"}
