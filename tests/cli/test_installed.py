"""The wheel, installed where there is no source tree: every verb works or says what it needs."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable

import pytest

from paged_attn import __version__
from paged_attn.cli import main
from tests.support.documents import ROOT

pytestmark = pytest.mark.thorough
Command = Callable[[str], subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """The command of a wheel, in an empty folder.

    Python runs it without `site`, which would add the clone by the environment's editable install.
    """
    pytest.importorskip("hatchling", reason="needs hatchling, of the extra dev")
    wheels, site, empty = (tmp_path_factory.mktemp(name) for name in ("wheels", "site", "empty"))
    pip = [sys.executable, "-m", "pip"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(wheels), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = wheels.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", str(site), str(wheel)], check=True)
    environment = {x: value for x, value in os.environ.items() if not x.startswith(("PAGED_ATTN", "TRITON_INTERPRET"))}
    environment |= {"PYTHONPATH": os.pathsep.join([str(site), sysconfig.get_paths()["purelib"]]), "COLUMNS": "200"}

    def command(words: str) -> subprocess.CompletedProcess[str]:
        program = [sys.executable, "-S", str(site / "bin" / "paged-attn"), *words.split()]
        return subprocess.run(program, cwd=empty, env=environment, capture_output=True, text=True)

    return command


@pytest.mark.parametrize("verb", ["", *main.commands])
def test_every_verb_has_help(installed: Command, verb: str) -> None:
    done = installed(f"{verb} --help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(" ".join(f"Usage: paged-attn {verb}".split()))
    assert done.stderr == ""


def test_it_is_this_version(installed: Command) -> None:
    assert installed("--version").stdout.split()[-1] == __version__


@pytest.mark.parametrize("words", ["check", "info", "info --json", "explain", "explain --device b200 --json"])
def test_what_needs_no_gpu_works(installed: Command, words: str) -> None:
    done = installed(words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout) > 100


def test_prepare_compiles_for_a_gpu_that_is_elsewhere(installed: Command) -> None:
    words = "--heads 2 --kv-heads 1 --head-dim 16 --max-seqs 1 --max-tokens 1 --max-seqlen 16 --device h200"
    done = installed(f"prepare {words}")
    assert done.returncode == 0, done.stderr
    assert "kernels for sm90" in done.stdout


def test_a_benchmark_says_that_it_needs_a_clone(installed: Command) -> None:
    done = installed("bench")
    assert (done.returncode, done.stdout) == (2, "")
    assert "benchmarks need a clone" in done.stderr
