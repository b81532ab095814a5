"""Which keys a query sees by its position, told by the host: what kernels/common/bounds.py tells on the device.

One place for all that ask without looking at the device's lengths: the planner, checks of page ids, what `explain`
counts, and how launches cut known batches.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

Position = TypeVar("Position", int, Tensor)  # a position, or a tensor of them


class KeyBounds(NamedTuple):
    """Keys that a query sees before and after its own position, -1 where there is no end, and what else bounds both."""

    left: int = -1
    right: int = -1
    chunk: int | None = None  # as in paged_attention
    positions: bool = False  # queries have positions of their own, none before the context's end, so right counts slots

    @property
    def reach(self) -> int:
        """The most that a query sees before its own position, -1: all."""
        if self.chunk is None:
            return self.left
        return self.chunk - 1 if self.left < 0 else min(self.left, self.chunk - 1)

    def first_key(self, pos: Position) -> Position:
        """The first that a query at pos sees."""
        first = at_least(pos - self.left, 0) if self.left >= 0 else pos * 0
        if self.chunk is not None:
            first = at_least(first, pos // self.chunk * self.chunk)
        return first

    def end_of_keys(self, pos: Position, seq_len: int) -> Position:
        """Behind the last that a query at pos sees, of so many."""
        end = pos * 0 + seq_len
        if self.right >= 0:
            end = at_most(pos + self.right + 1, seq_len)
        if self.chunk is not None and not self.positions:
            end = at_most((pos // self.chunk + 1) * self.chunk, end)
        return end

    def shows(self, pos: Tensor, key_pos: Tensor) -> Tensor:
        """Whether queries at pos see keys at key_pos, which may lie before position 0."""
        visible = torch.ones((), dtype=torch.bool, device=pos.device)
        if self.left >= 0:
            visible = visible & (key_pos >= pos - self.left)
        if self.right >= 0:
            visible = visible & (key_pos <= pos + self.right)
        if self.chunk is not None:
            visible = visible & (key_pos // self.chunk == pos // self.chunk)
        return visible


CAUSAL = KeyBounds(right=0)


def key_bounds_of(options: Any, positions: bool = False) -> KeyBounds:
    """Of the options of a call, or of a model; a window by head, which the host does not know, bounds nothing here."""
    left, right = options.window_size
    return KeyBounds(left, 0 if options.causal else -1 if positions else right, options.chunk, positions)


def at_least(x: Position, bound: Position | int) -> Position:
    return x.clamp(min=bound) if isinstance(x, Tensor) else max(x, bound)


def at_most(x: Position, bound: Position | int) -> Position:
    return x.clamp(max=bound) if isinstance(x, Tensor) else min(x, bound)
