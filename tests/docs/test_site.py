"""The built site shows what its sources say: no text of a page or docstring is taken for a tag, and lost."""

from __future__ import annotations

import inspect
import operator
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import paged_attn
from tests.support.documents import ROOT, name

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
HIDDEN = {"script", "style", "svg", "head"}
TAGS = HIDDEN | {
    "html", "meta", "link", "title", "path", "body", "header", "footer", "main", "nav", "aside", "article", "section",
    "div", "span", "p", "a", "br", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "li", "dl", "dt", "dd",
    "table", "thead", "tbody", "tr", "th", "td", "pre", "code", "em", "strong", "b", "img", "blockquote", "details",
    "summary", "form", "input", "label", "button", "noscript", "small",
}  # fmt: skip
EMPTY = {"meta", "link", "img", "br", "hr", "input"}
API = (DOCS / "api.md").read_text(encoding="utf-8")
NAMES = re.findall(r"^::: paged_attn\.(\w+)$", API, re.M)
MEMBERS = dict(re.findall(r"^::: paged_attn\.(\w+)\n    options:\n      members: \[(.*)\]$", API, re.M))
WRITTEN = [x for x in NAMES if x not in MEMBERS]
WRITTEN += [f"{module}.{x}" for module, members in MEMBERS.items() for x in re.findall(r"\w+", members)]
FORMULA = "sum_j softmax_j(modify(scale * <q[t, h], k[j]>)) * v[j]"


class Page(HTMLParser):
    """Text that is seen, and tags that no page is made of."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.open: list[str] = []
        self.strange: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, _: object) -> None:
        if tag not in TAGS:
            self.strange.add(tag)
        if tag in HIDDEN:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in HIDDEN:
            self.open.remove(tag)

    def handle_data(self, data: str) -> None:
        if not self.open:
            self.seen.append(data)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make docs` builds."""
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def built(site: Path, page: Path) -> Page:
    path = page.relative_to(DOCS).with_suffix("")
    return Page(site / (path.parent if path.name == "index" else path) / "index.html")


def bare(text: str) -> str:
    """Letters and digits alone: the rest is markup, or may be."""
    return re.sub(r"[\W_]", "", text)


def said(page: Path) -> list[str]:
    """Lines of a page without markup: comments, directives, languages of code, numbers of lists, targets of links."""
    text = re.sub(
        r"<!--.*?-->|^:::.*\n(?:    .*\n)*|^```.*$|^ *\d+\. |!\[[^\]]*\]\([^)]*\)",
        "",
        page.read_text(encoding="utf-8"),
        flags=re.M,
    )
    return re.sub(r"\]\([^)\s]*\)", "]", text).splitlines()


def test_the_formula_of_attention_is_text_of_the_page(site: Path) -> None:
    assert FORMULA in inspect.getdoc(paged_attn.paged_attention)
    assert FORMULA in "".join(built(site, DOCS / "api.md").seen)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_shows_all_that_its_source_says(page: Path, site: Path) -> None:
    found = built(site, page)
    shown = bare("".join(found.seen))
    assert found.strange == set()
    assert [line for line in said(page) if bare(line) not in shown] == []


@pytest.mark.parametrize("word", WRITTEN)
def test_the_page_of_the_api_shows_whole_docstrings(word: str, site: Path) -> None:
    """Arguments become rows of a table, with names and texts apart."""
    told = inspect.getdoc(operator.attrgetter(word)(paged_attn))
    shown = bare("".join(built(site, DOCS / "api.md").seen))
    lines = (re.sub(r"^\s+[\w, ]+: |^(Args|Returns|Raises|Source):", "", line) for line in told.splitlines())
    assert [line for line in lines if bare(line) not in shown] == []
