"""The planner with other rules: plans are forgotten before and after these rules hold."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from paged_attn.calls import call_cache
from paged_attn.planning import planner


def forget() -> None:
    """Forget all plans, and all kept calls, which hold plans."""
    planner.plan.cache_clear()
    call_cache.clear()


@contextlib.contextmanager
def replanned() -> Iterator[pytest.MonkeyPatch]:
    """Yield a patch; forget all plans before and after, also if a test is skipped inside."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            forget()
            yield patch
    finally:
        forget()
