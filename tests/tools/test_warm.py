"""Processes that begin with torch imported are otherwise as any process is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support import warm

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there processes are started as they always are")
FACTS = """
import __main__, atexit, json, os, sys, threading

atexit.register(print, "exit")
ours = ("triton", "paged_attn", "tests")
facts = dict(
    argv=sys.argv, path=sys.path, cwd=os.getcwd(), environ=dict(os.environ), stdin=sys.stdin.read(),
    name=__name__, file=globals().get("__file__"), main=vars(__main__) is globals(),
    threads=threading.active_count(), imported=sorted(x for x in sys.modules if x.split(".")[0] in ours),
)
print(json.dumps(facts, sort_keys=True))
print("error", file=sys.stderr)
sys.exit(3)
"""


@pytest.mark.parametrize("kind", ["script", "-c", "-m"])
def test_a_process_is_as_one_that_python_starts(kind: str, tmp_path: Path) -> None:
    script = tmp_path / "facts_of_a_process.py"
    script.write_text(FACTS)
    arguments = {"script": [str(script)], "-c": ["-c", FACTS], "-m": ["-m", "facts_of_a_process"]}[kind] + ["a", "b c"]
    env = os.environ | {"OF_THE_TEST": "1", "PYTHONPATH": str(tmp_path)}
    del env["TRITON_INTERPRET"]
    cold = subprocess.run(
        [sys.executable, *arguments], env=env, cwd=tmp_path, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    found = warm.run(arguments, env, tmp_path)
    assert (found.returncode, found.stdout, found.stderr) == (cold.returncode, cold.stdout, cold.stderr)
    assert cold.returncode == 3
    assert cold.stdout.endswith("exit\n")


def test_processes_know_nothing_of_each_other() -> None:
    first = warm.run(["-c", "import sys, torch, os; torch.mine = sys.mine = os.environ['MINE'] = '1'"], os.environ)
    again = warm.run(
        ["-c", "import sys, torch, os; print(hasattr(torch, 'mine'), hasattr(sys, 'mine'), 'MINE' in os.environ)"],
        os.environ,
    )
    assert (first.returncode, again.stdout) == (0, "False False False\n")


def test_an_error_and_a_signal_are_told() -> None:
    failed = warm.run(["-c", "import nothing_of_this_name"], os.environ)
    assert failed.returncode == 1
    assert failed.stderr.endswith("ModuleNotFoundError: No module named 'nothing_of_this_name'\n")
    assert warm.run(["-c", "import os; os.abort()"], os.environ).returncode == -6


def test_what_hangs_is_ended_and_the_next_is_served() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        warm.run(["-c", "import time; time.sleep(3600)"], os.environ, timeout=0.2)
    assert warm.run(["-c", "print('next')"], os.environ).stdout == "next\n"
