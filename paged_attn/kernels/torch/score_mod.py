"""A user's function in plain torch: one in torch is called, one under @triton.jit interpreted over blocks of scores.

Shapes: H heads, T queries, N keys.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...launching.platform import interpreting, under_triton

MOST_AT_ONCE = 1 << 16  # scores of a program in the interpreter


def applied(function: Any, scores: Tensor, pos: Tensor, key_pos: Tensor, args: Sequence[Any]) -> Tensor:
    """Scores [H, T, N] as the function has them, of queries at positions [T] and keys at positions [N]."""
    if under_triton(function):
        return _interpreted(function, scores, pos, key_pos, args)
    head = torch.arange(len(scores), device=scores.device)[:, None, None]
    new: Tensor = function(scores, pos[:, None], key_pos[None], head, *args)
    return new.to(scores.dtype).expand_as(scores)


def _interpreted(function: Any, scores: Tensor, pos: Tensor, key_pos: Tensor, args: Sequence[Any]) -> Tensor:
    """Scores as a function under @triton.jit has them, by Triton's interpreter, a few rows at a time."""
    from ..common.score_mod import interpreted  # with Triton, which the function has imported before

    heads, queries, keys = scores.shape
    columns = 1 << max(0, keys - 1).bit_length()
    rows = max(1, min(MOST_AT_ONCE // columns, 1 << (heads * queries - 1).bit_length()))
    flat = scores.reshape(-1, keys).contiguous()
    of_rows = [pos.repeat(heads).int(), torch.arange(heads, device=pos.device).repeat_interleave(queries).int()]
    grid = (-(-len(flat) // rows),)
    with interpreting():
        kernel = _kernel()
        kernel[grid](
            flat,
            *of_rows,
            key_pos.int().contiguous(),
            len(flat),
            keys,
            tuple(args),
            interpreted(function),
            rows,
            columns,
        )
    return flat.view_as(scores)


@functools.cache
def _kernel() -> Any:
    from triton.runtime.interpreter import InterpretedFunction

    from . import score_mod_kernel

    return InterpretedFunction(score_mod_kernel.apply_score_mod)
