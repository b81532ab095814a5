"""Functions that torch.compile is to leave alone, and what importing the package leaves to the first call.

Outside of a graph torch.compile calls a public function as it is where it has given up on it: after an error in its
arguments, say.  Then it would look into what that calls, which is nothing that it can trace.

Whatever asks for the device, changes Triton or takes time is imported by the first call.
"""

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ..launching.locks import FIRST

Function = TypeVar("Function", bound=Callable[..., object])


def untraced(function: Function) -> Function:
    """The function itself, marked, with all that it calls: torch's own decorator costs each call a microsecond."""
    frames = torch._C._dynamo.eval_frame
    mark = getattr(frames, "set_code_exec_strategy", None)
    if mark is not None:  # another torch
        skip = frames._FrameAction.SKIP
        mark(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


def at_first_call(name: str, module: str, namespace: dict[str, Any]) -> Callable[..., Any]:
    """Stands for a function of a module of ours, and puts it into its own place when it is called."""

    @untraced
    def first(*args: Any, **options: Any) -> Any:
        with FIRST:
            function = getattr(importlib.import_module(module, namespace["__package__"]), name)
        namespace[name] = function
        return function(*args, **options)

    return first
