"""Functions that torch.compile must not trace, and imports deferred to the first call.

When torch.compile gives up on a public function, for example after an error in its arguments, it calls the function
outside of a graph.  It would then try to trace the functions inside, which it cannot.

Modules that ask for the device, change Triton or take time are imported by the first call.
"""

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ..launching.locks import FIRST

Function = TypeVar("Function", bound=Callable[..., object])


def untraced(function: Function) -> Function:
    """Mark a function, so that torch skips it and its callees; torch's own decorator costs each call a microsecond."""
    frames = torch._C._dynamo.eval_frame
    mark = getattr(frames, "set_code_exec_strategy", None)
    if mark is not None:  # another torch
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
