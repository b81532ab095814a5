"""Where the time of a suite on a GPU goes: seconds of its workers, and kernels compiled, by file, told at its end.

Workers hand a test's compilations to the process that reports as properties of the test, which a report in JUnit's
format (`--junitxml`) has, too.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

FILES = 25  # that are told, those of most seconds first


spent = Counter[str]()  # by the test that runs: kernels compiled, and seconds of their compilation


def _listener(*, times: Any, cache_hit: bool, **_: Any) -> None:
    if not cache_hit:
        spent.update(kernels=1, compiling=times.total / 1e6)


@contextlib.contextmanager
def compiling(item: pytest.Item) -> Iterator[None]:
    """Count what Triton compiles inside; nothing while somebody else listens."""
    import triton

    if triton.knobs.compilation.listener is None:
        triton.knobs.compilation.listener = _listener
    spent.clear()
    try:
        yield
    finally:
        item.user_properties.extend(spent.items())


def by_file(reports: list[Any]) -> dict[str, Counter[str]]:
    """tests, seconds of all phases, kernels and seconds of their compilation, by file."""
    files: dict[str, Counter[str]] = {}
    for report in reports:
        found = files.setdefault(report.nodeid.partition("::")[0], Counter())
        found["seconds"] += report.duration
        if report.when == "call":
            found["tests"] += 1
            found.update(dict(report.user_properties))
    return files


def tell(terminal: pytest.TerminalReporter) -> None:
    """A line for each of the files that took longest, and one for all."""
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
