"""Long tests begin first on every worker, and nothing is lost or doubled."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import selection


class Item:
    """A test that says of itself what a node of pytest would."""

    def __init__(self, name: str, *marks: str, device: bool = False) -> None:
        self.path = Path()
        self.nodeid, self.marks, self.fixturenames = name, [*marks], ("device",) * device

    def get_closest_marker(self, name: str) -> bool:
        return name in self.marks

    def add_marker(self, mark: Any) -> None:
        self.marks.append(mark.name)

    @property
    def own_markers(self) -> list[Any]:
        return [SimpleNamespace(name=name) for name in self.marks]

    @own_markers.setter
    def own_markers(self, marks: list[Any]) -> None:
        self.marks = [mark.name for mark in marks]


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_every_worker_begins_with_its_part_of_the_long_tests(workers: int) -> None:
    items: list[Any] = [Item(str(i), *["long"] * (i % 10 == 9)) for i in range(103)]
    before = list(items)
    selection.balance(SimpleNamespace(workerinput=dict(workercount=workers)), items)  # type: ignore[arg-type]
    assert sorted(map(id, items)) == sorted(map(id, before))
    for worker in range(workers):
        run = items[103 * worker // workers : 103 * (worker + 1) // workers]
        count = sum(item.get_closest_marker("long") for item in run)
        assert 10 // workers <= count <= 10 // workers + 1
        assert all(item.get_closest_marker("long") for item in run[:count])


def test_a_test_without_a_device_is_of_the_host_and_the_first_of_several_cases_of_another_is_smoke() -> None:
    items: Any = [
        Item("a"),
        Item("b[1]", device=True),
        Item("b[2]", device=True),
        Item("c[1]", "hopper"),
        Item("c[2]", "hopper", "quick"),
        Item("d", "gpu"),
    ]
    selection.mark(items)
    found = {item.nodeid: {"host", "smoke"} & {*item.marks} for item in items}
    smoke = {"smoke"}
    assert found == {"a": {"host"}, "b[1]": smoke, "b[2]": set(), "c[1]": smoke, "c[2]": set(), "d": set()}
    told: list[Any] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: told.extend(items))
    for expression, arguments, left in (("", ["tests"], 1), ("host", ["tests"], 0), ("", ["tests/test_a.py"], 0)):
        config: Any = SimpleNamespace(option=SimpleNamespace(markexpr=expression), args=arguments, hook=hook)
        some, told[:] = list(items), []
        selection.leave_to_cpus(config, some)
        assert len(told) == left == len(items) - len(some)


def test_slow_likes_are_thorough_and_each_is_a_test_of_the_suite() -> None:
    items: list[Any] = [Item(f"tests/a.py::{name}") for name in selection.SLOW_LIKES] + [Item("tests/a.py::test_b")]
    selection.leave_slow_likes(items)
    assert ["thorough" in x.marks for x in items] == [True] * len(selection.SLOW_LIKES) + [False]
    texts = "".join(path.read_text() for path in Path(__file__).parents[1].rglob("test_*.py"))
    assert not [name for name in selection.SLOW_LIKES if f"def {name.partition('[')[0]}(" not in texts]


class _Hook:
    def __init__(self) -> None:
        self.left: list[Any] = []

    def pytest_deselected(self, items: list[Any]) -> None:
        self.left += items


def test_a_cpu_takes_one_case_in_so_many_and_the_first_of_each_test() -> None:
    def item(file: str, test: str, case: int) -> Any:
        said = SimpleNamespace(path=Path(file), nodeid=f"tests/features/{file}::{test}[{case}]")
        said.get_closest_marker = lambda name: name == "thorough" and test == "d"
        return said

    names = [("test_latent.py", "a"), ("test_latent.py", "b"), ("test_step.py", "c"), ("test_step.py", "d")]
    items = [item(file, test, case) for file, test in names for case in range(60)]
    hook = _Hook()
    config: Any = SimpleNamespace(args=["tests"], hook=hook, option=SimpleNamespace(markexpr=""))
    kept = list(items)
    selection.thin_out(config, kept)
    there = {x.nodeid for x in kept}
    taken = {test: [n for n in range(60) if item(file, test, n).nodeid in there] for file, test in names}
    assert taken["d"] == []
    assert taken["c"] == list(range(60))
    for test in "ab":
        assert taken[test][0] == 0
        assert 10 < len(taken[test]) < 30
        assert {case % 3 for case in taken[test]} == {0, 1, 2}, "a column of a matrix is left out"
    assert len(kept) + len(hook.left) == len(items)
    for words, arguments in (("", ["tests/features/test_latent.py"]), ("thorough", ["tests"])):
        config = SimpleNamespace(args=arguments, hook=hook, option=SimpleNamespace(markexpr=words))
        asked = list(items)
        selection.thin_out(config, asked)
        assert asked == items


def test_half_of_the_cases_that_a_cpu_takes_of_a_large_matrix_are_thorough() -> None:
    def item(file: str, test: str, case: int) -> Any:
        made = Item(f"tests/features/{file}::{test}[{case}]", device=test != "host")
        made.path = Path(file)
        return made

    names = [("test_latent.py", "a", 600), ("test_step.py", "b", 600), ("test_step.py", "few", 7), ("c.py", "host", 60)]
    items = [item(file, test, case) for file, test, cases in names for case in range(cases)]
    adapters = [Item(f"tests/integrations/test_x.py::x[{case}]", device=True) for case in range(60)]
    items += adapters
    selection.leave_half_of_many(items)
    left = {test: [x for x in items if f"::{test}[" in x.nodeid and "thorough" in x.marks] for _, test, _ in names}
    assert left["few"] == left["host"] == [x for x in adapters if "thorough" in x.marks] == []
    assert 80 < len(left["a"]) < 120, "half of one case in three"
    assert 250 < len(left["b"]) < 350
    taken = {test: selection.on_a_cpu([x for x in items if f"::{test}[" in x.nodeid]) for test in "ab"}
    for test in "ab":
        assert {*map(id, left[test])} < {*map(id, taken[test])}
        assert taken[test][0] not in left[test]


def test_in_plain_torch_the_cases_that_a_cpu_leaves_out_are_thorough() -> None:
    items: list[Any] = [Item(f"tests/features/test_masks.py::test[{case}]", device=True) for case in range(300)]
    for x in items:
        x.path = Path("test_masks.py")
    selection.leave_half_of_many(items, others=True)
    left = {x.nodeid for x in items if "thorough" in x.marks}
    taken = {x.nodeid for x in selection.on_a_cpu(items)}
    assert {x.nodeid for x in items} - taken < left
    assert 0 < len(taken - left) < len(taken)


def test_a_gpu_takes_the_root_of_the_number_of_cases_that_are_variants_and_the_first_of_each_test() -> None:
    def taken(file: str, cases: int) -> list[int]:
        items: list[Any] = [Item(f"{file}::test[{case}]", device=True) for case in range(cases)]
        hook, kept = _Hook(), list(items)
        config: Any = SimpleNamespace(args=["tests"], hook=hook, option=SimpleNamespace(markexpr=""))
        selection.thin_out(config, kept, selection.on_a_gpu)
        assert len(kept) + len(hook.left) == cases
        return [items.index(x) for x in kept]

    for cases, count in ((1, 1), (2, 1), (3, 2), (12, 3), (25, 5), (64, 8), (400, 8)):
        some = taken("tests/features/test_masks.py", cases)
        assert some == sorted(set(some)), "in their order"
        assert some[0] == 0
        assert len(some) == count
        assert len(taken("tests/kernels/hopper/test_hopper_tree.py", cases)) == count
        assert len(taken("tests/checks/test_check.py", cases)) == cases
    before, after = (set(taken("tests/features/test_masks.py", cases)) for cases in (100, 101))
    assert len(before - after) <= 1, "one more case takes the place of one"


def test_most_quick_cases_are_thorough_where_they_are_simulated_but_the_first_of_each_test() -> None:
    def items() -> list[Any]:
        found = [
            Item(f"tests/{file}::{test}[{case}]", "hopper", *["quick"] * (case > 0))
            for file, test in names
            for case in range(61)
        ]
        for item in found:
            item.path = Path(item.nodeid.partition("::")[0])
        return found

    names = [("test_hopper_tree.py", "a"), ("test_hopper_any.py", "b"), ("test_simulator.py", "c")]
    found = items()
    selection.leave_to_thorough(found)
    left = [x.nodeid.partition("::")[2] for x in found if "thorough" in x.marks]
    # cases 1 to 60 are quick
    assert left == [
        *(f"a[{case}]" for case in range(1, 61) if case % 10 != 1),
        *(f"b[{case}]" for case in range(1, 61) if case % 6 != 1),
    ]
    assert all("quick" in x.marks for x in found if "thorough" in x.marks)
    names = [("test_hopper.py", "a")]
    found = items()
    selection.leave_to_thorough(found)
    quick = [x for x in found if {"quick", "thorough"} <= {*x.marks}]
    assert 20 < len(quick) < 34, "half of 54"
    assert len([x for x in found if "quick" in x.marks and "thorough" not in x.marks]) == 6


def test_every_file_with_quick_cases_says_that_it_is_simulated() -> None:
    files = [file for file in Path(selection.__file__).parent.rglob("test_*.py") if file != Path(__file__)]
    quick = [file for file in files if "mark.quick" in file.read_text(encoding="utf-8")]
    assert len(quick) > 10
    assert [file.name for file in quick if not selection.is_simulated(file)] == []
