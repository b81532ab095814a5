"""Score modifiers of models that hosts serve: ALiBi of square roots (Step), a temperature by position (Grok).

Grok's temperature applies after the softcap, so softmax_scale cannot express it.
"""

from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl


@triton.jit
def alibi_sqrt(score, query_pos, key_pos, head, slopes):  # type: ignore[no-untyped-def]
    """Add -slope * sqrt(query_pos - key_pos) to a score, float32; visible keys after the query get no bias."""
    behind = tl.maximum(query_pos - key_pos, 0).to(tl.float32)
    return score - tl.load(slopes + head) * tl.sqrt(behind)


@triton.jit
def temperature(score, query_pos, key_pos, head, length, per_log):  # type: ignore[no-untyped-def]
    """Multiply the score of a query at a position > length by log2(query_pos) * per_log."""
    grown = tl.log2(tl.maximum(query_pos, 1).to(tl.float32)) * per_log
    return score * tl.where(query_pos > length, grown, 1.0)


def modifier(length: int) -> dict[str, Any]:
    """Grok's temperature as keywords of paged_attention."""
    return {"score_mod": temperature, "score_mod_args": (length, 1 / math.log2(length))}
