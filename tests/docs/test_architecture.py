"""The map of the house is the house."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

from tests.support.documents import ROOT, name

PACKAGE = ROOT / "paged_attn"
# whose files the map does not name one by one
WHOLE = {"integrations", "serving"}


def test_the_map_names_every_file_where_it_lies_and_no_other() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w/]+)/` \| (.*) \|$", page, re.M)
    drawn = {folder.removeprefix("paged_attn"): set(re.findall(r"`(\w+\.py)`", text)) for folder, text in rows}
    there: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        folder = path.parent.relative_to(PACKAGE)
        if folder.parts[:1] and folder.parts[0] in WHOLE:
            continue
        if not path.name.startswith("__"):
            there.setdefault("" if folder.as_posix() == "." else folder.as_posix(), set()).add(path.name)
    assert drawn == there


def test_the_order_of_imports_on_the_page_is_that_of_the_contracts() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    drawn = {
        folder: re.split(r"\s+->\s+", chain) for folder, chain in re.findall(r"^- In `([\w/]+)`: `([^`]+)`", page, re.M)
    }
    held = {}
    contract = r'^containers = \["([\w.]+)"\]\nlayers = \[\n(.*?)^\]'
    for folder, layers in re.findall(contract, (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M | re.S):
        lines = re.findall(r'"([^"]+)"', layers)
        held[folder.replace(".", "/")] = [line.replace(".", "/").replace(" | ", ", ") for line in lines]
    assert len(held) == 2
    assert drawn == held


FOLDERS = sorted(path.parent.relative_to(PACKAGE) for path in PACKAGE.rglob("__init__.py"))
STAGES = [folder for folder in FOLDERS if folder.parts and folder.parts[0] not in (*WHOLE, "cli")]


@pytest.mark.parametrize("folder", STAGES, ids=Path.as_posix)
def test_a_folder_says_what_lives_there_what_it_imports_and_where_the_new_goes(folder: Path) -> None:
    said = ast.get_docstring(ast.parse((PACKAGE / folder / "__init__.py").read_text(encoding="utf-8")))
    assert said is not None
    what, empty, imports, new = said.splitlines()
    assert what.endswith(".")
    assert not empty
    assert "import" in imports
    assert "new " in new.lower()
    for file in re.findall(r"((?:\w+/)*\w+\.py)", said):
        assert any((root / file).exists() for root in (PACKAGE / folder, PACKAGE)), file


@pytest.mark.parametrize("index", [ROOT / "README.md", ROOT / "docs" / "hosts" / "index.md"], ids=name)
def test_every_host_has_a_line(index: Path) -> None:
    rows = re.findall(r"^\|.*\|$", index.read_text(encoding="utf-8"), re.M)
    hosts = [page.name for page in (ROOT / "docs" / "hosts").glob("*.md") if page.name != "index.md"]
    assert len(hosts) > 5
    for host in hosts:
        assert len([row for row in rows if re.search(rf"\((?:docs/hosts/)?{re.escape(host)}\)", row)]) == 1, host


def test_files_that_the_drawing_of_a_call_names_are_there() -> None:
    drawing = (ROOT / "docs" / "images" / "call.svg").read_text(encoding="utf-8")
    named = set(re.findall(r"(?:\w+/)*\w+\.py|\w+/(?=<)", drawing))
    folders = {"calls", "checks", "planning", "records", "launching"}
    assert len(named) > 6
    assert [
        x for x in named if not any((root / x).exists() for root in (PACKAGE, *(PACKAGE / y for y in folders)))
    ] == []
    kernels = "\n".join(path.read_text(encoding="utf-8") for path in (PACKAGE / "kernels").rglob("*.py"))
    assert all(f"def {kernel}(" in kernels for kernel in re.findall(r"\w+_kernel", drawing))


def test_the_pages_of_design_keep_to_their_length() -> None:
    assert len((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").splitlines()) <= 250


def test_the_page_of_performance_has_the_conditions_of_hopper_in_the_words_of_explain() -> None:
    plan = pytest.importorskip("paged_attn.kernels.hopper.planning.coverage")
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    (table,) = (part for part in page.split("\n\n") if part.startswith("| in the words of `explain`"))
    trial = "a score_mod that Gluon does not compile"  # no condition on a Problem, and so in no row of CONDITIONS
    assert trial in inspect.getsource(plan.uncovered)
    rows = set(re.findall(r"^\| ([^|]+) \|", table.partition("\n")[2], re.M)) - {"---"}
    assert rows == {trial} | {words for _, words in plan.CONDITIONS}


def test_the_rules_of_hopper_name_places_that_there_are() -> None:
    page = (ROOT / "docs" / "hopper.md").read_text(encoding="utf-8")
    rules = re.findall(r"^\| .* \| ([^|]+) \|$", page, re.M)
    named = {place for cell in rules for place in re.findall(r"`([\w/]+)`", cell)}
    roots = (PACKAGE, PACKAGE / "kernels" / "hopper")
    missing = {x for x in named if not any((root / x).is_dir() or (root / f"{x}.py").exists() for root in roots)}
    assert len(named) > 20
    assert not missing


SOURCES = ("paged_attn", "tests", "benchmarks", "tools", "examples", "docs", "Makefile", ".ci/run")
COMMON = re.compile(r"get[t]empdir|tempfile\.mk[t]emp\(|[\"'\s:=]/tm[p]/")


def test_nothing_lies_at_a_name_in_the_common_temporary_folder() -> None:
    """Whoever else uses the machine could put code there first."""
    files = [file for name in SOURCES for file in [ROOT / name, *(ROOT / name).rglob("*")]]
    texts = {file: file.read_text(encoding="utf-8") for file in files if file.suffix in (".py", ".md", ".sh", "")
             and file.is_file()}  # fmt: skip
    assert len(texts) > 500
    assert [str(file) for file, text in texts.items() if COMMON.search(text)] == []
