"""Reads of keys and values from a paged cache, and writes into it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .scales import Scale, narrow, per_kv_head


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
    """
    page_size = k_cache.shape[3 if k_cache.dim() == 5 else 2 if kv_layout == "HND" else 1]
    keep = slot_mapping >= 0
    page, slot = slot_mapping[keep].long() // page_size, slot_mapping[keep].long() % page_size
    num_kv_heads = k.shape[1]
    for new, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        if new is None or cache is None:
            continue
        stored = narrow(new[keep].double() / per_kv_head(scale, num_kv_heads, k)[:, None], cache.dtype)
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
    """For positions [N] of a rank's own keys: how many of the rank's keys come before each."""
    if shard is None:
        return pos
    _, world, stripe = shard
    return pos // (stripe * world) * stripe + pos % stripe


def gather(k_cache: Tensor, v_cache: Tensor, pages: Tensor, pos: Tensor, kv_layout: str) -> tuple[Tensor, Tensor]:
    """Keys and values [N, G, D] at positions [N] of one sequence, as float64; no other slot is read."""
    page_size = v_cache.shape[3] if k_cache.dim() == 5 else k_cache.shape[2 if kv_layout == "HND" else 1]
    page, slot = pages[pos // page_size].long(), pos % page_size
    if k_cache.dim() == 5:  # K [pages, G, D // x, page_size, x], V [pages, G, D, page_size]
        return k_cache[page, :, :, slot].flatten(2).double(), v_cache[page, :, :, slot].double()
    if kv_layout == "HND":  # [pages, G, page_size, D]
        return k_cache[page, :, slot].double(), v_cache[page, :, slot].double()
    return k_cache[page, slot].double(), v_cache[page, slot].double()  # NHD: [pages, page_size, G, D]
