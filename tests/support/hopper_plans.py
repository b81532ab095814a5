"""Decorators of tests: the planner of the Hopper kernels with other rules, for lengths that a test can afford."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import math
import pkgutil
from collections.abc import Iterator
from typing import Any

from paged_attn.kernels.hopper import planning
from paged_attn.kernels.hopper.planning.operands import NONE, conversion
from paged_attn.kernels.hopper.planning.shapes import padded_dim
from paged_attn.records.problem import Problem
from tests.support.replanned import replanned

MODULES = [importlib.import_module(f"{planning.__name__}.{x.name}") for x in pkgutil.iter_modules(planning.__path__)]


def _home(name: str) -> Any:
    """Return the planner's module that defines a number or a rule."""
    (home,) = [
        x
        for x in MODULES
        if name in inspect.get_annotations(x) or getattr(vars(x).get(name), "__module__", None) == x.__name__
    ]
    return home


@contextlib.contextmanager
def planned(**changes: Any) -> Iterator[None]:
    """The planner with other numbers, or another rule."""
    with replanned() as monkeypatch:
        for name, value in changes.items():
            monkeypatch.setattr(_home(name), name, value)
        yield


def _never(p: Problem) -> bool:
    return False


def _always(p: Problem) -> bool:
    return True


def anywhere() -> contextlib._GeneratorContextManager[None]:
    """Plan Hopper kernels also for few queries that see few keys."""
    return planned(MAX_PORTABLE_KEYS=-1, MAX_PORTABLE_KEYS_OF_LARGE_HEADS=-1)


def copied(**changes: Any) -> contextlib._GeneratorContextManager[None]:
    """Plan copies in 16 bits for all long queries over int8, int4 or fp8, however few scores they have."""
    limits = ("_SCORES_WORTH_A_COPY", "_SCALED_SCORES_WORTH_A_COPY", "_FP8_SCORES_WORTH_A_COPY")
    names = [*limits, "_SCORES_PER_SCALED_KEY", "_SCORES_PER_FP8_KEY", "_TOKENS_PER_LONG_SEQ"]
    return planned(**{f"MIN{name}": 0 for name in names} | changes)


def mixed() -> contextlib._GeneratorContextManager[None]:
    """Plan batches of uneven queries as if they had many keys and were memory-bound."""
    return planned(MAX_BYTES_OF_ONE_LIST=0, MIN_TOKENS_PER_LONG_SEQ=1 << 40)


def _by_type(p: Problem) -> bool:
    return p.packed or conversion(p) != NONE


def two_lists() -> contextlib._GeneratorContextManager[None]:
    """Plan as `mixed`, and as if long queries were few and decodes many."""
    return planned(
        MAX_BYTES_OF_ONE_LIST=0,
        MIN_TOKENS_PER_LONG_SEQ=1 << 40,
        MIN_SCORES_PER_KEY=1 << 60,
        decodes_read_faster_alone=_by_type,
    )


def apart() -> contextlib._GeneratorContextManager[None]:
    """Plan as `mixed`, and as if both long queries and decodes were few: in two launches."""
    return planned(
        MAX_BYTES_OF_ONE_LIST=0,
        MIN_TOKENS_PER_LONG_SEQ=1 << 40,
        MIN_SCORES_PER_KEY=1 << 60,
        decodes_read_faster_alone=_always,
    )


def long() -> contextlib._GeneratorContextManager[None]:
    """Plan batches of uneven queries as batches of long queries."""
    return planned(MIN_TOKENS_PER_LONG_SEQ=0)


def wide() -> contextlib._GeneratorContextManager[None]:
    """Plan as `mixed`, and as if windows showed many keys: whole tiles, in blocks that may be cut."""
    return planned(MAX_BYTES_OF_ONE_LIST=0, MIN_TOKENS_PER_LONG_SEQ=1 << 40, MAX_KEYS_OF_HALF_TILES=-1)


def shares() -> contextlib._GeneratorContextManager[None]:
    """Plan even shares also for many rows."""
    return planned(even_shares_end_sooner=_always)


def three() -> contextlib._GeneratorContextManager[None]:
    """Plan blocks of 192 rows for three consumers wherever these can compute them."""
    return planned(
        MAX_ROWS_OF_EVEN_SHARES=0,
        MAX_TIME_OF_WHOLE_BLOCKS=math.inf,
        MIN_TOKENS_WORTH_CODE_COPIES=0,
        MIN_MEAN_TOKENS_WORTH_CODE_COPIES=0,
        MAX_KEYS_OF_HALF_TILES=-1,
        three_copies_have_room=lambda p: padded_dim(p) == 128,
        three_copies_end_sooner=_always,
        four_warpgroups_end_sooner=_never,
    )


def one(**more: Any) -> contextlib._GeneratorContextManager[None]:
    """Plan blocks of 128 rows for one consumer wherever it can compute them, also for long queries."""
    return planned(
        MAX_ROWS_OF_EVEN_SHARES=0, MIN_TOKENS_WORTH_CODE_COPIES=1 << 40, four_warpgroups_end_sooner=_never, **more
    )


def uncut(**more: Any) -> contextlib._GeneratorContextManager[None]:
    """Plan as `one`, in whole blocks."""
    return one(MAX_TIME_OF_WHOLE_BLOCKS=math.inf, **more)


def four() -> contextlib._GeneratorContextManager[None]:
    """Plan blocks of 256 rows, which may be cut, wherever four warpgroups that share code can compute them."""
    return planned(
        MAX_ROWS_OF_EVEN_SHARES=0,
        MAX_TIME_OF_WHOLE_BLOCKS=0,
        MAX_KEYS_OF_HALF_TILES=-1,
        four_warpgroups_end_sooner=_always,
    )


def four_uncut() -> contextlib._GeneratorContextManager[None]:
    """Plan as `four`, in whole blocks."""
    return planned(MAX_ROWS_OF_EVEN_SHARES=0, MAX_TIME_OF_WHOLE_BLOCKS=math.inf, four_warpgroups_end_sooner=_always)
