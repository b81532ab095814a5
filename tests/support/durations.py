"""Where the time of a suite on a GPU goes: seconds of workers and compiled kernels of each file, printed at the end.

A worker reports a test's compilations as properties of the test, which a report in JUnit's format (`--junitxml`) has,
too.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

FILES = 25  # number of files in the report, in falling order of seconds


spent = Counter[str]()  # the running test's compiled kernels, and seconds of their compilation


def _listener(*, times: Any, cache_hit: bool, **_: Any) -> None:
    if not cache_hit:
        spent.update(kernels=1, compiling=times.total / 1e6)


@contextlib.contextmanager
def compiling(item: pytest.Item) -> Iterator[None]:
    """Count what Triton compiles inside, unless another listener is installed."""
    import triton

    if triton.knobs.compilation.listener is None:
        triton.knobs.compilation.listener = _listener
    spent.clear()
    try:
        yield
    finally:
        item.user_properties.extend(spent.items())


def by_file(reports: list[Any]) -> dict[str, Counter[str]]:
    """Return by file: tests, seconds of all phases, compiled kernels, and seconds of their compilation."""
    files: dict[str, Counter[str]] = {}
    for report in reports:
        found = files.setdefault(report.nodeid.partition("::")[0], Counter())
        found["seconds"] += report.duration
        if report.when == "call":
            found["tests"] += 1
            found.update(dict(report.user_properties))
    return files


def tell(terminal: pytest.TerminalReporter) -> None:
    """Print a line for each of the files that took longest, and one for all files."""
    files = by_file([x for found in terminal.stats.values() for x in found if isinstance(x, pytest.TestReport)])
    everything = Counter[str]()
    for found in files.values():
        everything.update(found)
    longest = sorted(files.items(), key=lambda x: -x[1]["seconds"])[:FILES]
    terminal.section("seconds of workers")
    for name, found in [*longest, ("all files", everything)]:
        terminal.line(
            f"{found['seconds']:7.1f} s, {found['tests']:4} tests, {found['kernels']:4} kernels compiled in "
            f"{found['compiling']:7.1f} s: {name}"
        )
