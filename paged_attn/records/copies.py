"""Whole pages to which a call's keys and values are copied, for launches that read only whole pages.

The pages of a sequence lie side by side, and each sequence has as many as the longest may need.  So arithmetic finds a
page.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import layout
from .formats import cdiv
from .problem import Problem, Stripes

PAGE = 128  # slots of a page: whole tiles


class Copies(NamedTuple):
    """Two caches [most * pages, PAGE, kv_heads, dims] and a page table [seqs, pages]."""

    seqs: int
    most: int  # most sequences of `shortest` query tokens or more, one after another in the copies; seqs: all, in order
    pages: int  # of each sequence
    shortest: int  # fewest query tokens of sequences that are served
    from_page: int  # slots of a page of the call's cache
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype  # of the cache, or of 16 bits: numbers times their scales by token
    native: bool  # the device converts e4m3
    dependent: bool  # launches may begin before the launch ahead has ended
    stripes: Stripes | None  # how keys lie over ranks; None: each rank has all keys

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and page table as meta tensors."""
        slots = (self.most * self.pages, PAGE, self.kv_heads)
        keys, values = (
            torch.empty(*slots, dims, dtype=self.dtype, device="meta") for dims in (self.head_dim, self.value_dim)
        )
        return keys, values, torch.empty(self.seqs, self.pages, dtype=torch.int32, device="meta")

    @property
    def bytes(self) -> int:
        """Bytes of both caches."""
        dims = self.head_dim + self.value_dim
        return self.most * self.pages * PAGE * self.kv_heads * dims * self.dtype.itemsize


def copies_of(p: Problem) -> Copies:
    """Pages for all keys that a call may have; the host knows no lengths, so each sequence counts as the longest."""
    return Copies(
        seqs=p.seqs,
        most=p.seqs,
        pages=max(1, cdiv(p.max_seqlen_k, PAGE)),
        shortest=1 if p.only is None else 2,
        from_page=p.page_size,
        kv_heads=p.kv_heads,
        head_dim=p.head_dim,
        value_dim=p.value_width,
        dtype=p.cache,
        native=p.device.capability >= 89,
        dependent=p.device.dependent,
        stripes=p.stripes,
    )


def over(p: Problem, copies: Copies) -> Problem:
    """The problem of the launches that read the copies: only place and type of keys and values differ."""
    keys, values, _ = copies.tensors()
    return p._replace(
        page_size=PAGE,
        rows_per_page=layout.rows_per_page(keys, values, "NHD"),
        adjacent=layout.adjacent(keys, values, "NHD"),
        boxable=layout.boxable(keys, values),
        cache=copies.dtype,
        compute=p.compute if copies.dtype == p.cache else copies.dtype,
        pairable=p.pairable and copies.dtype == p.cache,
        slot_scales=False,
    )
