"""Number formats of cases, and how tests look at their bits."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
INT4 = torch.uint8  # two dims a byte


def is_fp8(dtype: torch.dtype) -> bool:
    return dtype in (E4M3, E5M2)


def is_scaled(dtype: torch.dtype) -> bool:
    """fp8, or int8 or int4 of a cache."""
    return dtype.itemsize == 1


def widest(query: torch.dtype, cache: torch.dtype) -> torch.dtype:
    """The first of the two of more than a byte, else bfloat16: the type of k_new, and of P in P V."""
    return next((dtype for dtype in (query, cache) if not is_scaled(dtype)), torch.bfloat16)


def bits(tensor: Tensor) -> Tensor:
    """An fp8 or int8 tensor as its bytes, which every device can index and fill; any other tensor as it is."""
    return tensor.view(torch.uint8) if is_scaled(tensor.dtype) else tensor


def stored(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers in the nearest of a type; int8 and int4 saturate, and two numbers of int4 are a byte."""
    if dtype == INT4:
        codes = numbers.round().clamp(0, 15).to(dtype)
        return codes[..., ::2] | codes[..., 1::2] << 4
    return numbers.round().clamp(-127, 127).to(dtype) if dtype == INT8 else numbers.to(dtype)


def with_zero(scales: Tensor, zeros: Tensor) -> Tensor:
    """float32 scales of an int4 cache with integer zero points, 0 to 15, in their lowest four bits."""
    return (scales.float().contiguous().view(torch.int32) & -16 | zeros.int()).view(torch.float32)


def int4_numbers(cache: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """(stored numbers - zero points [..., dims], scales [..., 1]) of an int4 cache, float64."""
    words = scales.contiguous().view(torch.int32)
    codes = torch.stack([cache & 15, cache >> 4], -1).flatten(-2).double()
    return codes - (words & 15)[..., None], (words & -16).view(torch.float32).double()[..., None]
