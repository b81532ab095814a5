"""A call of write_qkv: RMS norm and rotary embedding in float32, then the write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .cache import write
from .call import narrow, per_head, quiet


def write_qkv(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor | None, slot_mapping: Tensor,
    positions: Tensor | None, cos_sin: Tensor | None, q_norm: Tensor | None, k_norm: Tensor | None, k_scale: Any,
    v_scale: Any, q_scale: Any, q_out: Tensor, kv_layout: str, interleaved: bool,
    mrope_sections: Sequence[int] | None, eps: float, norm_offset: float, part: str | None,
) -> None:  # fmt: skip
    """Write queries of all tokens to q_out, and keys and values of tokens whose slot is not negative to the caches.

    part = "keys": no values are written.  v_cache = None: k_cache is a latent cache, v the latent, and k the rest.
    """
    with quiet(q.device):
        queries = _normed(q, q_norm, eps, norm_offset)
        normed = _normed(v if v_cache is None else k, k_norm, eps, norm_offset)
        keys = k.float() if v_cache is None else normed  # k_norm applies to the latent, which is v
        if cos_sin is not None:
            cos, sin = _angles(cos_sin, positions, mrope_sections)
            queries, keys = _rotated(queries, cos, sin, interleaved), _rotated(keys, cos, sin, interleaved)
        if v_cache is None:
            whole = torch.cat([normed, keys], dim=-1)
            write(whole, None, k_cache, None, slot_mapping, k_scale, None, kv_layout, "keys")
        else:
            write(keys, v, k_cache, v_cache, slot_mapping, k_scale, v_scale, kv_layout, part)
        scale = per_head(q_scale, k.shape[1])
        if isinstance(scale, Tensor):
            scale = scale.repeat_interleave(q.shape[1] // k.shape[1])[:, None]
        q_out.copy_(narrow(queries / scale, q_out.dtype))


def _normed(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
    """RMS norm of heads [tokens, heads, D], in float32; weight: [D], or None for no norm."""
    x = x.float()
    if weight is None:
        return x
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * (weight.float() + offset)


def _angles(cos_sin: Tensor, positions: Tensor | None, sections: Sequence[int] | None) -> tuple[Tensor, Tensor]:
    """(cosines, sines) float32 [tokens, 1, pairs]; positions outside the table take its nearest row."""
    rows = cos_sin
    if positions is not None:
        at = positions.long().clamp(0, len(cos_sin) - 1)
        rows = cos_sin[at]  # [tokens, 2 * pairs], or [3, tokens, 2 * pairs]
    cos, sin = rows.float().chunk(2, dim=-1)
    if sections is not None:
        parts = [torch.cat([x[i] for i, x in enumerate(y.split([*sections], dim=-1))], dim=-1) for y in (cos, sin)]
        cos, sin = parts
    return cos[:, None], sin[:, None]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first 2 * pairs dims of float32 heads.

    A pair is dims i and pairs + i, or the neighbours 2 * i and 2 * i + 1 if interleaved.
    """
    dims = 2 * cos.shape[-1]
    turned, rest = x[..., :dims], x[..., dims:]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    pair = (a * cos - b * sin, b * cos + a * sin)
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat([turned, rest], dim=-1)
