"""Every call has a row of the table of regimes, and everything in the tables says why it is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from benchmarks.suites import SUITES
from paged_attn.kernels.hopper import planning
from paged_attn.kernels.hopper.planning import block_kinds, regimes
from paged_attn.kernels.hopper.planning.coverage import uncovered
from paged_attn.kernels.portable import regimes as portable_regimes
from paged_attn.planning.dialects import DIALECTS, dialect
from tests.planning.page import PAGE, page, thresholds
from tests.planning.problems import problem_of_case, suites
from tests.planning.test_any_plan import any_calls

FOLDERS = Path(planning.__file__).parent, Path(portable_regimes.__file__).parent


def test_the_page_of_regimes_is_made_of_the_tables() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tests.planning.page writes it"


def test_every_row_has_calls() -> None:
    """A row that no call reaches behind those before it decides nothing."""
    reached = {regimes.regime_of(p).name for p in any_calls(5, 4000)}
    reached |= {regimes.regime_of(p).name for _, case in suites() if not uncovered(p := problem_of_case(case))}
    assert {row.name for row in regimes.REGIMES} - reached <= {"large groups beside drafts"}


def test_large_groups_beside_drafts_have_a_row() -> None:
    falcon = next(case for case in SUITES["models"] if case.name == "Falcon 7B: 1024 at 4096 + 31 at 2048")
    decodes = problem_of_case(falcon)
    assert regimes.regime_of(decodes).name == "large groups beside decodes"
    assert regimes.regime_of(decodes._replace(tokens=decodes.tokens + 90)).name == "large groups beside drafts"


def test_names_of_rows_are_one_row_s() -> None:
    for table in (regimes.REGIMES, portable_regimes.REGIMES, (*block_kinds.KINDS_OF_TWO_LISTS, *block_kinds.KINDS)):
        names = [row.name for row in table]
        assert len(set(names)) == len(names)


def test_the_last_row_takes_what_is_left() -> None:
    for table in (regimes.REGIMES, portable_regimes.REGIMES, block_kinds.KINDS_OF_TWO_LISTS, block_kinds.KINDS):
        assert table[-1].when(None)  # type: ignore[arg-type]  # whatever it is


def test_every_number_has_a_unit_a_reason_and_what_decided() -> None:
    found = list(thresholds())
    assert len(found) > 30
    for module, name, _, said in found:
        assert all(said), f"{module}.{name}"


@pytest.mark.parametrize(
    "path",
    sorted(x for folder in FOLDERS for x in folder.glob("*.py")),
    ids=lambda path: f"{path.parent.name}/{path.stem}",
)
def test_no_number_decides_without_saying_why(path: Path) -> None:
    """Names of least and most are thresholds, or say in a comment what they are the size of."""
    told = {name for module, name, _, _ in thresholds() if module == path.stem}
    lines = path.read_text(encoding="utf-8").splitlines()
    for node in ast.parse("\n".join(lines)).body:
        if isinstance(node, ast.Assign):
            for target in ast.walk(node.targets[0]):
                if isinstance(target, ast.Name) and re.match(r"(MIN|MAX)_", target.id):
                    commented = "#" in lines[node.lineno - 1] or lines[node.lineno - 2].startswith("#")
                    assert target.id in told or commented, target.id


def test_cases_that_decided_are_of_the_suites() -> None:
    """What begins with a suite goes on with the name of a case of it."""
    checked = 0
    for row in regimes.REGIMES:
        suite, _, rest = row.decided.partition(": ")
        if suite in SUITES:
            checked += 1
            assert any(rest.startswith(f"{case.name} ") for case in SUITES[suite]), f"{row.name}: {row.decided}"
            for case in SUITES[suite]:
                if rest.startswith(f"{case.name} "):
                    problem = problem_of_case(case)
                    assert regimes.regime_of(problem).name == row.name, f"{row.name}: {case.name}"
    assert checked > 12


@pytest.mark.parametrize("name", DIALECTS)
def test_a_dialect_names_the_row_of_a_call(name: str) -> None:
    for problem in any_calls(6, 50):
        regime, reason = dialect(name).regime(problem)
        assert regime
        assert reason
        assert ":" not in regime + reason  # `explain` puts one between
