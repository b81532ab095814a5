"""Number formats of cases, and how tests look at their bits."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8


def is_fp8(dtype: torch.dtype) -> bool:
    return dtype in (E4M3, E5M2)


def is_scaled(dtype: torch.dtype) -> bool:
    """fp8, or int8 of a cache."""
    return dtype.itemsize == 1


def widest(query: torch.dtype, cache: torch.dtype) -> torch.dtype:
    """The first of the two of more than a byte, else bfloat16: the type of k_new, and of P in P V."""
    return next((dtype for dtype in (query, cache) if not is_scaled(dtype)), torch.bfloat16)


def bits(tensor: Tensor) -> Tensor:
    """An fp8 or int8 tensor as its bytes, which every device can index and fill; any other tensor as it is."""
    return tensor.view(torch.uint8) if is_scaled(tensor.dtype) else tensor


def stored(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers in the nearest of a type; int8 saturates."""
    return numbers.round().clamp(-127, 127).to(dtype) if dtype == INT8 else numbers.to(dtype)
