"""A layer's keys and values in the host's paged cache, as views."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class Layer(NamedTuple):
    """A layer's part of the cache: pages [pages, page_size, kv_heads, D], and the host's slots [slots, 1, kv_heads, D].

    Pages and slots are views of one memory.  Some hosts keep all layers in one buffer, and their slots count the rows
    of all layers.  Slots of keys and of values then overlap, and are only for reading.
    """

    group: int  # group of layers with common page tables and indices
    kind: str  # "full_attention" or "sliding_attention": key of the host's lengths
    page_size: int
    stride: int  # slots of the host from a page to the next page
    window: int | None  # slots of a ring; None: no ring
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
    if hasattr(cache, "layer_to_allocator"):  # one buffer for all layers, views shifted by the layer
        allocator = cache.layer_to_allocator[index]
        k, v = allocator._kv_token_views[index]
        kind, page_size = allocator.layer_type, allocator.tokens_per_page
        window, stride = getattr(allocator, "sliding_window", None), allocator.block_physical_stride
        return _layer(allocator.index, kind, page_size, stride, window, k, v)
    if hasattr(cache, "layer_index_to_group_indices"):  # a buffer per layer of a group
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
    slots = min(len(k), len(v))  # with shifted views, the view of values is shorter
    pages = 1 + (slots - page_size) // stride
    paged = [x.as_strided((pages, page_size, *x.shape[1:]), (stride * x.stride(0), *x.stride())) for x in (k, v)]
    return Layer(group, kind, page_size, stride, window, k[:slots].unsqueeze(1), v[:slots].unsqueeze(1), *paged)
