"""RMS norm and rotary embedding of heads, and the write that follows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .cache import write_kv
from .scales import INT4, Scale, narrow, per_kv_head


def write_qkv(
    qkv: Tensor | Sequence[Tensor],
    k_cache: Tensor,
    v_cache: Tensor | None,
    slot_mapping: Tensor,
    *,
    kv_layout: str = "NHD",
    positions: Tensor | None = None,
    cos_sin: Tensor | None = None,
    interleaved: bool = False,
    mrope_sections: Sequence[int] | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    norm_offset: float = 0.0,
    k_scale: Scale = None,
    v_scale: Scale = None,
    q_out: Tensor | None = None,
    q_scale: Scale = None,
    check: bool | None = None,
) -> Tensor:
    """What `paged_attn.write_qkv` must leave in the caches and return; its docstring explains the arguments.

    `check` cannot change a result and is ignored.  Norm and rotation are float64, and nothing is rounded between them.
    Without `q_out` the queries are float64 and not rounded, and `q_scale` divides them without a clamp.
    Returns: queries [tokens, heads, dims of q].
    """
    q, k, v = _parts(qkv, k_cache, kv_layout)
    q, k = q.double(), k.double()
    if q_norm is not None:
        q = norm(q, q_norm, eps, norm_offset)
    if v_cache is None:  # (q_rope, latent, k_rope)
        latent, k = k, v.double()
        latent = latent if k_norm is None else norm(latent, k_norm, eps, norm_offset)
    elif k_norm is not None:
        k = norm(k, k_norm, eps, norm_offset)
    if cos_sin is not None:
        angles = rows_of(cos_sin, positions, mrope_sections)
        q, k = rotate(q, angles, interleaved), rotate(k, angles, interleaved)
    keys, values = (torch.cat([latent, k], dim=-1), None) if v_cache is None else (k, v)
    write_kv(keys, values, k_cache, v_cache, slot_mapping, kv_layout=kv_layout, k_scale=k_scale, v_scale=v_scale)
    q = q / per_kv_head(q_scale, k.shape[1], q).repeat_interleave(q.shape[1] // k.shape[1])[:, None]
    return q if q_out is None else q_out.copy_(narrow(q, q_out.dtype))


def _parts(qkv: Tensor | Sequence[Tensor], k_cache: Tensor, kv_layout: str) -> Sequence[Tensor]:
    """Return a tuple of tensors unchanged, or split a packed tensor, which has the heads of q, then of k, then of v."""
    if not isinstance(qkv, Tensor):
        return qkv
    packed = k_cache.dim() == 5
    num_kv_heads = k_cache.shape[1] if packed or kv_layout == "HND" else k_cache.shape[2]
    head_dim = k_cache.shape[2] * k_cache.shape[4] if packed else k_cache.shape[3]
    if k_cache.dtype == INT4:
        head_dim *= 2
    heads = qkv.unflatten(1, (-1, head_dim))
    return heads.split([heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)


def norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """x [..., D] divided by its root mean square, times offset + weight [D], in float64 (Zhang & Sennrich 2019)."""
    mean = x.square().mean(dim=-1, keepdim=True)
    return x / torch.sqrt(mean + eps) * (offset + weight.double())


def rows_of(cos_sin: Tensor, positions: Tensor | None, sections: Sequence[int] | None) -> Tensor:
    """Cosines and sines of each token, [tokens, 2, rotary_dim / 2].  Positions outside the table take its nearest row.

    Without positions, row t belongs to token t.  With sections, positions are [3, tokens], one row of
    them for each section, and pair i of dims takes the position of its section.
    """
    table = cos_sin.double().unflatten(1, (2, -1))
    if positions is None:
        return table
    rows = positions.long().clamp(0, len(table) - 1)
    if sections is None:
        return table[rows]
    section = torch.arange(3, device=rows.device).repeat_interleave(torch.tensor(sections, device=rows.device))
    pair = torch.arange(len(section), device=rows.device)
    return table[rows.T[:, section], :, pair].transpose(1, 2)


def rotate(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first rotary_dim dims of x [tokens, heads, D] (Su et al. 2021).  interleaved: as in write_qkv."""
    cos, sin = angles[:, None, 0], angles[:, None, 1]
    pairs = cos.shape[-1]
    turned, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    a, b = turned.unflatten(-1, (pairs, 2)).unbind(-1) if interleaved else turned.chunk(2, dim=-1)
    made = [a * cos - b * sin, b * cos + a * sin]
    turned = torch.stack(made, dim=-1).flatten(-2) if interleaved else torch.cat(made, dim=-1)
    return torch.cat([turned, rest], dim=-1)
