"""What tests of the table of arguments share: who must have each row, and values that show where they arrive."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from paged_attn.arguments import (
    ARGUMENTS,
    BY_NAME,
    INSTEAD,
    OPTION,
    PART,
    WITHIN,
    Argument,
)
from paged_attn.launching.platform import Device
from tests.support.score_mods import relative

NAMES = [x.name for x in ARGUMENTS if x.kind != PART]  # of signatures; parts are given within others
H200 = Device("sm90", 132)
every = pytest.mark.parametrize("argument", ARGUMENTS, ids=lambda x: x.name)


assert {*INSTEAD} == {name for name, within in WITHIN.items() if BY_NAME[within].kind == OPTION}


def lacks(place: str, has: Iterable[str], wanted: Iterable[str] = NAMES) -> None:
    """Each name once, and no other; their order is another matter."""
    has, wanted = list(has), list(wanted)
    missing = [name for name in wanted if name not in has]
    unknown = [name for name in has if name not in wanted]
    assert not missing, f"{place} lacks {missing}, which paged_attn/arguments.py has"
    assert not unknown, f"{place} has {unknown}, which paged_attn/arguments.py lacks"
    assert len(has) == len(set(has)), f"{place} has a name twice: {has}"


class Marked:
    """Stands for the value of an argument, to see where it arrives."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"the value of {self.name}"

    def __iter__(self) -> Any:  # of a window: its operator makes a tuple of it
        return iter([self])


class Arrived(Exception):
    """Carries what a function was given."""


def caught(module: Any, name: str, monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any]) -> tuple[Any, Any]:
    """(positional, keyword) arguments of a function that is called within another."""

    def arrive(*args: Any, **given: Any) -> Any:
        raise Arrived(args, given)

    monkeypatch.setattr(module, name, arrive)
    with pytest.raises(Arrived) as arrived:
        call()
    args, given = arrived.value.args
    return args, given


def given_as(argument: Argument, value: Any) -> dict[str, Any]:
    """How callers give a value of an argument: indptr with indices."""
    if argument.name == "page_starts":
        return {"page_table": (value, torch.zeros(12, dtype=torch.int32))}
    return {WITHIN.get(argument.name, argument.name): value}


def half(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.float16)


CALL: dict[str, Any] = dict(
    q=half(4, 4, 64), k_cache=half(6, 8, 2, 64), v_cache=half(6, 8, 2, 64),
    page_table=torch.zeros(4, 3, dtype=torch.int32), seq_lens=torch.zeros(4, dtype=torch.int32),
    k_new=half(4, 2, 64), v_new=half(4, 2, 64), score_mod=relative, score_mod_args=(half(4), 3),
)  # fmt: skip
