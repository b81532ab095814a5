"""Whether pages of other than a multiple of 8 tokens are gathered row by row, which no GPU has tried yet.

Until one has, PAGED_ATTN_GATHER=1 asks for it, and the portable kernels serve such pages otherwise.
"""

from __future__ import annotations

import os

from ....records.plan import Launch
from ....records.problem import Problem

ASKED = os.environ.get("PAGED_ATTN_GATHER", "").lower() in ("1", "true", "yes", "on")  # read once, at import


def in_boxes(p: Problem) -> bool:
    """Whether pages are cut into boxes of 8 rows and more."""
    return p.page_size % 8 == 0


def gathers(p: Problem) -> bool:
    """Whether a call's tiles are gathered: of 16 bits, in 16-byte steps, none outside the cache, no fixed pieces."""
    return (
        ASKED
        and not in_boxes(p)
        and p.cache.itemsize == 2
        and not (p.packed or p.new or p.batch_invariant)
        and p.head_dim % 8 == 0
    )


def gathered(launch: Launch) -> Launch:
    """The same launch with loaders that gather."""
    pipe = launch.pipe and launch.pipe._replace(GATHER=True, PREFETCH=False)
    beside = launch.beside and gathered(launch.beside)
    return launch._replace(pipe=pipe, beside=beside)
