"""Random calls of one seed: one configuration, many batches of it drawn by hypothesis, and shrinking of failures.

Kernels are compiled for a configuration, so batches cost little.  hypothesis shrinks a batch under the same kernels.
Then sequences and plans are removed, and fields of the case reset to their defaults, as long as the call still fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import hypothesis
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from paged_attn.launching import platform
from paged_attn.planning import planner
from tests.simulator import SIMULATES
from tests.support import hopper_plans, portable_plans, torch_ways
from tests.support.cases import Case, build, problem_of, run
from tests.support.other_calls import run_merge, run_write, run_write_qkv
from tests.support.random_calls import (
    ANYTHING,
    GPU,
    INTERPRETER,
    OPTIONS,
    SIMULATOR,
    SIZES,
    TORCH,
    Draw,
    batch,
    configuration,
)
from tests.support.spent import spent
from tests.support.torch_ways import IN_TORCH

DEVICE = "cuda" if torch.cuda.is_available() and not SIMULATES else "cpu"
LIMITS = SIMULATOR if SIMULATES else GPU if DEVICE == "cuda" else TORCH if IN_TORCH else INTERPRETER
FUNCTIONS: dict[str, Callable[..., Any]] = {x.__name__: x for x in (run, run_write, run_write_qkv, run_merge)}
SHRINKING = 60.0  # upper bound of the seconds in which hypothesis shrinks, and of those in which `_simplest` does
# Products below which the reference is computed on the host (`tests.fuzz --on-host` sets others).  A sequence takes
# some milliseconds, about as long as launches if many processes share a GPU; 2^27 products take a core 0.3 s.
ON_HOST = 1 << 23

HOPPER_WAYS = {
    f"hopper_plans.{way.__name__}()": way
    for way in (
        hopper_plans.anywhere, hopper_plans.mixed, hopper_plans.two_lists, hopper_plans.apart, hopper_plans.long,
        hopper_plans.wide, hopper_plans.shares, hopper_plans.one, hopper_plans.uncut, hopper_plans.three,
        hopper_plans.four, hopper_plans.four_uncut,
    )
}  # fmt: skip
PORTABLE_WAYS = {
    f"portable_plans.cut{cut}": lambda cut=cut: portable_plans.cut(*cut) for cut in ((1, 16), (3, 16), (2, 32), (7, 16))
} | {"portable_plans.portable()": portable_plans.portable}
TORCH_WAYS = {
    f"torch_ways.cut{cut}": lambda cut=cut: torch_ways.cut(*cut) for cut in ((1, 16), (3, 16), (3, 32), (3, 64))
}
WAYS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = HOPPER_WAYS | PORTABLE_WAYS | TORCH_WAYS


class Call(NamedTuple):
    """One call: the function of tests/support that makes it, its case, and the names of its plans (WAYS)."""

    function: str
    case: Case
    ways: tuple[str, ...]

    def as_test(self) -> str:
        """Return the source of a test that makes this call."""
        fields = [
            f"{field.name}={getattr(self.case, field.name)!r}"
            for field in dataclasses.fields(Case)
            if field.name != "name" and getattr(self.case, field.name) != field.default
        ]
        lines = [f"@{way}" for way in self.ways]
        lines += ["def test_what_fuzzing_has_found(device: str) -> None:"]
        return "\n".join([*lines, f'    {self.function}(Case("found", {", ".join(fields)}), device)'])


class Report(NamedTuple):
    """Report of one seed."""

    seed: int
    configuration: str
    ways: tuple[str, ...]
    calls: int
    seconds: float
    error: str | None = None
    test: str | None = None  # source of a test with this error
    # parts of the seconds
    compiling: float = 0.0
    building: float = 0.0  # making inputs
    comparing: float = 0.0  # comparing with the reference, which waits for the kernels


class Over(KeyboardInterrupt):
    """The time is up.  It is a KeyboardInterrupt, which hypothesis does not take for a failure."""


def explore(
    seed: int,
    batches: int,
    until: float,
    begin: Callable[[Call], None] = lambda call: None,
    lines: dict[str, Draw] | None = None,
) -> Report:
    """Try batches of a seed's configuration until a time.

    begin: gets each call before it runs.  lines: what a configuration is drawn from; None: anything legal.
    """
    started, rng = time.time(), random.Random(seed)
    fields = configuration(rng, LIMITS, lines or (SIZES | OPTIONS if SIMULATES else ANYTHING))
    ways, calls = tuple(_ways(rng)), 0
    functions = ["run"] if SIMULATES else ["run"] * 8 + [x for x in FUNCTIONS if x != "run"]
    failing: tuple[Call, str] | None = None

    @hypothesis.seed(seed)
    @settings(
        max_examples=batches,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        verbosity=hypothesis.Verbosity.quiet,
    )
    @given(st.randoms(use_true_random=False))
    def every(source: random.Random) -> None:
        nonlocal calls, failing, until
        if time.time() > until:
            raise Over
        call = Call(source.choice(functions), batch(source, fields, LIMITS), ways)
        begin(call)
        error = failure(call)
        calls += error is not SKIPPED
        if error:
            until = until if failing else max(until, time.time() + SHRINKING)
            failing = call, error
            raise AssertionError(error)

    with spent() as parts:
        try:
            every()
        except (AssertionError, Over):
            if failing is not None:
                failing = _simplest(*failing, time.time() + SHRINKING, begin)
    seconds = round(time.time() - started, 2)
    shown = ", ".join(f"{name}={value}" for name, value in fields.items())
    found = (None, None) if failing is None else (failing[1], failing[0].as_test())
    return Report(seed, shown, ways, calls, seconds, *found, **{part: round(x, 2) for part, x in parts.items()})


SKIPPED = ""  # the outcome of a call that the simulator cannot run


def failure(call: Call) -> str | None:
    """Make a call; return its error, SKIPPED, or None if all is right."""
    case = call.case
    with contextlib.ExitStack() as stack:
        for way in call.ways:
            stack.enter_context(WAYS[way]())
        try:
            if SIMULATES and any(x.pipe is None for x in planner.plan(problem_of(build(case, DEVICE))).launches):
                return SKIPPED
            if call.function != "run":
                FUNCTIONS[call.function](case, DEVICE)
            else:
                seen = sum(queries * max(keys, 0) for queries, keys in zip(case.query_lens, case.seq_lens))
                small = seen * case.heads * case.head_dim < ON_HOST
                run(case, DEVICE, on="cpu" if small else None)
        except Exception as error:  # any exception of a call or of its compiler is a failure
            if DEVICE == "cuda" and not isinstance(error, AssertionError):
                torch.cuda.synchronize()  # raises if the CUDA context is broken, which ends this process
            return f"{type(error).__name__}: {error}"
    return None


def _ways(rng: random.Random) -> Iterator[str]:
    """Yield names of WAYS: none for plans as they are, or plans by which small batches meet other paths."""
    if DEVICE == "cpu" and not SIMULATES:
        yield from rng.choice([[], *([way] for way in (TORCH_WAYS if IN_TORCH else PORTABLE_WAYS))])
        return
    hopper = SIMULATES or platform.device_of(torch.device(DEVICE, 0)).arch == "sm90"
    if not SIMULATES and (not hopper or rng.random() < 0.25):
        yield from rng.choice([[], *([way] for way in PORTABLE_WAYS)])
    elif SIMULATES or rng.random() < 0.7:
        yield "hopper_plans.anywhere()"
        yield rng.choice(list(HOPPER_WAYS))


def _simplest(call: Call, error: str, until: float, begin: Callable[[Call], None]) -> tuple[Call, str]:
    """Simplify a call as long as it fails with an error of the same type; return the simplest call and its error."""
    again, kind = True, error.partition(":")[0]
    while again:
        again = False
        for simpler in _simpler(call):
            if time.time() > until:
                return call, error
            begin(simpler)
            found = failure(simpler)
            if found and found.partition(":")[0] == kind:
                call, error, again = simpler, found, True
                break
    return call, error


def _simpler(call: Call) -> Iterator[Call]:
    """Yield calls that are one step simpler."""
    case = call.case
    yield from (call._replace(ways=tuple(x for x in call.ways if x != way)) for way in call.ways)
    lengths = list(zip(case.query_lens, case.seq_lens))
    changes: list[dict[str, Any]] = []
    for i, (queries, keys) in enumerate(lengths):
        others = lengths[:i], lengths[i + 1 :]
        if len(lengths) > 1:
            changes.append(_lengths(*others[0], *others[1]))
            # a failure may need one sequence's queries and another's keys: give both to one sequence
            before = lengths[i - 1]
            rest = [pair for j, pair in enumerate(lengths) if j not in (i, (i - 1) % len(lengths))]
            for fewest in (min, max):
                joined = fewest(queries, before[0]), max(keys, before[1])
                changes.append(_lengths(*rest, joined))
        context = keys - queries
        fewer = [(queries, queries + left) for left in _smaller(context)]
        fewer += [(left, context + left) for left in _smaller(queries) if left]
        changes += [_lengths(*others[0], pair, *others[1]) for pair in fewer]
    for field in dataclasses.fields(Case):
        if field.default is not dataclasses.MISSING and getattr(case, field.name) != field.default:
            changes.append({field.name: field.default})
    for change in changes:
        with contextlib.suppress(ValueError):  # the changed case is not valid
            yield call._replace(case=dataclasses.replace(case, **change))


def _smaller(number: int) -> list[int]:
    return sorted({number // 2, number - max(1, number // 4), number - 1}) if number > 0 else []


def _lengths(*lengths: tuple[int, int]) -> dict[str, Any]:
    return dict(query_lens=tuple(q for q, _ in lengths), seq_lens=tuple(n for _, n in lengths))
