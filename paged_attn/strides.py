"""Meaningful strides, and pages of any strides as runs of bytes.

Strides have a meaning on axes with two elements or more, in tensors that are not empty.  Other strides may hold any
number that torch leaves there, so views of one memory may differ in these strides.  For example, in a latent cache with
one KV head, `cache[..., :512].unsqueeze(2)` and `cache.unsqueeze(2)` have different strides of the head.  Code that
compares tensors calls `same_steps`, or `lies_in` where keys may hold their values (multi-head latent attention).  Code
that makes kernel arguments from strides calls `settled` first.

Two tensors with an axis of pages are copied page by page, in runs of bytes.  `runs_of` merges axes where both tensors
allow it, in the order of the target's strides.  A page of most caches is one run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

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

    A last axis without a meaningful stride gets 1.  Any other axis without one copies the nearest earlier meaningful
    stride, and with it the alignment.  If no earlier axis has a meaningful stride, the axis gets the product of the
    next axis's stride and size.
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


# ---- pages as runs of bytes ----------------------------------------------------------------------

VECTOR = 16  # bytes that a thread moves at once

Axis = tuple[int, int, int]  # (number of elements, stride in the source, stride in the target); strides in bytes


class PageRuns(NamedTuple):
    """Runs of a page.  Run (i, j) begins i strides of `outer` and j strides of `inner` after run (0, 0).

    In page 0, run (0, 0) begins `source` bytes after the source's address, and `target` bytes after the target's.
    Strides are in bytes.
    """

    source: int
    target: int
    source_page: int  # stride of pages
    target_page: int
    run: int  # bytes of a run
    inner: Axis
    outer: Axis

    @property
    def bytes(self) -> int:
        return self.run * self.inner[0] * self.outer[0]

    @property
    def unit(self) -> int:
        """Largest power of two, at most VECTOR bytes, that divides the run, both offsets and all strides."""
        return math.gcd(VECTOR, *self[:5], *self.inner[1:], *self.outer[1:])

    def in_units(self, unit: int) -> list[int]:
        """Fields of a table's row after its addresses.  Page strides are in bytes, all other lengths in units."""
        inner, outer = ([x // unit for x in axis[1:]] for axis in (self.inner, self.outer))
        return [self.source_page, self.target_page, self.run // unit, self.inner[0], *inner, *outer, self.bytes // unit]


def runs_of(source: Tensor, target: Tensor, page_axis: int) -> list[PageRuns]:
    """Return the runs of a page.  Several PageRuns are needed if axes do not merge into a run and two further axes."""
    if 0 in source.shape or 0 in target.shape:
        return []
    size = source.element_size()
    steps = [(n, a * size, b * size) for n, a, b in zip(source.shape, source.stride(), target.stride())]
    pages = [x.stride(page_axis) * size if x.shape[page_axis] > 1 else 0 for x in (source, target)]
    within = [axis for i, axis in enumerate(steps) if i != page_axis and axis[0] > 1]
    *far, outer, inner, run = [(1, 0, 0)] * 2 + _merged([*within, (size, 1, 1)])
    places = itertools.product(*[range(n) for n, _, _ in far])
    offsets = [[sum(i * axis[which] for i, axis in zip(place, far)) for which in (1, 2)] for place in places]
    return [PageRuns(a, b, pages[0], pages[1], run[0], inner, outer) for a, b in offsets]


def _merged(axes: list[Axis]) -> list[Axis]:
    """Axes from the largest stride of the target to the smallest, neighbours merged where both tensors allow it."""
    merged: list[Axis] = []
    for n, a, b in sorted(axes, key=lambda axis: (-axis[2], -axis[0])):
        if merged and merged[-1][1:] == (n * a, n * b):
            merged[-1] = (merged[-1][0] * n, a, b)
        else:
            merged.append((n, a, b))
    return merged
