"""Every example runs and says what it shows: their own assertions compare with dense attention and the reference."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.own_process import run

EXAMPLES = Path(__file__).parents[2] / "examples"
SAID = {
    "step": r"26 tokens of 3 sequences .*: as the reference\n3 decodes in the same tensors: as the reference",
    "tiny_engine": r"4 requests in \d+ steps, [1-9]\d* preempted: tokens as of dense attention",
    "speculative_tree": r"1[67] tokens in (?:[2-9]|1[0-4]) steps: those of plain greedy decoding",
    "fp8_cache": r"64 instead of 128 KiB; .*\nwith e4m3 queries as well .*%",
    "shared_prefix": r"4 sequences in 9 pages instead of 15: the same results",
}
APART = {
    "tensor_parallel": r"2 processes of 1 KV head each on \w+: tokens as of one process",
    "keys_over_gpus": r"keys over 2 ranks by \w+: 3 steps and a prompt as of one",
}
SHARED = {"tiny_model"}  # what examples import


@pytest.mark.parametrize("name", SAID)
def test_an_example_shows_what_it_says(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert re.fullmatch(SAID[name], printed.getvalue().strip()), printed.getvalue()


@pytest.mark.long
@pytest.mark.parametrize("name", APART)
def test_an_example_of_processes_shows_what_it_says(name: str, device: str) -> None:
    script = f"import sys\nsys.path.insert(0, {str(EXAMPLES)!r})\n"
    script += f"if __name__ == '__main__': import {name}; {name}.main()"
    assert re.fullmatch(APART[name], run(script).strip())


@pytest.mark.long
def test_torchrun_starts_the_ranks_of_an_example() -> None:
    run_by = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)}
    done = subprocess.run([*run_by, str(EXAMPLES / "keys_over_gpus.py")], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert re.fullmatch(APART["keys_over_gpus"], done.stdout.strip())


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SAID, *APART, *SHARED}


def test_the_engine_fits_in_150_lines() -> None:
    assert len((EXAMPLES / "tiny_engine.py").read_text(encoding="utf-8").splitlines()) <= 150
