"""Scales of heads and of tokens, and rounding."""

from __future__ import annotations

import torch
from torch import Tensor

Scale = float | Tensor | None


def per_kv_head(scale: Scale, num_kv_heads: int, like: Tensor) -> Tensor:
    """A scale, None, a float, [], [1], [kv_heads] or [1, kv_heads], as float64 [kv_heads]."""
    return per_seq(scale, 1, num_kv_heads, like)[0]


def per_seq(scale: Scale, seqs: int, num_kv_heads: int, like: Tensor) -> Tensor:
    """A scale as `per_kv_head` takes it, or of [seqs, kv_heads], as float64 [seqs, kv_heads]."""
    value = torch.as_tensor(1.0 if scale is None else scale, dtype=torch.float64, device=like.device)
    return value.expand(seqs, num_kv_heads)


def per_token(q_scale: Scale, starts: list[int], num_kv_heads: int, q: Tensor) -> Tensor:
    """float64 [tokens, kv_heads] of a scale of fp8 queries as others are, or of [tokens], [tokens, 1 or kv_heads].

    [kv_heads] belongs to fp8 queries and [tokens] to others; rows are of tokens where there are as many sequences.
    Queries of sequence s are starts[s] ... starts[s + 1] - 1; padding has a scale of 1.
    """
    tokens = len(q)
    if isinstance(q_scale, Tensor):
        if q_scale.ndim == 1 and q.dtype.itemsize > 1:
            q_scale = q_scale[:, None]
        if q_scale.ndim == 2 and len(q_scale) == tokens:
            return q_scale.double().expand(tokens, num_kv_heads)
    found = torch.ones(tokens, num_kv_heads, dtype=torch.float64, device=q.device)
    for start, end, scale in zip(starts, starts[1:], per_seq(q_scale, len(starts) - 1, num_kv_heads, q)):
        found[start:end] = scale
    return found


def narrow(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast to the nearest number of dtype; fp8 types saturate."""
    if dtype.itemsize == 1:
        limit = torch.finfo(dtype).max
        values = values.clamp(-limit, limit)
    return values.to(dtype)
