"""chunk_lookback: queries that see their own chunk of positions, and some chunks before it."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit
def chunks_back(score, query_pos, key_pos, head, size, lookback):  # type: ignore[no-untyped-def]
    """Minus infinity at keys of chunks, of `size` positions each, that are more than `lookback` before the query's."""
    return tl.where(query_pos // size - key_pos // size <= lookback, score, float("-inf"))


def look_back(lookback: int, window: int, causal: bool) -> dict[str, Any]:
    """Arguments in place of a window of so many positions, which the chunks that a query sees make up together.

    A causal query that sees its own chunk alone needs no modifier.  Others never see a key at a distance of `window`.
    """
    size = window // (lookback + 1)
    if size < 1:
        raise ValueError(f"chunk_lookback must be less than window_size[0] + 1 = {window}, got {lookback}")
    if lookback == 0 and causal:
        return {"attention_chunk": size, "window_size": (-1, -1)}
    left = size * (lookback + 1) - 1
    return {"score_mod": chunks_back, "score_mod_args": (size, lookback), "window_size": (left, -1)}
