"""`generate_batch`: attention over the host's own paged cache, without gathering keys and values.

A layer's keys and values are views of the host's cache.  Page tables, lengths and slots of a step are derived once for
all layers of a group.  Nothing waits for the GPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...api import paged_attention, write_kv
from .. import BUCKET
from . import ready


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, cache: Any, window: int | None, scores: Any, kwargs: Any
) -> Tensor:
    """Store new key and value [1, kv_heads, T, D] and attend with query [1, heads, T, D] -> [1, T, heads, D]."""
    ready.wait()
    layer = layer_of(cache, module.layer_idx)
    tables = tables_of(layer, module.layer_idx, kwargs)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if k.shape[1:] != layer.k_pages.shape[2:] or v.shape[1:] != layer.v_pages.shape[2:]:
        # All rows of the host's cache have config.head_dim elements, too few for expanded keys of latent attention.
        raise ValueError(
            f"{type(module).__name__} brings keys {list(k.shape[1:])}, values {list(v.shape[1:])} [kv_heads, dim], but "
            f"transformers' paged cache has rows of {list(layer.k_pages.shape[2:])}, for any attention: plain generate "
            "serves this model"
        )
    rest: dict[str, Any] = {
        "max_seqlen_q": tables.max_seqlen_q,
        "max_seqlen_k": tables.max_seqlen_k,
        "window_size": (-1, -1) if (window := layer.window or window) is None else (window - 1, 0),
        **scores._asdict(),
    }
    where: Any = (tables.page_table, tables.seq_lens, tables.cu_seqlens_q)
    if layer.window is None:
        _write(k, v, layer, tables)
        out = paged_attention(q, layer.k_pages, layer.v_pages, *where, **rest)
    else:  # new keys are written after the call, because they may overwrite cached keys that the call reads
        cached = kwargs["read_index"][layer.group].numel() > 0
        pages = (layer.k_slots, layer.v_slots) if cached else (layer.k_pages, layer.v_pages)
        out = paged_attention(q, *pages, *where, k_new=k, v_new=v, **rest)
        _write(k, v, layer, tables)
    return out.unsqueeze(0)  # type: ignore[union-attr]


def _write(k: Tensor, v: Tensor, layer: Any, tables: Any) -> None:
    # Unchecked: the host gives all padding one slot, which nobody reads, and checks refuse a slot given twice.
    write_kv(k, v, layer.k_pages, layer.v_pages, tables.slots, check=False)


# ---- a layer's part of the cache -----------------------------------------------------------------


class Layer(NamedTuple):
    """A layer's part of the cache: pages [pages, page_size, kv_heads, D], and the host's slots [slots, 1, kv_heads, D].

    Pages and slots are views of one memory.  Some versions of the host keep all layers in one buffer, and slot numbers
    then count the rows of all layers.  In this case `k_slots` and `v_slots` overlap: each is nearly the whole buffer.
    Both are only read.  Writes of new keys and values go to `k_pages` and `v_pages`.
    """

    group: int  # number of the layer's group, whose layers share page tables and indices
    kind: str  # "full_attention" or "sliding_attention": the layer's key in the host's dicts of lengths
    page_size: int
    stride: int  # distance from the first slot of a page to that of the next page, in the host's slot numbers
    window: int | None  # slots of a sequence's ring buffer in a sliding layer; None: no ring buffer
    k_slots: Tensor
    v_slots: Tensor
    k_pages: Tensor
    v_pages: Tensor


def layer_of(cache: Any, index: int) -> Layer:
    """The layer's part of this cache, looked up once and kept with the cache."""
    layers = cache.__dict__.setdefault("_paged_attn_layers", {})
    if index not in layers:
        layers[index] = _find(cache, index)
    return layers[index]


def _find(cache: Any, index: int) -> Layer:
    if hasattr(cache, "layer_to_allocator"):  # one buffer for all layers; a layer's views begin at its first row
        allocator = cache.layer_to_allocator[index]
        k, v = allocator._kv_token_views[index]
        kind, page_size = allocator.layer_type, allocator.tokens_per_page
        window, stride = getattr(allocator, "sliding_window", None), allocator.block_physical_stride
        return _layer(allocator.index, kind, page_size, stride, window, k, v)
    if hasattr(cache, "layer_index_to_group_indices"):  # one buffer holds the n-th layer of every group
        group, place = cache.layer_index_to_group_indices[index]
        window = cache.sliding_windows[index]  # the host writes 1 for full attention
        kind = "full_attention" if window == 1 else "sliding_attention"
        k, v = cache.key_cache[place], cache.value_cache[place]
        return _layer(group, kind, cache.block_size, cache.block_size, None if window == 1 else window, k, v)
    raise RuntimeError(
        f"paged_attn does not know this {type(cache).__name__}: it has neither layer_to_allocator nor "
        "layer_index_to_group_indices"
    )


def _layer(group: int, kind: str, page_size: int, stride: int, window: int | None, k: Tensor, v: Tensor) -> Layer:
    if kind not in ("full_attention", "sliding_attention"):
        raise ValueError(f"paged_attn does not know layers of {kind}")
    slots = min(len(k), len(v))  # if keys and values share one buffer, the view of values begins later and is shorter
    pages = 1 + (slots - page_size) // stride
    paged = [x.as_strided((pages, page_size, *x.shape[1:]), (stride * x.stride(0), *x.stride())) for x in (k, v)]
    return Layer(group, kind, page_size, stride, window, k[:slots].unsqueeze(1), v[:slots].unsqueeze(1), *paged)


# ---- a step's tables -----------------------------------------------------------------------------


class Tables(NamedTuple):
    """Arguments of write_kv and paged_attention."""

    page_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor | None
    slots: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


class StepTables:
    """Tables of a step for each group of layers, and the layers that have asked for them."""

    def __init__(self) -> None:
        self.layers: set[int] = set()
        self.groups: dict[int, Tables] = {}


def tables_of(layer: Layer, index: int, kwargs: dict[str, Any]) -> Tables:
    """Return the tables of a layer's group; they are kept as an attribute of the step's tensor cu_seq_lens_q.

    If a layer asks a second time, the host has put a new step into the same tensors, as when it captures a graph after
    a trial run.  All tables are then derived anew.
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
    """Derive tables from read_index, the slots of keys to read, and write_index, the slots of new keys.

    Both list slots sequence after sequence.  read_index is empty if no key is cached.
    """
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
    else:  # rings without cached keys: all keys are new, and no page is read
        table = cu_q.new_zeros(1, bound // page).expand(len(cu_q) - 1, -1)
    if layer.stride != layer.page_size:  # the host's slots also count rows of other layers
        slots = slots // layer.stride * layer.page_size + slots % layer.stride
    # For a padded batch, the host's bound on a sequence's queries is the number of all tokens, padding included.
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
