"""Names of ours, on pages and in docstrings and comments, are names that the code has."""

from __future__ import annotations

import ast
import functools
import io
import itertools
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.documents import PAGES, ROOT, name

FOLDERS = ("paged_attn", "tests", "benchmarks", "tools", "examples")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
TOLD = sorted((ROOT / "paged_attn").rglob("*.py"))  # files whose docstrings and comments are read
FILE = re.compile(
    r"(?<![\w/.<*-])((?:[\w-]+/)*[\w-]+\.(?:py|md|txt|toml|cpp)|(?:\w+/)+[\w-]+\.(?:json|svg|png))(?![\w*])"
)

# Exceptions.  Folders of ours that have the names of libraries, and words that stand for a user's variables:
OTHERS = {"torch", "triton", "vllm", "sglang", "transformers", "flash_attn", "model", "cache"}
# pages about names of other libraries, whose words may be unknown to our code;
OTHER_PAGES = {"docs/glossary.md", "docs/errors.md"} | {name(page) for page in PAGES if page.parent.name == "hosts"}
# files of other projects, and folders that make's verbs make;
OTHER_FILES = {"utils.py", "version.py", "site", "dist", "build"}
# and words of steps that a page leaves to its reader, and of Triton.
OTHER_WORDS = {"USE_X", "one_tile", "kernels.one_tile", "jit_post_compile_hook"}


@functools.cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(text_of(path))


def docstrings(path: Path) -> Iterator[str]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            yield ast.get_docstring(node) or ""


def comments(path: Path) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(text_of(path)).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


@functools.cache
def told(path: Path) -> str:
    """A page without its blocks of code, or the docstrings and comments of a source."""
    if path.suffix == ".md":
        return re.sub(r"^```.*?^```$|\]\([^)]*\)", "]", text_of(path), flags=re.M | re.S)
    return "\n\n".join((*docstrings(path), *comments(path)))


def quoted(path: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", told(path))


def defined(body: list[ast.stmt]) -> Iterator[str]:
    """Names that the statements of a module or class define."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            yield from defined(node.body)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            yield from stored(node)


def stored(node: ast.AST) -> Iterator[str]:
    """Names and attributes that are assigned somewhere in a node."""
    for x in ast.walk(node):
        if isinstance(x, (ast.Name, ast.Attribute)) and isinstance(x.ctx, ast.Store):
            yield x.id if isinstance(x, ast.Name) else x.attr


@functools.cache
def owners() -> dict[str, set[str]]:
    """Names that modules, folders and classes of ours have, by the last name of each; a module has its classes' too."""
    found: dict[str, set[str]] = {}
    for path in SOURCES:
        module = path.parent.name if path.stem == "__init__" else path.stem
        found.setdefault(module, set()).update(defined(tree_of(path).body))
        found.setdefault(path.parent.name, set()).add(path.stem)
        found.setdefault(path.parent.parent.name, set()).add(path.parent.name)
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef):
                mine = {*defined(node.body), *stored(node)}
                found.setdefault(node.name, set()).update(mine)
                found[module] |= mine
    return found


@functools.cache
def words() -> set[str]:
    """Words of all code but docstrings, comments and this file; files and folders, too."""
    sources = [path for path in SOURCES if path != Path(__file__)]
    codes = (re.sub(r'"""[\s\S]*?"""|# .*', "", text_of(path)) for path in sources)
    files = {part for path in SOURCES for part in (*path.parent.parts, path.stem)}
    return files.union(*(re.findall(r"\w+", code) for code in codes))


@functools.cache
def paths() -> set[str]:
    """Each file and folder of ours, by its path and by the ends of this path."""
    found = [path for folder in (*FOLDERS, "docs") for path in (ROOT / folder).rglob("*")]
    parts = [path.relative_to(ROOT).parts for path in (*found, *ROOT.iterdir())]
    return {"/".join(path[i:]) for path in parts for i in range(len(path))}


def missing_paths(path: Path) -> set[str]:
    folders = {span.rstrip("/") for span in quoted(path) if re.fullmatch(r"(?:\w+/)+", span)}
    return folders.union(FILE.findall(told(path))) - paths() - OTHER_FILES


def missing_attributes(path: Path) -> set[str]:
    """`module.name`, `Class.field` and longer ones that begin with a name of ours."""
    missing = set()
    for span in quoted(path):
        dotted = re.match(r"(?:paged_attn\.)?(\w+(?:\.\w+)+)(?:\(.*\))?$", span)
        if dotted and not FILE.match(span):
            parts = dotted[1].split(".")
            ours = parts[0] in owners().keys() - OTHERS
            missing |= {span for a, b in itertools.pairwise(parts) if ours and b not in owners().get(a, {b})}
    return missing - OTHER_WORDS


def missing_words(path: Path) -> set[str]:
    """Words with an underscore, alone or dotted, that no code has."""
    names = [span.partition("(")[0] for span in quoted(path) if re.fullmatch(r"[\w.]+(?:\(.*\))?", span)]
    spoken = {word for dotted in names for word in dotted.split(".") if "_" in word.strip("_")}
    return spoken - words() - OTHER_WORDS


@pytest.mark.parametrize("path", [*PAGES, *TOLD], ids=name)
def test_what_is_named_is_there(path: Path) -> None:
    assert missing_paths(path) == set()
    assert missing_attributes(path) == set()
    assert name(path) in OTHER_PAGES or missing_words(path) == set()


def test_a_name_that_is_gone_is_missed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("`schedule.gone`, `gone_function()`, `gone/`, [gone.py](x), `Shape.GONE` beside `Shape.ROWS`")
    assert missing_paths(page) == {"gone", "gone.py"}
    assert missing_attributes(page) == {"schedule.gone", "Shape.GONE"}
    assert missing_words(page) == {"gone_function"}
