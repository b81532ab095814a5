"""A temperature by position, as Grok has it: a modifier of scores, since it comes after their softcap."""

from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl


@triton.jit
def temperature(score, query_pos, key_pos, head, length, per_log):  # type: ignore[no-untyped-def]
    """Scores of queries behind `length` grow with the logarithm of their position."""
    grown = tl.log2(tl.maximum(query_pos, 1).to(tl.float32)) * per_log
    return score * tl.where(query_pos > length, grown, 1.0)


def modifier(length: int) -> dict[str, Any]:
    """Keywords of paged_attention."""
    return {"score_mod": temperature, "score_mod_args": (length, 1 / math.log2(length))}
