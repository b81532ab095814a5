"""Bounds on the keys that a query sees by its position, on the host.  kernels/common/bounds.py has them on the device.

The planner, checks of page ids, arguments of kernels, plain torch's masks, ranks and `explain` use this file.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

Position = TypeVar("Position", int, Tensor)  # a position, or a tensor of them


class KeyBounds(NamedTuple):
    """Numbers of keys that a query sees before and after its own position, -1 for all, and further bounds."""

    left: int = -1
    right: int = -1
    chunk: int | None = None  # as in paged_attention
    positions: bool = False  # query_positions are given; `right` and `end_of_keys` then count places, not positions
    shard: tuple[int, int, int] | None = None  # as in paged_attention

    @property
    def reach(self) -> int:
        """The most keys that a query sees before its own position; -1: all."""
        if self.chunk is None:
            return self.left
        return self.chunk - 1 if self.left < 0 else min(self.left, self.chunk - 1)

    def first_key(self, pos: Position) -> Position:
        """The first key that a query at pos sees, inclusive."""
        first = at_least(pos - self.left, 0) if self.left >= 0 else pos * 0
        if self.chunk is not None:
            first = at_least(first, pos // self.chunk * self.chunk)
        return first

    def end_of_keys(self, pos: Position, seq_len: int) -> Position:
        """The end, exclusive, of the keys that a query at pos sees, out of seq_len keys."""
        end = pos * 0 + seq_len
        if self.right >= 0:
            end = at_most(pos + self.right + 1, seq_len)
        if self.chunk is not None and not self.positions:
            end = at_most((pos // self.chunk + 1) * self.chunk, end)
        return end

    def shows(self, pos: Tensor, key_pos: Tensor) -> Tensor:
        """Whether queries at pos see keys at key_pos.  Keys may lie before position 0."""
        visible = torch.ones((), dtype=torch.bool, device=pos.device)
        if self.left >= 0:
            visible = visible & (key_pos >= pos - self.left)
        if self.right >= 0:
            visible = visible & (key_pos <= pos + self.right)
        if self.chunk is not None:
            visible = visible & (key_pos // self.chunk == pos // self.chunk)
        return visible

    def own_before(self, pos: Position) -> Position:
        """Number of this rank's keys before a position; without a shard the position itself."""
        if self.shard is None:
            return pos
        rank, world, stripe = self.shard
        pos = at_least(pos, 0)
        rest = pos % (stripe * world) - rank * stripe
        return pos // (stripe * world) * stripe + at_most(at_least(rest, 0), stripe)

    def place_of(self, number: Position) -> Position:
        """The position of this rank's key `number`, counted from 0; without a shard the number itself."""
        if self.shard is None:
            return number
        rank, world, stripe = self.shard
        return number // stripe * (stripe * world) + rank * stripe + number % stripe

    def most_own(self, keys: int) -> int:
        """The most keys that a rank has among `keys` consecutive positions; a negative `keys` is returned unchanged."""
        if self.shard is None or keys < 0:
            return keys
        _, world, stripe = self.shard
        return keys // (stripe * world) * stripe + min(keys % (stripe * world), stripe)


CAUSAL = KeyBounds(right=0)


def key_bounds_of(options: Any, positions: bool = False) -> KeyBounds:
    """Bounds from the options of a call or of a model.  Windows by head are unknown on the host and bound nothing."""
    left, right = options.window_size
    return KeyBounds(left, 0 if options.causal else -1 if positions else right, options.chunk, positions, options.shard)


def visible_keys(query_len: int, seq_len: int, bounds: KeyBounds = CAUSAL) -> int:
    """Number of keys of a sequence that at least one query sees.  With a shard, only the rank's own keys count.

    Queries are the sequence's last tokens, and the last query sees the last key.
    """
    if query_len <= 0 or seq_len <= 0:
        return 0
    return bounds.own_before(seq_len) - bounds.own_before(bounds.first_key(seq_len - query_len))


def visible_pairs(query_len: int, seq_len: int, bounds: KeyBounds = CAUSAL) -> int:
    """Number of visible (query, key) pairs, if a query's position is its index in the sequence."""
    if query_len <= 0 or seq_len <= 0:
        return 0
    if query_len == 1:  # the most frequent case, for which a tensor would cost more than the arithmetic
        end, first = bounds.end_of_keys(seq_len - 1, seq_len), bounds.first_key(seq_len - 1)
        return max(0, bounds.own_before(end) - bounds.own_before(first))
    pos = torch.arange(seq_len - query_len, seq_len, device="cpu")
    ends, firsts = bounds.own_before(bounds.end_of_keys(pos, seq_len)), bounds.own_before(bounds.first_key(pos))
    return int((ends - firsts).clamp(min=0).sum())


def page_ids(query_len: int, seq_len: int, page_size: int, bounds: KeyBounds = CAUSAL) -> int:
    """Number of page table entries whose pages hold visible keys."""
    keys, last = visible_keys(query_len, seq_len, bounds), bounds.own_before(seq_len)
    return -(-last // page_size) - (last - keys) // page_size if keys else 0


def at_least(x: Position, bound: Position | int) -> Position:
    return x.clamp(min=bound) if isinstance(x, Tensor) else max(x, bound)


def at_most(x: Position, bound: Position | int) -> Position:
    return x.clamp(max=bound) if isinstance(x, Tensor) else min(x, bound)
