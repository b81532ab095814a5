"""Number formats of cases, and how tests look at their bits."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
INT4 = torch.uint8  # a byte holds two dims
FORMATS: dict[str, tuple[torch.dtype, ...]] = {"int8": (INT8,), "fp8": (E4M3, E5M2), "int4": (INT4,)}


def is_fp8(dtype: torch.dtype) -> bool:
    return dtype in (E4M3, E5M2)


def is_scaled(dtype: torch.dtype) -> bool:
    """Whether a dtype is fp8, int8 or int4."""
    return dtype.itemsize == 1


def widest(query: torch.dtype, cache: torch.dtype) -> torch.dtype:
    """Return the first of both dtypes with more than a byte, else bfloat16: the dtype of k_new, and of P in P V."""
    return next((dtype for dtype in (query, cache) if not is_scaled(dtype)), torch.bfloat16)


def bits(tensor: Tensor) -> Tensor:
    """View a tensor of fp8 or int8 as bytes, which every device can index and fill; return others as they are."""
    return tensor.view(torch.uint8) if is_scaled(tensor.dtype) else tensor


def stored(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Round numbers to a dtype.  int8 and int4 saturate; int4 packs two numbers into a byte."""
    if dtype == INT4:
        codes = numbers.round().clamp(0, 15).to(dtype)
        return codes[..., ::2] | codes[..., 1::2] << 4
    return numbers.round().clamp(-127, 127).to(dtype) if dtype == INT8 else numbers.to(dtype)


def with_zero(scales: Tensor, zeros: Tensor) -> Tensor:
    """Return float32 scales of an int4 cache, with integer zero points 0 to 15 in their lowest four bits."""
    return (scales.float().contiguous().view(torch.int32) & -16 | zeros.int()).view(torch.float32)


def int4_numbers(cache: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return (stored numbers - zero points [..., dims], scales [..., 1]) of an int4 cache, float64."""
    words = scales.contiguous().view(torch.int32)
    codes = torch.stack([cache & 15, cache >> 4], -1).flatten(-2).double()
    return codes - (words & 15)[..., None], (words & -16).view(torch.float32).double()[..., None]
