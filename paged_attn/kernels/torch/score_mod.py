"""A user's function under @triton.jit in plain torch: Triton's interpreter applies it to blocks of scores.

This file is imported only for such a function, because it imports Triton.  Shapes: H heads, T queries, N keys.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from ...launching.platform import interpreting
from ..common.score_mod import interpreted

MOST_AT_ONCE = 1 << 16  # maximum scores of a program in the interpreter, unless one row has more


def applied_by_triton(function: Any, scores: Tensor, pos: Tensor, key_pos: Tensor, args: Sequence[Any]) -> Tensor:
    """Scores [H, T, N] as the function returns them, for queries at positions [T] and keys at positions [N]."""
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
def _kernel() -> InterpretedFunction:
    return InterpretedFunction(apply_score_mod)


def apply_score_mod(
    scores, query_pos, heads, key_pos, rows, keys, args, SCORE_MOD: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr
):
    """Replace scores [rows, keys] by SCORE_MOD's results; a program has ROWS rows and all keys."""
    row, key = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, KEYS)
    live = (row < rows)[:, None] & (key < keys)[None, :]
    row, key = tl.minimum(row, rows - 1), tl.minimum(key, keys - 1)  # padding reads the last row or key
    at = scores + row[:, None] * keys + key[None, :]
    query, head = tl.load(query_pos + row)[:, None], tl.load(heads + row)[:, None]
    new = SCORE_MOD(tl.load(at), query, tl.load(key_pos + key)[None, :], head, *args)
    tl.store(at, new.to(tl.float32), mask=live)
