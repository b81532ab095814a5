"""Modifiers of scores that models of hosts have: ALiBi of square roots (Step), a temperature by position (Grok).

Grok's comes after the softcap of its scores, and so is no scale.
"""

from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl


@triton.jit
def alibi_sqrt(score, query_pos, key_pos, head, slopes):  # type: ignore[no-untyped-def]
    """A bias of -slope * sqrt(places behind the query); later keys, where they are visible, have none."""
    behind = tl.maximum(query_pos - key_pos, 0).to(tl.float32)
    return score - tl.load(slopes + head) * tl.sqrt(behind)


@triton.jit
def temperature(score, query_pos, key_pos, head, length, per_log):  # type: ignore[no-untyped-def]
    """Scores of queries behind `length` grow with the logarithm of their position."""
    grown = tl.log2(tl.maximum(query_pos, 1).to(tl.float32)) * per_log
    return score * tl.where(query_pos > length, grown, 1.0)


def modifier(length: int) -> dict[str, Any]:
    """Keywords of paged_attention."""
    return {"score_mod": temperature, "score_mod_args": (length, 1 / math.log2(length))}
