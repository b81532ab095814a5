"""Functions that torch.compile is to leave alone where it meets them outside of a graph.

It calls a public function as it is where it has given up on it: after an error in its arguments, say.  Then it would
look into what that calls, which is nothing that it can trace.
"""

from collections.abc import Callable
from typing import TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., object])


def untraced(function: Function) -> Function:
    """The function itself, marked, with all that it calls: torch's own decorator costs each call a microsecond."""
    frames = torch._C._dynamo.eval_frame
    mark = getattr(frames, "set_code_exec_strategy", None)
    if mark is not None:  # another torch
        skip = frames._FrameAction.SKIP
        mark(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function
