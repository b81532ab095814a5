"""Selection of the tests that a machine runs, and fixtures: its device, plans that cut short sequences, no launches."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import selection, simulator  # before the package decides whether it is interpreted
from tests.support import durations
from tests.support.torch_ways import IN_TORCH

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # for kernels of tests: the package decides for its own

# Ranks that are streams of one device wait for each other.  Of the default 8 connections two streams might share one.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

os.environ.setdefault("PAGED_ATTN_CHECK", "0")  # unchecked, the default on GPUs; tests of the checked call ask for it

# torch.compile's cache is in this checkout, not in the temporary folder that all checkouts share.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(__file__).parents[1] / "build" / "inductor"))

# Tests of many files call assertions in these modules, so pytest has to rewrite them, too.
pytest.register_assert_rewrite("tests.support.bad_input", "tests.support.compiled_layer")


def pytest_configure(config: pytest.Config) -> None:
    # torch.compile captures an empty CUDA graph to make a memory pool, and torch warns of it.
    config.addinivalue_line("filterwarnings", "ignore:The CUDA Graph is empty:UserWarning")
    # torch 2.11 calls its own deprecated functions when its compiler is imported.
    config.addinivalue_line("filterwarnings", "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
    # Triton's interpreter converts arrays of one element to loop bounds.
    config.addinivalue_line("filterwarnings", "ignore:Conversion of an array with ndim > 0:DeprecationWarning")


def pytest_sessionstart() -> None:
    if not torch.cuda.is_available():  # operations are small: several threads would mostly wait for each other
        torch.set_num_threads(1)
    if simulator.SIMULATES:
        from tests.simulator import process

        process.simulate()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    left_out = simulator.SIMULATES and collection_path.suffix == ".py" and not selection.is_simulated(collection_path)
    return True if left_out else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    has_gpu = torch.cuda.is_available()
    has_hopper = has_gpu and torch.version.hip is None and torch.cuda.get_device_capability()[0] == 9
    selection.mark(items)
    selection.leave_slow_likes(items)
    if simulator.SIMULATES:
        selection.leave_to_thorough(items)
    elif not has_gpu:
        selection.leave_half_of_many(items, others=IN_TORCH)
    for item in items:
        hopper, gpu = item.get_closest_marker("hopper"), item.get_closest_marker("gpu")
        if simulator.SIMULATES and not hopper:
            item.add_marker(pytest.mark.skip(reason="is not about Hopper kernels"))
        elif hopper and not (has_hopper or simulator.SIMULATES):
            item.add_marker(pytest.mark.skip(reason="needs a Hopper GPU, or SIMULATE=1"))
        elif item.get_closest_marker("gpus") and torch.cuda.device_count() < 2:
            item.add_marker(pytest.mark.skip(reason="needs several GPUs"))
        elif gpu and not has_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
    if has_gpu and not simulator.SIMULATES:
        selection.leave_to_cpus(config, items)
        selection.thin_out(config, items, selection.on_a_gpu)
    elif not simulator.SIMULATES:
        if IN_TORCH:
            selection.leave_to_kernels(config, items)
        selection.thin_out(config, items)
    selection.balance(config, items)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if torch.cuda.is_available():
        durations.tell(terminalreporter)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    with durations.compiling(item) if torch.cuda.is_available() else contextlib.nullcontext():
        return (yield)


def pytest_collection_finish() -> None:
    # Imported modules and collected tests stay; the garbage collector would spend a tenth of the time on them.
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def quick() -> Iterator[pytest.MonkeyPatch]:
    """Make Triton's interpreter quicker; yield the patch, which the test that results stay equal undoes."""
    from paged_attn.launching import platform

    with pytest.MonkeyPatch.context() as patch:
        if platform.INTERPRET:
            from tests.support.interpreter import quicken

            quicken(patch)
        yield patch


@pytest.fixture(scope="session")
def device() -> str:
    """Return "cuda" if there is a GPU and SIMULATE is off, else "cpu" (interpreter, simulator or plain torch)."""
    return "cuda" if torch.cuda.is_available() and not simulator.SIMULATES else "cpu"


@pytest.fixture
def cut() -> Iterator[Callable[..., None]]:
    """Yield cut(segments, tile), which cuts all later plans of the test: `portable_plans.cut`, or `torch_ways.cut`."""
    if IN_TORCH:
        from tests.support import torch_ways as plans
    else:
        from tests.support import portable_plans as plans  # type: ignore[no-redef]

    with contextlib.ExitStack() as stack:

        def cut(segments: int, tile: int = 32) -> None:
            stack.close()
            stack.enter_context(plans.cut(segments, tile))

        yield cut


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Require that every launch of the test is of the Hopper dialect, also for few queries that see few keys."""
    from paged_attn.planning import planner
    from paged_attn.records.plan import Plan
    from paged_attn.records.problem import Problem
    from tests.support import hopper_plans

    made = planner.plan

    def checked(problem: Problem) -> Plan:
        launches = made(problem)
        assert all(x.pipe is not None for x in launches.launches), problem
        return launches

    monkeypatch.setattr("paged_attn.calls.launched.plan", checked)
    with hopper_plans.anywhere():
        yield


@pytest.fixture
def no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test at any kernel launch; in plain torch, at any call that passes the checks."""
    if IN_TORCH:
        from paged_attn.planning.dialects import torch_dialect

        for name in ("attention", "write", "write_qkv", "merge_states"):
            monkeypatch.setattr(torch_dialect(), name, lambda *_, **__: pytest.fail("a call was made"))
        return
    from triton.runtime.jit import KernelInterface

    def launched(kernel: Any, grid: Any) -> None:
        pytest.fail(f"{kernel} was launched")

    monkeypatch.setattr(KernelInterface, "__getitem__", launched)


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    """Forget torch's compiled graphs and ignore those on disk, whose keys leave out the implementation of operators."""
    import torch._functorch.config
    import torch._inductor.config

    torch.compiler.reset()
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield


@pytest.fixture(params=["check=True", "PAGED_ATTN_CHECK=1"])
def checked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Ask for the checked call in each of two ways; return the arguments to add."""
    if request.param == "check=True":
        return {"check": True}
    from paged_attn.calls import checked

    monkeypatch.setenv("PAGED_ATTN_CHECK", "1")
    monkeypatch.setattr(checked, "ALWAYS", checked.asked())
    return {}


@pytest.fixture(autouse=True)
def plans_of_other_rules(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a test that uses `monkeypatch`, forget all plans: it may have changed what the planner decides by."""
    yield
    if "monkeypatch" in request.fixturenames and "paged_attn.planning.planner" in sys.modules:
        from tests.support.replanned import forget

        forget()
