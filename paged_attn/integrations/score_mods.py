"""Score modifiers of models that hosts serve.

- `alibi_sqrt`: ALiBi by the square root of the distance (Step).
- `temperature`: a temperature by position (Grok).  It applies after the softcap, so scaled queries cannot express it.
- `chunks_back`: a query sees its own chunk of positions and some chunks before it (vLLM's chunk_lookback).
"""

from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl


@triton.jit
def alibi_sqrt(score, query_pos, key_pos, head, slopes):  # type: ignore[no-untyped-def]
    """Add -slope * sqrt(query_pos - key_pos) to a float32 score.  Visible keys after the query get no bias."""
    behind = tl.maximum(query_pos - key_pos, 0).to(tl.float32)
    return score - tl.load(slopes + head) * tl.sqrt(behind)


@triton.jit
def temperature(score, query_pos, key_pos, head, length, per_log):  # type: ignore[no-untyped-def]
    """Multiply the score of a query at a position > length by log2(query_pos) * per_log."""
    grown = tl.log2(tl.maximum(query_pos, 1).to(tl.float32)) * per_log
    return score * tl.where(query_pos > length, grown, 1.0)


def modifier(length: int) -> dict[str, Any]:
    """Grok's temperature as keywords of paged_attention.  length: last query position whose scores stay as they are."""
    return {"score_mod": temperature, "score_mod_args": (length, 1 / math.log2(length))}


@triton.jit
def chunks_back(score, query_pos, key_pos, head, size, lookback):  # type: ignore[no-untyped-def]
    """Set a score to minus infinity if the key's chunk lies more than `lookback` chunks before the query's.

    Chunks have `size` positions and count from position 0.
    """
    return tl.where(query_pos // size - key_pos // size <= lookback, score, float("-inf"))


def look_back(lookback: int, window: int, causal: bool) -> dict[str, Any]:
    """Arguments of flash_attn/common_call.attend: `lookback` + 1 chunks in place of a window of `window` keys.

    All chunks have `size` positions.  A query sees its own chunk, `lookback` chunks before it and, without causality,
    all later keys.  If `lookback` is 0, a causal call needs no score_mod.  Any other call gets one, and a window of
    `size` * (`lookback` + 1) - 1 keys before the query.
    """
    size = window // (lookback + 1)
    if size < 1:
        raise ValueError(f"chunk_lookback must be less than window_size[0] + 1 = {window}, got {lookback}")
    if lookback == 0 and causal:
        return {"attention_chunk": size, "window_size": (-1, -1)}
    left = size * (lookback + 1) - 1
    return {"score_mod": chunks_back, "score_mod_args": (size, lookback), "window_size": (left, -1)}
