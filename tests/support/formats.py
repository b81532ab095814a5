"""Number formats of cases, and how tests look at their bits."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def is_fp8(dtype: torch.dtype) -> bool:
    return dtype.itemsize == 1


def widest(query: torch.dtype, cache: torch.dtype) -> torch.dtype:
    """The first of the two that is not fp8, else bfloat16: the type of k_new, and of P in P V."""
    return next((dtype for dtype in (query, cache) if not is_fp8(dtype)), torch.bfloat16)


def bits(tensor: Tensor) -> Tensor:
    """An fp8 tensor as its bytes, which every device can index and fill; any other tensor as it is."""
    return tensor.view(torch.uint8) if is_fp8(tensor.dtype) else tensor
