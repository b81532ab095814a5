"""A call of write_kv."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .attention import quiet
from .cache import Layout, layouts_of
from .call import narrow, per_head


def write(
    k: Tensor, v: Tensor | None, k_cache: Tensor, v_cache: Tensor | None, slot_mapping: Tensor, k_scale: Any,
    v_scale: Any, kv_layout: str, part: str | None,
) -> None:  # fmt: skip
    """Write the keys, the values, or both, of tokens whose slot is not negative."""
    layouts = layouts_of(k_cache, kv_layout)
    size = k_cache.permute(layouts[0].slots).shape[1]
    with quiet(k.device):
        kept = slot_mapping >= 0
        slots = slot_mapping.long()
        if not bool(kept.all()):
            slots, k, v = slots[kept], k[kept], v if v is None else v[kept]
        if part != "values":
            _scatter(k_cache, layouts[0], k, slots, size, k_scale)
        if part != "keys" and v is not None and v_cache is not None:
            _scatter(v_cache, layouts[1], v, slots, size, v_scale)


def _scatter(cache: Tensor, layout: Layout, new: Tensor, slots: Tensor, size: int, scale: Any) -> None:
    """New [tokens, kv_heads, dims] / scale into slots of a cache, rounded to nearest."""
    by = per_head(scale, new.shape[1])
    if isinstance(by, Tensor):
        new = new.float() / by[:, None]
    elif by != 1.0:
        new = new.float() / by
    stored = narrow(new, cache.dtype)
    if cache.dtype.itemsize == 1:
        cache, stored = cache.view(torch.uint8), stored.view(torch.uint8)
    rows = cache.permute(layout.slots)
    rows[slots // size, slots % size] = stored.unflatten(-1, rows.shape[3:]) if rows.ndim == 5 else stored
