"""The planner of the portable kernels with other rules, for lengths that a test can afford; also as decorators."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from paged_attn.kernels.portable import launches as portable_plan
from paged_attn.planning import dialects
from tests.support.replanned import replanned


@contextlib.contextmanager
def portable() -> Iterator[pytest.MonkeyPatch]:
    """Every call goes to the portable kernels, also on Hopper."""
    with replanned() as patch:
        patch.setattr(dialects, "DIALECTS", ("portable",))
        yield patch


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
