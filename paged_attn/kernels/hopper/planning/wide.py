"""Whether values of another width than keys, and heads beyond 256 dims, have Hopper kernels, which no GPU has run yet.

Until one has, PAGED_ATTN_WIDE=1 asks for them, and the portable kernels serve such calls otherwise.
"""

import os

from ....records.problem import Problem

ASKED = os.environ.get("PAGED_ATTN_WIDE", "").lower() in ("1", "true", "yes", "on")  # read once, at import


def is_wide(p: Problem) -> bool:
    """Whether values have another width than keys, or either has more dims than the other kernels' tiles."""
    return p.value_width != p.head_dim or p.widest > 256
