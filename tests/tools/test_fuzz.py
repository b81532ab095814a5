"""What fuzzing does with a fault: it finds it, shrinks it, and prints a test of it; nothing is launched here."""

from __future__ import annotations

import itertools
import math
import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.fuzz import _told, parsed
from tests.support import cases, fuzzing, spent, warm
from tests.support.cases import BAD_PAGE, E4M3, E5M2, INT4, INT8, Case, build
from tests.support.random_calls import ANYTHING, BATCH, GPU, INTERPRETER, SIMULATOR, batch, configuration, of_formats

# On a failure hypothesis imports what warns, and warnings are errors.
pytestmark = pytest.mark.filterwarnings("ignore:mypy_extensions.TypedDict:DeprecationWarning")


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Every reading is a second after the one before, and only readings take time."""
    ticks = itertools.count()
    clock = SimpleNamespace(time=lambda: next(ticks), perf_counter=lambda: next(ticks))
    monkeypatch.setattr(fuzzing, "time", clock)
    monkeypatch.setattr(fuzzing, "SHRINKING", math.inf)
    monkeypatch.setattr(spent, "time", clock)
    return clock


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Case], bool]], None]:
    """From then on every function of the library is wrong where this holds of a case."""

    def plant(wrong: Callable[[Case], bool]) -> None:
        def run(case: Case, device: str, **_: Any) -> None:
            if wrong(case):
                raise AssertionError("wrong")

        monkeypatch.setattr(fuzzing, "run", run)
        monkeypatch.setattr(fuzzing, "FUNCTIONS", dict.fromkeys(fuzzing.FUNCTIONS, run))

    return plant


def test_a_fault_is_found_and_its_test_has_nothing_that_it_does_not_need(fault: Any) -> None:
    fault(lambda case: case.sinks and max(case.seq_lens) > 20 and 3 in case.query_lens)
    found = next(x for x in (fuzzing.explore(seed, 30, math.inf) for seed in range(100)) if x.error)
    assert found.error == "AssertionError: wrong"
    assert found.test is not None
    *_, call = found.test.splitlines()
    fields = "query_lens=(3,), seq_lens=(21,), sinks=True"
    assert call.strip().partition("(")[2] == f'Case("found", {fields}), device)'
    names: dict[str, Any] = {**vars(fuzzing), "torch": torch}
    exec("from __future__ import annotations\n" + found.test, names)
    with pytest.raises(AssertionError, match="wrong"):
        names["test_what_fuzzing_has_found"]("cpu")


def test_of_two_sequences_one_is_left_that_has_the_queries_of_one_and_the_keys_of_the_other(fault: Any) -> None:
    fault(lambda case: max(case.seq_lens) > 20 and 3 in case.query_lens)
    call = fuzzing.Call("run", Case("found", (3, 5), (3, 21)), ())
    simplest, _ = fuzzing._simplest(call, "AssertionError: wrong", math.inf, lambda _: None)
    assert (simplest.case.query_lens, simplest.case.seq_lens) == ((3,), (21,))


def test_a_test_of_a_fault_fails_as_the_call_that_was_found_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its sinks the call would be refused, which is an error of another type."""

    def run(case: Case, device: str, **_: Any) -> None:
        if not case.sinks and max(case.seq_lens) < 90:
            raise TypeError("refused")
        if case.sinks:
            raise AssertionError("wrong")

    monkeypatch.setattr(fuzzing, "run", run)
    case = Case("found", (3,), (21,), sinks=True)
    _, error = fuzzing._simplest(fuzzing.Call("run", case, ()), "AssertionError: wrong", math.inf, lambda _: None)
    assert error == "AssertionError: wrong"


def test_a_seed_draws_the_same_calls_again(fault: Any) -> None:
    drawn: list[list[Case]] = []
    for _ in range(2):
        calls: list[Case] = []
        fault(lambda case, calls=calls: calls.append(case) is not None)
        assert fuzzing.explore(7, 20, math.inf).error is None
        drawn.append(calls)
    assert drawn[0] == drawn[1]
    assert len({str(case.query_lens) for case in drawn[0]}) > 3


def test_nothing_is_a_failure_where_nothing_is_wrong_and_time_ends_it(fault: Any) -> None:
    fault(lambda case: False)
    assert fuzzing.explore(3, 10, math.inf).error is None
    assert fuzzing.explore(3, 10, -1.0).calls == 0


@pytest.mark.skipif(fuzzing.DEVICE != "cpu", reason="is about reports, not about calls")
def test_a_report_tells_where_the_time_went(clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part has taken a second for each of its calls, which read the clock before and after."""
    called = Counter[str]()

    def counted(name: str) -> Callable[..., Any]:
        plain = getattr(cases, name)
        return lambda *args, **options: called.update([name]) or plain(*args, **options)

    for name in ("build", "compare"):
        monkeypatch.setattr(cases, name, counted(name))
    plain = cases.build, cases.compare
    found = fuzzing.explore(5, 3, math.inf)
    assert found.error is None
    assert (found.building, found.comparing) == (called["build"], called["compare"])
    assert min(called["build"], called["compare"]) > 0
    assert found.seconds == clock.time() - 1
    assert (cases.build, cases.compare) == plain


def test_formats_that_are_asked_for_are_those_of_all_calls(fault: Any) -> None:
    """A process of `--formats` draws each of them, and fp8 only with scales by token."""
    told = parsed(_told(parsed(["--formats", "fp8", "int4"])))
    calls: list[fuzzing.Call] = []
    fault(lambda case: False)
    for seed in range(30):
        assert fuzzing.explore(seed, 3, math.inf, calls.append, of_formats(told.formats)).error is None
    assert {call.case.cache_dtype for call in calls} == {E4M3, E5M2, INT4}
    assert {call.case.scales for call in calls} == {"per_token", "per_token, float16"}
    assert {call.case.cache_dtype for call in calls if call.function == "run_write_qkv"} == {E4M3, E5M2, INT4}
    drawn = [configuration(random.Random(seed), INTERPRETER, of_formats(["int8"])) for seed in range(60)]
    assert {x["cache_dtype"] for x in drawn} == {INT8}
    assert len({x["scales"] for x in drawn}) > 4


@pytest.mark.kernels
@pytest.mark.skipif(fuzzing.DEVICE != "cpu", reason="kernels are compiled on a GPU")
@pytest.mark.parametrize("dialect", [None, "torch"])
def test_without_a_gpu_kernels_are_interpreted_unless_plain_torch_is_asked_for(dialect: str | None) -> None:
    code = "import tests.fuzz, torch; from paged_attn.launching import platform"
    code += "; print(platform.in_torch(torch.device('cpu')))"
    environment = {x: y for x, y in os.environ.items() if x not in ("TRITON_INTERPRET", "PAGED_ATTN_DIALECT")}
    environment |= {"PAGED_ATTN_DIALECT": dialect} if dialect else {}
    done = warm.run(["-c", code], environment, Path(__file__).parents[2])
    assert done.stdout.split() == [str(dialect == "torch")], done.stderr


@pytest.mark.parametrize("limits", [GPU, SIMULATOR, INTERPRETER], ids=["gpu", "simulator", "interpreter"])
def test_every_argument_is_drawn_in_more_than_one_way(limits: Any) -> None:
    rng = random.Random(0)
    cases = [batch(rng, configuration(rng, limits), limits) for _ in range(200)]
    for name in [*ANYTHING, *BATCH, "check"]:
        assert len({getattr(case, name) for case in cases}) > 1, name
    assert max(case.heads for case in cases) <= limits.heads
    assert any(n < 0 for case in cases for n in case.seq_lens)


def test_every_argument_of_the_library_is_drawn() -> None:
    """Those of a case's arguments come from its fields: a new one has to be drawn, too."""
    rng = random.Random(1)
    given: set[str] = set()
    for _ in range(60):
        inputs = build(batch(rng, configuration(rng, INTERPRETER), INTERPRETER))
        given |= {name for name, value in inputs.items() if value is not None}
        pages = inputs["page_table"]  # or (indptr, indices)
        assert ((pages if isinstance(pages, torch.Tensor) else pages[1]) == BAD_PAGE).any(), "nothing is poisoned"
    import inspect

    import paged_attn

    assert given == inspect.signature(paged_attn.paged_attention).parameters.keys()
