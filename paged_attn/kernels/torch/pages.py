"""Copies of whole pages, and rows gathered from pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...records.formats import INT4, in_words
from .cache import HND, NHD, PACKED_KEYS, PACKED_VALUES, Layout, times
from .call import quiet

LAYOUTS = {"NHD": NHD, "HND": HND, "HDN": PACKED_VALUES}


def move_pages(sources: Sequence[Tensor], targets: Sequence[Tensor], src: Tensor, dst: Tensor, page_axis: int) -> None:
    """Copy page src[i] of each source to page dst[i] of its target; a negative id skips the pair."""
    with quiet(src.device):
        live = (src >= 0) & (dst >= 0)
        given, into = src[live].long(), dst[live].long()
        for source, target in zip(sources, targets):
            pages = in_words(source).index_select(page_axis, given.to(source.device))
            in_words(target).index_copy_(page_axis, into.to(target.device), pages.to(target.device))


def gather_pages(
    cache: Tensor, page_table: Tensor, page_starts: Tensor | None, seq_lens: Tensor, out: Tensor, kv_layout: str,
    scale: Any,
) -> None:  # fmt: skip
    """Write the rows of all sequences to out; rows after them, and rows of a page with a negative id, are zeros."""
    layout = PACKED_KEYS if cache.ndim == 5 else LAYOUTS[kv_layout]
    rows = in_words(cache).permute(layout.slots)
    if not len(rows):  # the cache has no pages, so no row has one
        in_words(out).zero_()
        return
    with quiet(out.device):
        lengths = seq_lens.long().clamp(min=0)
        seq = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)[: len(out)]
        pos = torch.arange(len(seq), device=seq.device) - (lengths.cumsum(0) - lengths)[seq]
        column, slot = pos // rows.shape[1], pos % rows.shape[1]
        page = page_table[seq, column] if page_starts is None else page_table[page_starts[seq] + column]
        there = page >= 0
        place = torch.where(there, page, 0).long(), slot
        found = rows[place].flatten(2).view(cache.dtype)
        if scale is not None or out.dtype != cache.dtype:
            int4 = cache.dtype == INT4
            numbers = torch.stack((found & 15, found >> 4), -1).flatten(-2) if int4 else found
            found = times(numbers.float(), _scale(scale, place, layout), int4)
        found = found.to(out.dtype)
        in_words(out)[: len(seq)] = in_words(found).masked_fill_(~there[:, None, None], 0)
        in_words(out)[len(seq) :] = 0


def _scale(scale: Any, place: tuple[Tensor, Tensor], layout: Layout) -> Any:
    """None, a number, or float32 [N, kv_heads, 1] or [kv_heads, 1], for rows [N, kv_heads, head_dim]."""
    if not isinstance(scale, Tensor):
        return scale
    if scale.ndim == 3:
        return (scale if layout is NHD else scale.transpose(1, 2))[place].float()[..., None]
    return scale.float().flatten()[:, None]
