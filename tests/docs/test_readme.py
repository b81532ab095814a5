"""What the README and the pages under docs/ show is what happens."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import paged_attn
from benchmarks import headline, runner, tables
from paged_attn import reference
from paged_attn.cli import main
from tests import warm
from tests.cases import TOLERANCES
from tests.documents import DIFFS, MADE, PAGES, README, ROOT, Block, anchors, apply, blocks, links, name

CODE = [page for page in PAGES if blocks(page, "python")]


@pytest.mark.parametrize("page", CODE, ids=name)
def test_code_runs_and_its_calls_agree_with_the_reference(
    page: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page's blocks run one after another, in one namespace."""
    real, calls = paged_attn.paged_attention, []

    def compared(*args: Any, **options: Any) -> Any:
        out = real(*args, **options)
        if (mod := options.get("score_mod")) is not None:  # a page has the same in torch under this name
            options |= {"score_mod": names[f"torch_{mod.fn.__name__}"]}
        if device == "cpu" or not torch.cuda.is_current_stream_capturing():
            wanted = reference.paged_attention(*args, **options | {"out": None})
            bound = max(TOLERANCES[x.dtype][0] for x in args[:2])
            for one, other in zip(*((x if isinstance(x, tuple) else (x,)) for x in (out, wanted))):
                torch.testing.assert_close(one.double(), other, atol=bound, rtol=bound)
        calls.append(args)
        return out

    monkeypatch.setattr(paged_attn, "paged_attention", compared)
    # what compiles for minutes stands behind a guard
    names: dict[str, Any] = {"__name__": "__page__" if device == "cuda" else "__main__"}
    for block in blocks(page, "python"):
        code = block.compiled()
        if not block.needs or (block.needs == "gpu" and device == "cuda"):
            exec(code, names)
    assert calls or page != README


@pytest.mark.parametrize("page", CODE, ids=name)
def test_what_a_page_expects_to_fail_has_to_fail_as_it_says(page: Path) -> None:
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block.text)):
            if isinstance(node, ast.Try):
                assert node.orelse, "what raises nothing passes"
                assert all(any(isinstance(x, ast.Assert) for x in ast.walk(y)) for y in node.handlers), (
                    "any error passes"
                )


CHANGED = [block for page in CODE for block in blocks(page, "python") if block.needs == DIFFS]


@pytest.mark.parametrize("block", CHANGED, ids=lambda block: f"{name(block.page)}:{block.line}")
def test_diffs_apply_and_do_what_the_program_behind_them_says(block: Block, tmp_path: Path) -> None:
    """Each begins with the package as it is."""
    programs = [other.line for other in CHANGED if other.page == block.page and other.line < block.line]
    shutil.copytree(ROOT / "paged_attn", tmp_path / "paged_attn", ignore=shutil.ignore_patterns("__pycache__"))
    diffs = [x for x in blocks(block.page, "diff") if max(programs, default=0) < x.line < block.line]
    for diff in diffs:
        for file in re.findall(r"^--- a/(?!paged_attn/)(.*)", diff.text, re.M):
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, tmp_path / file)
        apply(diff.text, tmp_path)
    (tmp_path / "program.py").write_text(block.text, encoding="utf-8")
    done = warm.run([str(tmp_path / "program.py")], os.environ | {"PYTHONPATH": ""}, tmp_path)
    assert diffs
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_what_explain_prints_on_a_page_is_what_it_prints(page: Path) -> None:
    for words, wanted in re.findall(r"\$ paged-attn (explain .*)\n([\s\S]*?)```", page.read_text(encoding="utf-8")):
        got = CliRunner().invoke(main, words.split()).output
        assert [line.rstrip() for line in got.splitlines()] == wanted.splitlines()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists() or target in MADE, link
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), link


@pytest.mark.parametrize("page", [README, ROOT / "docs" / "performance.md"], ids=name)
def test_the_speed_table_is_that_of_the_committed_runs(page: Path) -> None:
    wanted = headline.table(runner.folder("h200"))
    assert [line for line in page.read_text(encoding="utf-8").splitlines() if line in wanted] == wanted
    assert len(headline.ROWS) <= 12


def test_the_page_of_all_figures_has_every_case_of_a_committed_run_and_what_it_took() -> None:
    (decodes,) = re.findall(r"## H200: decode\n([\s\S]*?)\n##", tables.page(runner.ROOT / "benchmarks" / "results"))
    run = json.loads((runner.folder("h200") / "decode.json").read_text(encoding="utf-8"))
    rows = [re.split(r" *\| *", line)[1:3] for line in decodes.splitlines() if line.startswith("| decode")]
    assert rows == [[x["case"], headline.three_digits(1e6 * x["seconds"][tables.OURS])] for x in run["results"]]


def test_the_picture_beside_it_shows_the_same_runs() -> None:
    picture = (ROOT / "docs" / "images" / "speed.svg").read_text(encoding="utf-8")
    for case, factors in headline.factors(runner.folder("h200")):
        assert f">{case}<" in picture
        for column, factor in factors.items():
            assert column == headline.OURS or f">{factor:.2f}x<" in picture or f">{factor:.1f}x " in picture


def test_the_readme_is_read_in_minutes() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150
    (program,) = blocks(README, "python")
    assert len([line for line in program.text.splitlines() if line.strip()]) <= 25
