"""The suite of keys over GPUs: all of its parts on one rank without a GPU, small, and without clocks."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import ranks, runner
from benchmarks.ranks import Batch
from tests.distributed import spawned, works


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    with contextlib.closing(type("Group", (), {"close": dist.destroy_process_group})):
        yield


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Few keys, and calls that are made once; a time is the number of calls so far."""
    calls: list[Any] = []

    def times(self: ranks.Ranks, call: ranks.Call, inner: int = 20, rounds: int = 25) -> list[float]:
        calls.append(call())
        return self.of_all(float(len(calls)))

    monkeypatch.setattr(ranks.Ranks, "times", times)
    monkeypatch.setattr(ranks, "_wall", lambda call: calls.append(call()) or float(len(calls)))
    monkeypatch.setattr(works, "errors_of_merged_states", lambda rank, world: (2.0, 1.0))
    few = Batch(1, 32, 2, 1)
    monkeypatch.setattr(ranks, "SPEED", {"plain": (few, (1.9, 3.7)), "latent": (few._replace(latent=True), (1.7, 2.7))})
    for name, value in dict(
        EXCHANGED=(2,), LOCAL_KEYS=32, OWN_KEYS={"own": (2, 32)}, FEATURES=Batch(1, 48, 4, 2), PROMPT=32, STRIPE=16
    ).items():
        monkeypatch.setattr(ranks, name, value)
    return calls


def test_late_hosts_get_more_time_up_to_a_limit(one_rank: None) -> None:
    rank, found = ranks.Ranks(0, 1), iter([[], [1.0] * 12, [2.0] * 13])
    assert rank.on_time(lambda: next(found), 13) == [2.0] * 13
    assert rank.cycles == 4 * ranks.HOST_CYCLES
    with pytest.raises(RuntimeError, match="hosts took longer than 200000000 cycles"):
        rank.on_time(list, 13)


def test_every_part_measures_what_it_says(one_rank: None, small: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    rows = ranks.measure(0, 1, [*ranks.PARTS])
    assert {row["part"] for row in rows} == {*ranks.PARTS}
    found = {(row["part"], row["case"]): row for row in rows}
    assert found["exchange", "2 x 32 heads"].keys() >= {"local us", "peers adds us", "NCCL adds us", "NCCL alone us"}
    speed = found["speed", "latent"]
    assert speed["peers x"] == speed["one GPU us"] / speed["peers us"]
    assert speed["asked x"] == 1.7
    assert found["errors", "4 x 8k, norms"]["ratio"] == 0.5
    assert [case for part, case in found if part == "features"] == [
        "window", "ALiBi", "ALiBi, stripes of 16", "ALiBi, stripes of 1", "stripes of 1", "sinks, at the merge",
        "tree of 32",
    ]  # fmt: skip
    for result in small:  # with one rank all calls of a part give results over all keys
        out = result[0] if isinstance(result, tuple) else result
        assert torch.isfinite(out).all()
    assert "no peers: " in capsys.readouterr().out


def test_numbers_of_rank_0_are_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    rows = [{"part": "speed", "case": "1 x 1M", "peers us": 501.25, "each GPU us": [980.0, 981.0]}]
    answers = [spawned.Answer(rank, "measure", rows if rank == 0 else [], None) for rank in (1, 0)]
    monkeypatch.setattr(spawned, "run", lambda *given, **options: answers)
    monkeypatch.setattr(runner, "device_name", lambda: "a card")
    target = tmp_path / "deep" / "ranks.json"
    monkeypatch.setattr("sys.argv", ["ranks", "--json", str(target), "--world", "2", "--parts", "speed"])
    ranks.main()
    written = json.loads(target.read_text())
    assert (written["device"], written["world"], written["rows"]) == ("a card", 2, rows)
    assert "1 x 1M" in capsys.readouterr().out


def test_a_rank_that_failed_fails_the_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [spawned.Answer(0, "measure", [], None), spawned.Answer(1, "measure", "OSError: gone", "Traceback")]
    monkeypatch.setattr(spawned, "run", lambda *given, **options: answers)
    monkeypatch.setattr("sys.argv", ["ranks", "--world", "2"])
    with pytest.raises(AssertionError, match="measure, rank 1: Traceback"):
        ranks.main()
