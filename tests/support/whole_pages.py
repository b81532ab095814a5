"""Tensors of copied and gathered pages: random bytes, page ids, and a batch of tables and lengths."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

PAGES = 7
RARE = [torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.float8_e4m3fnuz, torch.float8_e8m0fnu]
# What calls that are refused have beside what is wrong.
CACHE = torch.zeros(4, 8, 2, 16)
ID = torch.zeros(3, dtype=torch.int64)


def noise(device: str, dtype: torch.dtype, *shape: int) -> Tensor:
    """A tensor of random bytes."""
    return torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, device=device).view(dtype)[..., 0]


def ids(device: str, *numbers: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(numbers, dtype=dtype, device=device)


def as_bytes(tensors: list[Tensor]) -> list[bytes]:
    return [x.contiguous().view(torch.uint8).cpu().numpy().tobytes() for x in tensors]


LENGTHS = (11, 0, -4, 5, 1)
TABLE = ((2, 6, 0), (9, 9, 9), (9, 9, 9), (5, 9, 9), (-1, 9, 9))  # of page -1 rows are zeros; 9 is no page


def batch(device: str, ragged: bool, dtype: torch.dtype = torch.int32) -> tuple[Any, Tensor]:
    lengths = torch.tensor(LENGTHS, dtype=dtype, device=device)
    if not ragged:
        return torch.tensor(TABLE, dtype=dtype, device=device), lengths
    pair = ids(device, 0, 3, 3, 3, 4, 5, dtype=dtype), ids(device, 2, 6, 0, 5, -1, dtype=dtype)
    return tuple([torch.stack([x, x + 1], 1)[:, 0] for x in pair]), lengths  # strided
