"""Functions whose text follows from the table of arguments: written when their module is read.

Every call runs through them, and a loop over the table would cost it a microsecond.  Their text is what one would write
by hand, as that of a dataclass's is; tracebacks and inspect.getsource show it.
"""

from __future__ import annotations

import linecache
import textwrap
from collections.abc import Iterable
from typing import Any


def function(text: str, namespace: dict[str, Any]) -> Any:
    """The function that a text defines, whose globals are those of a module."""
    name = text[text.index("def ") + 4 : text.index("(")]
    lines = [x for line in text.splitlines() for x in _folded(line)]
    text, file = "".join(lines), f"<{name}, written for {namespace['__name__']}>"
    linecache.cache[file] = (len(text), None, lines, file)
    made: dict[str, Any] = {}
    exec(compile(text, file, "exec"), namespace, made)
    return made[name]


def listed(names: Iterable[str]) -> str:
    """The inside of a tuple."""
    return ", ".join(names) + ","


def _folded(line: str) -> list[str]:
    """A line, or as many as it takes, of which only parentheses know that they are one."""
    indent = " " * (len(line) - len(line.lstrip()))
    folded = (
        textwrap.wrap(line, 120, subsequent_indent=indent + "    ", break_long_words=False) if line[120:] else [line]
    )
    return [f"{x}\n" for x in folded]
