"""A reference to a user's score_mod, with which another process imports the function and makes its arguments."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..launching.locks import FIRST


class Named(NamedTuple):
    """A score_mod's module and name.  args: its score_mod_args, with a dtype in place of each tensor."""

    module: str
    name: str
    args: tuple[Any, ...]

    @property
    def function(self) -> Any:
        with FIRST:
            return getattr(importlib.import_module(self.module), self.name)

    def score_mod_args(self) -> tuple[Any, ...]:
        """Tensors of these dtypes, and the numbers; contents of tensors do not matter."""
        return tuple([torch.empty(16, dtype=x) if isinstance(x, torch.dtype) else x for x in self.args])


def named(function: Any, args: Sequence[Any]) -> Named | None:
    """Reference to a function, None for None; raises ValueError if the function's module and name do not lead to it."""
    if function is None:
        return None
    written = getattr(function, "fn", function)  # an interpreted function's own __module__ is Triton's
    types = tuple([x.dtype if isinstance(x, Tensor) else x for x in args])
    found = Named(written.__module__, written.__name__, types)
    try:
        there = found.function
    except (ImportError, AttributeError):
        there = None
    if there is not function:
        raise ValueError(
            f"score_mod must be a function of a module, for other processes to find it: {found.module} has no such "
            f"{found.name}"
        )
    return found


def named_by(text: str | None, args: str) -> Named | None:
    """Reference from text: "package.module:function", and arguments as "float32,int32,0.5,37": dtypes and numbers."""
    if text is None:
        return None
    module, _, name = text.partition(":")
    try:
        found = Named(module, name, tuple([_argument(x) for x in args.split(",") if x]))
        if hasattr(found.function, "fn"):
            return found
        why = "it is not under @triton.jit"
    except (ImportError, AttributeError, ValueError) as error:
        why = str(error)
    raise ValueError(f"a score_mod must be like package.module:function, got {text!r}: {why}")


def _argument(text: str) -> Any:
    if isinstance(dtype := getattr(torch, text, None), torch.dtype):
        return dtype
    return int(text) if text.lstrip("-").isdecimal() else float(text)
