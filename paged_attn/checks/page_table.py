"""Checks of page tables: dense [seqs, max_pages], or ragged (indptr, indices)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .axes import Axes, Door
from .kernel_tensors import INTEGER
from .options import kind

STARTS, IDS = "indptr of page_table", "indices of page_table"


def admit_page_table(door: Door, page_table: Any, page_starts: Any, seq_lens: Any) -> None:
    """Check a dense or ragged page table, and seq_lens.

    page_starts: indptr of a ragged table.  page_table is then its indices.  None: the table is dense.
    """
    if page_starts is not None and not isinstance(page_starts, Tensor) and not isinstance(page_table, Tensor):
        page_table, page_starts = [page_starts, page_table], None  # lists of two rows, not a pair of tensors
    if isinstance(page_table, (tuple, list)) and page_starts is None:
        given = f"{kind(page_table)} of ({', '.join(map(kind, page_table))})"
        if all(isinstance(x, (tuple, list)) for x in page_table):
            given += ": pad_batch makes a tensor of rows"
        raise TypeError(f"page_table must be a tensor or (indptr, indices), two tensors, got {given}")
    if page_starts is None:
        door.tensor("page_table", page_table, ("seqs", "max_pages"), INTEGER)
        door.tensor("seq_lens", seq_lens, ("seqs",), INTEGER)
        return
    door.tensor("seq_lens", seq_lens, ("seqs",), INTEGER)
    admit_ragged(door, page_starts, page_table)


def admit_ragged(door: Door, indptr: Any, indices: Any) -> None:
    """Check a ragged table of any strides.  indptr settles the number of sequences if no tensor has settled it."""
    if "seqs" in door.sizes:
        door.sizes["seqs + 1"] = door.sizes["seqs"] + 1
    door.place(STARTS, indptr, INTEGER)
    if indptr.shape == (0,):
        raise door.wrong_shape(STARTS, indptr.shape, ("seqs + 1",))
    door.bind(STARTS, indptr, ("seqs + 1",))
    door.sizes["seqs"] = door.sizes["seqs + 1"] - 1
    door.place(IDS, indices, INTEGER)
    door.bind(IDS, indices, ("all pages",))
    door.sizes["max_pages"] = door.sizes["all pages"]


def check_ragged(
    axes: Axes, indices: Tensor, starts: Tensor, length: Tensor, first: Tensor, end: Tensor, live: Tensor
) -> None:
    """Check that rows of live sequences lie within `indices`, and name pages of the cache for keys [first, end).

    starts: indptr [seqs + 1].  length, first, end and live: [seqs].  With a shard, first and end count own keys.
    """
    ids, bounds, count = indices.cpu(), starts.cpu().long(), axes.max_pages
    begin, past = bounds[:-1], bounds[1:]
    check_row_bounds(bounds, count, live)
    size = axes.page_size
    for i in first_true(live & (end > (past - begin) * size)):
        held = f"row {i} of page_table holds {past[i] - begin[i]} pages of {size}"
        raise ValueError(f"seq_lens[{i}] = {length[i]} needs {end[i]} keys in the cache, but {held}")
    needed = torch.where(live, (end + size - 1) // size - first // size, 0)
    seq = torch.arange(len(needed)).repeat_interleave(needed)
    page = torch.arange(len(seq)) - (needed.cumsum(0) - needed)[seq] + (first // size)[seq]
    at = begin[seq] + page
    for i in first_true((ids[at] < 0) | (ids[at] >= axes.pages)):
        which = f"sequence {seq[i]}, page {page[i]}"
        raise ValueError(
            f"indices[{at[i]}] = {ids[at[i]]} of page_table ({which}) is no page of the cache, which has {axes.pages}"
        )


def check_row_bounds(bounds: Tensor, count: int, live: Tensor | bool = True) -> None:
    """Check that `bounds` [seqs + 1] of a ragged table's rows ascend within [0, count], for live sequences."""
    begin, past = bounds[:-1], bounds[1:]
    for i in first_true(live & ((begin < 0) | (past < begin) | (past > count))):
        row = f"indptr[{i}] = {begin[i]} and indptr[{i + 1}] = {past[i]}"
        raise ValueError(f"{row} of page_table must ascend within its {count} indices")


def first_true(wrong: Tensor) -> list[int]:
    """[index of the first True], or [] if there is none."""
    found: list[int] = wrong.nonzero()[:1, 0].tolist()
    return found
