"""The integers of an engine's step, from its lengths: pages, positions, slots, and the padding of a CUDA graph.

All of it is plain torch without a host sync: a CUDA graph can hold it, and torch.compile makes few kernels of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from .checks.axes import INTEGER, Door, both, integer

Lengths = TypeVar("Lengths", int, Tensor)


def pages_needed(lengths: Lengths, page_size: int) -> Lengths:
    """Pages that so many tokens fill, the last one perhaps in part.

    Args:
        lengths: an int, or a tensor of integers of any shape.  0 or less: no page.
        page_size: tokens in a page.

    Returns: an int for an int, a tensor of the same shape and dtype for a tensor.
    """
    integer("page_size", page_size, 1, "an int")
    if isinstance(lengths, Tensor):
        return ((lengths + (page_size - 1)) // page_size).clamp(min=0)
    return max(0, -(-lengths // page_size))


def positions(seq_lens: Tensor, cu_seqlens_q: Tensor | None = None, *, tokens: int | None = None) -> Tensor:
    """Where each query token of a call stands in its sequence, -1 for padding: what rotary embeddings and `slots` want.

    Query i of a sequence has position context_len + i, where context_len = seq_len - query_len, as in paged_attention.

    Args:
        seq_lens: [seqs] int32 | int64; keys of each sequence after the step, its own tokens included.
        cu_seqlens_q: [seqs + 1] int32 | int64; queries of sequence s are tokens cu_seqlens_q[s] ...
            cu_seqlens_q[s + 1] - 1.  None: one query token per sequence.
        tokens: with cu_seqlens_q, and only then: rows of q on the host, padding included; cu_seqlens_q[-1] is not read
            back.

    Returns:
        [tokens] int64.  -1 where the token is padding: from cu_seqlens_q[-1] on, and in sequences that are empty.

    Raises: ValueError naming the tensor, the axis and both sizes; TypeError naming the dtype wanted.
    """
    admit(seq_lens=(seq_lens, ("seqs",)), cu_seqlens_q=(cu_seqlens_q, ("seqs + 1",)))
    if cu_seqlens_q is None and tokens is None:
        return (seq_lens.long() - 1).clamp(min=-1)
    both("tokens", tokens, "cu_seqlens_q", cu_seqlens_q)
    integer("tokens", tokens, 0, "an int")
    assert cu_seqlens_q is not None
    assert tokens is not None
    if seq_lens.shape[0] == 0:
        return seq_lens.new_full((tokens,), -1, dtype=torch.int64)
    token, sequence, live = sequences_of(cu_seqlens_q, tokens)
    # The last query of a sequence is its last token.
    position = token + (seq_lens - cu_seqlens_q[1:]).long()[sequence]
    return torch.where(live, position, -1).clamp(min=-1)


def slots(page_table: Tensor, positions: Tensor, page_size: int, cu_seqlens_q: Tensor | None = None) -> Tensor:
    """The slot_mapping of write_kv: where in the cache the token at each position of its sequence lies.

    Args:
        page_table: [seqs, max_pages] int32 | int64, as in paged_attention.
        positions: [tokens] int32 | int64, as `positions` gives them; negative = padding.
        page_size: tokens in a page.
        cu_seqlens_q: [seqs + 1] int32 | int64, which tokens are whose.  None: one token per sequence, tokens = seqs.

    Returns:
        [tokens] int64: page * page_size + slot.  -1, which write_kv skips, for padding and for a position without a
        page: one past the page table's last column, or of a negative entry.

    Raises: ValueError naming the tensor, the axis and both sizes; TypeError naming the dtype wanted.
    """
    axis = "seqs" if cu_seqlens_q is None else "tokens"
    table = (page_table, ("seqs", "max_pages"))
    admit(page_table=table, positions=(positions, (axis,)), cu_seqlens_q=(cu_seqlens_q, ("seqs + 1",)))
    integer("page_size", page_size, 1, "an int")
    seqs, max_pages = page_table.shape
    position = positions.long()
    live = position >= 0
    if cu_seqlens_q is None:
        sequence = torch.arange(seqs, device=position.device)
    else:
        _, sequence, owned = sequences_of(cu_seqlens_q, position.shape[0])
        live = live & owned
    if seqs == 0 or max_pages == 0:
        return torch.full_like(position, -1)
    column = position // page_size
    live = live & (column < max_pages)
    page = page_table[sequence, column.clamp(0, max_pages - 1)].long()
    return torch.where(live & (page >= 0), page * page_size + position % page_size, -1)


Batch = tuple[Tensor, Tensor, "Tensor | None"]


def pad_batch(
    page_table: Tensor | Sequence[Sequence[int]],
    seq_lens: Tensor | Sequence[int],
    cu_seqlens_q: Tensor | Sequence[int] | None = None,
    *,
    seqs: int | None = None,
    max_pages: int | None = None,
    out: Batch | None = None,
    device: torch.device | str | None = None,
) -> Batch:
    """A batch with empty sequences behind it, as many as a CUDA graph has: into its own tensors, or into new ones.

    Empty sequences have length 0 and no query: `positions` and `slots` of theirs are -1, and attention gives zeros.

    Args:
        page_table, seq_lens, cu_seqlens_q: as in paged_attention, of n sequences; on out's device or the host.  Or
            lists: the pages of each sequence, as many as it has, and ints.  Lists become int32.
        seqs: sequences of the result, n or more; the number that out has, or n, if None.
        max_pages: columns of the result's page table, as many as page_table's or more; as many as these if None.
        out: (page_table, seq_lens, cu_seqlens_q) of an earlier call, in which the batch is put; cu_seqlens_q is None
            where the batch's is.  A copy from pinned host memory does not wait.
        device: of new tensors that are made from lists, the host if None.

    Returns:
        (page_table [seqs, max_pages], seq_lens [seqs], cu_seqlens_q [seqs + 1] or None): out, if it was given.  What
        page_table held beyond the batch's own entries stays, or is 0 where it is new.

    Raises: ValueError naming the argument and both sizes where the batch is larger than its place; TypeError naming the
        dtype wanted.
    """
    if not isinstance(page_table, Tensor):
        page_table = _ragged(page_table, device)
    if not isinstance(seq_lens, Tensor):
        seq_lens = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    if not isinstance(cu_seqlens_q, (Tensor, type(None))):
        cu_seqlens_q = torch.tensor(cu_seqlens_q, dtype=torch.int32, device=device)
    admit(
        page_table=(page_table, ("seqs", "max_pages")),
        seq_lens=(seq_lens, ("seqs",)),
        cu_seqlens_q=(cu_seqlens_q, ("seqs + 1",)),
    )
    count, columns = page_table.shape
    if out is None:
        for name, value, least, what in (
            ("seqs", seqs, count, "sequences"),
            ("max_pages", max_pages, columns, "pages of a sequence"),
        ):
            integer(name, value, 0)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, the {what} in page_table, got {value}")
        seqs = count if seqs is None else seqs
        table = page_table.new_zeros(seqs, columns if max_pages is None else max_pages)
        starts = None if cu_seqlens_q is None else cu_seqlens_q.new_empty(seqs + 1)
        out = table, seq_lens.new_empty(seqs), starts
    table, lengths, starts = out
    if (cu_seqlens_q is None) != (starts is None):
        both("cu_seqlens_q", cu_seqlens_q, "out[2]", starts)
    if table.shape[0] < count or table.shape[1] < columns:
        raise ValueError(f"out[0] must be at least {[count, columns]} like page_table, got {list(table.shape)}")
    table[:count, :columns].copy_(page_table, non_blocking=True)
    lengths[:count].copy_(seq_lens, non_blocking=True)
    lengths[count:].zero_()
    if starts is not None and cu_seqlens_q is not None:
        starts[: count + 1].copy_(cu_seqlens_q, non_blocking=True)
        starts[count + 1 :].copy_(starts[count : count + 1].expand(starts.shape[0] - count - 1))
    return out


def _ragged(rows: Sequence[Sequence[int]], device: torch.device | str | None) -> Tensor:
    """Rows of any lengths as one table, with zeros behind the shorter ones."""
    columns = max((len(row) for row in rows), default=0)
    filled = [[*row, *[0] * (columns - len(row))] for row in rows]
    return torch.tensor(filled, dtype=torch.int32, device=device).reshape(len(rows), columns)


def sequences_of(cu_seqlens_q: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """(number of each token, its sequence, whether it has one), [tokens] each."""
    last = cu_seqlens_q.shape[0] - 2
    token = torch.arange(tokens, dtype=cu_seqlens_q.dtype, device=cu_seqlens_q.device)
    # Of several sequences that begin at one token all but the last are empty.
    sequence = torch.searchsorted(cu_seqlens_q, token, right=True) - 1
    return token, sequence.clamp(0, max(last, 0)), sequence <= last


def admit(**given: tuple[Tensor | None, tuple[str, ...]]) -> None:
    """Tensors of integers, each of its axes, all on one device; inside torch.compile torch's own errors have to do."""
    if torch.compiler.is_compiling():
        return
    door = Door()
    for name, (value, axes) in given.items():
        if name != "cu_seqlens_q":
            door.tensor(name, value, axes, INTEGER)
        elif value is not None:
            door.sizes["seqs + 1"] = door.sizes["seqs"] + 1
            door.tensor(name, value, axes, INTEGER)
