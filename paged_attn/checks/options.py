"""What is no tensor: numbers, pairs of them, words; arguments that come together."""

from __future__ import annotations

from typing import Any

import torch

from ..arguments import TINY

# numbers reach the kernels as int32 and float32
INT32_MAX = torch.iinfo(torch.int32).max
HUGE = torch.finfo(torch.float32).max


def both(name: str, value: Any, other_name: str, other: Any) -> None:
    """Two arguments that come together."""
    if value is None or other is None:
        given, missing = (other_name, name) if value is None else (name, other_name)
        raise ValueError(f"{name} and {other_name} must be given together, got {given} without {missing}")


def integer(name: str, value: Any, least: int, wanted: str = "None or an int") -> None:
    """An int32, which a bool is not; None only where the text says so."""
    if value is None and wanted != "an int":
        return
    if not isinstance(value, int) or value is True or value is False:
        raise TypeError(f"{name} must be {wanted} >= {least}, got {kind(value)}")
    if not least <= value <= INT32_MAX:
        raise ValueError(f"{name} must be {wanted} >= {least} and < 2^31, got {value}")


def window(name: str, value: Any) -> None:
    """(left, right), two ints, -1 = no limit."""
    if not isinstance(value, (tuple, list)):
        raise TypeError(f"{name} must be (left, right), two ints >= -1, or a tensor [heads, 2], got {kind(value)}")
    if len(value) != 2:
        raise ValueError(f"{name} must be (left, right), two ints >= -1, or a tensor [heads, 2], got {value!r}")
    integer(f"{name}[0]", value[0], -1, "an int")
    integer(f"{name}[1]", value[1], -1, "an int")


def boolean(name: str, value: Any, wanted: str = "True or False") -> None:
    if value is not True and value is not False:
        raise TypeError(f"{name} must be {wanted}, got {kind(value)}")


def number(name: str, value: Any, wanted: str, least: float = -HUGE) -> None:
    """A number that is finite in float32 and at least `least`."""
    if not isinstance(value, (float, int)) or value is True or value is False:
        raise TypeError(f"{name} must be {wanted}, got {kind(value)}")
    if not least <= value <= HUGE:
        raise ValueError(f"{name} must be {wanted}, got {value}")


def scale_number(name: str, value: Any) -> None:
    """A scale that is no tensor."""
    number(name, value, "a finite number > 0, or a float32 tensor", TINY)


def choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """One of a few words."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be {' or '.join(map(repr, choices))}, got {kind(value)}")
    if value not in choices:
        raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, got {value!r}")


def kind(value: Any) -> str:
    return "None" if value is None else type(value).__name__
