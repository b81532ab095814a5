"""Cases of other projects' tests: a seeded sample of each grid, and a report of what the sample leaves out.

The environment's SAMPLE is the number of cases in all, and SEED decides which they are.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.suites import flash_attention, grids

MODULES = ("test_flash_attn_2", "test_flash_attn_3")
SAMPLE = int(os.environ.get("SAMPLE", "500" if torch.cuda.is_available() else "30"))
SEED = int(os.environ.get("SEED", "1"))
MANY_KEYS = 50_000  # of a sequence
LOCK = Path(__file__).parents[2] / "build" / "suites.lock"


@functools.cache
def chosen(module: str) -> dict[str, list[grids.Values]]:
    """Cases by test."""
    tests = [
        x
        for x in flash_attention.tests_in(vars(importlib.import_module(module)))
        if x.__name__ not in flash_attention.WHOLE
    ]
    return grids.sample(tests, SAMPLE // len(MODULES), SEED, flash_attention.reason, flash_attention.fits)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__.rpartition(".")[2] not in MODULES:
        return
    function = metafunc.function
    cases, names = chosen(metafunc.module.__name__).get(function.__name__, []), grids.names_of(function)
    if names:
        label = [",".join(str(x).removeprefix("torch.") for x in case) for case in cases]
        metafunc.parametrize(names, cases, ids=label)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    theirs = [x for x in items if x.path.stem in MODULES]
    for item in theirs:
        item.add_marker(pytest.mark.filterwarnings("ignore"))
    none = {id(x) for x in theirs if not chosen(f"tests.suites.{x.path.stem}").get(getattr(x, "originalname", ""))}
    items[:] = [x for x in items if id(x) not in none]


@pytest.fixture(autouse=True)
def forward_alone(request: pytest.FixtureRequest) -> Iterator[None]:
    """No gradients; and as workers share a GPU, one of them at a time has keys of many gigabytes."""
    case = getattr(request.node, "callspec", None)
    many = case is not None and case.params.get("seqlen_k", 0) > MANY_KEYS
    with torch.no_grad(), one_at_a_time() if many else contextlib.nullcontext():
        yield
        if torch.cuda.is_available() and torch.cuda.memory_reserved() > 2 << 30:
            gc.collect()
            torch.cuda.empty_cache()


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Within, no other process is."""
    LOCK.parent.mkdir(exist_ok=True)
    with LOCK.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


@functools.cache
def counts() -> dict[str, dict[str, Any]]:
    """Return how many cases of each module's tests are left out by which reason."""
    found = {}
    for name in MODULES:
        tests = flash_attention.tests_in(vars(importlib.import_module(f"tests.suites.{name}")))
        found[name] = {test.__name__: grids.counted(test, flash_attention.reason) for test in tests}
    return found


@pytest.fixture
def counted() -> dict[str, dict[str, Any]]:
    if flash_attention.CHECKOUT is None:
        pytest.skip(flash_attention.ABSENT)
    return counts()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if flash_attention.CHECKOUT is None:
        return
    for name, of_tests in counts().items():
        terminalreporter.section(f"FlashAttention-{name[-1]}: cases of its grids")
        ran = {test: len(cases) for test, cases in chosen(f"tests.suites.{name}").items()}
        for line in grids.lines(of_tests, ran, flash_attention.ASIDE):
            terminalreporter.write_line(line)
