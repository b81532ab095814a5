"""Checks of numbers that are read back from the device, for checked calls: lengths, page ids, slots and others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .axes import Axes
from .options import INT32_MAX
from .page_table import check_ragged, first_true
from .swapped import shares_out

if TYPE_CHECKING:
    from ..records.key_bounds import KeyBounds


def check_attention_contents(
    axes: Axes,
    page_table: Tensor,
    page_starts: Tensor | None,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor | None,
    *,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    k_new: Tensor | None,
    key_bounds: KeyBounds,
    causal: bool | Tensor = True,
    head_windows: Tensor | None = None,
    only: str | None,
    query_positions: Tensor | None = None,
    token_scales: Tensor | None = None,
    prefix_lens: Tensor | None = None,
    spans: Tensor | None = None,
    clip_spans: bool = False,
) -> None:
    """Check lengths, page ids, positions, spans, windows by head and scales by token of a call of paged_attention.

    Page ids, positions, spans and scales may be anything in sequences without keys or query tokens, and in sequences
    that `only` leaves out.
    """
    length = seq_lens.cpu().long()
    query = query_lens(axes.seqs, axes.tokens, cu_seqlens_q)
    asked = query > 0
    if only is not None:
        asked &= (query == 1) if only == "decode" else (query != 1)
    live = asked & (length > 0)

    for i in first_true(asked & ((length > INT32_MAX) | (length < -INT32_MAX - 1))):
        raise ValueError(f"seq_lens[{i}] = {length[i]}, but lengths must fit 32 bits")
    for i in first_true(live & (query > (query if max_seqlen_q is None else max_seqlen_q))):
        raise ValueError(f"sequence {i} has {query[i]} query tokens, but max_seqlen_q = {max_seqlen_q}")
    for i in first_true(live & (length > (length if max_seqlen_k is None else max_seqlen_k))):
        raise ValueError(f"seq_lens[{i}] = {length[i]}, but max_seqlen_k = {max_seqlen_k}")
    # Without causal, a sequence may have more queries than keys, as in cross attention, or if the call has only the
    # shared prefix of a cascade.
    own = torch.ones_like(live) if k_new is not None else _per_seq(causal, live)
    check_own_keys(length, query, asked & own)

    context = length - query
    if token_scales is not None:
        _check_token_scales(token_scales.cpu(), query, live)
    if query_positions is not None:
        _check_positions(query_positions.cpu().long(), context, query, live)

    # [first, end): keys in the cache that some query of the sequence may see
    if head_windows is not None:
        key_bounds = key_bounds._replace(left=_most_to_the_left(head_windows.cpu().long()))
    own_before = key_bounds.own_before  # position -> number of the rank's own keys before it
    first = key_bounds.first_key(context)
    if spans is not None and spans.shape[1]:
        begin = _begin_of_spans(spans.cpu().long(), context, live)
        first = first if clip_spans else first.minimum(begin)
    end = length if k_new is None else context
    prefix = torch.zeros_like(end) if prefix_lens is None else prefix_lens.cpu().long().minimum(end)
    first, end, prefix = own_before(first), own_before(end), own_before(prefix)
    live &= (first < end) | (prefix > 0)
    if page_starts is not None:
        check_ragged(axes, page_table, page_starts, length, first, end, live & (first < end))
        if prefix_lens is not None:
            check_ragged(axes, page_table, page_starts, length, torch.zeros_like(end), prefix, live & (prefix > 0))
        return
    for i in first_true(live & (end > axes.max_pages * axes.page_size)):
        held = f"page_table[{i}] holds max_pages = {axes.max_pages} pages of {axes.page_size}"
        if not axes.x and shares_out(axes.heads, axes.page_size) and end[i] <= axes.max_pages * axes.kv_heads:
            held += f", or of {axes.kv_heads} in the other kv_layout"
        raise ValueError(f"seq_lens[{i}] = {length[i]} needs {end[i]} keys in the cache, but {held}")
    column, table = torch.arange(axes.max_pages), page_table.cpu()
    seen = (first < end)[:, None] & (column >= (first // axes.page_size)[:, None])
    seen |= column * axes.page_size < prefix[:, None]
    used = live[:, None] & seen & (column * axes.page_size < end[:, None])
    for i in first_true((used & ((table < 0) | (table >= axes.pages))).flatten()):
        seq, col = divmod(i, axes.max_pages)
        raise ValueError(f"page_table[{seq}, {col}] = {table[seq, col]}, but the cache has {axes.pages} pages")


def check_write_contents(axes: Axes, slot_mapping: Tensor) -> None:
    """Check that slots lie inside the cache, and that none occurs twice.  A negative slot means a skipped token."""
    slots = slot_mapping.cpu().long()
    for i in first_true(slots >= axes.pages * axes.page_size):
        held = f"{axes.pages} pages of {axes.page_size} slots"
        raise ValueError(f"slot_mapping[{i}] = {slots[i]} (token {i}), but the cache has {held}")
    order = slots.argsort(stable=True)
    again = (slots[order[1:]] == slots[order[:-1]]) & (slots[order[1:]] >= 0)
    for j in first_true(again):
        i, before = int(order[j + 1]), int(order[j])
        raise ValueError(f"slot_mapping[{i}] = {slots[i]} (token {i}), but token {before} has the same slot")


def _per_seq(causal: bool | Tensor, like: Tensor) -> Tensor:
    """Whether each sequence is causal, bool [seqs]."""
    return causal.cpu() if isinstance(causal, Tensor) else torch.full_like(like, causal)


def _check_positions(pos: Tensor, context: Tensor, query: Tensor, live: Tensor) -> None:
    """Check that positions of live sequences are at least context_len and at most the query's place.

    query: number of query tokens of every sequence [seqs].  pos has positions of sequences that are not live, too.
    """
    tokens = int(query.sum())
    seq = torch.arange(len(query)).repeat_interleave(query)
    index = torch.arange(tokens) - (query.cumsum(0) - query)[seq]
    least, pos = context[seq], pos[:tokens]
    for i in first_true(live[seq] & ((pos < least) | (pos > least + index))):
        which = f"query_positions[{i}] = {pos[i]} (sequence {seq[i]}, query {index[i]})"
        raise ValueError(f"{which} must be at least {least[i]} and at most {least[i] + index[i]}")


def _most_to_the_left(windows: Tensor) -> int:
    """Check windows of heads.  Return the largest number of keys that a head sees before a query; -1: all."""
    for i in first_true(((windows < -1) | (windows > INT32_MAX)).flatten()):
        head, side = divmod(i, 2)
        which = f"window_size[{head}, {side}] = {windows[head, side]}"
        raise ValueError(f"{which}, but it must be at least -1 and less than 2^31")
    return -1 if (windows[:, 0] < 0).any() else int(windows[:, 0].max())


def _begin_of_spans(spans: Tensor, context: Tensor, live: Tensor) -> Tensor:
    """Check spans.  Return the first key [seqs] that spans show to the first query of each sequence.

    If no span contains the first query, the result is the query's own place.
    """
    begin, past = spans.unbind(2)
    wrong = live[:, None] & ((begin < 0) | (past < begin)) & ~((begin == -1) & (past == -1))
    for i in first_true(wrong.flatten()):
        seq, index = divmod(i, spans.shape[1])
        which = f"spans[{seq}, {index}] = {spans[seq, index].tolist()}"
        raise ValueError(f"{which}, but a span begins at 0 or later and ends no earlier, or is [-1, -1]")
    holds = (begin <= context[:, None]) & (context[:, None] < past)
    return torch.where(holds, begin, context[:, None]).amin(1).clamp(min=0)


def _check_token_scales(scale: Tensor, query: Tensor, live: Tensor) -> None:
    """Check that scales by token are finite and > 0 in live sequences.

    Scores multiplied by any other scale could hide visible keys, or show hidden ones.
    """
    tokens = int(query.sum())
    seq = torch.arange(len(query)).repeat_interleave(query)
    scale = (scale[:, None] if scale.ndim == 1 else scale)[:tokens]
    wrong = (~(scale > 0) | scale.isinf()) & live[seq][:, None]
    for i in first_true(wrong.any(1)):
        value = scale[i][wrong[i]][0]
        raise ValueError(f"q_scale[{i}] = {value} (sequence {seq[i]}), but scales must be finite and > 0")


def check_own_keys(length: Tensor, query: Tensor, own: Tensor) -> None:
    """Check that sequences have as many keys as query tokens or more; all arguments are [seqs].

    own: whether a sequence's query tokens count among its keys.  A sequence of one query token, or of negative length,
    passes, because it may be padding.
    """
    for i in first_true(own & (length >= 0) & (length < query) & (query > 1)):
        raise ValueError(f"seq_lens[{i}] = {length[i]}, but sequence {i} has {query[i]} query tokens, which count too")


def query_lens(seqs: int, tokens: int | None, cu_seqlens_q: Tensor | None) -> Tensor:
    """Query tokens of each sequence [seqs].  Checks that cu_seqlens_q begins at 0, ascends, and ends within q.

    tokens: rows of q.  None: there is no q.
    """
    if cu_seqlens_q is None:
        return torch.ones(seqs, dtype=torch.int64)
    bounds = cu_seqlens_q.cpu().long()
    if bounds[0] != 0:
        raise ValueError(f"cu_seqlens_q[0] = {bounds[0]}, but it must be 0")
    for i in first_true(bounds[1:] < bounds[:-1]):  # differences could exceed 64 bits
        before = f"cu_seqlens_q[{i}] = {bounds[i]}"
        raise ValueError(f"cu_seqlens_q[{i + 1}] = {bounds[i + 1]} is less than {before} (sequence {i})")
    if tokens is not None and bounds[-1] > tokens:
        raise ValueError(f"cu_seqlens_q[{seqs}] = {bounds[-1]}, but q has tokens = {tokens}")
    return bounds.diff()
