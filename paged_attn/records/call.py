"""The tensors of one call, as records that every launch of its plan shares."""

from typing import Any, NamedTuple

import torch

from ..arguments import scales_slots
from ..kernels.common.records import KeyValues, Modifiers, PageStarts, Rows, Scales, Scratch
from ..launching.launch import COUNTERS, STATES

ROOM = Scratch(STATES, COUNTERS)  # two Holes, which each launch fills with scratch memory of its stream


class Call(NamedTuple):
    """The tensors of a call.  In a kept call, a Hole (launching/template.py) stands for each tensor."""

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
    softmax: float,
    query: Any = None,
    key: Any = None,
    value: Any = None,
    out: Any = None,
    gate: Any = None,
    by_token: bool = False,
) -> Scales:
    """Scales as kernels take them.  An absent scale is 1.

    A tensor of two axes has a row for each sequence, or one row for all.  by_token: `query` has a row for each token
    instead.  A scale by slot is part of its cache's record (`layout.cache`), and 1 here.
    """
    of_tokens: tuple[Any, Any, Any] = (None, None, None)
    if by_token:
        of_tokens = (query, query.stride(0), query.stride(1) if query.ndim == 2 and query.shape[1] > 1 else 0)
        query = None
    given = (query, *[1.0 if scales_slots(x) else x for x in (key, value)], out)
    numbers = [float(x) if isinstance(x, (int, float)) else 1.0 for x in given]
    tensors = [None if isinstance(x, (int, float)) else x for x in given]
    strides = [None if x is None else 0 if x.ndim == 0 or x.shape[-1] == 1 else x.stride(-1) for x in tensors]
    by_seq = [None if x is None else _stride_of_seqs(x) for x in tensors[:3]]
    of_gate: tuple[Any, Any, Any] = (None, None, None) if gate is None else (gate, *gate.stride()[:2])
    values = (softmax, *numbers, *tensors, *strides, *of_gate, *of_tokens, *by_seq)
    return Scales(**dict(zip(Scales._fields, values)))  # `launch_arguments` sets the last fields, for Hopper kernels


def _stride_of_seqs(scale: Any) -> int | None:
    """Stride from a sequence's scale to the next sequence's; None if all sequences have one scale."""
    if scale.ndim < 2 or scale.shape[0] == 1 or scale.stride(0) == 0:
        return None
    return int(scale.stride(0))
