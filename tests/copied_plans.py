"""The planner with other rules for copies in whole pages; also as decorators."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from paged_attn.calls import memo
from paged_attn.planning import plan
from paged_attn.records.copies import Copies, copies_of, over
from paged_attn.records.problem import Problem


def _always(p: Problem) -> tuple[Problem, Copies | None]:
    if p.packed or p.latent or p.gap or not p.ragged:
        return p, None
    copies = copies_of(p)
    return over(p, copies), copies


@contextlib.contextmanager
def copied() -> Iterator[None]:
    """Every call that can be is over copies, whatever its pages, by the kernels that take it then."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            _forget()
            patch.setattr(plan, "in_whole_pages", _always)
            yield
    finally:  # a test may be skipped, or a draw rejected, inside
        _forget()


def _forget() -> None:
    plan.plan.cache_clear()
    memo.clear()
