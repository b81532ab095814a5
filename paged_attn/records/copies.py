"""Whole pages to which a call's keys and values are copied, for launches that cannot read the cache, or only slowly.

The pages of a sequence lie side by side, and all sequences with pages have equally many, enough for the longest.  If
every sequence has pages, those of sequence s begin at page s * `pages`, and no kernel has to search for them.
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
    # Number of sequences for which there are pages.  If `most` equals `seqs`, sequence i has the i-th pages.  If it is
    # less, the i-th sequence of `shortest` query tokens or more has them; a call has no more than `most` of these.
    most: int
    pages: int  # pages of each sequence
    shortest: int  # fewest query tokens of sequences that the launches over copies serve
    from_page: int  # slots of a page of the call's cache
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype  # that of the cache; over a cache of 8 bits or less perhaps the queries' 16-bit dtype
    native: bool  # the device has instructions that convert e4m3
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
    """Pages for max_seqlen_k keys of each sequence, because the host does not know which sequences have fewer."""
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
        native=p.device.converts_fp8,
        dependent=p.device.dependent,
        stripes=p.stripes,
    )


def over(p: Problem, copies: Copies) -> Problem:
    """The problem of launches that read the copies.

    Layout, dtype and scales of keys and values differ, and with the dtype also the operands of products (`compute`).
    """
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
        copied=True,
    )
