"""Docstrings of the package that open with a word whose noun stands elsewhere: `Of each`, `That lie`, `whether ...`.

    python -m tools.openings          names those beyond the allowance, and fails if there are any
    python -m tools.openings --allow  writes the allowance anew: the openings that each file has now

The allowance, tools/openings.txt, has a line `count path` for each file.  Without that file no opening is allowed.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
ALLOWANCE = Path(__file__).with_suffix(".txt")
LEANING = re.compile(r"(Of|That|Whose|The same|Which|Such|Until)\b")
WORD = re.compile(r"[a-z]+(?=[,.;]?(\s|$))")  # a lower-case word, but not fp8, x-packed, `q`, load_tile, q: ...

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def leans(text: str, names: frozenset[str] = frozenset()) -> bool:
    """Whether a docstring opens with a leaning word, or with a lower-case word that is not among `names`."""
    word = WORD.match(text)
    return LEANING.match(text) is not None or (word is not None and word[0] not in names)


def openings(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, first line) of each docstring that leans; a function's may open with an argument."""
    for node in ast.walk(ast.parse(source)):
        text = ast.get_docstring(node) if isinstance(node, Documented) else None
        if text and leans(text, _arguments(node)):
            yield node.body[0].lineno, text.partition("\n")[0]  # type: ignore[attr-defined]


def _arguments(node: ast.AST) -> frozenset[str]:
    """Return the names of a function's arguments; none for classes and modules."""
    arguments = getattr(node, "args", None)
    return frozenset(x.arg for x in ast.walk(arguments) if isinstance(x, ast.arg)) if arguments else frozenset()


def allowance() -> dict[str, int]:
    """Return the number of allowed openings by path."""
    lines = ALLOWANCE.read_text().splitlines() if ALLOWANCE.exists() else []
    return {path: int(count) for count, path in (line.split(maxsplit=1) for line in lines)}


def main() -> int:
    paths = sorted(ROOT.glob("paged_attn/**/*.py"))
    found = {path.relative_to(ROOT).as_posix(): list(openings(path.read_text())) for path in paths}
    if "--allow" in sys.argv[1:]:
        ALLOWANCE.write_text("".join(f"{len(rows)} {name}\n" for name, rows in found.items() if rows))
    allowed = allowance()
    beyond = {name: rows for name, rows in found.items() if len(rows) > allowed.get(name, 0)}
    for name, rows in beyond.items():
        print(f"{name}: {len(rows)} docstrings open without their noun, {allowed.get(name, 0)} are allowed")
        print("".join(f"  {name}:{line}: {text}\n" for line, text in rows), end="")
    return 1 if beyond else 0


if __name__ == "__main__":
    sys.exit(main())
