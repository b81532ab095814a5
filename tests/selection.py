"""Selection of tests by machine, and their order, by markers.

- Tests set `gpu`, `gpus`, `hopper`, `quick`, `long` and `kernels`; files set `simulated`.
- Tests that take long, such as most of those of machine code, set `thorough`.  This module adds it to SLOW_LIKES, to
  most simulated cases, and without a GPU to half of the cases of tests that run kernels in many.  `make test` leaves
  `thorough` out, and `make thorough` runs it.
- `host` is added to tests that ask for no device, which are about plans, texts and compilers.  A GPU's suite leaves
  them out.
- `smoke` is added to the first case of each test that has several cases and may ask for a GPU.
"""

from __future__ import annotations

import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

Taken = Callable[[list[pytest.Item]], list[pytest.Item]]  # all cases of a test -> those that the whole suite runs


def is_simulated(file: Path) -> bool:
    """Whether a file has the marker `simulated`; only its text is read, so other files need not be imported."""
    return "pytest.mark.simulated" in file.read_text(encoding="utf-8")


def mark(items: list[pytest.Item]) -> None:
    """Add the markers `host` and `smoke`."""
    met: set[str] = set()
    for item in items:
        kernels = any(item.get_closest_marker(name) for name in ("gpu", "gpus", "hopper"))
        if not kernels and "device" not in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.host)
            continue
        test, _, parameters = item.nodeid.partition("[")
        if parameters and test not in met:
            item.add_marker(pytest.mark.smoke)
        met.add(test)


# Tests of processes and compilers that take ten seconds or more.  The whole suite keeps a similar test of each, with
# another number of ranks, target, start method or example.
SLOW_LIKES = (
    "test_ranks_have_the_results_of_one_process[4]",
    "test_no_order_of_kernels_changes_a_key",
    "test_an_assembler_that_torch_compile_names_changes_no_key[spawned]",
    "test_an_example_of_processes_shows_what_it_says[tensor_parallel]",
    "test_an_example_of_processes_shows_what_it_says[keys_over_gpus]",
    "test_kernels_take_what_the_driver_is_told[hopper]",
    "test_prefills_whose_functions_load_by_score_or_by_position_beside_a_bias_compile_for_wgmma",
    "test_processes_of_multiprocessing_call[forkserver]",
    "test_a_child_calls_whatever_another_thread_was_in_the_midst_of[launched]",
    "test_a_child_calls_whatever_another_thread_was_in_the_midst_of['paged_attn.kernels' in sys.modules]",
    "test_a_run_that_is_stopped_tells_what_it_has",
    "test_of_two_daemonic_workers_one_compiles_and_the_other_finds_all",
)


def leave_slow_likes(items: list[pytest.Item]) -> None:
    """Mark SLOW_LIKES as `thorough`."""
    for item in items:
        if item.nodeid.endswith(SLOW_LIKES):
            item.add_marker(pytest.mark.thorough)


def leave_to_cpus(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On a GPU, deselect `host` tests, whose results are the same there, unless the marker or a file is asked for."""
    if "host" in config.option.markexpr or any(".py" in argument for argument in config.args):
        return
    left = [item for item in items if item.get_closest_marker("host")]
    items[:] = [item for item in items if not item.get_closest_marker("host")]
    config.hook.pytest_deselected(items=left)


# Fixtures of tests of plans and launches.
PLANNED = {"parts", "copied", "on_hopper"}


def leave_to_kernels(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In plain torch, deselect tests of plans, launches and processes of kernels."""

    def of_kernels(item: pytest.Item) -> bool:
        return bool(item.get_closest_marker("kernels") or PLANNED & {*getattr(item, "fixturenames", ())})

    left = [item for item in items if of_kernels(item)]
    items[:] = [item for item in items if not of_kernels(item)]
    config.hook.pytest_deselected(items=left)


# File with a large matrix of cases -> n: a machine without a GPU runs about one case in n, chosen by a hash of its
# name.  Every n-th case would leave out the same columns of each row if n divides the cases of a row.
ONE_IN = {
    "test_masks.py": 6, "test_latent.py": 3, "test_widths.py": 2, "test_gate.py": 2, "test_tree.py": 2,
    "test_token_scales.py": 2, "test_matrix.py": 2,
}  # fmt: skip

# On a GPU most of a case's time is the compilation of its kernels, some four seconds of a core, and twelve workers have
# nine minutes.  In these files nearly every case is a variant of kernels of its own, so few cases run.  In other files
# many cases share compiled kernels, and all run.
OF_VARIANTS = (
    *(f"tests/{folder}/" for folder in ("arguments", "compiled", "features", "reference", "steps")),
    "tests/kernels/hopper/test_hopper",
)
MOST_ON_A_GPU = 8  # cases of a test


def lot(item: pytest.Item) -> int:
    """Return a hash of the names of a case and its file; the folder of the file does not count."""
    return zlib.crc32(re.sub(r"^tests/\w+/(?=test_)", "tests/", item.nodeid).encode())


def by_test(items: Iterable[pytest.Item]) -> dict[str, list[pytest.Item]]:
    """Return cases by their test, in the given order."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return cases


def on_a_cpu(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Return a test's first case, and by lot one in ONE_IN of the others."""
    return [x for x in cases if x is cases[0] or lot(x) % ONE_IN.get(x.path.name, 1) == 0]


MANY = 8  # cases


def leave_half_of_many(items: list[pytest.Item], others: bool = False) -> None:
    """Without a GPU, mark about half of a test's cases as `thorough`, if it runs kernels in MANY cases or more.

    Only cases that `on_a_cpu` takes count.  The first case of a test is never marked.  Tests of adapters keep all
    cases, because `make test-hosts` runs these tests, and `make thorough` does not run them beside a host.

    others: also mark all cases that `on_a_cpu` leaves out.
    """
    if others:
        taken_of_all = {id(x) for cases in by_test(items).values() for x in on_a_cpu(cases)}
        for item in items:
            if id(item) not in taken_of_all:
                item.add_marker(pytest.mark.thorough)
    of_kernels = [x for x in items if "device" in getattr(x, "fixturenames", ()) and "integrations/" not in x.nodeid]
    for cases in by_test(of_kernels).values():
        taken = [x for x in on_a_cpu(cases) if not x.get_closest_marker("thorough")]
        for item in taken[1:] if len(taken) >= MANY else ():
            if lot(item) // ONE_IN.get(item.path.name, 1) % 2:
                item.add_marker(pytest.mark.thorough)


def on_a_gpu(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Return all cases of a test, or in OF_VARIANTS the first and, by lot, others: the square root of their number."""
    if not cases[0].nodeid.startswith(OF_VARIANTS):
        return cases
    first, *others = cases
    count = min(MOST_ON_A_GPU, round(math.sqrt(len(cases))))
    return [first, *sorted(others, key=lot)[: count - 1]]


# File -> n: `make test` simulates every n-th of a test's quick cases, from the first on; `make thorough` does the rest.
SIMULATED_ONE_IN = {"test_simulator.py": 1, "test_hopper_any.py": 6}  # elsewhere SIMULATED_ELSEWHERE
SIMULATED_ELSEWHERE = 10
# First cases that take ten seconds and more.
SLOW_SIMULATED = (
    "test_any_call_gives_the_results_of_the_reference[0]",
    "test_even_shares_of_a_line_give_the_results_of_the_reference[chunks, window, not causal]",
)
SIMULATED = ("[prompt, softcap, float16]",)  # always simulated: no other case has this format
# Files with so many quick cases that `make thorough` simulates half of them, by lot.  `make simulate ARGS="-m hopper"`
# simulates all.
HALVED = ("test_hopper.py", "test_hopper_positions.py", "test_hopper_masks.py", "test_hopper_int4.py")


def leave_to_thorough(items: list[pytest.Item]) -> None:
    """Where Hopper kernels are simulated, mark most of the quick cases as `thorough`."""
    met: Counter[str] = Counter()
    for item in items:
        if item.get_closest_marker("quick"):
            test = item.nodeid.partition("[")[0]
            one_in = SIMULATED_ONE_IN.get(item.path.name, SIMULATED_ELSEWHERE)
            others = met[test] % one_in and not item.nodeid.endswith(SIMULATED)
            if others or item.nodeid.endswith(SLOW_SIMULATED):
                item.add_marker(pytest.mark.thorough)
                if item.path.name in HALVED and lot(item) % 2:
                    item.own_markers = [x for x in item.own_markers if x.name != "quick"]
            met[test] += 1


def thin_out(config: pytest.Config, items: list[pytest.Item], taken: Taken = on_a_cpu) -> None:
    """Deselect `thorough` tests, and cases that are not taken, unless the marker or a file is asked for."""
    if "thorough" in config.option.markexpr or any(".py" in argument for argument in config.args):
        return
    met = {id(x) for cases in by_test(items).values() for x in taken(cases) if not x.get_closest_marker("thorough")}
    left = [x for x in items if id(x) not in met]
    items[:] = [x for x in items if id(x) in met]
    config.hook.pytest_deselected(items=left)


def balance(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put long tests first in each worker's part, equally many in each.

    xdist gives each worker a run of the list, and lets idle workers take from the ends of other runs.
    """
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    long = [item for item in items if item.get_closest_marker("long")]
    short = iter([item for item in items if not item.get_closest_marker("long")])
    dealt: list[pytest.Item] = []
    for worker in range(workers):
        size = len(items) * (worker + 1) // workers - len(dealt)
        first = long[worker::workers]
        dealt += first + [item for _, item in zip(range(size - len(first)), short)]
    items[:] = dealt + list(short)
