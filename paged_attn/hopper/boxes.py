"""Tensors as the copy engine sees them: a base, sizes, strides, and the box that one message moves."""

from __future__ import annotations

import functools

import torch

from ..kernels.args import KV, Rows, Shape
from .args import Pipe
from .shim import TensorDescriptor, gl

_GLUON = {
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
}
_FP8 = {0: None, 2: torch.float8_e5m2, 3: torch.float8_e4m3fn}  # by mantissa bits


@functools.cache
def _layout(shape: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(shape), _GLUON[dtype])


def _box(stored: KV | Rows, sizes: list[int], strides: list[int], box: tuple[int, ...]) -> TensorDescriptor:
    fp8 = _FP8[stored.FP8.value]
    tensor = stored.ptr if fp8 is None else stored.ptr.view(fp8)
    return TensorDescriptor(tensor, sizes, strides, list(box), _layout(box, tensor.dtype))


def cache_box(kv: KV, shape: Shape, pipe: Pipe) -> TensorDescriptor:
    """A cache as [rows, heads, head_dim], a row being one slot's stride; pages lie ROWS_PER_PAGE apart."""
    rows = (kv.ptr.shape[0] - 1) * pipe.ROWS_PER_PAGE + shape.PAGE
    sizes = [rows, shape.KV_HEADS, shape.HEAD_DIM]
    return _box(kv, sizes, [kv.stride_slot, kv.stride_head, 1], (pipe.BOX, 1, shape.DIM))


def new_box(kv: KV | None, shape: Shape, pipe: Pipe) -> TensorDescriptor | None:
    """Keys or values outside the cache, a token's to a row, in boxes of the same form; None: there are none."""
    if kv is None:
        return None
    sizes = [kv.ptr.shape[0], shape.KV_HEADS, shape.HEAD_DIM]
    return _box(kv, sizes, [kv.stride_slot, kv.stride_head, 1], (pipe.BOX, 1, shape.DIM))


def rows_box(rows: Rows, shape: Shape, pipe: Pipe) -> TensorDescriptor:
    """Queries: a consumer's tokens x the heads of a group."""
    tokens, heads, head_dim = rows.ptr.shape
    box = (shape.BLOCK_Q // pipe.CONSUMERS, shape.GROUP, shape.DIM)
    return _box(rows, [tokens, heads, head_dim], [rows.stride_token, rows.stride_head, 1], box)
