"""Test from addresses, sizes and strides alone whether strided tensors share memory; exact within STEPS steps.

Element x of a tensor lies at address + sum x_i * stride_i, 0 <= x_i < size_i.  Two elements share a byte if an equation
in such bounded integers has a solution.  The search picks an index for each stride, from the largest stride to the
smallest.  What remains of the sum must lie within reach of the strides that are left, and be a multiple of their
greatest common divisor.  If a stride exceeds the reach of all smaller strides, at most one of its indices remains to
try.  Other layouts take more steps.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from ..strides import same_steps

STEPS = 100_000  # limit of a search, which then answers "shared"

Terms = tuple[tuple[int, int], ...]  # (stride, largest x), strides descending


def overlaps_itself(x: Tensor) -> bool:
    """Whether two elements of a tensor share memory."""
    if 0 in x.shape:
        return False
    # Two elements differ in some axes.  Along the one with the largest stride, they differ by i > 0 indices.  Along an
    # axis of smaller stride s and largest index m, they differ by d indices, -m <= d <= m.  If the elements share an
    # address, the sum of all d * s is -i * stride.  The search takes d + m, which is 0 to 2 m.  Its target is
    # reach - i * stride, because `reach` is the sum of all m * s.
    search, reach = _Search(), 0
    smaller: list[tuple[int, int]] = []
    for stride, most in sorted((stride, size - 1) for stride, size in zip(x.stride(), x.shape) if size > 1):
        if stride == 0:
            return True
        if stride <= reach:
            terms = _terms([(s, 2 * m) for s, m in smaller])
            if any(search.finds(terms, reach - i * stride) for i in range(1, min(most, reach // stride) + 1)):
                return True
        smaller.append((stride, most))
        reach += stride * most
    return False


def overlap(x: Tensor, y: Tensor) -> bool:
    """Whether an element of x shares memory with an element of y."""
    if 0 in x.shape or 0 in y.shape or x.device != y.device or x.device.type == "meta":
        return False
    (begin, end), (other_begin, other_end) = _range(x), _range(y)
    if end <= other_begin or other_end <= begin:
        return False
    # The distance from x's first byte to a shared byte is a sum of multiples of x's strides.  The distance from the
    # shared byte to y's last byte is a sum of multiples of y's strides.  Both sums add up to the distance from x's
    # first byte to y's last byte.
    terms = _terms([*_bytes(x), *_bytes(y)])
    return _Search().finds(terms, other_end - 1 - begin)


def first_overlap(written: Sequence[Tensor], others: Sequence[Tensor]) -> tuple[int, int] | None:
    """Return the first (i, j) for which written[i] and others[j] share memory; None if there are none."""
    ranges = [_range(x) for x in others]
    for i, x in enumerate(written):
        begin, end = _range(x)
        for j, (other_begin, other_end) in enumerate(ranges):
            if begin < other_end and other_begin < end and overlap(x, others[j]):
                return i, j
    return None


def pairs_that_meet(tensors: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """Indices (i, j), i < j, of tensors that share memory."""
    ranges = sorted((*_range(x), *_step(x), i) for i, x in enumerate(tensors) if 0 not in x.shape)
    reached: list[tuple[int, ...]] = []  # earlier tensors that end after `one` begins
    for one in ranges:
        reached = [x for x in reached if x[1] > one[0]]
        for other in reached:
            i, j = sorted((one[-1], other[-1]))
            if not _side_by_side(other, one) and overlap(tensors[i], tensors[j]):
                yield i, j
        reached.append(one)


def _step(x: Tensor) -> tuple[int, int]:
    """(largest stride, bytes that the other axes span) of a tensor, in bytes."""
    *others, (stride, _) = sorted((stride, most) for stride, most in _bytes(x) if most or stride == 1)
    return stride, 1 + sum(stride * most for stride, most in others)


def _side_by_side(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether tensors (begin, end, *_step, ...) of equal largest strides alternate in memory without a shared byte."""
    gap = (other[0] - one[0]) % one[2]
    return one[2] == other[2] and one[3] <= gap and gap + other[3] <= one[2]


def same_elements(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors have the same elements at the same addresses."""
    return (x.data_ptr(), x.dtype) == (y.data_ptr(), y.dtype) and same_steps(x, y)


def writable(name: str, value: Tensor) -> None:
    """Check that no two elements of a tensor share memory, because a kernel could write either last."""
    if overlaps_itself(value):
        raise ValueError(f"{name} must not overlap itself, got {list(value.shape)} strides {list(value.stride())}")


def no_overlap(name: str, value: Tensor, cure: str | bool = "", /, **others: Any) -> None:
    """Check that a tensor that is written shares no memory with others.  cure: advice for the error."""
    for other, tensor in others.items():
        if isinstance(tensor, Tensor) and overlap(value, tensor):
            other += f": {cure}" if cure else ""
            raise ValueError(f"{name} must share no memory with {other}")


def _terms(pairs: list[tuple[int, int]]) -> Terms:
    """Terms that have the same sums as `pairs`.  Neighbouring strides are merged if their sums leave no gap."""
    terms: list[tuple[int, int]] = []
    for stride, most in sorted(pair for pair in pairs if 0 not in pair):
        before, reached = terms[-1] if terms else (stride, 0)
        if stride % before == 0 and stride // before <= reached + 1:
            terms[-1:] = [(before, reached + stride // before * most)]
        else:
            terms.append((stride, most))
    return tuple(reversed(terms))


def _bytes(x: Tensor) -> tuple[tuple[int, int], ...]:
    """(stride in bytes, largest index) of each axis, and of the bytes of an element."""
    size = x.element_size()
    return (*((stride * size, most - 1) for stride, most in zip(x.stride(), x.shape)), (1, size - 1))


def _range(x: Tensor) -> tuple[int, int]:
    """[first, end) byte addresses of a tensor."""
    first = x.data_ptr()
    return first, first + 1 + sum(stride * most for stride, most in _bytes(x))


class _Search:
    """A search for integers 0 <= x_i <= most_i with sum x_i * stride_i = target.

    finds: whether there are such integers; True also after `STEPS` steps.
    """

    def __init__(self) -> None:
        self.steps = 0

    def finds(self, terms: Terms, target: int) -> bool:
        self.steps += 1
        reach = sum(stride * most for stride, most in terms)
        if self.steps > STEPS:
            return True
        if not 0 <= target <= reach:
            return False
        if target in (0, reach):
            return True
        if target % math.gcd(*[stride for stride, _ in terms]):
            return False
        (stride, most), *rest = terms
        reach -= stride * most
        least = max(0, -((reach - target) // stride))
        return any(self.finds(tuple(rest), target - x * stride) for x in range(least, min(most, target // stride) + 1))


def written_scale(name: str, scale: Any, **others: Any) -> None:
    """Check a scale by token that a call writes: its numbers share no memory with each other or with `others`."""
    writable(name, scale)
    no_overlap(name, scale, **others)
