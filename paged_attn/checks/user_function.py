"""Checks of score_mod and score_mod_args."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .axes import Door
from .kernel_tensors import POINTED
from .options import INT32_MAX, integer, kind, number

GIVEN = ("score", "query_pos", "key_pos", "head")  # parameters of a score_mod before score_mod_args


def check_score_mod(door: Door, function: Any, args: Any, in_torch: bool) -> dict[str, Tensor]:
    """Check a user's function and its further arguments; returns the tensors among these, by name.

    in_torch: plain torch makes the call, so the function may also be one of torch.
    """
    from ..launching.platform import under_triton  # looks for a GPU, which `import paged_attn` does not

    if function is None and isinstance(args, tuple) and not args:
        return {}
    if function is None:
        raise ValueError("score_mod_args must be () without a score_mod")
    of_triton = under_triton(function)
    if not of_triton and not in_torch:
        raise TypeError(f"score_mod must be a function under @triton.jit, got {kind(function)}")
    if not of_triton and not callable(function):
        raise TypeError(f"score_mod must be a function in torch or under @triton.jit, got {kind(function)}")
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"score_mod_args must be a tuple of tensors, floats and ints, got {kind(args)}")
    _check_parameters(function.fn if of_triton else function, len(args))
    tensors = {}
    for i, arg in enumerate(args):
        name = f"score_mod_args[{i}]"
        if isinstance(arg, Tensor):
            door.place(name, arg, POINTED)
            if not arg.is_contiguous():
                raise ValueError(f"{name} must be contiguous, got {list(arg.shape)} strides {list(arg.stride())}")
            tensors[name] = arg
        else:
            number(name, arg, "a tensor, a finite float or an int")
            if isinstance(arg, int):
                integer(name, arg, -INT32_MAX, "an int")
    return tensors


def _check_parameters(function: Callable[..., Any], count: int) -> None:
    """Check that the function takes GIVEN and `count` more arguments."""
    parameters = inspect.signature(function).parameters.values()
    if any(x.kind is x.VAR_POSITIONAL for x in parameters):
        return
    required = sum(x.default is x.empty for x in parameters)
    if not required <= len(GIVEN) + count <= len(parameters):
        raise ValueError(
            f"score_mod must take ({', '.join(GIVEN)}) and score_mod_args, {len(GIVEN) + count} arguments, "
            f"got one that takes {', '.join(x.name for x in parameters)}"
        )
