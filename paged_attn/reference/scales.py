"""Scales of heads and of tokens, and rounding."""

from __future__ import annotations

import torch
from torch import Tensor

Scale = float | Tensor | None


def per_kv_head(scale: Scale, num_kv_heads: int, like: Tensor) -> Tensor:
    """A scale, None, a float, [], [1], [kv_heads] or [n, kv_heads] of equal rows, as float64 [kv_heads]."""
    value = torch.as_tensor(1.0 if scale is None else scale, dtype=torch.float64, device=like.device)
    if value.ndim == 2:
        value = value[0] if len(value) else value.new_ones(1)  # of no sequence it scales nothing
    return value.expand(num_kv_heads)


def per_token(q_scale: Scale, num_kv_heads: int, q: Tensor) -> Tensor:
    """float64 [tokens, kv_heads] of a scale of fp8 queries as others are, or of [tokens], [tokens, 1 or kv_heads].

    [kv_heads] belongs to fp8 queries and [tokens] to others.
    """
    tokens = len(q)
    if isinstance(q_scale, Tensor):
        if q_scale.ndim == 1 and q.dtype.itemsize > 1:
            q_scale = q_scale[:, None]
        if q_scale.ndim == 2 and len(q_scale) == tokens:
            return q_scale.double().expand(tokens, num_kv_heads)
    return per_kv_head(q_scale, num_kv_heads, q).expand(tokens, num_kv_heads)


def narrow(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast to the nearest number of dtype; fp8 types saturate."""
    if dtype.itemsize == 1:
        limit = torch.finfo(dtype).max
        values = values.clamp(-limit, limit)
    return values.to(dtype)
