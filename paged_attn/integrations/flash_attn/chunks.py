"""chunk_lookback: queries that see their own chunk of positions, and some chunks before it."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit
def chunks_back(score, query_pos, key_pos, head, size, lookback):  # type: ignore[no-untyped-def]
    """Set a score to minus infinity if the key's chunk lies more than `lookback` chunks before the query's.

    Chunks have `size` positions and count from position 0.
    """
    return tl.where(query_pos // size - key_pos // size <= lookback, score, float("-inf"))


def look_back(lookback: int, window: int, causal: bool) -> dict[str, Any]:
    """Arguments in place of a window: the chunks that a query sees have `window` positions together.

    A causal query that sees only its own chunk needs no modifier.  All other calls get a modifier, and a window of
    `size` * (`lookback` + 1) - 1 keys before the query.
    """
    size = window // (lookback + 1)
    if size < 1:
        raise ValueError(f"chunk_lookback must be less than window_size[0] + 1 = {window}, got {lookback}")
    if lookback == 0 and causal:
        return {"attention_chunk": size, "window_size": (-1, -1)}
    left = size * (lookback + 1) - 1
    return {"score_mod": chunks_back, "score_mod_args": (size, lookback), "window_size": (left, -1)}
