"""Facts about dtypes and shapes of caches, and integers rounded up, without Triton."""

import torch

INT4 = torch.uint8  # dtype of int4 caches: a byte has two dims, 0 to 15 each, the earlier one in its lower bits
# Bits of a number that are neither sign nor exponent, for each format of a byte or less.  Kernels get tensors of these
# formats as bytes, and this number as the name of the format (`Rows.FP8`).
MANTISSA = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2, torch.int8: 7, INT4: 4}
# Largest stored number of each format.  The stored number is number / scale, for int4 number / scale + zero point.
# int8 is symmetric: -128 is read, but never written.
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0, INT4: 15.0}
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # number of bytes -> integer dtype


def is_fp8(dtype: torch.dtype) -> bool:
    """Whether this is a floating-point format of one byte."""
    return dtype in MANTISSA and dtype.is_floating_point


def is_scaled(dtype: torch.dtype) -> bool:
    """Whether caches of this dtype have scales: fp8, int8 and int4."""
    return dtype in LARGEST


def dims_of(cache: torch.Tensor) -> int:
    """Dims of a head along the last axis of a cache; a byte of int4 has two."""
    return cache.shape[-1] * (2 if cache.dtype == INT4 else 1)


def in_words(x: torch.Tensor) -> torch.Tensor:
    """View elements as integers of equal size, because torch and Triton know few operations on rare dtypes."""
    word = WORDS.get(x.dtype.itemsize)
    return x if word is None else x.view(word)


def page_of(k_cache: torch.Tensor, kv_layout: str) -> tuple[int, int]:
    """(slots of a page, KV heads) of a cache."""
    slot, head = (3, 1) if k_cache.ndim == 5 else (1, 2) if kv_layout == "NHD" else (2, 1)
    return k_cache.shape[slot], k_cache.shape[head]


def value_dim_of(k_cache: torch.Tensor, v_cache: torch.Tensor) -> int:
    """Dims of values: axis 2 of an x-packed v_cache, the last axis of others."""
    return v_cache.shape[2] if k_cache.ndim == 5 else dims_of(v_cache)


# Triton's cdiv and next_power_of_2 take 2 us a call, because kernels use them, too.  A plan calls them a dozen times.


def cdiv(x: int, y: int) -> int:
    """x / y, rounded up."""
    return -(-x // y)


def next_power_of_2(x: int) -> int:
    """The smallest power of two >= x; 0 for x <= 0."""
    return 1 << (x - 1).bit_length() if x > 0 else 0
