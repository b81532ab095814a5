"""Facts from dtypes and shapes of caches, for code that needs no record of Triton."""

import torch

MANTISSA = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}


def is_fp8(dtype: torch.dtype) -> bool:
    """Whether elements of this type are passed to kernels as bytes."""
    return dtype in MANTISSA


def page_of(k_cache: torch.Tensor, kv_layout: str) -> tuple[int, int]:
    """(slots of a page, KV heads)."""
    slot, head = (3, 1) if k_cache.ndim == 5 else (1, 2) if kv_layout == "NHD" else (2, 1)
    return k_cache.shape[slot], k_cache.shape[head]


def value_dim_of(k_cache: torch.Tensor, v_cache: torch.Tensor) -> int:
    """Dims of values, which are not the innermost axis of x-packed caches."""
    return v_cache.shape[2 if k_cache.ndim == 5 else 3]
