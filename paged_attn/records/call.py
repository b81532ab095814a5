"""The tensors of one call, as records that every launch of its plan shares."""

from typing import Any, NamedTuple

import torch

from ..kernels.common.records import KeyValues, Modifiers, PageStarts, Rows, Scales, Scratch
from ..launching.launch import COUNTERS, STATES

ROOM = Scratch(STATES, COUNTERS)  # which a launch has of its stream


class Call(NamedTuple):
    """One slot for each tensor; in kept calls an Argument stands for it."""

    out: Rows
    lse: torch.Tensor | None
    query: Rows
    cache: KeyValues
    new: KeyValues | None
    query_starts: torch.Tensor | None
    seq_lens: torch.Tensor
    page_table: torch.Tensor
    page_starts: PageStarts | None
    mods: Modifiers
    scales: Scales


def scales(
    softmax: float, query: Any = None, key: Any = None, value: Any = None, out: Any = None, gate: Any = None
) -> Scales:
    """Scales as kernels take them: absent is 1; what a tensor has before its last axis is the same for all."""
    given = (query, key, value, out)
    numbers = [float(x) if isinstance(x, (int, float)) else 1.0 for x in given]
    tensors = [None if isinstance(x, (int, float)) else x for x in given]
    strides = [None if x is None else 0 if x.ndim == 0 or x.shape[-1] == 1 else x.stride(-1) for x in tensors]
    of_gate = (None, None, None) if gate is None else (gate, *gate.stride()[:2])
    return Scales(softmax, *numbers, *tensors, *strides, *of_gate)
