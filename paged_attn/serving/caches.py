"""The key and value caches of one layer, with NaN in every slot without a live token, so that wrong reads show."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LAYOUTS = ("NHD", "HND", "x-packed")
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Caches:
    """Keys and values of one layer in one of the library's layouts."""

    k: Tensor
    v: Tensor
    kv_layout: str  # the library's argument; ignored for x-packed caches, whose k has 5 axes

    @staticmethod
    def allocate(
        layout: str, pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> Caches:
        """Caches in which every slot is NaN."""
        if layout == "x-packed":
            x = 16 // dtype.itemsize  # 16 bytes side by side
            if head_dim % x:
                raise ValueError(f"x-packed {dtype} wants a head_dim divisible by {x}, got {head_dim}")
            k_shape: tuple[int, ...] = (pages, kv_heads, head_dim // x, page_size, x)
            v_shape: tuple[int, ...] = (pages, kv_heads, head_dim, page_size)
        elif layout == "HND":
            k_shape = v_shape = (pages, kv_heads, page_size, head_dim)
        else:
            k_shape = v_shape = (pages, page_size, kv_heads, head_dim)
        k = torch.empty(k_shape, dtype=dtype, device=device)
        caches = Caches(k, torch.empty(v_shape, dtype=dtype, device=device), "HND" if layout == "HND" else "NHD")
        caches.poison(slice(None))
        return caches

    def poison(self, pages: list[int] | slice) -> None:
        """Fill pages with NaN, written as bits, because not every device can index fp8 tensors."""
        if pages == []:
            return
        bits = _BITS[self.k.element_size()]
        nan = torch.tensor(torch.nan).to(self.k.dtype).view(bits).item()
        index = torch.tensor(pages, device=self.k.device) if isinstance(pages, list) else pages
        self.k.view(bits)[index] = nan
        self.v.view(bits)[index] = nan
