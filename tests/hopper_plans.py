"""Decorators of tests: the planner of the Hopper kernels with other rules, for lengths that a test can afford."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from paged_attn.calls import memo
from paged_attn.kernels.hopper.planning import block_items
from paged_attn.kernels.hopper.planning import plan as hopper
from paged_attn.planning import plan
from paged_attn.records.problem import Problem


@contextlib.contextmanager
def planned(**changes: Any) -> Iterator[None]:
    """The planner with other numbers, or another rule."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        plan.plan.cache_clear()
        memo.clear()
        for name, value in changes.items():
            monkeypatch.setattr(hopper if hasattr(hopper, name) else block_items, name, value)
        yield
    plan.plan.cache_clear()
    memo.clear()


def _never(p: Problem) -> bool:
    return False


def _small_heads(p: Problem) -> bool:
    return hopper.dim_of(p) == 64


def anywhere() -> contextlib._GeneratorContextManager[None]:
    """Also few queries that see few keys."""
    return planned(FEW_KEYS=-1, FEW_KEYS_OF_LARGE=-1)


def mixed() -> contextlib._GeneratorContextManager[None]:
    """Batches of uneven queries as those of many keys, which wait for memory."""
    return planned(LITTLE_TO_READ=0, MOSTLY_LONG=1 << 40)


def _by_type(p: Problem) -> bool:
    return p.packed or block_items.conversion(p) != block_items.NONE


def two_lists() -> contextlib._GeneratorContextManager[None]:
    """`mixed`, as where long queries are few, and decodes many."""
    return planned(LITTLE_TO_READ=0, MOSTLY_LONG=1 << 40, ENOUGH_ROWS=1 << 60, _are_better_apart=_by_type)


def apart() -> contextlib._GeneratorContextManager[None]:
    """`mixed`, as where long queries are few, and decodes, too: in two launches."""
    return planned(LITTLE_TO_READ=0, MOSTLY_LONG=1 << 40, ENOUGH_ROWS=1 << 60, _are_better_apart=lambda p: True)


def long() -> contextlib._GeneratorContextManager[None]:
    """Batches of uneven queries as those of long ones."""
    return planned(MOSTLY_LONG=0)


def wide() -> contextlib._GeneratorContextManager[None]:
    """`mixed`, and windows as those that show many keys: whole tiles, of blocks that may be cut."""
    return planned(LITTLE_TO_READ=0, MOSTLY_LONG=1 << 40, SHORT=-1)


def shares() -> contextlib._GeneratorContextManager[None]:
    """Even shares also of many rows."""
    return planned(has_little=lambda p: True)


def three() -> contextlib._GeneratorContextManager[None]:
    """Blocks of 192 rows for three consumers wherever these can do them."""
    wherever = dict(_is_for_three=lambda p: hopper.dim_of(p) == 128, _is_for_four=_never)
    return planned(MOST_ROWS=0, UNCUT=0, LONG=0, SHORT=-1, **wherever)


def one(**more: Any) -> contextlib._GeneratorContextManager[None]:
    """Blocks of 128 rows for one consumer wherever it can do them, also of long queries."""
    return planned(MOST_ROWS=0, LONG=1 << 40, _is_for_four=_never, **more)


def uncut(**more: Any) -> contextlib._GeneratorContextManager[None]:
    """`one`, of whole blocks."""
    return one(UNCUT=0, **more)


def four() -> contextlib._GeneratorContextManager[None]:
    """Blocks of 256 rows for four warpgroups of one code wherever these can do them, which may be cut."""
    return planned(MOST_ROWS=0, UNCUT=1 << 40, FULL=2, SHORT=-1, _is_for_four=_small_heads)


def four_uncut() -> contextlib._GeneratorContextManager[None]:
    """`four`, of whole blocks."""
    return planned(MOST_ROWS=0, UNCUT=0, _is_for_four=_small_heads)
