"""The reference on one sequence, for tests of the reference: keys in pages, and torch's attention to compare with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from paged_attn import reference

F64 = torch.float64


def paged(k: Tensor, v: Tensor, page_size: int = 4, layout: str = "NHD", x: int = 4) -> dict[str, Any]:
    """Return the cache arguments of one sequence: k, v [N, kv_heads, head_dim] in pages in reverse order, else NaN."""
    num_pages = -(-len(k) // page_size)
    caches = []
    for keys in (k, v):
        cache = torch.full((num_pages + 1, page_size, *k.shape[1:]), torch.nan, dtype=k.dtype)
        for pos, key in enumerate(keys):
            cache[num_pages - pos // page_size, pos % page_size] = key
        caches.append(cache)
    if layout == "HND":
        caches = [cache.transpose(1, 2).contiguous() for cache in caches]
    if layout == "x":
        caches = [caches[0].unflatten(-1, (-1, x)).permute(0, 2, 3, 1, 4), caches[1].permute(0, 2, 3, 1)]
    table = torch.arange(num_pages, 0, -1, dtype=torch.int32)[None]
    return {
        "k_cache": caches[0],
        "v_cache": caches[1],
        "page_table": table,
        "kv_layout": "HND" if layout == "HND" else "NHD",
    }


def attend(q: Tensor, k: Tensor, v: Tensor, layout: str = "NHD", page_size: int = 4, **options: Any) -> Any:
    """Call the reference on one sequence: queries [T, heads, head_dim] at the end of keys [N, kv_heads, head_dim]."""
    lens = {"seq_lens": torch.tensor([len(k)]), "cu_seqlens_q": torch.tensor([0, len(q)])}
    return reference.paged_attention(q, **paged(k, v, page_size, layout), **lens, **options)


def sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float | None = None) -> Tensor:
    """Return torch's attention of [T, H, D] over [N, G, D] with bias [H, T, N] added to the scores."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=bias[None], scale=scale)[0].transpose(0, 1)


def random_qkv(queries: int, keys: int, heads: int = 4, kv_heads: int = 2, head_dim: int = 8) -> tuple[Tensor, ...]:
    rng = torch.Generator().manual_seed(queries * 100 + keys)
    shapes = (queries, heads, head_dim), (keys, kv_heads, head_dim), (keys, kv_heads, head_dim)
    return tuple(torch.randn(shape, dtype=F64, generator=rng) for shape in shapes)


def distances(queries: int, keys: int) -> Tensor:
    """Return key position - query position, [T, N]; queries are at the last positions."""
    return torch.arange(keys)[None, :] - torch.arange(keys - queries, keys)[:, None]


def hidden(mask: Tensor) -> Tensor:
    """Return a bias [..., T, N] that hides keys where mask is True."""
    return torch.zeros(mask.shape, dtype=F64).masked_fill(mask, -torch.inf)
