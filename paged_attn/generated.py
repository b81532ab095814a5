"""Functions generated from the argument table at import.

Every call runs these functions, and a loop over the table would cost a microsecond per call.  The generated text reads
like hand-written code.  Tracebacks and inspect.getsource show it.
"""

from __future__ import annotations

import linecache
import textwrap
from collections.abc import Iterable
from typing import Any


def function(text: str, namespace: dict[str, Any]) -> Any:
    """Compile the text of one function.  namespace: the globals of the module that the function belongs to."""
    name = text[text.index("def ") + 4 : text.index("(")]
    lines = [x for line in text.splitlines() for x in _folded(line)]
    text, file = "".join(lines), f"<{name}, written for {namespace['__name__']}>"
    linecache.cache[file] = (len(text), None, lines, file)
    made: dict[str, Any] = {}
    exec(compile(text, file, "exec"), namespace, made)
    return made[name]


def listed(names: Iterable[str]) -> str:
    """Names as the inside of a tuple: "a, b,"."""
    return ", ".join(names) + ","


def _folded(line: str) -> list[str]:
    """A line, wrapped at 120 columns.  Wrapped lines must lie inside parentheses."""
    indent = " " * (len(line) - len(line.lstrip()))
    folded = (
        textwrap.wrap(line, 120, subsequent_indent=indent + "    ", break_long_words=False) if line[120:] else [line]
    )
    return [f"{x}\n" for x in folded]
