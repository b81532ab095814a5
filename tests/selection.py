"""Which tests run where, and in which order, from what the tests say of themselves.

- `gpu`, `hopper`, `quick`, `long` are said by tests.
- `thorough` is said by what takes minutes, and whose like the whole suite has; and is true of most that is simulated.
- `host`: asks for no device, so it is about plans, texts and compilers: it runs where the kernels are interpreted.
- `smoke`: the first case of each test that a GPU may fail, and what CI simulates.
"""

from __future__ import annotations

import zlib
from collections import Counter

import pytest


def mark(items: list[pytest.Item]) -> None:
    """Add `host` and `smoke` to those that they are true of."""
    seen: set[str] = set()
    for item in items:
        kernels = item.get_closest_marker("gpu") or item.get_closest_marker("hopper")
        if not kernels and "device" not in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.host)
            continue
        test = item.nodeid.partition("[")[0]
        if test not in seen or item.get_closest_marker("quick"):
            item.add_marker(pytest.mark.smoke)
        seen.add(test)


def leave_to_cpus(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On a GPU, deselect what is the same there, unless it is asked for by its marker or its file."""
    if "host" in config.option.markexpr or any(".py" in argument for argument in config.args):
        return
    left = [item for item in items if item.get_closest_marker("host")]
    items[:] = [item for item in items if not item.get_closest_marker("host")]
    config.hook.pytest_deselected(items=left)


# Of large matrices of cases a machine without a GPU takes one in so many.  Names decide which: every n-th of a matrix
# whose rows have n cases, or a multiple, would leave out the same columns of each row.
ONE_IN = {
    "test_masks.py": 6, "test_latent.py": 3, "test_widths.py": 2, "test_gate.py": 2, "test_tree.py": 2,
    "test_token_scales.py": 2, "test_matrix.py": 2,
}  # fmt: skip

# On a GPU a case is its kernels' compilation, some five seconds of a core, and twelve workers have nine minutes.
ONE_IN_ON_GPU = {
    "test_hopper.py": 6, "test_masks.py": 8, "test_latent.py": 6, "test_paged_attention.py": 4, "test_matrix.py": 4,
    "test_batch_invariance.py": 4, "test_batch_invariance_of_plans.py": 4,
    "test_ends.py": 4, "test_hopper_masks.py": 4, "test_fp8.py": 4, "test_widths.py": 4,
    "test_hopper_numbers.py": 3, "test_positions.py": 3, "test_hopper_wide.py": 3, "test_hopper_join.py": 3,
    "test_hopper_positions.py": 3, "test_score_mod.py": 3, "test_gate.py": 3, "test_tree.py": 3,
    "test_hopper_wide_blocks.py": 3, "test_hopper_gate.py": 3, "test_pieces.py": 2, "test_copies.py": 2,
    "test_token_scales.py": 2, "test_hopper_tree.py": 2, "test_hopper_token_scales.py": 2,
}  # fmt: skip


def drawn(name: str, one_in: int) -> bool:
    """Whether a case is one of those that are always taken, of which there is one in so many."""
    return zlib.crc32(name.encode()) % one_in == 0


# Of a test's quick cases `make test` simulates the first and each so-manieth; the others `make thorough` does.
SIMULATED_ONE_IN = {"test_simulator.py": 1, "test_hopper_any.py": 6}  # elsewhere 3
SIMULATED = ("[prompt, softcap, float16]",)  # a format that no other case has


def leave_to_thorough(items: list[pytest.Item]) -> None:
    """Where Hopper kernels are simulated, mark most of the quick cases as `thorough`."""
    met: Counter[str] = Counter()
    for item in items:
        if item.get_closest_marker("quick"):
            test = item.nodeid.partition("[")[0]
            if met[test] % SIMULATED_ONE_IN.get(item.path.name, 3) and not item.nodeid.endswith(SIMULATED):
                item.add_marker(pytest.mark.thorough)
            met[test] += 1


def thin_out(config: pytest.Config, items: list[pytest.Item], one_in: dict[str, int] = ONE_IN) -> None:
    """Deselect what is `thorough`, and most cases of large matrices, unless file or marker is asked for.

    Of these each test keeps its first.
    """
    if "thorough" in config.option.markexpr or any(".py" in argument for argument in config.args):
        return
    met: set[str] = set()
    kept: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item in items:
        test = item.nodeid.partition("[")[0]
        taken = drawn(item.nodeid, one_in.get(item.path.name, 1)) or test not in met
        (kept if taken and not item.get_closest_marker("thorough") else left).append(item)
        met.add(test)
    items[:] = kept
    config.hook.pytest_deselected(items=left)


def balance(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long tests begin first, as many on each worker: xdist deals out runs of the list, and takes from their ends."""
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    long = [item for item in items if item.get_closest_marker("long")]
    short = iter([item for item in items if not item.get_closest_marker("long")])
    dealt: list[pytest.Item] = []
    for worker in range(workers):
        size = len(items) * (worker + 1) // workers - len(dealt)
        first = long[worker::workers]
        dealt += first + [item for _, item in zip(range(size - len(first)), short)]
    items[:] = dealt + list(short)
