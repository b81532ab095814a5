"""ALiBi by square roots of distances, as Step models have it: a modifier of scores."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def alibi_sqrt(score, query_pos, key_pos, head, slopes):  # type: ignore[no-untyped-def]
    """A bias of -slope * sqrt(places behind the query); later keys, where they are visible, have none."""
    behind = tl.maximum(query_pos - key_pos, 0).to(tl.float32)
    return score - tl.load(slopes + head) * tl.sqrt(behind)
