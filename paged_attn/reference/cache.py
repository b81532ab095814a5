"""Reads of keys and values from a paged cache, and writes into it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .scales import INT4, Scale, by_slot, narrow, per_kv_head, quantised, scale_and_zero


def write_kv(
    k: Tensor,
    v: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor | None,
    slot_mapping: Tensor,
    *,
    kv_layout: str = "NHD",
    k_scale: Scale = None,
    v_scale: Scale = None,
) -> None:
    """What `paged_attn.write_kv` must leave in the caches.

    Token t of k and v goes to slot_mapping[t] = page * page_size + slot, or nowhere if slot_mapping[t] is negative.  If
    v is None, values are the first dims of keys, and writing the keys writes them.
    Scales by token, and zero points of int4, are computed and written, too.  Quotients are those of float32.
    """
    page_size = k_cache.shape[3 if k_cache.dim() == 5 else 2 if kv_layout == "HND" else 1]
    keep = slot_mapping >= 0
    page, slot = slot_mapping[keep].long() // page_size, slot_mapping[keep].long() % page_size
    num_kv_heads = k.shape[1]
    for new, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        if new is None or cache is None:
            continue
        if isinstance(scale, Tensor) and by_slot(scale):
            rows = scale if kv_layout == "NHD" and k_cache.dim() == 4 else scale.transpose(1, 2)
            stored, rows[page, slot] = quantised(new[keep], scale, cache.dtype)
        else:
            by = per_kv_head(scale, num_kv_heads, k)[:, None]
            stored = new[keep].to(cache.dtype) if scale is None else narrow(new[keep].float() / by.float(), cache.dtype)
        if cache.dim() == 5:  # [tokens, G, D]
            cache[page, :, :, slot] = stored.unflatten(-1, (cache.shape[2], cache.shape[4]))
        elif k_cache.dim() == 5:
            cache[page, :, :, slot] = stored
        elif kv_layout == "HND":
            cache[page, :, slot] = stored
        else:
            cache[page, slot] = stored


def pages_of_seq(page_table: Tensor | Sequence[Tensor], seq: int) -> Tensor:
    """Page ids of one sequence, from a dense page table or from (indptr, indices)."""
    if isinstance(page_table, Tensor):
        return page_table[seq]
    indptr, indices = page_table
    return indices[int(indptr[seq]) : int(indptr[seq + 1])]


def own_number(pos: Tensor, shard: tuple[int, int, int] | None) -> Tensor:
    """Number of the rank's keys before each of its own keys, [N].  pos: their positions in the whole sequence."""
    if shard is None:
        return pos
    _, world, stripe = shard
    return pos // (stripe * world) * stripe + pos % stripe


def scaled(
    stored: Tensor, scale: Scale, k_cache: Tensor, pages: Tensor, pos: Tensor, kv_layout: str
) -> Tensor:  # fmt: skip
    """Real numbers of `stored` [N, G, D], at positions pos [N] of one sequence.  Only scales by slot are applied."""
    if not isinstance(scale, Tensor) or not by_slot(scale):
        return stored
    rows = scale if kv_layout == "NHD" and k_cache.dim() == 4 else scale.transpose(1, 2)
    found = rows[pages[pos // rows.shape[1]].long(), pos % rows.shape[1]]
    if k_cache.dtype != INT4:
        return stored * found.double()[..., None]
    scales, zeros = scale_and_zero(found)
    return (stored - zeros[..., None]) * scales[..., None]


def gather(k_cache: Tensor, v_cache: Tensor, pages: Tensor, pos: Tensor, kv_layout: str) -> tuple[Tensor, Tensor]:
    """Keys and values [N, G, D] at positions [N] of one sequence, as stored, in float64.  No other slot is read."""
    page_size = v_cache.shape[3] if k_cache.dim() == 5 else k_cache.shape[2 if kv_layout == "HND" else 1]
    page, slot = pages[pos // page_size].long(), pos % page_size
    if k_cache.dim() == 5:  # K [pages, G, D // x, page_size, x], V [pages, G, D, page_size]
        return k_cache[page, :, :, slot].flatten(2).double(), v_cache[page, :, :, slot].double()
    if kv_layout == "HND":  # [pages, G, page_size, D]
        return whole(k_cache[page, :, slot]), whole(v_cache[page, :, slot])
    return whole(k_cache[page, slot]), whole(v_cache[page, slot])  # NHD: [pages, page_size, G, D]


def whole(stored: Tensor) -> Tensor:
    """Stored elements as float64.  A byte of int4 gives two numbers."""
    if stored.dtype != INT4:
        return stored.double()
    return torch.stack([stored & 15, stored >> 4], -1).flatten(-2).double()
