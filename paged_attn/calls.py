"""Calls that were made before: by everything that decides a call but addresses, what has been found out about it.

A signature holds every fact that the checks, the plan, the compiled kernels and their arguments depend on, so calls of
equal signature differ in nothing but where their tensors lie.  Whatever cannot be described so has none, and is checked
and planned each time.
"""

import contextlib
from collections.abc import Hashable, Sequence
from typing import Any

from .launch import Launches

LIMIT = 4096  # signatures kept; a server's steps differ in lengths, so old ones are dropped
ALIGNMENT = 63  # bits of an address that kernels are compiled for: 16 bytes, or 16 elements of x-packed values
NUMBERS = (float, int)  # and no subclass: True equals 1, but only one of them is a scale


Signature = tuple[Hashable, tuple[int, ...]]  # what decides a call, and the addresses that do not

_kept: dict[Hashable, Launches] = {}


def signature(tensors: Sequence[Any], options: tuple[Any, ...]) -> Signature | None:
    """Of a call with these tensors, each a tensor, a number or None, and these options; None if it has none."""
    try:
        facts, addresses = facts_of(tensors)
        return (facts, options, tuple(map(type, options))), addresses
    except (AttributeError, TypeError, RuntimeError):  # not tensors, or tensors without memory
        return None


def facts_of(tensors: Sequence[Any]) -> tuple[tuple[Hashable, ...], tuple[int, ...]]:
    """(what decides, addresses) of tensors, numbers and None; raises on anything else.

    Strides even of contiguous tensors, for sizes do not imply them where one is 0 or 1.
    """
    addresses = tuple([0 if x is None or type(x) in NUMBERS else x.data_ptr() for x in tensors])
    facts = [
        x if x is None or type(x) in NUMBERS else (x.shape, x.stride(), x.dtype, x.device, address & ALIGNMENT)
        for x, address in zip(tensors, addresses)
    ]
    return tuple(facts), addresses


def find(of: Signature | None) -> Launches | None:
    """The launches of a signature, if they are kept."""
    try:
        return None if of is None else _kept.get(of[0])
    except TypeError:  # an option that cannot be hashed
        return None


def keep(of: Signature | None, launches: Launches) -> None:
    """Remember launches that went well, and forget the oldest."""
    if of is None:
        return
    while len(_kept) >= LIMIT:
        _kept.pop(next(iter(_kept)), None)
    with contextlib.suppress(TypeError):
        _kept[of[0]] = launches


def clear() -> None:
    """Forget everything, for those who change what calls are planned by."""
    _kept.clear()
