"""What the README and the pages under docs/ show is what happens."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import paged_attn
from benchmarks import headline, runner, tables
from paged_attn import reference
from paged_attn.cli import main
from tests import tritons
from tests.support import warm
from tests.support.cases import TOLERANCES
from tests.support.documents import (
    DIFFS,
    MADE,
    PAGES,
    README,
    ROOT,
    Block,
    anchors,
    apply,
    blocks,
    links,
    name,
    plain,
    prose,
)

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
            bound = max(TOLERANCES[x.dtype][0] for x in args[:2] if x.dtype in TOLERANCES)  # int8 loses nothing more
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


@pytest.mark.parametrize("dialect", ["", "torch"], ids=["kernels", "plain torch"])
@pytest.mark.parametrize("block", CHANGED, ids=lambda block: f"{name(block.page)}:{block.line}")
def test_diffs_apply_and_do_what_the_program_behind_them_says(block: Block, dialect: str, tmp_path: Path) -> None:
    """Each begins with the package as it is, and is tried in kernels and in plain torch."""
    programs = [other.line for other in CHANGED if other.page == block.page and other.line < block.line]
    shutil.copytree(ROOT / "paged_attn", tmp_path / "paged_attn", ignore=shutil.ignore_patterns("__pycache__"))
    diffs = [x for x in blocks(block.page, "diff") if max(programs, default=0) < x.line < block.line]
    for diff in diffs:
        for file in re.findall(r"^--- a/(?!paged_attn/)(.*)", diff.text, re.M):
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, tmp_path / file)
        apply(diff.text, tmp_path)
    (tmp_path / "program.py").write_text(block.text, encoding="utf-8")
    environ = os.environ | {"PYTHONPATH": "", "PAGED_ATTN_DIALECT": dialect}
    done = warm.run([str(tmp_path / "program.py")], environ, tmp_path)
    assert diffs
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "text",
    ["    call(a, b, check=c,\n    )\n", "    call(\n        a,\n        b, check=c,\n    )\n"],
    ids=["long", "short"],
)
def test_a_hunk_is_found_wherever_lines_end(text: str, tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text(text, encoding="utf-8")
    apply("--- a/file.py\n+++ b/file.py\n@@\n-        b, check=c,\n+        b, new=new, check=c,\n", tmp_path)
    assert "".join((tmp_path / "file.py").read_text(encoding="utf-8").split()) == "call(a,b,new=new,check=c,)"


def test_a_hunk_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text("a, b\na,\nb\n", encoding="utf-8")
    with pytest.raises(AssertionError, match="has 2 times"):
        apply("--- a/file.py\n+++ b/file.py\n@@\n a, b\n+c\n", tmp_path)


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


def rows_of(page: Path) -> list[str]:
    return [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("|")]


@pytest.mark.parametrize(
    ("page", "table"),
    [
        (README, headline.beside_peers),
        (README, headline.portable_beside_vllm),
        (ROOT / "docs" / "performance.md", headline.table),
    ],
    ids=["README, peers", "README, portable", "performance"],
)
def test_tables_of_speed_are_those_of_the_committed_runs(page: Path, table: Callable[[Path], list[str]]) -> None:
    wanted = table(runner.folder("h200"))
    assert "\n".join(wanted) in "\n".join(rows_of(page))
    assert len(headline.ROWS) <= 12


def test_means_in_the_readme_are_those_of_the_cases() -> None:
    """All cases beside peers are committed; of those beside vLLM nine, and the means over all."""
    folder, text = runner.folder("h200"), plain(README)
    assert len(headline.read(folder, headline.PEERS_RUN)["results"]) == 38
    assert f"takes **{headline.mean_factor(folder):.2f}x** paged-attn's time" in text
    times = [x["seconds"] for x in headline.read(folder, headline.PEERS_RUN)["results"]]
    alone = statistics.geometric_mean(min(x["fa3"], x["fa3, pages of 128"]) / x["paged-attn"] for x in times)
    assert f"FlashAttention-3 alone takes {alone:.2f}x" in text
    means = headline.read(folder, headline.PORTABLE_RUN)["geomean"][headline.VLLM]
    assert f"takes **{means['all']:.1f}x** their time" in text
    assert f"{means['decode']:.1f}x in decodes, {means['prefill']:.1f}x in prefills" in text


def test_losses_in_the_readme_are_all_there_are() -> None:
    text, behind = plain(README), []
    for result in headline.read(runner.folder("h200"), headline.PEERS_RUN)["results"]:
        if result["best_peer"] < 1 or result["case"] == "decode b1 ctx8192 h32/32":  # 1.00x, and 0.2% behind
            ours, *peers = (result["seconds"][x] for x in ("paged-attn", "fa3", "fa3, pages of 128", "cudnn paged"))
            behind.append((result["case"].split()[0], round(100 * (ours / min(peers) - 1))))
    assert behind == [("decode", 8), ("decode", 11), ("decode", 0), ("decode", 1)]
    assert "slower in four decodes: by 8% and 11% in two, by less than 1% in two" in text


TRITONS = re.compile(r"^\| (2\.\d+)(?:, 2\.\d+)* \| (3\.\d+) \|", re.M)  # a row of torch's versions and their Triton


@pytest.mark.parametrize("page", [README, ROOT / "docs" / "start.md"], ids=name)
def test_versions_on_a_page_are_those_that_the_package_asks_for_and_the_suite_runs(page: Path) -> None:
    """torch's wheels on PyPI name one Triton each, so the first torch of the first Triton is the floor."""
    rows = TRITONS.findall(page.read_text(encoding="utf-8"))
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.findall(r'"torch>=([\d.]+)"', declared) == [rows[0][0]]
    assert re.findall(r'"triton>=([\d.]+)', declared) == [rows[0][1]]
    pinned = re.findall(r"^triton==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M)
    assert [triton for _, triton in rows] == sorted([*pinned, *(x.rpartition(".")[0] for x in tritons.VERSIONS)])


def test_the_page_of_all_figures_has_every_case_of_a_committed_run_and_what_it_took() -> None:
    (decodes,) = re.findall(r"## H200: decode\n([\s\S]*?)\n##", tables.page(runner.ROOT / "benchmarks" / "results"))
    run = json.loads((runner.folder("h200") / "decode.json").read_text(encoding="utf-8"))
    rows = [re.split(r" *\| *", line)[1:3] for line in decodes.splitlines() if line.startswith("| decode")]
    assert rows == [[x["case"], headline.three_digits(1e6 * x["seconds"][tables.OURS])] for x in run["results"]]


def test_the_page_of_all_figures_has_every_case_beside_flash_attention_3() -> None:
    page, run = tables.page(runner.ROOT / "benchmarks" / "results"), headline.read(runner.folder("h200"), "peers-38")
    (part,) = re.findall(r"## H200: 38 cases [^\n]*\n([\s\S]*?)\n##", page)
    rows = {cells[0]: cells[1:] for line in part.splitlines() if (cells := re.split(r" *\| *", line)[1:-1])}
    at = rows["case"].index("fa3, pages of 128")
    assert len(run["results"]) == 38
    for result in run["results"]:
        assert rows[result["case"]][at] == headline.three_digits(1e6 * result["seconds"]["fa3, pages of 128"])


def test_the_picture_beside_it_shows_the_same_runs() -> None:
    picture = (ROOT / "docs" / "images" / "speed.svg").read_text(encoding="utf-8")
    for case, factors in headline.factors(runner.folder("h200")):
        assert f">{case}<" in picture
        for column, factor in factors.items():
            assert column == headline.OURS or f">{factor:.2f}x<" in picture or f">{factor:.1f}x " in picture


def test_the_readme_is_read_in_minutes() -> None:
    """Words of its sentences, not rows of its tables: a feature is a row."""
    assert len(prose(README).split()) <= 1000
    (program,) = blocks(README, "python")
    assert len([line for line in program.text.splitlines() if line.strip()]) <= 25


def test_the_program_of_the_readme_prints_what_stands_below_it(capsys: pytest.CaptureFixture[str]) -> None:
    (program,), (wanted,) = blocks(README, "python"), blocks(README, "text")
    exec(program.compiled(), {"__name__": "__page__"})
    assert capsys.readouterr().out == wanted.text


def test_a_page_on_extending_is_short_and_the_changelog_too() -> None:
    for page, lines in ((ROOT / "docs" / "extending.md", 300), (ROOT / "CHANGELOG.md", 80)):
        assert len(page.read_text(encoding="utf-8").splitlines()) <= lines, page
