"""Meaningful strides: strides of axes with two elements or more, in tensors that are not empty.

torch may leave any number in other strides, so views of one memory may differ in them.  For example, in a latent cache
with one KV head, `cache[..., :512].unsqueeze(2)` and `cache.unsqueeze(2)` have different strides of the head.  Code
that compares tensors calls `same_steps`, or `lies_in` where keys may hold their values (multi-head latent attention).
Code that makes kernel arguments from strides calls `settled` first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def same_steps(x: Tensor, y: Tensor, end: int | None = None) -> bool:
    """Whether x and y have equal sizes and equal meaningful strides on axes [0, end)."""
    if x.shape[:end] != y.shape[:end]:
        return False
    empty = x.numel() == y.numel() == 0
    return empty or all(a == b for size, a, b in zip(x.shape[:end], x.stride(), y.stride()) if size > 1)


def lies_in(values: object, keys: object) -> bool:
    """Whether values [..., value_dim] are the first dims of keys [..., head_dim], in the same memory."""
    return (
        isinstance(values, Tensor)
        and isinstance(keys, Tensor)
        and looks_within(values, keys)
        and values.data_ptr() == keys.data_ptr()
    )


def looks_within(values: Tensor, keys: Tensor) -> bool:
    """Whether values would be the first dims of keys, if both had the same address."""
    return (
        values.ndim == keys.ndim == 4
        and 0 < values.shape[3] <= keys.shape[3]
        and keys.numel() > 0
        and values.dtype == keys.dtype
        and same_steps(values, keys, 3)
        and (values.shape[3] == 1 or values.stride(3) == keys.stride(3))
    )


def settled(x: Any) -> Any:
    """Replace meaningless strides of a tensor; values that are no tensors are returned unchanged.

    A last axis without a meaningful stride gets 1.  Another such axis gets the stride of the nearest axis before it
    that has one, and so its alignment.  If there is none, it gets the product of the next axis's stride and size.
    """
    if not isinstance(x, Tensor) or not (1 in x.shape or 0 in x.shape):
        return x
    strides = _settled(x.shape, [None if size < 2 or x.numel() == 0 else s for size, s in zip(x.shape, x.stride())])
    return x if strides == x.stride() else x.as_strided(x.shape, strides)


def _settled(shape: Sequence[int], known: list[int | None]) -> tuple[int, ...]:
    """All strides of a tensor.  known: its meaningful strides, None for other axes."""
    last = len(shape) - 1
    for axis in range(1, last):
        known[axis] = known[axis - 1] if known[axis] is None else known[axis]
    strides: list[int] = []  # from the last axis to the first
    for axis in range(last, -1, -1):
        behind = strides[-1] * max(shape[axis + 1], 1) if strides else 1
        stride = known[axis]
        strides.append(behind if stride is None else stride)
    return tuple(reversed(strides))
