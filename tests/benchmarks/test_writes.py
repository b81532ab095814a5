"""The suite `writes`: peers are compared before they are timed, and the JSON is that of any suite."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__ as bench
from benchmarks import writes
from benchmarks.peers import OURS
from benchmarks.writes import BF16, E4M3, INT4, Write


def test_the_cases_and_their_bytes() -> None:
    assert {tuple(case) for case in writes.CASES} == {(n, *cache) for n in writes.TOKENS for cache in writes.CACHES}
    ids, angles = 16, 512
    assert Write(1, BF16).bytes == 2 * (48 + 32 + 16) * 128 + ids + angles
    assert Write(64, E4M3).bytes == 64 * (2 * (48 + 32) * 128 + 16 * 128 + ids + angles)
    assert Write(64, torch.int8, True).bytes == Write(64, E4M3).bytes + 64 * 16 * 4
    assert Write(64, INT4, True).bytes == Write(64, torch.int8, True).bytes - 64 * 8 * 128


@pytest.mark.parametrize("cache", [INT4, torch.int8, E4M3], ids=str)
def test_torch_compile_writes_the_same_numbers_by_token(cache: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    torch.manual_seed(0)
    case = Write(5, cache, True)
    x, found = writes.inputs_of(case, "cpu"), []
    for peer in (writes.ours, writes.compiled):
        stores = writes.stores_of(case, x)
        found.append(writes.written(peer(case, x, stores)(), stores))
    assert 0 < writes.error_of(*found) < (writes.AGREE_OF_INT4 if cache == INT4 else writes.AGREE)
    assert all(y.norm() > 1 for y in found[0])


def wrong(*args: Any) -> Any:
    call = writes.ours(*args)
    return lambda: call() * 1.1


@pytest.mark.usefixtures("timeless")
def test_a_run_compares_and_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = (Write(2, BF16), Write(18, E4M3), Write(18, torch.int8, True), Write(2, E4M3))
    monkeypatch.setattr(writes, "CASES", cases)  # of which --quick has one of four
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setitem(writes.PEERS, "wrong", wrong)
    bench.main(["writes", "--quick", "--output", str(tmp_path)])
    kept = json.loads((tmp_path / "writes.json").read_text())
    (result,) = kept["results"]
    assert result["case"] == "18 tokens, float8_e4m3fn cache"
    assert list(result["seconds"]) == [OURS, "torch.compile"]
    assert 0 < result["errors"]["torch.compile"] < writes.AGREE
    assert "relative error 0.1" in result["skipped"]["wrong"]
    assert result["skipped"].keys() >= {"flashinfer", "sglang"}
    assert kept["totals"]["torch.compile"]["factor"] == pytest.approx(2.0)
    assert "writes 1/1  18 tokens" in capsys.readouterr().out
