"""The planner with other rules, and no plan of before or of inside where it does not belong."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from paged_attn.calls import call_cache
from paged_attn.planning import planner


def forget() -> None:
    """All plans, and all calls that are kept with theirs."""
    planner.plan.cache_clear()
    call_cache.clear()


@contextlib.contextmanager
def replanned() -> Iterator[pytest.MonkeyPatch]:
    """No plan of before is known inside, and none of inside afterwards, also where a test is skipped inside."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            forget()
            yield patch
    finally:
        forget()
