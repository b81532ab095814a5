"""The planner of the portable kernels with other rules, for lengths that a test can afford; also as decorators."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from paged_attn.calls import memo
from paged_attn.kernels.portable import plan as portable_plan
from paged_attn.planning import dialects, plan


@contextlib.contextmanager
def portable() -> Iterator[pytest.MonkeyPatch]:
    """Every call goes to the portable kernels, also on Hopper."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            _forget()
            patch.setattr(dialects, "DIALECTS", ("portable",))
            yield patch
    finally:  # a test may be skipped, or a draw rejected, inside
        _forget()


@contextlib.contextmanager
def cut(segments: int, tile: int = 32) -> Iterator[None]:
    """Every plan has tiles of so many keys, and so many shares of every sequence.

    What the planner chooses for lengths that a test can afford is one tile, one share and one block of queries.
    """
    with portable() as patch:
        patch.setattr(portable_plan, "_shares", lambda p, c, blocks, q: blocks * segments if segments > 1 else 0)
        patch.setattr(portable_plan, "MAX_ROWS_OF_ONE_BLOCK", 16)
        for name, rows in (("decode_config", 16), ("prefill_config", 32)):
            choose = getattr(portable_plan, name)
            patch.setattr(portable_plan, name, lambda p, c=choose, r=rows: c(p)._replace(rows=r, tile=tile, least=1))
        yield


def _forget() -> None:
    plan.plan.cache_clear()
    memo.clear()
