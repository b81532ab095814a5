"""Softmax, and attention over several sets of keys as attention over all."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_states(outs: Tensor, lses: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """What `paged_attn.merge_states` must return, in float64.

    outs [n, tokens, heads, head_dim] and lses [n, tokens, heads] are attention over n sets of keys, the result is
    attention over all.  A part with lse = -inf holds no key, whatever its out says.  One with inf has a sink of
    infinity, which takes all weight and has value 0.  sinks [heads] are one more part, of value 0, counted once.
    """
    outs, lses = outs.double(), lses.double()
    if sinks is not None:
        outs = torch.cat([outs, torch.zeros_like(outs[:1])])
        lses = torch.cat([lses, sinks.double().expand_as(lses[:1])])
    weights, lse = softmax(lses, 0)
    weights = weights[..., None]
    return torch.where(weights == 0, 0.0, weights * outs).sum(0), lse


def softmax(scores: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """(weights, logarithm of the denominator) along an axis.

    Weights are divided by their sum: beside a score of 1e30 the logarithm of a sum of two is lost.  One of infinity has
    all the weight there is, and shows it in the logarithm alone: itself, and where all are minus infinity, none weighs.
    """
    top = scores.amax(dim, keepdim=True)
    weights = torch.where(scores.isinf(), 0.0, torch.exp(scores - top.masked_fill(top == -torch.inf, 0.0)))
    total = weights.sum(dim, keepdim=True)
    lse = torch.where(top.isinf(), top, top + total.log())
    return weights / total.masked_fill(total == 0, 1.0), lse.squeeze(dim)
