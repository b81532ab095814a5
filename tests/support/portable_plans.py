"""The planner of the portable kernels with other rules, for lengths that a test can afford; also as decorators."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from paged_attn.kernels.portable import launches as portable_plan
from paged_attn.planning import dialects, planner
from tests.support.replanned import replanned


@contextlib.contextmanager
def portable() -> Iterator[pytest.MonkeyPatch]:
    """Plan every call for the portable kernels, also on Hopper."""
    with replanned() as patch:
        for module in (dialects, planner):
            patch.setattr(module, "DIALECTS", ("portable",))
        yield patch


@contextlib.contextmanager
def cut(segments: int, tile: int = 32) -> Iterator[None]:
    """Plan tiles of `tile` keys, small blocks and, if `segments` > 1, `segments` shares for each block.

    For lengths that a test can afford, the planner itself chooses one tile, one share and one block of queries.
    """
    with portable() as patch:
        patch.setattr(portable_plan, "_shares", lambda p, c, blocks, q: blocks * segments if segments > 1 else 0)
        patch.setattr(portable_plan, "MAX_ROWS_OF_ONE_BLOCK", 16)
        for name, rows in (("decode_config", 16), ("prefill_config", 32)):
            choose = getattr(portable_plan, name)
            patch.setattr(portable_plan, name, lambda p, c=choose, r=rows: c(p)._replace(rows=r, tile=tile, least=1))
        yield
