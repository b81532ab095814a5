"""`generate_batch`: attention over the host's own paged cache, without gathering keys and values."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...api import paged_attention, write_kv
from . import ready
from .steps import tables_of
from .storage import layer_of


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, cache: Any, window: int | None, scores: Any, kwargs: Any
) -> Tensor:
    """Store new key and value [1, kv_heads, T, D] and attend with query [1, heads, T, D] -> [1, T, heads, D]."""
    ready.wait()
    layer = layer_of(cache, module.layer_idx)
    tables = tables_of(layer, module.layer_idx, kwargs)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if k.shape[1:] != layer.k_pages.shape[2:] or v.shape[1:] != layer.v_pages.shape[2:]:
        # All rows have config.head_dim elements: too few for expanded keys of latent attention, for example.
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
    else:  # new keys may overwrite keys that this call still has to read, so they are written afterwards
        cached = kwargs["read_index"][layer.group].numel() > 0
        pages = (layer.k_slots, layer.v_slots) if cached else (layer.k_pages, layer.v_pages)
        out = paged_attention(q, *pages, *where, k_new=k, v_new=v, **rest)
        _write(k, v, layer, tables)
    return out.unsqueeze(0)  # type: ignore[union-attr]


def _write(k: Tensor, v: Tensor, layer: Any, tables: Any) -> None:
    # Unchecked, because the host sends all padding to one slot, which nobody reads.
    write_kv(k, v, layer.k_pages, layer.v_pages, tables.slots, check=False)
