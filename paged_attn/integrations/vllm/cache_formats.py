"""Formats of vLLM's caches: elements, scales after rows, and the rotation of heads that int4 asks for."""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.platforms import current_platform

INT4 = "int4_per_token_head"
# Formats with a scale for each token and head.
BY_TOKEN = (INT4, "int8_per_token_head", "fp8_per_token_head")
TAIL = 4  # bytes of the float32 scale after each row of keys or of values


def elements_of(kv_cache_dtype: str) -> torch.dtype | None:
    """Dtype of the elements of a cache of bytes: fp8, int8, or pairs of int4; None for other caches."""
    if kv_cache_dtype in ("fp8", "fp8_e4m3", "fp8_per_token_head"):
        return current_platform.fp8_dtype()
    known = {"fp8_e5m2": torch.float8_e5m2, "int8_per_token_head": torch.int8, INT4: torch.uint8}
    return known.get(kv_cache_dtype)


def elements_in(kv_cache_dtype: str, dims: int) -> int:
    """Number of elements that hold `dims` dims of a head, without the scale: an element of int4 holds two dims."""
    return dims // 2 if kv_cache_dtype == INT4 else dims


def tail_of(kv_cache_dtype: str) -> int:
    """Bytes of the scale after each row of keys or of values; 0 without a scale."""
    return TAIL if kv_cache_dtype in BY_TOKEN else 0


def row_of(kv_cache_dtype: str, *dims: int) -> int:
    """Elements of one head in a slot, scales included.  dims: width of the key, of the value, or of both in turn."""
    return sum(elements_in(kv_cache_dtype, n) + tail_of(kv_cache_dtype) for n in dims)


class Rotation:
    """vLLM's rotation of heads before int4: signs, then Hadamard matrices of 1 and -1.

    The matrices make a head longer by a factor.  The product of a rotated query and a rotated key, divided by the
    square of this factor, is the product of the unrotated ones.  The signs are vLLM's own, so that its kernels and
    other instances read the same caches.
    """

    def __init__(self, dims: int) -> None:
        from vllm.v1.attention.ops.int4_per_token_head import single_rht

        # not on the meta device, on which some loaders of vLLM make layers
        heads = torch.eye(dims, device=current_platform.device_type or "cpu")
        # on CUDA vLLM multiplies in bfloat16, whose rounding is no part of the rotation
        self.of_cache: Tensor = single_rht(heads).round()
        squared_length = self.of_cache[0].abs().sum()  # a power of two: quotients are exact in all dtypes
        self.of_queries, self.of_results = self.of_cache / squared_length, self.of_cache.t() / squared_length


def rotated(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate heads [tokens, heads, dims] by a matrix [dims, dims], a field of Rotation.

    VLLM_BATCH_INVARIANT replaces torch's product, but in vLLM 0.26 not a product that writes into a given tensor.
    Therefore the result is a new tensor.
    """
    return x @ rotation.to(x)
