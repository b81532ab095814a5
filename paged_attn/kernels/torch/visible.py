"""Visible keys: the runs of keys that queries may see, as Python numbers, and the mask of a tile, as a tensor.

Shapes: B sequences, T queries of each, N keys of a tile, H heads or 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...arguments import Options, Tensors
from ...records.key_bounds import CAUSAL, KeyBounds
from .call import Seq


class Sight(NamedTuple):
    """Everything that decides which keys queries see; values on which loops depend are Python numbers."""

    window: KeyBounds  # window and chunk, by positions; only the chunk if windows differ by head
    # the least window that contains every head's window, and the chunk; with a shard, also which keys are the rank's
    widest: KeyBounds
    causal: bool | list[bool]
    windows: Tensor | None  # int64 [H, 2]; None: all heads have `window`
    positions: Tensor | None  # int64 [tokens], query_positions
    prefix: list[int] | None
    spans: list[list[list[int]]] | None
    clip_spans: bool
    bits: Tensor | None  # qq_mask

    @property
    def simple(self) -> bool:
        """Whether each query sees exactly one run of keys, whose ends the host knows."""
        masks = (
            self.windows,
            self.positions,
            self.prefix,
            self.spans,
            self.bits,
        )
        return all(mask is None for mask in masks)

    @property
    def bounded(self) -> bool:
        """Whether anything besides causality and a shard decides which keys a query sees."""
        return self.window != KeyBounds() or not self.simple

    def is_causal(self, seq: Seq) -> bool:
        return self.causal if isinstance(self.causal, bool) else self.causal[seq.number]


def sight_of(given: Tensors, options: Options) -> Sight:
    """The Sight of a call."""
    left, right = options.window_size
    window = widest = KeyBounds(left, right, options.chunk)
    windows = None if given.head_windows is None else given.head_windows.long()
    if windows is not None:
        by_head = windows.tolist()
        sides = [max(x) if min(x) >= 0 else -1 for x in zip(*by_head)]
        window, widest = KeyBounds(chunk=options.chunk), KeyBounds(sides[0], sides[1], options.chunk)
        if all(x == by_head[0] for x in by_head):  # all heads have one window
            window, windows = widest, None
    return Sight(
        window=window,
        widest=widest._replace(shard=options.shard),
        causal=bool(options.causal) if given.causal_seqs is None else given.causal_seqs.tolist(),
        windows=windows,
        positions=None if given.query_positions is None else given.query_positions.long(),
        prefix=None if given.prefix_lens is None else given.prefix_lens.tolist(),
        spans=None if given.spans is None else given.spans.tolist(),
        clip_spans=bool(options.clip_spans),
        bits=given.qq_mask,
    )


class Runs(NamedTuple):
    """The keys that some row may see: [0, prefix) and [first, end), prefix <= first.

    With a shard these are numbers of the rank's own keys.
    """

    first: int
    end: int
    prefix: int


def runs_of(sight: Sight, seq: Seq, first_row: int, end_row: int) -> Runs:
    """The keys that queries [first_row, end_row) of a sequence may see."""
    first_slot, last_slot = seq.context_len + first_row, seq.context_len + end_row - 1
    # with query_positions, a position is at least context_len and at most the query's place
    first = sight.widest.first_key(seq.context_len if sight.positions is not None else first_slot)
    end = seq.seq_len
    if sight.is_causal(seq):
        end = CAUSAL.end_of_keys(last_slot, end)
    if sight.positions is None:
        end = min(end, sight.widest.end_of_keys(last_slot, seq.seq_len))
    for begin, past in sight.spans[seq.number] if sight.spans is not None else ():
        if begin <= last_slot and past > first_slot:
            end = max(end, min(past, seq.seq_len))
            first = first if sight.clip_spans else min(first, max(begin, 0))
    prefix = 0 if sight.prefix is None else max(0, min(sight.prefix[seq.number], seq.seq_len))
    first, end, prefix = first, max(end, prefix, first), min(prefix, first)
    return Runs(*[sight.widest.own_before(x) for x in (first, end, prefix)])


def seen_by_all(sight: Sight, seq: Seq, first_row: int, end_row: int, first: int, end: int) -> bool:
    """Whether queries [first_row, end_row) all see keys [first, end), as far as the host can tell."""
    if not sight.simple:
        return False
    first, end = sight.widest.place_of(first), sight.widest.place_of(end - 1) + 1
    slots = seq.context_len + first_row, seq.context_len + end_row - 1
    if sight.is_causal(seq) and end > slots[0] + 1:
        return False
    return sight.window.first_key(slots[1]) <= first and end <= sight.window.end_of_keys(slots[0], seq.seq_len)


def mask_of(
    sight: Sight, group: Sequence[Seq], rows: Tensor, query: Tensor, key: Tensor, key_pos: Tensor, pos: Tensor
) -> Tensor:
    """Mask bool [B, H, T, N], True where a query sees a key.

    rows: int64 [B, T], indices of the queries in q.

    query, pos: places and positions of queries, [B, T].

    key, key_pos: places and positions of keys, [B, N].
    """
    causal = _causal_of(sight, group, key.device)
    slot, at = query[:, None, :, None], pos[:, None, :, None]
    key, key_pos = key[:, None, None, :], key_pos[:, None, None, :]
    visible = CAUSAL.shows(slot, key)
    if causal is not True:
        visible = visible | ~causal if isinstance(causal, Tensor) else torch.ones_like(visible)
    together = None if sight.spans is None else _together(sight.spans, group, slot, key)
    if together is not None and sight.clip_spans:
        visible = visible | together
    visible = visible & _in_window(sight, at, key_pos)
    if sight.prefix is not None:
        prefix = torch.tensor([sight.prefix[seq.number] for seq in group], device=key.device)
        visible = visible | (key < prefix[:, None, None, None])
    if together is not None and not sight.clip_spans:
        visible = visible | together
    if sight.bits is not None:
        context = torch.tensor([seq.context_len for seq in group], device=key.device)
        visible = visible & _bits(sight.bits[rows], key[:, 0, 0] - context[:, None])
    return visible


def _causal_of(sight: Sight, group: Sequence[Seq], device: torch.device) -> Any:
    """Whether sequences are causal: True, False, or bool [B, 1, 1, 1]."""
    causal = [sight.is_causal(seq) for seq in group]
    if len({*causal}) == 1:
        return causal[0]
    return torch.tensor(causal, device=device)[:, None, None, None]


def _in_window(sight: Sight, pos: Tensor, key_pos: Tensor) -> Tensor:
    """Whether the window and the chunk of a query at pos show a key, bool [B, H, T, N]."""
    visible = sight.window.shows(pos, key_pos)
    if sight.windows is not None:
        left, right = sight.windows.to(pos.device).T[:, None, :, None, None]
        visible = visible & ((left < 0) | (key_pos >= pos - left)) & ((right < 0) | (key_pos <= pos + right))
    return visible


def _together(spans: list[list[list[int]]], group: Sequence[Seq], query: Tensor, key: Tensor) -> Tensor:
    """Whether a span holds both the place of a query and the place of a key."""
    bounds = torch.tensor([spans[seq.number] for seq in group], device=key.device).view(len(group), -1, 2)
    together = torch.zeros((1, 1, 1, 1), dtype=torch.bool, device=key.device)
    for begin, past in bounds.permute(1, 2, 0)[..., None, None, None]:  # each [B, 1, 1, 1]
        together = together | ((begin <= query) & (query < past) & (begin <= key) & (key < past))
    return together


def _bits(words: Tensor, key: Tensor) -> Tensor:
    """Mask bool [B, 1, T, N] from the rows [B, T, words] of qq_mask that belong to the queries.

    key: [B, N], the index of each key's bit in such a row.  Keys without a bit are visible.
    """
    count = words.shape[2]
    if not count:
        return torch.ones((1, 1, 1, 1), dtype=torch.bool, device=key.device)
    at = key.clamp(0, 32 * count - 1)
    word = words.long().gather(2, (at // 32)[:, None].expand(-1, words.shape[1], -1))
    outside = (key < 0) | (key >= 32 * count)
    return (outside[:, None] | (word >> (at % 32)[:, None] & 1).bool())[:, None]
