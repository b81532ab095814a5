"""Packages that pip fetches into folders; an index that does not answer has an exception of its own."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

SECONDS = 300  # for one call of pip: the largest wheel takes some 60
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (28, 31, 34, 35)]
ALONE = ("--no-deps",)  # torch stays as it is
# What pip prints if it gives up because the index is unreachable, breaks off, or reports an error of its own.
SILENCE = re.compile(
    r"Retry\(total=0\b.*connection broken|Max retries exceeded|Read timed out|Connection (?:refused|reset|aborted)"
    r"|Temporary failure in name resolution|IncompleteRead|\b(?:429|5\d\d) (?:Client|Server) Error"
    r"|HTTP error (?:429|5\d\d)|too many (?:429|5\d\d) error"
)
KNOWN = re.compile(r"\(from versions: (?!none\))")  # the index answered, and lacks what was asked for


class NoAnswer(Exception):
    """The package index does not answer: nothing of ours is wrong."""


class Failed(Exception):
    """Pip failed for another reason."""


def install(folder: Path, *wanted: str) -> None:
    """Install packages, without what they require, into a folder, unless it exists."""
    made(folder, lambda to: _pip("install", *ALONE, "--target", str(to), *wanted))


def python_of_wheel(folder: Path, wanted: str) -> None:
    """Unpack a wheel without its compiled libraries, which may be gigabytes for a GPU that is not here."""

    def unpack(to: Path) -> None:
        with tempfile.TemporaryDirectory() as place:
            kind = ["--only-binary=:all:", "--python-version", "3.12"]
            platforms = [x for p in PLATFORMS for x in ("--platform", p)]
            _pip("download", *ALONE, *kind, *platforms, "--dest", place, wanted)
            with zipfile.ZipFile(next(Path(place).glob("*.whl"))) as wheel:
                wheel.extractall(to, [name for name in wheel.namelist() if not name.endswith(".so")])

    made(folder, unpack)


def made(folder: Path, make: Callable[[Path], None]) -> None:
    """Make a folder, unless it exists; it exists as a whole or not at all, whatever ends this process."""
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".") as place:
        make(Path(place, "made"))
        shutil.move(Path(place, "made"), folder)


def _pip(*words: str) -> None:
    command = [sys.executable, "-m", "pip", *words, "-vv", "--disable-pip-version-check"]
    command += ["--retries", "2", "--timeout", "30"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"not within {SECONDS} s") from None
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        why = (errors or [f"pip ended with status {done.returncode}"])[0]
        raise (NoAnswer if is_silence(done.stdout + done.stderr) else Failed)(why)


def is_silence(said: str) -> bool:
    """Whether pip says that it failed because the index did not answer."""
    return SILENCE.search(said) is not None and not KNOWN.search(said)
