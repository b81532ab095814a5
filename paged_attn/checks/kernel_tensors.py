"""Tensors that kernels can take: their dtypes, and checks for a strided layout, memory of their own and no gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
HALF = (torch.float16, torch.bfloat16)
FLOAT = (*HALF, torch.float32)
QUERY = (*FLOAT, *FP8)
FLOAT32 = (torch.float32,)
SLOT_SCALE = (torch.float32, torch.float16)
INT4 = torch.uint8  # dtype of int4 caches: a byte has two dims
# Dtypes of caches that have scales.  They equal the keys of LARGEST in records/formats.py, which no file of checks/
# imports.
SCALED = (*FP8, torch.int8, INT4)
INTEGER = (torch.int32, torch.int64)
BOOL = (torch.bool,)
INT32 = (torch.int32,)
SAME = {dtype: (dtype,) for dtype in (*FLOAT, *SCALED)}
# dtype of q -> dtypes of the caches (CACHE_FOR), and dtypes of sinks, qq_bias and gate (BIAS_FOR)
CACHE_FOR = {dtype: (dtype, *SCALED) if dtype in FLOAT else (*HALF, *SCALED) for dtype in QUERY}
BIAS_FOR = {dtype: (torch.float32, dtype) if dtype in HALF else FLOAT32 for dtype in FLOAT} | dict.fromkeys(FP8, FLOAT)

# Dtypes of tensors among score_mod_args: the keys of kernels/common/score_mod.POINTERS.
POINTED = (*FLOAT, torch.float64, torch.bool, torch.uint8, torch.int8, torch.int16, *INTEGER)

NO_DISPATCH = Tensor.__torch_dispatch__


def names(dtypes: tuple[torch.dtype, ...]) -> str:
    """Names of dtypes as text: "float16 | bfloat16"."""
    return " | ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def watched(*tensors: Any) -> bool:
    """Whether torch must see operators, not launches: in a dispatch mode, or if a tensor has no memory of its own."""
    return torch._C._len_torch_dispatch_stack() > 0 or any(
        isinstance(x, Tensor) and (x.is_meta or type(x).__torch_dispatch__ is not NO_DISPATCH) for x in tensors
    )


def refuse_gradient(name: str, value: Tensor) -> None:
    """Refuse a tensor that requires grad under grad mode: its gradient would be missing silently."""
    if value.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name} requires grad, but paged attention has no backward pass: call it under torch.no_grad()"
        )


def plain(name: str, value: Tensor) -> None:
    """Refuse sparse and nested tensors, gradients, and tensors without memory (meta, fake, wrapped by vmap)."""
    if value.layout is not torch.strided or value.is_nested:
        what = "a nested one" if value.is_nested else str(value.layout).removeprefix("torch.")
        raise TypeError(f"{name} must be a strided tensor, got {what}")
    refuse_gradient(name, value)
    if what := _instead_of_memory(value):
        raise TypeError(f"{name} must be a tensor with memory of its own, got {what}")


def _instead_of_memory(x: Tensor) -> str:
    """What a tensor without memory of its own is, for the error; "" for a tensor with memory."""
    if type(x).__torch_dispatch__ is not NO_DISPATCH:
        return type(x).__name__
    if x.is_meta:
        return "one on meta"
    try:
        x.data_ptr()
        wrapped = torch._is_functional_tensor(x)
    except RuntimeError:
        wrapped = True
    return "one that torch.func wraps" if wrapped else ""
