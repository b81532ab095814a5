"""Rotary embedding of the first dims of each head, from tables of cosines and sines."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate x [tokens, heads, head_dim] by rows `positions` [tokens] of tables [max_len, rotary_dim / 2], in float32.

    interleaved: dims 0 and 1, 2 and 3, ... are pairs (GPT-J).  Otherwise 0 and rotary_dim / 2, ... (GPT-NeoX).
    Positions outside the tables, as padding has, take the nearest row.  Source: Su et al. 2021.
    """
    at = positions.long().clamp(0, cos.shape[0] - 1)
    c, s = cos[at].float()[:, None], sin[at].float()[:, None]
    dims = 2 * cos.shape[1]
    turned = x[..., :dims].float()
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    pair = (a * c - b * s, a * s + b * c)
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((turned.to(x.dtype), x[..., dims:]), dim=-1)


def check_tables(cos: Tensor | None, sin: Tensor | None, head_dim: int) -> None:
    """Check rotary tables: both or neither given, equal shapes, and no more dims than a head has."""
    if cos is None and sin is None:
        return
    if cos is None or sin is None:
        raise ValueError("rotary_cos and rotary_sin must be given together")
    if cos.ndim != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > head_dim:
        wanted = f"both [max_len, rotary_dim / 2] with rotary_dim <= head_dim = {head_dim}"
        raise ValueError(f"rotary_cos and rotary_sin must be {wanted}, got {list(cos.shape)} and {list(sin.shape)}")
