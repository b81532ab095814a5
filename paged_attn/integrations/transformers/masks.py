"""What the host's masks say to plain `generate`: the first key of each sequence and the one past its last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

KNOWN = ("causal_mask_function", "sliding_window_overlay.<locals>.inner_mask")


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
    """None where every sequence sees all kv_length keys; else [B, 1, 1, 2] int32: first key, end of keys.

    The host passes 4-D masks on as they are.  Padding is looked at on the host, once for all layers.
    """
    if mask_function is not None:
        _check(mask_function)
    end = q_offset + q_length - kv_offset  # a static cache is longer than what it holds
    ends_early = isinstance(end, Tensor) or end < kv_length
    padded = attention_mask is not None and not bool(attention_mask.all())
    if not padded and not ends_early:
        return None
    device = attention_mask.device if attention_mask is not None else device
    bounds = torch.zeros(batch_size, 1, 1, 2, dtype=torch.int32, device=device)
    bounds[..., 1] = end.clamp(max=kv_length) if isinstance(end, Tensor) else min(end, kv_length)
    if padded:
        assert attention_mask is not None
        seen = attention_mask.bool()
        # A static cache's mask may go on behind the tokens of so far.
        known = seen[:, : end + kv_offset] if not isinstance(end, Tensor) else seen
        if bool((known[:, :-1] & ~known[:, 1:]).any()):
            raise ValueError("paged_attn takes padding on the left only: attention_mask has a 0 behind a 1")
        start = (~known).sum(1, dtype=torch.int32) - kv_offset
        bounds[..., 0] = start.clamp(min=0)[:, None, None]
    return bounds


def _check(function: Callable[..., Any]) -> None:
    """Refuse what is not causal, with or without a sliding window."""
    name = getattr(function, "__qualname__", repr(function))
    if name == "and_masks.<locals>.and_mask":
        for part in function.__closure__[0].cell_contents:  # type: ignore[index]
            _check(part)
    elif name not in KNOWN:
        raise ValueError(f"paged_attn serves causal and sliding window masks, not transformers' {name}")
