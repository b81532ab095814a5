"""The state of attention over a set of keys, and joining the states of disjoint sets.

Shapes: R rows, N keys, D dims of values; any axes come first.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

LOWEST = torch.finfo(torch.float32).min


class State(NamedTuple):
    """Softmax over the keys seen so far, float32, to base e."""

    acc: Tensor  # [..., R, D]
    max: Tensor  # [..., R, 1]
    sum: Tensor  # [..., R, 1]


def start(acc: Tensor, sinks: Tensor | None) -> State:
    """State of no key, or of the sinks [..., R, 1] alone; acc: zeros [..., R, D]."""
    if sinks is None:
        top = acc.new_full((*acc.shape[:-1], 1), float("-inf"))
        return State(acc, top, torch.zeros_like(top))
    # an infinite sink becomes the largest finite maximum with an infinite sum
    top = sinks.clamp(max=-LOWEST).expand(*acc.shape[:-1], 1).clone()
    total = torch.where(sinks == float("inf"), float("inf"), (sinks > float("-inf")).float())
    return State(acc, top, total.expand_as(top).clone())


def update(state: State, scores: Tensor, values: Tensor, scale: Tensor | float = 1.0, infinite: bool = False) -> State:
    """Fold scores [..., R, N], which are overwritten, and values [..., N, D] times a scale into a state.

    infinite: scores may be plus infinity.  A key with such a score takes the weight of all others, but its value is not
    added: the row's result is 0, and its log-sum-exp infinite.
    """
    top = torch.maximum(state.max, scores.amax(-1, keepdim=True))
    base = top.clamp(min=LOWEST)  # -inf - -inf is NaN
    past = (state.max - base).exp_()
    if infinite:
        past = torch.where(state.max == top, 1.0, past)
        scores = torch.where(scores == float("inf"), float("-inf"), scores).sub_(base.clamp(max=-LOWEST))
    else:
        scores = scores.sub_(base)
    weights = scores.exp_()
    total = state.sum * past + weights.sum(-1, keepdim=True)
    added = weights @ values
    if not isinstance(scale, float) or scale != 1.0:
        added = added * scale
    return State((state.acc * past).add_(added), top, total)


def finish(state: State) -> tuple[Tensor, Tensor]:
    """(results [..., R, D], log-sum-exps [..., R]); 0 and minus infinity where no key was seen."""
    total = state.sum
    lse = torch.where(state.max == float("inf"), state.max, state.max + total.log())
    return state.acc / total.masked_fill(total == 0, 1.0), lse.squeeze(-1)


def join(outs: Tensor, lses: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Join results [n, ..., D] over disjoint sets of keys by log-sum-exps [n, ...]: (result, log-sum-exp), float32.

    sinks: log-sum-exps of one more part, whose result is 0.  They are broadcast to the last axes of lses.
    """
    top = lses.amax(0) if sinks is None else torch.maximum(lses.amax(0), sinks.float())
    base = top.clamp(min=LOWEST, max=-LOWEST)
    weights = torch.where(lses.isinf(), 0.0, (lses - base).exp())
    total = functools.reduce(torch.add, weights)  # in the order of parts, whatever their shape
    if sinks is not None:
        total = total + torch.where(sinks.isinf(), 0.0, (sinks.float() - base).exp())
    lse = torch.where(top.isinf(), top, base + total.log())
    weights = (weights / total.masked_fill(total == 0, 1.0))[..., None]
    return functools.reduce(torch.add, torch.where(weights == 0, 0.0, weights * outs)), lse
