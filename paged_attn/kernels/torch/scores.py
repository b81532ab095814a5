"""Modifiers of scores before the softmax: softcap, ALiBi, query-query bias, a user's function, in this order.

Shapes: scores are [B, H, T, N] float32, places and positions of queries [B, T], those of keys [B, N].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...launching.platform import under_triton
from .call import Call, Seq


def modifies(call: Call) -> bool:
    """Whether anything besides a scale and a mask changes scores."""
    given = call.given
    return call.cap is not None or given.alibi_slopes is not None or biased(call)


def biased(call: Call) -> bool:
    """Whether a modifier may make scores infinite."""
    return call.given.qq_bias is not None or call.options.score_mod is not None


def modify(
    call: Call, scores: Tensor, group: Sequence[Seq], query: Tensor, key: Tensor, pos: Tensor, key_pos: Tensor
) -> Tensor:
    """Scores with all modifiers of the call; may overwrite `scores`.

    query, key: places of queries and keys.  pos, key_pos: their positions.
    """
    given = call.given
    if call.cap is not None:
        scores = scores.div_(call.cap).tanh_().mul_(call.cap)
    if given.alibi_slopes is not None:
        distance = (key_pos[:, None, None, :] - pos[:, None, :, None]).float()
        distance = -distance.abs() if call.options.alibi_symmetric else distance
        slopes = given.alibi_slopes[[seq.number for seq in group] if given.alibi_slopes.ndim == 2 else None]
        scores = scores.addcmul_(slopes[:, :, None, None], distance)
    if given.qq_bias is not None:
        scores = scores.add_(bias_of(given.qq_bias, group, query, key))
    if call.options.score_mod is not None:
        last = torch.tensor([max(seq.seq_len - 1, 0) for seq in group], device=scores.device)[:, None]
        scores = _call(call, scores, *(x.clamp(min=0).minimum(last) for x in (pos, key_pos)))
    return scores


def bias_of(qq_bias: Tensor, group: Sequence[Seq], query: Tensor, key: Tensor) -> Tensor:
    """The query-query bias, float32 [B, 1, T, N]: 0 except for pairs of the call's own tokens."""
    context = torch.tensor([seq.context_len for seq in group], device=key.device)[:, None]
    n = qq_bias.shape[-1]
    if n == 0:
        return torch.zeros((1, 1, 1, 1), dtype=torch.float32, device=key.device)
    row, column = (query - context)[:, :, None], (key - context)[:, None, :]
    inside = (row >= 0) & (row < n) & (column >= 0) & (column < n)
    at: tuple[Tensor, ...] = (row.clamp(0, n - 1), column.clamp(0, n - 1))
    if qq_bias.ndim == 3:
        at = (torch.tensor([seq.number for seq in group], device=key.device)[:, None, None], *at)
    return torch.where(inside, qq_bias[at].float(), 0.0)[:, None]


def _call(call: Call, scores: Tensor, pos: Tensor, key_pos: Tensor) -> Tensor:
    """Scores as the user's function returns them, sequence by sequence."""
    function, args = call.options.score_mod, call.given.score_mod_args or ()
    return torch.stack([applied(function, *x, args) for x in zip(scores, pos, key_pos)])


def applied(function: Any, scores: Tensor, pos: Tensor, key_pos: Tensor, args: Sequence[Any]) -> Tensor:
    """Scores [H, T, N] as the function returns them, for queries at positions [T] and keys at positions [N]."""
    if under_triton(function):
        from .score_mod import applied_by_triton  # imports Triton, as the function's own module has done

        return applied_by_triton(function, scores, pos, key_pos, args)
    head = torch.arange(len(scores), device=scores.device)[:, None, None]
    new: Tensor = function(scores, pos[:, None], key_pos[None], head, *args)
    return new.to(scores.dtype).expand_as(scores)
