"""The benchmark checks peers before it times them, says who is left out, keeps and draws; on the CPU."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor
from torch.nn.attention import SDPBackend

import paged_attn
from benchmarks import __main__ as bench
from benchmarks import cliffs, host, measure, options, plots, report, runner, suites, traces, warm
from benchmarks.inputs import inputs_of, tree
from benchmarks.peers import OURS, PEERS, Call, flashinfer, sdpa
from benchmarks.peers.cannot import Cannot, allow, features
from benchmarks.work import traffic
from paged_attn import reference
from paged_attn.cli import main
from tests.cases import E4M3, Case

SMALL = Case("small", (3, 1), (20, 33), heads=2, kv_heads=1, head_dim=16, lse=False)
EVEN = Case("even", (5, 5), (5, 5), heads=4, kv_heads=2, head_dim=16, dtype=torch.bfloat16, lse=False)
CEILINGS = {"bytes_per_second": 4.4e12, "operations_per_second": 750e12}


def truth(case: Case, inputs: dict[str, Any]) -> Call:
    """A peer that is right."""

    def call() -> Tensor:
        out = reference.paged_attention(**inputs | {"out": None})
        assert isinstance(out, Tensor)
        return out

    return call


def wrong(case: Case, inputs: dict[str, Any]) -> Call:
    return lambda: 1.05 * truth(case, inputs)()


def nan(case: Case, inputs: dict[str, Any]) -> Call:
    return lambda: torch.nan * truth(case, inputs)()


def modest(case: Case, inputs: dict[str, Any]) -> Call:
    raise Cannot("no Tuesdays")


def absent(case: Case, inputs: dict[str, Any]) -> Call:
    import a_package_that_does_not_exist  # noqa: F401

    return truth(case, inputs)


def broken(case: Case, inputs: dict[str, Any]) -> Call:
    raise RuntimeError("first line\nsecond line")


@pytest.fixture
def timeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU: names stand for graphs, and every peer takes a time by its place, the library 10 us."""
    monkeypatch.setattr(runner, "device", lambda: "cpu")
    monkeypatch.setattr(measure, "capture", lambda call: call)
    monkeypatch.setattr(measure, "ceilings", lambda: dict(CEILINGS))
    monkeypatch.setattr(measure, "replay", lambda graphs, rounds: {n: 1e-5 * (i + 1) for i, n in enumerate(graphs)})


# Peers.


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


def test_host_calls_are_timed_in_turns_and_as_often_as_asked() -> None:
    made: list[str] = []
    calls = {"one": lambda: made.append("1"), "other": lambda: made.append("2")}
    assert set(host.measure(calls, 150, lambda: made.append("wait"))) == set(calls)
    runs = [(x, len(list(run))) for x, run in itertools.groupby(made)]
    waited = [run for pair in [("1", 100), ("2", 100), ("1", 50), ("2", 50)] for run in (pair, ("wait", 1))]
    assert runs == [("1", 10), ("2", 10), ("wait", 1), *waited]


def test_peers_that_need_no_package_decline_or_agree_here() -> None:
    inputs = inputs_of(SMALL, "cpu")
    for name in ("sdpa cudnn", "cudnn paged", "flashinfer fa2", "vllm triton"):
        with pytest.raises((Cannot, ImportError)):
            PEERS[name](SMALL, inputs)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_sdpa_gathers_the_pages_it_is_a_bound_for(layout: str) -> None:
    for lengths in ((EVEN.query_lens, EVEN.seq_lens), ((1, 1), (40, 40))):
        case = replace(EVEN, query_lens=lengths[0], seq_lens=lengths[1], layout=layout)
        inputs = inputs_of(case, "cpu")
        got = sdpa._call(case, inputs, SDPBackend.MATH)()
        # a step of bfloat16 at 2 is 2^-7; a wrong key is far beyond
        torch.testing.assert_close(got.float(), truth(case, inputs)().float(), atol=2**-6, rtol=0)


def test_host_time_is_measured_without_a_device(tmp_path: Path) -> None:
    """In a process of its own, for it pretends to have one."""
    output = tmp_path / "host.json"
    command = [sys.executable, "-m", "benchmarks.host", "--stub", "--calls", "20", "--output", str(output)]
    subprocess.run(command, cwd=Path(__file__).parents[2], check=True, capture_output=True, timeout=3600)
    found = json.loads(output.read_text())["host_us"]
    assert {name.split()[0] for name in found} == {"eager", "launch", "operator", "write_kv"}
    assert 0 < found["launch decode"] < found["eager decode"] < found["operator decode"]


def test_features_name_what_a_case_asks_for() -> None:
    case = Case("", (1,), (9,), softcap=3.0, sinks=True, cache_dtype=E4M3, dtype=torch.bfloat16)
    assert features(case) == {"softcap", "sinks", "fp8", "log-sum-exps"}
    allow(case, "softcap", "sinks", "fp8", "log-sum-exps")
    with pytest.raises(Cannot, match="no sinks, fp8, log-sum-exps"):
        allow(case, "softcap", "window")


def test_flashinfer_gets_the_live_pages_in_order() -> None:
    case = Case("", (1, 1, 1), (33, 16, 1))
    inputs = inputs_of(case, "cpu")
    indptr, indices, last = flashinfer._pages(case, inputs)
    table = inputs["page_table"]
    assert indptr.tolist() == [0, 3, 4, 5]
    assert indices.tolist() == [*table[0, :3].tolist(), table[1, 0].item(), table[2, 0].item()]
    assert last.tolist() == [1, 16, 1]


def test_flashinfers_mask_is_the_tree_behind_the_context() -> None:
    case = Case("", (3, 2), (5, 2), qq_bias=3, tree=True)
    mask = flashinfer._mask(case, tree(3))
    rows = ["11100", "11110", "11101", "10", "11"]
    assert mask.int().tolist() == [int(digit) for row in rows for digit in row]


# Results.


def results() -> list[dict[str, Any]]:
    """Three cases: won, lost to one, and not run by it."""
    times = [{OURS: 10e-6, "sdpa cudnn": 8e-6, "a": 12e-6, "b": 15e-6}, {OURS: 20e-6, "a": 16e-6}, {OURS: 30e-6}]
    return [
        {"case": f"case {i}", "bytes": 10**7, "operations": 10**9, "seconds": one, "errors": {}, "skipped": {}}
        for i, one in enumerate(times)
    ]


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
    assert "failed" in capsys.readouterr().out
    assert report.left_out([*results(), failed]) == ["paged-attn left out: why (bad)"]


# What is compiled beforehand.


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


# The command.


def test_the_verb_is_the_same_runner() -> None:
    result = CliRunner().invoke(main, ["bench", "--help"])
    assert result.exit_code == 0
    assert "--cliffs" in result.output
    assert CliRunner().invoke(main, ["bench", "nonsense"]).exit_code == 2


def test_without_a_checkout_the_verb_says_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_attn, "__file__", str(tmp_path / "paged_attn" / "__init__.py"))
    result = CliRunner().invoke(main, ["bench"])
    assert result.exit_code == 2
    assert "run `make bench` in a clone" in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_benchmark_says_so() -> None:
    with pytest.raises(SystemExit, match="needs a GPU"):
        bench.main(["decode"])


def test_peers_are_chosen_by_the_beginning_of_their_names() -> None:
    asked = options.parse(["decode", "--peers", "sdpa,cudnn"])
    assert asked.peers == [OURS, "sdpa cudnn", "sdpa flash", "cudnn paged"]
    assert asked.suites == ["decode"]
    assert options.parse(["--cliffs"]).suites == ["cliffs"]
    assert options.parse([]).suites == list(options.ALL)


def test_the_command_line_names_every_suite_and_every_peer() -> None:
    assert tuple(suites.SUITES) == options.SUITES
    assert tuple(bench.PEERS) == options.PEERS


@pytest.mark.parametrize(
    "words, message",
    [
        ("--peers nobody", "no peer 'nobody'"),
        ("--rounds 0", "must be a number above 0, got '0'"),
        ("--processes many", "must be a number above 0, got 'many'"),
        ("--trace /no/where", "there is no file '/no/where'"),
    ],
)
def test_mistakes_end_before_anything_is_measured(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        options.parse(words.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


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
