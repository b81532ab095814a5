"""A planner that copies small pages into whole pages wherever it can; also as a decorator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from paged_attn.planning import planner
from paged_attn.records.copies import Copies, copies_of, over
from paged_attn.records.problem import Problem
from tests.support.replanned import replanned


def _always(p: Problem) -> tuple[Problem, Copies | None]:
    if p.packed or p.latent or p.gap or p.head_windows or not p.ragged:
        return p, None
    copies = copies_of(p)
    return over(p, copies), copies


@contextlib.contextmanager
def copied() -> Iterator[None]:
    """Plan every call over copies in whole pages, whatever its pages, unless its problem does not allow copies."""
    with replanned() as patch:
        patch.setattr(planner, "in_whole_pages", _always)
        yield
