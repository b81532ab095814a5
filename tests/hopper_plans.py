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
    return planned(MAX_PORTABLE_KEYS=-1, MAX_PORTABLE_KEYS_OF_LARGE_HEADS=-1)


def mixed() -> contextlib._GeneratorContextManager[None]:
    """Batches of uneven queries as those of many keys, which wait for memory."""
    return planned(MAX_BYTES_OF_ONE_LIST=0, MIN_TOKENS_PER_LONG_SEQ=1 << 40)


def _by_type(p: Problem) -> bool:
    return p.packed or block_items.conversion(p) != block_items.NONE


def two_lists() -> contextlib._GeneratorContextManager[None]:
    """`mixed`, as where long queries are few, and decodes many."""
    return planned(
        MAX_BYTES_OF_ONE_LIST=0,
        MIN_TOKENS_PER_LONG_SEQ=1 << 40,
        MIN_LONG_ROWS_PER_SEQ=1 << 60,
        _few_rows_read_faster_alone=_by_type,
    )


def apart() -> contextlib._GeneratorContextManager[None]:
    """`mixed`, as where long queries are few, and decodes, too: in two launches."""
    return planned(
        MAX_BYTES_OF_ONE_LIST=0,
        MIN_TOKENS_PER_LONG_SEQ=1 << 40,
        MIN_LONG_ROWS_PER_SEQ=1 << 60,
        _few_rows_read_faster_alone=lambda p: True,
    )


def long() -> contextlib._GeneratorContextManager[None]:
    """Batches of uneven queries as those of long ones."""
    return planned(MIN_TOKENS_PER_LONG_SEQ=0)


def wide() -> contextlib._GeneratorContextManager[None]:
    """`mixed`, and windows as those that show many keys: whole tiles, of blocks that may be cut."""
    return planned(MAX_BYTES_OF_ONE_LIST=0, MIN_TOKENS_PER_LONG_SEQ=1 << 40, MAX_KEYS_OF_SMALL_TILES=-1)


def shares() -> contextlib._GeneratorContextManager[None]:
    """Even shares also of many rows."""
    return planned(even_shares_end_sooner=lambda p: True)


def three() -> contextlib._GeneratorContextManager[None]:
    """Blocks of 192 rows for three consumers wherever these can do them."""
    wherever = dict(_suits_three_consumers=lambda p: hopper.dim_of(p) == 128, _suits_four_warpgroups=_never)
    return planned(
        MAX_ROWS_OF_EVEN_SHARES=0,
        MIN_BLOCKS_PER_MULTIPROCESSOR=0,
        MIN_TOKENS_WORTH_CODE_COPIES=0,
        MAX_KEYS_OF_SMALL_TILES=-1,
        **wherever,
    )


def one(**more: Any) -> contextlib._GeneratorContextManager[None]:
    """Blocks of 128 rows for one consumer wherever it can do them, also of long queries."""
    return planned(
        MAX_ROWS_OF_EVEN_SHARES=0, MIN_TOKENS_WORTH_CODE_COPIES=1 << 40, _suits_four_warpgroups=_never, **more
    )


def uncut(**more: Any) -> contextlib._GeneratorContextManager[None]:
    """`one`, of whole blocks."""
    return one(MIN_BLOCKS_PER_MULTIPROCESSOR=0, **more)


def four() -> contextlib._GeneratorContextManager[None]:
    """Blocks of 256 rows for four warpgroups of one code wherever these can do them, which may be cut."""
    return planned(
        MAX_ROWS_OF_EVEN_SHARES=0,
        MIN_BLOCKS_PER_MULTIPROCESSOR=1 << 40,
        MIN_FRACTION_OF_PLACES=2,
        MAX_KEYS_OF_SMALL_TILES=-1,
        _suits_four_warpgroups=_small_heads,
    )


def four_uncut() -> contextlib._GeneratorContextManager[None]:
    """`four`, of whole blocks."""
    return planned(MAX_ROWS_OF_EVEN_SHARES=0, MIN_BLOCKS_PER_MULTIPROCESSOR=0, _suits_four_warpgroups=_small_heads)
