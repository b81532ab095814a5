"""A process of its own that compiles: what it says where it fails, and when it ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from paged_attn.preparation import manifest, subprocess
from tests.preparation.asked import ASKED


def test_a_process_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "PROGRAM", "raise SystemExit('the disk is full')")
    with pytest.raises(RuntimeError, match="ended with status 1: the disk is full"):
        subprocess.prepare(ASKED)


def test_what_compiles_ends_with_who_began_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import os, threading, time; from paged_attn.preparation import subprocess; os.setpgid(0, 0); "
    program += (
        "threading.Thread(target=subprocess._end_with_parent).start(); print('begun', flush=True); time.sleep(3600)"
    )
    monkeypatch.setattr(subprocess, "PROGRAM", program)
    process = subprocess._begin(ASKED, manifest.Held(None))
    assert process.stdout.readline() == "begun\n"
    process.stdin.close()  # as the end of this process would
    assert process.wait(3600) == -9
    process.stdout.close()
