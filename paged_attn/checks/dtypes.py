"""Dtypes that tensors may have, and their names in errors."""

from __future__ import annotations

import torch

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
HALF = (torch.float16, torch.bfloat16)
FLOAT = (*HALF, torch.float32)
QUERY = (*FLOAT, *FP8)
FLOAT32 = (torch.float32,)
INTEGER = (torch.int32, torch.int64)
BOOL = (torch.bool,)
INT32 = (torch.int32,)
SAME = {dtype: (dtype,) for dtype in QUERY}
# by q's dtype: dtypes of the caches, and of sinks, qq_bias and gate
CACHE_FOR = {dtype: (dtype, *FP8) if dtype in FLOAT else (*HALF, *FP8) for dtype in QUERY}
BIAS_FOR = {dtype: (torch.float32, dtype) if dtype in HALF else FLOAT32 for dtype in FLOAT} | dict.fromkeys(FP8, FLOAT)

# what a score_mod may be given a pointer to: the keys of kernels/common/score_mod.POINTERS, which Triton's names take
POINTED = (*FLOAT, torch.float64, torch.bool, torch.uint8, torch.int8, torch.int16, *INTEGER)


def names(dtypes: tuple[torch.dtype, ...]) -> str:
    """float16 | bfloat16."""
    return " | ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
