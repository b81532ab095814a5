"""Grids of cases that are too large to run whole: counted in full by what leaves a case out, and sampled.

Tests of other projects skip cases before they seed torch, and begin their work by that.  So a case that is called up to
there tells within microseconds whether it runs.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

ITSELF = "skipped by the test itself"
Values = tuple[Any, ...]
Reason = Callable[[str, dict[str, Any]], str | None]  # why a test's case is left out, if it is


class Axis(NamedTuple):
    """Parameters that vary together."""

    names: tuple[str, ...]
    points: list[Values]


def grid(names: str, values: Any) -> Callable[[Any], Any]:
    """In place of pytest.mark.parametrize: remember the axis, and make no test of each case."""
    split = tuple([name.strip() for name in names.split(",")])
    axis = Axis(split, [tuple(x) if len(split) > 1 else (x,) for x in values])

    def add(function: Any) -> Any:
        function.axes = [*getattr(function, "axes", []), axis]
        return function

    return add


def names_of(function: Any) -> list[str]:
    return [name for axis in getattr(function, "axes", []) for name in axis.names]


def size_of(function: Any) -> int:
    return math.prod(len(axis.points) for axis in getattr(function, "axes", []))


def case_at(function: Any, index: int) -> Values:
    """A case by its number in the grid, the last axis first."""
    found: Values = ()
    for axis in reversed(getattr(function, "axes", [])):
        index, at = divmod(index, len(axis.points))
        found = axis.points[at] + found
    return found


class _BeginsError(Exception):
    """A test is about to do its work."""


def _begins(seed: int) -> None:
    raise _BeginsError


@contextlib.contextmanager
def asking() -> Iterator[None]:
    """Within, tests stop where they would seed torch."""
    seeds, torch.random.manual_seed = torch.random.manual_seed, _begins  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.random.manual_seed = seeds


def reason_of(function: Any, case: Values, reason: Reason) -> str | None:
    """Why a case does not run, or None; inside `asking`."""
    named = dict(zip(names_of(function), case))
    why = reason(function.__name__, named)
    if why is not None:
        return why
    try:
        function(**named)
    except _BeginsError:
        return None
    except pytest.skip.Exception:
        return ITSELF
    raise AssertionError(f"{function.__name__} ends before it seeds torch: whether it runs cannot be asked")


def counted(function: Any, reason: Reason) -> Counter[str | None]:
    """How many cases of the whole grid are left out by each reason; None: by none."""
    with asking():
        points = itertools.product(*(axis.points for axis in getattr(function, "axes", [])))
        return Counter(reason_of(function, tuple(itertools.chain(*point)), reason) for point in points)


def sample(
    functions: list[Any], count: int, seed: int, reason: Reason, fits: Callable[[dict[str, Any]], bool]
) -> dict[str, list[Values]]:
    """So many cases of these tests that run and `fits` takes, as many of each as there are, small grids first."""
    found: dict[str, list[Values]] = {}
    for at, function in enumerate(sorted(functions, key=size_of)):
        quota = count // (len(functions) - at)
        found[function.__name__] = drawn(function, quota, seed, reason, fits)
        count -= len(found[function.__name__])
    return found


def drawn(function: Any, quota: int, seed: int, reason: Reason, fits: Callable[[dict[str, Any]], bool]) -> list[Values]:
    """Up to `quota` cases of a test in random order; after many that do not run it stops looking."""
    rng, size, names = random.Random(f"{seed} {function.__name__}"), size_of(function), names_of(function)
    found: list[Values] = []
    with asking():
        for index in rng.sample(range(size), min(size, 2000 * quota)):
            if len(found) == quota:
                break
            case = case_at(function, index)
            if fits(dict(zip(names, case))) and reason_of(function, case, reason) is None:
                found.append(case)
    return found


def lines(counts: dict[str, Counter[str | None]], ran: dict[str, int], aside: set[str]) -> Iterator[str]:
    """The report: a line for each test, and one of what is left out but for the reasons `aside`."""
    for name, count in counts.items():
        others = "".join(f"; {count[why]:,} {why}" for why in count if why is not None)
        yield f"{name}: {ran.get(name, 0)} of {count[None]:,} cases run{others}"
    left, runs = left_out(counts.values(), aside)
    share = f"{left:,} of {left + runs:,} cases ({left / (left + runs):.2%})"
    yield f"left out, but for {' and '.join(sorted(aside))}: {share}"


def left_out(counts: Any, aside: set[str]) -> tuple[int, int]:
    """(cases left out by a reason that counts, cases that run)."""
    total: Counter[str | None] = sum(counts, Counter())
    return sum(n for why, n in total.items() if why not in (None, ITSELF, *aside)), total[None]
