"""Reads of keys and values from a paged cache, and writes into it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .scales import Scale, by_slot, narrow, per_kv_head, quantised


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
    Scales by token are computed and written, too.  Quotients are those of float32.
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
    """For positions [N] of a rank's own keys: how many of the rank's keys come before each."""
    if shard is None:
        return pos
    _, world, stripe = shard
    return pos // (stripe * world) * stripe + pos % stripe


def slot_scales(scale: Tensor, k_cache: Tensor, pages: Tensor, pos: Tensor, kv_layout: str) -> Tensor:
    """Scales [N, G] of some positions [N] of one sequence."""
    rows = scale if kv_layout == "NHD" and k_cache.dim() == 4 else scale.transpose(1, 2)
    return rows[pages[pos // rows.shape[1]].long(), pos % rows.shape[1]].double()


def gather(k_cache: Tensor, v_cache: Tensor, pages: Tensor, pos: Tensor, kv_layout: str) -> tuple[Tensor, Tensor]:
    """Keys and values [N, G, D] at positions [N] of one sequence, as float64; no other slot is read."""
    page_size = v_cache.shape[3] if k_cache.dim() == 5 else k_cache.shape[2 if kv_layout == "HND" else 1]
    page, slot = pages[pos // page_size].long(), pos % page_size
    if k_cache.dim() == 5:  # K [pages, G, D // x, page_size, x], V [pages, G, D, page_size]
        return k_cache[page, :, :, slot].flatten(2).double(), v_cache[page, :, :, slot].double()
    if kv_layout == "HND":  # [pages, G, page_size, D]
        return k_cache[page, :, slot].double(), v_cache[page, :, slot].double()
    return k_cache[page, slot].double(), v_cache[page, slot].double()  # NHD: [pages, page_size, G, D]
