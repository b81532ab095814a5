"""Whether tensors share memory: exactly, from addresses, sizes and strides; nothing is read.

An element of a strided tensor lies at address + sum x_i * stride_i, 0 <= x_i < size_i.  Two that share a byte are a
solution of an equation in bounded integers, which is looked for from the largest stride to the smallest: what is left
has to be within the reach of the smaller ones, and a multiple of their common divisor.  Layouts whose strides nest end
at once, and others in a few steps.
"""

import math
from typing import Any

from torch import Tensor

STEPS = 100_000  # of a search; who asks for more is told that memory is shared

Terms = tuple[tuple[int, int], ...]  # (stride, largest x), strides descending


def overlaps_itself(x: Tensor) -> bool:
    """Whether two elements share memory."""
    if 0 in x.shape:
        return False
    # of two elements the difference in the axis of the largest stride in which they differ may be taken to be positive
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
    """Whether an element of one shares memory with one of the other."""
    if 0 in x.shape or 0 in y.shape or x.device != y.device or x.device.type == "meta":
        return False
    (begin, end), (other_begin, other_end) = _range(x), _range(y)
    if end <= other_begin or other_end <= begin:
        return False
    # bytes of x, counted up, and bytes of y, counted down from their last
    terms = _terms([*_bytes(x), *_bytes(y)])
    return _Search().finds(terms, other_end - 1 - begin)


def same_elements(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are the same elements in the same places."""
    return (x.data_ptr(), x.dtype, x.shape, x.stride()) == (y.data_ptr(), y.dtype, y.shape, y.stride())


def writable(name: str, value: Tensor) -> None:
    """Each element has a place of its own: of two in one place, either could be written last."""
    if overlaps_itself(value):
        raise ValueError(f"{name} must not overlap itself, got {list(value.shape)} strides {list(value.stride())}")


def no_overlap(name: str, value: Tensor, cure: str | bool = "", /, **others: Any) -> None:
    """What a call writes shares no memory with what it reads at the same time."""
    for other, tensor in others.items():
        if isinstance(tensor, Tensor) and overlap(value, tensor):
            other += f": {cure}" if cure else ""
            raise ValueError(f"{name} must share no memory with {other}")


def _terms(pairs: list[tuple[int, int]]) -> Terms:
    """Terms with the same sums, as few as is seen easily: multiples of a stride without gaps are one term."""
    terms: list[tuple[int, int]] = []
    for stride, most in sorted(pair for pair in pairs if 0 not in pair):
        before, reached = terms[-1] if terms else (stride, 0)
        if stride % before == 0 and stride // before <= reached + 1:
            terms[-1:] = [(before, reached + stride // before * most)]
        else:
            terms.append((stride, most))
    return tuple(reversed(terms))


def _bytes(x: Tensor) -> tuple[tuple[int, int], ...]:
    size = x.element_size()
    return (*((stride * size, most - 1) for stride, most in zip(x.stride(), x.shape)), (1, size - 1))


def _range(x: Tensor) -> tuple[int, int]:
    """Of addresses: the first byte's, and the one behind the last."""
    first = x.data_ptr()
    return first, first + 1 + sum(stride * most for stride, most in _bytes(x))


class _Search:
    """For integers 0 <= x_i <= most_i with sum x_i * stride_i = target; True also where too many steps were made."""

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
