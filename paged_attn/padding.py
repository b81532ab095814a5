"""Padding of a batch to the sizes of a captured CUDA graph, with empty sequences at its end.

`pad_batch` is plain torch, and reads no tensor back from a device.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from .checks.kernel_tensors import INTEGER, names
from .checks.options import INT32_MAX, both, integer, kind, unboxed
from .checks.page_table import check_row_bounds, first_true
from .step import Table, admit, check_starts, is_ragged, on_host

PageLists = Sequence[Sequence[int]]
Padded = tuple[Table, Tensor, "Tensor | None"]


def pad_batch(
    page_table: Table | PageLists,
    seq_lens: Tensor | Sequence[int],
    cu_seqlens_q: Tensor | Sequence[int] | None = None,
    *,
    seqs: int | None = None,
    max_pages: int | None = None,
    page_size: int | None = None,
    out: Padded | None = None,
    device: torch.device | str | None = None,
) -> Padded:
    """Copy a batch into the tensors of a CUDA graph, or into new ones, and fill the rest with empty sequences.

    Empty sequences have length 0, and no query token; without cu_seqlens_q they have one.  `positions` and `slots` of
    padding tokens are -1, and attention gives zeros for them.

    Args:
        page_table: [n, pages] int32 | int64, or (indptr [n + 1], indices), as in paged_attention, on out's device or on
            the host.  Or a list with a list of page ids for each sequence, of any lengths.  A list becomes an int32
            table of the same kind as that of out, or a dense one without out.
        seq_lens, cu_seqlens_q: [n] and [n + 1] int32 | int64, as in paged_attention, or lists of ints, which become
            int32.
        seqs: number of sequences of the result, >= n.  None: the number that out has, or n without out.  With out, only
            that number is valid.
        max_pages: columns of the result's page table, or length of its indices if it is ragged; at least that of
            page_table.  None: that of out, or that of page_table without out.  With out, only that number is valid.
        page_size: tokens in a page, an int >= 1.  If given, each sequence must have pages for all its keys.  This is
            checked if seq_lens and, of a ragged table, indptr are on the host.  Leave page_size out where k_new brings
            keys that have no page.
        out: (page_table, seq_lens, cu_seqlens_q) of an earlier call, into which the batch is copied.  Its cu_seqlens_q
            must be None exactly if the batch's is.  Copies from pinned host memory do not wait.  None: new tensors.
        device: device of tensors made from lists.  None: that of the batch's tensors, or the host.

    Returns:
        (page_table [seqs, max_pages], seq_lens [seqs], cu_seqlens_q [seqs + 1] or None), which is out if given.
            Entries of page_table outside the batch keep their values; in a new table they are 0.  A ragged page_table
            is (indptr [seqs + 1], indices [max_pages]), in which rows of empty sequences are empty.

    Raises:
        ValueError: names the argument and both sizes if the batch is larger than its place.  Lists and tensors on the
            host are checked, too: cu_seqlens_q must ascend from 0, indptr must ascend within indices, and pages of
            page_size slots must hold the keys of their sequences.
        TypeError: names the dtype, or the kind of page table wanted.
    """
    seqs, max_pages = unboxed((seqs, max_pages))
    _check_triple(out)
    ragged = is_ragged(page_table) if out is None or isinstance(page_table, Tensor) else is_ragged(out[0])
    tensors = [x for x in (page_table, seq_lens, cu_seqlens_q) if isinstance(x, Tensor)]
    if is_ragged(page_table):
        tensors.append(page_table[0])
    if device is None and tensors:
        device = tensors[0].device
    given: Table
    if isinstance(page_table, Tensor) or is_ragged(page_table):
        given = page_table
    else:
        rows = cast(PageLists, page_table)
        _check_rows(rows)
        given = _ragged(rows, device) if ragged else _table(rows, device)
    host_lens, host_starts = _listed("seq_lens", seq_lens), _listed("cu_seqlens_q", cu_seqlens_q)
    if not isinstance(seq_lens, Tensor):
        seq_lens = cast(Tensor, host_lens.to(device))
    if not isinstance(cu_seqlens_q, (Tensor, type(None))):
        cu_seqlens_q = cast(Tensor, host_starts.to(device))
    admit(
        page_table=(given, ("seqs", "max_pages")),
        seq_lens=(seq_lens, ("seqs",)),
        cu_seqlens_q=(cu_seqlens_q, ("seqs + 1",)),
    )
    check_starts(host_starts)
    _check_pages(page_table, given, host_lens, page_size)
    if out is None:
        out = _new(given, seq_lens, cu_seqlens_q, seqs, max_pages)
    else:
        _check_place(out, seqs, max_pages)
    table, lengths, starts = out
    if (cu_seqlens_q is None) != (starts is None):
        both("cu_seqlens_q", cu_seqlens_q, "out[2]", starts)
    count = seq_lens.shape[0]
    _put_table(given, table, count)
    lengths[:count].copy_(seq_lens, non_blocking=True)
    lengths[count:].zero_()
    if starts is not None and cu_seqlens_q is not None:
        _put_starts(cu_seqlens_q, starts, count)
    return out


def _listed(name: str, numbers: Any) -> Any:
    """Return a list as a tensor on the host, where it can be checked; return a tensor or None as it is."""
    return numbers if isinstance(numbers, (Tensor, type(None))) else _int32(name, numbers, None)


def _check_pages(page_table: Table | PageLists, made: Table, seq_lens: Tensor, page_size: int | None) -> None:
    """Check page_size, and on the host that row bounds ascend and that pages hold the keys of their sequences."""
    integer("page_size", page_size, 1)
    page_size = unboxed(page_size)
    if is_ragged(page_table) and on_host(*page_table):
        check_row_bounds(page_table[0].long(), page_table[1].shape[0])
    if page_size is None or not on_host(seq_lens):
        return
    if not isinstance(page_table, Tensor) and not is_ragged(page_table):
        pages = torch.tensor([len(row) for row in cast(PageLists, page_table)], dtype=torch.int64)
    elif isinstance(made, Tensor):
        pages = torch.full_like(seq_lens, made.shape[1], dtype=torch.int64)
    elif on_host(made[0]):
        pages = made[0].long().diff()
    else:
        return
    for i in first_true(seq_lens.long() > pages * page_size):
        held = f"row {i} of page_table holds {pages[i]} pages of {page_size}"
        raise ValueError(f"seq_lens[{i}] = {seq_lens[i]} needs {seq_lens[i]} keys in the cache, but {held}")


def _new(
    page_table: Table, seq_lens: Tensor, cu_seqlens_q: Tensor | None, seqs: int | None, max_pages: int | None
) -> Padded:
    """Check seqs and max_pages, and return new tensors of these sizes.  All page ids are 0."""
    count = seq_lens.shape[0]
    dense = isinstance(page_table, Tensor)
    columns = page_table.shape[1] if isinstance(page_table, Tensor) else page_table[1].shape[0]
    for name, value, least, what in (
        ("seqs", seqs, count, "sequences"),
        ("max_pages", max_pages, columns, "pages of a sequence" if dense else "indices"),
    ):
        integer(name, value, 0)
        if value is not None and value < least:
            raise ValueError(f"{name} must be at least {least}, the {what} in page_table, got {value}")
    seqs = count if seqs is None else seqs
    columns = columns if max_pages is None else max_pages
    table: Table
    if isinstance(page_table, Tensor):
        table = page_table.new_zeros(seqs, columns)
    else:
        table = page_table[0].new_empty(seqs + 1), page_table[1].new_zeros(columns)
    starts = None if cu_seqlens_q is None else cu_seqlens_q.new_empty(seqs + 1)
    return table, seq_lens.new_empty(seqs), starts


def _check_triple(out: Any) -> None:
    """Check that out is (page_table, seq_lens, cu_seqlens_q)."""
    if out is not None and (not isinstance(out, (tuple, list)) or len(out) != 3):
        given = f"{kind(out)}: pass what an earlier pad_batch has returned"
        raise TypeError(f"out must be (page_table, seq_lens, cu_seqlens_q), got {given}")


def _check_place(out: Padded, seqs: int | None, max_pages: int | None) -> None:
    """Check that the tensors of out agree on the number of sequences, and with seqs and max_pages."""
    table, lengths, starts = out
    parts = (table,) if isinstance(table, Tensor) else tuple(table)
    for name, tensor in (*[("out[0]", x) for x in parts], ("out[1]", lengths), ("out[2]", starts)):
        if tensor is not None:
            _check_integers(name, tensor)
    rows, columns = table.shape if isinstance(table, Tensor) else (table[0].shape[0] - 1, table[1].shape[0])
    for name, value, has in (("seqs", seqs, rows), ("max_pages", max_pages, columns)):
        integer(name, value, 0)
        if value is not None and value != has:
            raise ValueError(f"{name} must be {has}, which out has, got {value}")
    for name, tensor, size in (("out[1]", lengths, rows), ("out[2]", starts, rows + 1)):
        if tensor is not None and list(tensor.shape) != [size]:
            raise ValueError(f"{name} must be [{size}] beside out[0] of {rows} sequences, got {list(tensor.shape)}")


def _check_integers(name: str, value: Any) -> None:
    """Check that a part of out is a tensor that page ids or lengths can be copied into."""
    cure = "pass what an earlier pad_batch has returned"
    if not isinstance(value, Tensor):
        given = f"{kind(value)}: {cure}"
        raise TypeError(f"{name} must be a tensor of {names(INTEGER)}, got {given}")
    if value.dtype not in INTEGER:
        given = f"{names((value.dtype,))}: {cure}"
        raise TypeError(f"{name} must be {names(INTEGER)}, got {given}")


def _put_table(given: Table, place: Table, count: int) -> None:
    """Copy a table of `count` sequences into a table of the same kind, at least as large."""
    if isinstance(given, Tensor) != isinstance(place, Tensor):
        kinds = [kind(x) if isinstance(x, Tensor) else "(indptr, indices)" for x in (given, place)]
        raise TypeError(f"page_table must be of the kind of out[0], {kinds[1]}, got {kinds[0]}")
    if isinstance(given, Tensor) and isinstance(place, Tensor):
        columns = given.shape[1]
        if place.shape[0] < count or place.shape[1] < columns:
            raise ValueError(f"out[0] must be at least {[count, columns]} like page_table, got {list(place.shape)}")
        place[:count, :columns].copy_(given, non_blocking=True)
        return
    for name, got, into in zip(("indptr", "indices"), given, place, strict=True):
        if into.shape[0] < got.shape[0]:
            shapes = list(got.shape), list(into.shape)
            raise ValueError(f"{name} of out[0] must be at least {shapes[0]} like those of page_table, got {shapes[1]}")
    place[1][: given[1].shape[0]].copy_(given[1], non_blocking=True)
    _put_starts(given[0], place[0], count)


def _put_starts(given: Tensor, place: Tensor, count: int) -> None:
    """Copy row bounds [count + 1] into [seqs + 1], and repeat the last one, so that further rows are empty."""
    place[: count + 1].copy_(given, non_blocking=True)
    place[count + 1 :].copy_(place[count : count + 1].expand(place.shape[0] - count - 1))


def _table(rows: PageLists, device: torch.device | str | None) -> Tensor:
    """Rows of any lengths as a dense table, padded with zeros."""
    columns = max([0, *map(len, rows)])
    filled = [[*row, *[0] * (columns - len(row))] for row in rows]
    return _int32("page_table", filled, device).reshape(len(rows), columns)


def _ragged(rows: PageLists, device: torch.device | str | None) -> tuple[Tensor, Tensor]:
    """(indptr, indices) of rows of any lengths."""
    ends = [0]
    for row in rows:
        ends.append(ends[-1] + len(row))
    pages = [page for row in rows for page in row]
    return _int32("page_table", ends, device), _int32("page_table", pages, device)


def _check_rows(rows: Any) -> None:
    """Check that pages are given as one list for each sequence."""
    if isinstance(rows, Collection) and all(isinstance(row, Collection) and not isinstance(row, str) for row in rows):
        return
    given = kind(rows)
    if isinstance(rows, (list, tuple)):
        given += f" of ({', '.join(map(kind, rows[:3]))}): one list for each sequence, like [[5, 9], [1]]"
    raise TypeError(f"page_table must be a tensor, (indptr, indices) or a list of lists of ints, got {given}")


def _int32(name: str, values: Any, device: torch.device | str | None) -> Tensor:
    """Lists of ints as an int32 tensor.

    torch.tensor(values, dtype=torch.int32) would truncate fractions, and its errors would name no argument.
    """
    try:
        made = torch.tensor(values)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        given = f"one of which torch says: {error}"
        raise TypeError(f"{name} must be a list of ints of 32 bits, got {given}") from None
    if made.numel() == 0:
        return made.to(dtype=torch.int32, device=device)
    if made.dtype.is_floating_point or made.dtype.is_complex or made.dtype is torch.bool:
        given = f"{names((made.dtype,))} numbers: int(x) for each"
        raise TypeError(f"{name} must be a list of ints of 32 bits, got {given}")
    for most in (int(made.max()), int(made.min())):
        if not -INT32_MAX - 1 <= most <= INT32_MAX:
            given = f"{most}: a tensor may be int64"
            raise ValueError(f"{name} must be a list of ints of 32 bits, got {given}")
    return made.to(dtype=torch.int32, device=device)
