"""The device that the suite runs on, plans small enough for short sequences to meet every path, no launch at all."""

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
    os.environ.setdefault("TRITON_INTERPRET", "1")  # for kernels of tests, too: the package looks after its own alone

# Ranks that are streams of one device wait for each other: of eight connections two streams might share one.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

os.environ.setdefault("PAGED_ATTN_CHECK", "0")  # as on GPUs; tests of the checked call ask for it

# What torch compiles and loads lies in the clone, not at a name in the common temporary folder.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(__file__).parents[1] / "build" / "inductor"))

# Their assertions are those of many files.
pytest.register_assert_rewrite("tests.support.bad_input", "tests.support.compiled_layer")


def pytest_configure(config: pytest.Config) -> None:
    # torch.compile makes a graph's pool by an empty graph, of which torch warns.
    config.addinivalue_line("filterwarnings", "ignore:The CUDA Graph is empty:UserWarning")
    # torch 2.11 uses its own deprecated functions where its compiler is imported.
    config.addinivalue_line("filterwarnings", "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
    # Triton's interpreter turns arrays of one element into loop bounds.
    config.addinivalue_line("filterwarnings", "ignore:Conversion of an array with ndim > 0:DeprecationWarning")


def pytest_sessionstart() -> None:
    if (
        not torch.cuda.is_available()
    ):  # of small operations: threads only wait for each other, most of all beside workers
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
        selection.leave_half_of_many(items)
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
    # What was imported and collected stays: looking through it again and again takes a tenth of the time.
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def quick() -> Iterator[pytest.MonkeyPatch]:
    """What makes the interpreter quick, for the test that it computes the same without."""
    from paged_attn.launching import platform

    with pytest.MonkeyPatch.context() as patch:
        if platform.INTERPRET:
            from tests.support.interpreter import quicken

            quicken(patch)
        yield patch


@pytest.fixture(scope="session")
def device() -> str:
    """A GPU where there is one, else the CPU, where kernels run through Triton's interpreter."""
    return "cuda" if torch.cuda.is_available() and not simulator.SIMULATES else "cpu"


@pytest.fixture
def cut() -> Iterator[Callable[..., None]]:
    """cut(segments, tile): from then on every plan of this test is cut so (`portable_plans.cut`)."""
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
    """Every launch of the test has to be of the Hopper dialect, also of few queries that see few keys."""
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
    """Any kernel launch of the test fails it, and in plain torch any call that passes the checks."""
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
    """Nor known from an earlier run: graphs on disk are found by what is traced, not by what operators are made of."""
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
    """The two ways to ask for the checked call: the arguments to add."""
    if request.param == "check=True":
        return {"check": True}
    from paged_attn.calls import checked

    monkeypatch.setenv("PAGED_ATTN_CHECK", "1")
    monkeypatch.setattr(checked, "ALWAYS", checked.asked())
    return {}


@pytest.fixture(autouse=True)
def plans_of_other_rules(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that replaces what the planner goes by leaves no plan of it to the tests behind it."""
    yield
    if "monkeypatch" in request.fixturenames and "paged_attn.planning.planner" in sys.modules:
        from tests.support.replanned import forget

        forget()
