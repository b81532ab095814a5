"""Helpers for functions that every call runs: hide them from torch.compile, import them late, generate their text.

When torch.compile gives up on a public function, for example after an error in its arguments, it calls the function
outside of a graph.  Without the mark of `untraced`, it would then try to trace the functions inside, and fail.

Modules that look for a GPU, change Triton or take long to import are imported by the first call (`at_first_call`).

A loop over the argument table would cost a microsecond per call.  So the loop runs at import, and writes the text of a
function (`from_text`).  The text reads like hand-written code.  Tracebacks and inspect.getsource show it.
"""

from __future__ import annotations

import importlib
import linecache
import textwrap
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from ..launching.locks import FIRST

Function = TypeVar("Function", bound=Callable[..., object])


def untraced(function: Function) -> Function:
    """Mark a function, so that torch.compile skips it and its callees.  torch's decorator would cost 1 us a call."""
    frames = torch._C._dynamo.eval_frame
    mark = getattr(frames, "set_code_exec_strategy", None)
    if mark is not None:  # other versions of torch lack it
        skip = frames._FrameAction.SKIP
        mark(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


def at_first_call(name: str, module: str, namespace: dict[str, Any]) -> Callable[..., Any]:
    """A stand-in for a function: its first call imports the module, and puts the function into the namespace."""

    @untraced
    def first(*args: Any, **options: Any) -> Any:
        with FIRST:
            function = getattr(importlib.import_module(module, namespace["__package__"]), name)
        namespace[name] = function
        return function(*args, **options)

    return first


# ---- generated functions -------------------------------------------------------------------------


def from_text(text: str, namespace: dict[str, Any]) -> Any:
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
