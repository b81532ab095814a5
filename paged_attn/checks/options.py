"""Checks of host values: numbers, windows, shards, words, and arguments that must be given together."""

from __future__ import annotations

import difflib
import sys
from typing import Any

import torch

from ..arguments import TINY

# Kernels get numbers as int32 and float32.
INT32_MAX = torch.iinfo(torch.int32).max
HUGE = torch.finfo(torch.float32).max


def both(name: str, value: Any, other_name: str, other: Any) -> None:
    """Check that two arguments are given.  Callers ask this only if one of the two is given."""
    if value is None or other is None:
        given, missing = (other_name, name) if value is None else (name, other_name)
        cure = f"{missing}: pass both, or neither"
        raise ValueError(f"{name} and {other_name} must be given together, got {given} without {cure}")


def unboxed(value: Any) -> Any:
    """Convert NumPy scalars to Python numbers, also inside a tuple or list; return other values as they are."""
    if torch.compiler.is_compiling():  # the tracer has no scalars of NumPy, and would guard sys.modules
        return value
    if isinstance(value, (tuple, list)):
        return (tuple if isinstance(value, tuple) else list)([unboxed(x) for x in value])
    numpy = sys.modules.get("numpy")
    return value.item() if numpy is not None and isinstance(value, numpy.generic) else value


def integer(name: str, value: Any, least: int, wanted: str = "None or an int") -> None:
    """Check an int in [least, 2^31); a bool is refused.  None is valid unless `wanted` is "an int"."""
    value = unboxed(value)
    if value is None and wanted != "an int":
        return
    if not isinstance(value, int) or value is True or value is False:
        given = "None: -1 = all" if value is None and least == -1 else _converted(name, value, "int")
        raise TypeError(f"{name} must be {wanted} >= {least}, got {given}")
    if not least <= value <= INT32_MAX:
        raise ValueError(f"{name} must be {wanted} >= {least} and < 2^31, got {value}")


def window(name: str, value: Any) -> None:
    """Check a window (left, right): two ints >= -1, -1 = no limit."""
    value = unboxed(value)
    if not isinstance(value, (tuple, list)):
        given = kind(value)
        if type(value) is int and value > 0:
            given = f"{value}: ({value - 1}, -1) is a sliding window of {value} keys"
        raise TypeError(f"{name} must be (left, right), two ints >= -1, or a tensor [heads, 2], got {given}")
    if len(value) != 2:
        raise ValueError(f"{name} must be (left, right), two ints >= -1, or a tensor [heads, 2], got {value!r}")
    integer(f"{name}[0]", value[0], -1, "an int")
    integer(f"{name}[1]", value[1], -1, "an int")


def shard(name: str, value: Any) -> None:
    """Check (rank, world, stripe): three ints, with rank < world and world * stripe < 2^27."""
    value, wanted = unboxed(value), "None or (rank, world, stripe), three ints"
    if not isinstance(value, (tuple, list)):
        raise TypeError(f"{name} must be {wanted}, got {kind(value)}")
    if len(value) != 3:
        raise refused(name, wanted, repr(value))
    for i, (part, least) in enumerate(zip(value, (0, 1, 1))):
        integer(f"{name}[{i}]", part, least, "an int")
    rank, world, stripe = value
    if rank >= world or world * stripe > INT32_MAX // 16:
        raise refused(name, f"{wanted}, with rank < world and world * stripe < 2^27", repr(value))


def refused(name: str, wanted: str, given: object) -> ValueError:
    """The error of an argument that has a valid type, but a wrong value."""
    return ValueError(f"{name} must be {wanted}, got {given}")


def boolean(name: str, value: Any, wanted: str = "True or False") -> None:
    """Check a bool; 0 and 1 are refused."""
    value = unboxed(value)
    if value is not True and value is not False:
        raise TypeError(f"{name} must be {wanted}, got {_converted(name, value, 'bool')}")


def number(name: str, value: Any, wanted: str, least: float = -HUGE) -> None:
    """Check a number in [least, largest float32]; a bool is refused."""
    value = unboxed(value)
    if not isinstance(value, (float, int)) or value is True or value is False:
        raise TypeError(f"{name} must be {wanted}, got {_converted(name, value, 'float')}")
    if not least <= value <= HUGE:
        raise ValueError(f"{name} must be {wanted}, got {value}")


def scale_number(name: str, value: Any) -> None:
    """Check a scale on the host: a normal float32 number > 0."""
    number(name, value, "a finite number > 0, or a float32 tensor", TINY)


def choice(name: str, value: Any, choices: tuple[str | None, ...]) -> None:
    """Check that a value is one of the words `choices`, which may include None."""
    *others, last = map(repr, choices)
    wanted = f"{', '.join(others)} or {last}"
    if value is None and None in choices:
        return
    if not isinstance(value, str):
        raise TypeError(f"{name} must be {wanted}, got {kind(value)}")
    if value not in choices:
        given = repr(value) if torch.compiler.is_compiling() else f"{value!r}{_nearest(value, choices)}"
        raise ValueError(f"{name} must be {wanted}, got {given}")


def _nearest(value: str, choices: tuple[str | None, ...]) -> str:
    """ ": 'word'?" for the choice nearest to a word; "" if none is near.  torch.compile cannot trace difflib."""
    words = {x.casefold(): x for x in choices if x is not None}
    return "".join(f": {words[x]!r}?" for x in difflib.get_close_matches(value.casefold(), words, 1))


def kind(value: Any) -> str:
    """The type of a value, as errors call it."""
    return "None" if value is None else type(value).__name__


def _converted(name: str, value: Any, to: str) -> str:
    """The type of a value, and a conversion to the type wanted, if there is one."""
    if isinstance(value, torch.Tensor):
        return f"{kind(value)}: {to}({name}), which waits for its device"
    convertible = isinstance(value, (float, int) if to == "bool" else (float, str))
    return f"{kind(value)}: {to}({name})" if convertible else kind(value)
