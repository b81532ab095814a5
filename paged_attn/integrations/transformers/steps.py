"""Page tables, lengths and slots of a step of continuous batching, derived once for all layers of a group.

Nothing in this file waits for the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import BUCKET
from .storage import Layer


class Tables(NamedTuple):
    """Arguments of write_kv and paged_attention."""

    page_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor | None
    slots: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


class StepTables:
    """Tables by group, and the layers that have used them."""

    def __init__(self) -> None:
        self.layers: set[int] = set()
        self.groups: dict[int, Tables] = {}


def tables_of(layer: Layer, index: int, kwargs: dict[str, Any]) -> Tables:
    """The tables of a layer's group, kept as an attribute of the step's tensor cu_seq_lens_q.

    If a layer comes twice, a new pass uses the tensors with new contents, as in a capture after its trial run.  All
    tables are then derived anew.
    """
    lengths = kwargs["cu_seq_lens_q"]
    step = getattr(lengths, "_paged_attn_step", None)
    if step is None or index in step.layers:
        step = lengths._paged_attn_step = StepTables()
    step.layers.add(index)
    if layer.group not in step.groups:
        derive = _of_index if kwargs.get("block_table") is None else _of_block_table
        step.groups[layer.group] = derive(layer, kwargs)
    return step.groups[layer.group]


def _of_kind(given: Any, kind: str) -> Any:
    return given[kind] if isinstance(given, dict) else given


def _bound(name: str, kwargs: dict[str, Any]) -> Any:
    for known in (f"max_length_{name}", f"max_seqlen_{name}"):
        if known in kwargs:
            return kwargs[known]
    raise RuntimeError(f"paged_attn finds neither max_length_{name} nor max_seqlen_{name} in what transformers gives")


def _of_index(layer: Layer, kwargs: dict[str, Any]) -> Tables:
    """Tables from the physical slot of every key, sequences one after another."""
    cu_q, cu_k = kwargs["cu_seq_lens_q"], _of_kind(kwargs["cu_seq_lens_k"], layer.kind)
    read, slots = kwargs["read_index"][layer.group], kwargs["write_index"][layer.group]
    cached = read.numel() > 0
    page = 1 if cached and layer.window else layer.page_size
    bound = -(-max(_of_kind(_bound("k", kwargs), layer.kind), 1) // BUCKET) * BUCKET
    bound = -(-bound // page) * page
    if cached or not layer.window:  # without cached keys, the slots that are written are the slots that are read
        index = read if cached else slots
        at = cu_k[:-1, None] + torch.arange(0, bound, page, device=index.device)
        table = index[at.clamp_(max=index.numel() - 1)]
        table = (table if page == 1 else table // layer.stride).int()
    else:  # an empty ring: all keys are new, and no page is read
        table = cu_q.new_zeros(1, bound // page).expand(len(cu_q) - 1, -1)
    # max_length_q of a padded batch is its number of tokens, padding included.
    if layer.stride != layer.page_size:  # the host's slots also count rows of other layers
        slots = slots // layer.stride * layer.page_size + slots % layer.stride
    return Tables(table, cu_k[1:] - cu_k[:-1], cu_q, slots, _bound("q", kwargs), bound)


def _of_block_table(layer: Layer, kwargs: dict[str, Any]) -> Tables:
    """Tables of decodes of one token.  Sequences of length 0 are padding; their rows of the table hold -1."""
    table, page = kwargs["block_table"][layer.group], layer.page_size
    if layer.stride != page:
        table = table // (layer.stride // page)
    cu_k = _of_kind(kwargs["cu_seq_lens_k"], layer.kind)
    lens = (cu_k[1:] - cu_k[:-1])[: len(table)]
    last = lens.long() - 1
    column = last.clamp(min=0)[:, None] // page
    slots = table.gather(1, column).squeeze(1) * page + last % page
    return Tables(table, lens, None, slots.where(last >= 0, -1), 1, table.shape[1] * page)
