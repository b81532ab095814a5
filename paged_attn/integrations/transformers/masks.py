"""The host's masks in plain `generate`, reduced to first keys, ends of keys and places in chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

CHUNKED = "chunked_overlay.<locals>.inner_mask"
KNOWN = ("causal_mask_function", "sliding_window_overlay.<locals>.inner_mask", CHUNKED)


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    device: Any = None,
    **kwargs: Any,
) -> Tensor | None:
    """Bounds on keys [B, 1, 1, 2] int32: first key, end (exclusive); None if every sequence sees all kv_length keys.

    With chunks that hide keys, [B, 1, 1, 3]: the third number is the first key's offset within its chunk.  Chunks count
    from a sequence's first token, as in the host.  The host passes 4-D masks on as they are.  Padding is read on the
    CPU, once for all layers.
    """
    chunk = None if mask_function is None else _chunk(mask_function)
    end = q_offset + q_length - kv_offset  # a static cache is longer than what it holds
    ends_early = isinstance(end, Tensor) or end < kv_length
    padded = attention_mask is not None and not bool(attention_mask.all())
    one_chunk = chunk is None or (not isinstance(end, Tensor) and end + kv_offset <= chunk)
    if not padded and not ends_early and one_chunk:
        return None
    device = attention_mask.device if attention_mask is not None else device
    bounds = torch.zeros(batch_size, 1, 1, 2 if one_chunk else 3, dtype=torch.int32, device=device)
    bounds[..., 1] = end.clamp(max=kv_length) if isinstance(end, Tensor) else min(end, kv_length)
    if padded:
        assert attention_mask is not None
        seen = attention_mask.bool()
        # A static cache's mask may be longer than the tokens so far.
        known = seen[:, : end + kv_offset] if not isinstance(end, Tensor) else seen
        if bool((known[:, :-1] & ~known[:, 1:]).any()):
            raise ValueError("paged_attn takes padding on the left only: attention_mask has a 0 behind a 1")
        start = (~known).sum(1, dtype=torch.int32) - kv_offset
        bounds[..., 0] = start.clamp(min=0)[:, None, None]
        place = -start
    else:
        place = torch.full((batch_size,), kv_offset, dtype=torch.int32, device=device)
    if chunk is not None and not one_chunk:
        bounds[..., 2] = (place.clamp(min=0) % chunk)[:, None, None]
    return bounds


def _chunk(function: Callable[..., Any]) -> int | None:
    """Positions in a chunk, or None for a mask without chunks; ValueError unless causal, sliding window or chunked."""
    name = getattr(function, "__qualname__", repr(function))
    if name == "and_masks.<locals>.and_mask":
        parts = [_chunk(part) for part in function.__closure__[0].cell_contents]  # type: ignore[index]
        return next((part for part in parts if part is not None), None)
    if name not in KNOWN:
        raise ValueError(f"paged_attn serves causal, sliding window and chunked masks, not transformers' {name}")
    if name != CHUNKED:
        return None
    named = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))  # type: ignore[arg-type]
    return int(named["chunk_size"].cell_contents)
