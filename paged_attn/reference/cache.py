"""Reads of keys and values from a paged cache, writes into it, and whole pages copied, moved and gathered."""

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
    Scales by token, and zero points of int4, are computed and written, too.  Quotients are computed in float32.
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
    """Apply scales by slot to `stored` [N, G, D], which `gather` read at `pos`.  Other scales are not applied here."""
    if not isinstance(scale, Tensor) or not by_slot(scale):
        return stored
    rows = scale if kv_layout == "NHD" and k_cache.dim() == 4 else scale.transpose(1, 2)
    found = rows[pages[pos // rows.shape[1]].long(), pos % rows.shape[1]]
    if k_cache.dtype != INT4:
        return stored * found.double()[..., None]
    scales, zeros = scale_and_zero(found)
    return (stored - zeros[..., None]) * scales[..., None]


def gather(k_cache: Tensor, v_cache: Tensor, pages: Tensor, pos: Tensor, kv_layout: str) -> tuple[Tensor, Tensor]:
    """Keys and values [N, G, D] at `pos` [N] of a sequence with these pages, as stored, in float64.

    No other slot is read.  pos: positions of keys; with a shard, indices among the rank's own keys (`own_number`).
    """
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


# ---- whole pages ---------------------------------------------------------------------------------


def copy_pages(caches: Tensor | Sequence[Tensor], src: Tensor, dst: Tensor, *, page_axis: int = 0) -> None:
    """What `paged_attn.copy_pages` must leave in the caches."""
    move_pages(caches, caches, src, dst, page_axis=page_axis)


def move_pages(
    sources: Tensor | Sequence[Tensor],
    targets: Tensor | Sequence[Tensor],
    src: Tensor,
    dst: Tensor,
    *,
    page_axis: int = 0,
) -> None:
    """What `paged_attn.move_pages` must leave in the targets.

    All pages of a tensor are read before any is written.  A pair with a negative id is skipped.
    """
    given, into = ([x] if isinstance(x, Tensor) else x for x in (sources, targets))
    pairs = [(a, b) for a, b in zip(src.tolist(), dst.tolist()) if a >= 0 and b >= 0]
    for source, target in zip(given, into):
        pages = [source.select(page_axis, a).clone() for a, _ in pairs]
        for page, (_, b) in zip(pages, pairs):
            target.select(page_axis, b).copy_(page)


def gather_pages(
    cache: Tensor,
    page_table: Tensor | Sequence[Tensor],
    seq_lens: Tensor,
    *,
    kv_layout: str = "NHD",
    tokens: int | None = None,
    dtype: torch.dtype | None = None,
    scale: Scale = None,
) -> Tensor:
    """What `paged_attn.gather_pages` must return."""
    if cache.dim() == 5:  # [pages, G, D // x, page_size, x]
        cache, kv_layout = cache.transpose(2, 3).flatten(3), "HND"
    heads = {"NHD": 2, "HND": 1, "HDN": 1}[kv_layout]
    slots = cache.permute({"NHD": (0, 1, 2, 3), "HND": (0, 2, 1, 3), "HDN": (0, 3, 1, 2)}[kv_layout])
    changes = scale is not None or dtype not in (None, cache.dtype)
    factor = torch.as_tensor(1.0 if scale is None else scale, dtype=torch.float64, device=cache.device)
    if changes and cache.dtype == INT4:
        assert isinstance(scale, Tensor)
        factor, zeros = scale_and_zero(scale if heads == 2 else scale.transpose(1, 2))
        slots = whole(slots) - zeros[..., None]
    elif factor.dim() == 3:
        factor = factor if heads == 2 else factor.transpose(1, 2)
    else:
        factor = factor.flatten().expand(slots.shape[:3])
    rows = []
    for seq, length in enumerate(seq_lens.tolist()):
        ids = pages_of_seq(page_table, seq).tolist()
        for pos in range(length):
            page, slot = ids[pos // slots.shape[1]], pos % slots.shape[1]
            row = slots[max(page, 0), slot]
            if changes:
                row = row.double() * factor[max(page, 0), slot][:, None]
            rows.append(row if page >= 0 else torch.zeros_like(row))
    count = len(rows) if tokens is None else tokens
    shape = (count, slots.shape[2], slots.shape[3])
    found = torch.zeros(shape, dtype=dtype or cache.dtype, device=cache.device)
    for i, row in enumerate(rows[:count]):
        found[i] = row.to(found.dtype)
    return found
