"""Copies of whole pages, and rows gathered from pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .cache import pages_of_seq
from .scales import Scale


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
    """What `paged_attn.move_pages` must leave in the targets: all pages are read before any is written."""
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
    by_slot = cache.permute({"NHD": (0, 1, 2, 3), "HND": (0, 2, 1, 3), "HDN": (0, 3, 1, 2)}[kv_layout])
    changes = scale is not None or dtype not in (None, cache.dtype)
    factor = torch.as_tensor(1.0 if scale is None else scale, dtype=torch.float64, device=cache.device)
    if factor.dim() == 3:
        factor = factor if heads == 2 else factor.transpose(1, 2)
    else:
        factor = factor.flatten().expand(by_slot.shape[:3])
    rows = []
    for seq, length in enumerate(seq_lens.tolist()):
        ids = pages_of_seq(page_table, seq).tolist()
        for pos in range(length):
            page, slot = ids[pos // by_slot.shape[1]], pos % by_slot.shape[1]
            row = by_slot[max(page, 0), slot]
            if changes:
                row = row.double() * factor[max(page, 0), slot][:, None]
            rows.append(row if page >= 0 else torch.zeros_like(row))
    count = len(rows) if tokens is None else tokens
    shape = (count, by_slot.shape[2], by_slot.shape[3])
    found = torch.zeros(shape, dtype=dtype or cache.dtype, device=cache.device)
    for i, row in enumerate(rows[:count]):
        found[i] = row.to(found.dtype)
    return found
