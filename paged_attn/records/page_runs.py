"""Pages as runs of contiguous bytes, by which pages are copied from one tensor to another.

Axes are merged where both tensors allow it, in the order of the target's strides.  A page of most caches is one run.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

from torch import Tensor

VECTOR = 16  # bytes that a thread moves at once

Axis = tuple[int, int, int]  # (size, stride in the source, stride in the target), bytes


class Runs(NamedTuple):
    """Runs of a page.  Run (0, 0) begins `source` and `target` bytes behind the addresses of the two tensors.

    Run (i, j) begins i strides of `outer` and j strides of `inner` behind run (0, 0).  Strides are in bytes.
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
        """Bytes that divide the run and all offsets, at most VECTOR."""
        return math.gcd(VECTOR, *self[:5], *self.inner[1:], *self.outer[1:])

    def in_units(self, unit: int) -> list[int]:
        """Fields of a table's row behind the addresses: strides of pages in bytes, everything else in units."""
        inner, outer = ([x // unit for x in axis[1:]] for axis in (self.inner, self.outer))
        return [self.source_page, self.target_page, self.run // unit, self.inner[0], *inner, *outer, self.bytes // unit]


def runs_of(source: Tensor, target: Tensor, page_axis: int) -> list[Runs]:
    """Return the runs of a page.  Several Runs are needed if axes do not merge into a run and two further axes."""
    if 0 in source.shape or 0 in target.shape:
        return []
    size = source.element_size()
    steps = [(n, a * size, b * size) for n, a, b in zip(source.shape, source.stride(), target.stride())]
    pages = [x.stride(page_axis) * size if x.shape[page_axis] > 1 else 0 for x in (source, target)]
    within = [axis for i, axis in enumerate(steps) if i != page_axis and axis[0] > 1]
    *far, outer, inner, run = [(1, 0, 0)] * 2 + _merged([*within, (size, 1, 1)])
    places = itertools.product(*[range(n) for n, _, _ in far])
    offsets = [[sum(i * axis[which] for i, axis in zip(place, far)) for which in (1, 2)] for place in places]
    return [Runs(a, b, pages[0], pages[1], run[0], inner, outer) for a, b in offsets]


def _merged(axes: list[Axis]) -> list[Axis]:
    """Axes from the largest stride of the target to the smallest, neighbours merged where both tensors allow it."""
    merged: list[Axis] = []
    for n, a, b in sorted(axes, key=lambda axis: (-axis[2], -axis[0])):
        if merged and merged[-1][1:] == (n * a, n * b):
            merged[-1] = (merged[-1][0] * n, a, b)
        else:
            merged.append((n, a, b))
    return merged
