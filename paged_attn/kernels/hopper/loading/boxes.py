"""TMA descriptors of caches, new keys and queries: base, sizes, strides, and the box that one message loads."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from ...common.records import KV, Rows, Shape
from ..args import Pipe, dim_parts
from ..planning.shapes import KEYS_PER_CORE_MATRIX, MAX_BOX_ELEMENTS, VALUES_PER_CORE_ROW
from ..shim import TensorDescriptor, gl

_GLUON = {
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
}
_FP8 = {0: None, 2: torch.float8_e5m2, 3: torch.float8_e4m3fn}  # by mantissa bits


@dataclass
class PartBox(TensorDescriptor):
    """A box that fills only the first rows of a slot; sizes: of its first axes, which need be no powers of two."""

    sizes: tuple[int, ...] = ()


@functools.cache
def _layout(shape: tuple[int, ...], dtype: torch.dtype, swizzle: int) -> gl.NVMMASharedLayout:
    if len(shape) > 3:  # x-packed: in the order of memory, except for values that are right operands
        return gl.NVMMASharedLayout(swizzle, dtype.itemsize * 8, len(shape))
    return gl.NVMMASharedLayout.get_default_for(list(shape), _GLUON[dtype])


def _box(
    stored: KV | Rows, sizes: list[int], strides: list[int], box: tuple[int, ...], swizzle: int = 0
) -> TensorDescriptor:
    fp8 = _FP8[stored.FP8.value]
    tensor = stored.ptr if fp8 is None else stored.ptr.view(fp8)
    return TensorDescriptor(tensor, sizes, strides, list(box), _layout(box, tensor.dtype, swizzle))


def _heads(shape: Shape, pipe: Pipe) -> int:
    """KV heads of a cache, or pairs of KV heads."""
    return shape.KV_HEADS // pipe.PARTS


def _box_dims(padded: int) -> int:
    """Dims of one message: all, or those of a part."""
    return padded // int(dim_parts(padded))


def cache_box(kv: KV, dim: int, padded: int, shape: Shape, pipe: Pipe) -> TensorDescriptor:
    """Descriptor of a cache as [rows, heads, dim]; a row is one slot's stride, and pages are ROWS_PER_PAGE rows apart.

    dim: dims of each key or value, loaded into slots of `padded` dims.  PAIRED: half as many heads of twice the dims.
    """
    if pipe.PACKED:
        return (_packed_box if pipe.SHARES else _core_box)(kv, dim, padded, shape, pipe)
    rows = (kv.ptr.shape[0] - 1) * pipe.ROWS_PER_PAGE + shape.PAGE
    together = 1 + shape.PAIRED
    sizes = [rows, _heads(shape, pipe), together * dim]
    return _box(kv, sizes, [kv.stride_slot, together * kv.stride_head, 1], (pipe.BOX, 1, _box_dims(padded)))


def _packed_box(kv: KV, dim: int, padded: int, shape: Shape, pipe: Pipe) -> TensorDescriptor:
    """Descriptor of an x-packed cache as [pages, heads, runs, page_size x run]; a run is a key's neighbouring elements.

    Whole pages that are contiguous are loaded as boxes of long rows.
    """
    run = kv.RUN.value
    runs, row, box = dim // run, shape.PAGE * run, [padded // run, pipe.BOX * run]
    step = kv.stride_run
    if pipe.BOX == shape.PAGE and (step, runs) == (row, box[0]):
        runs, row, step, box = (
            runs * row // MAX_BOX_ELEMENTS,
            MAX_BOX_ELEMENTS,
            MAX_BOX_ELEMENTS,
            [runs * row // MAX_BOX_ELEMENTS, MAX_BOX_ELEMENTS],
        )
    pages = kv.ptr.shape[0]
    sizes, strides = [pages, _heads(shape, pipe), runs, row], [kv.stride_page, kv.stride_head, step, 1]
    return _box(kv, sizes, strides, (1, 1, *box))


def _core_box(kv: KV, dim: int, padded: int, shape: Shape, pipe: Pipe) -> TensorDescriptor:
    """Descriptor of an x-packed cache as [pages, heads, groups of keys, runs, group x run], for right operands.

    Last two axes: core matrices of 8 keys x 16 bytes; for values, a row of 32 bytes for each dim.
    """
    run = kv.RUN.value
    group = KEYS_PER_CORE_MATRIX if run > 1 else VALUES_PER_CORE_ROW
    pages, runs = kv.ptr.shape[0], dim // run
    sizes = [pages, _heads(shape, pipe), shape.PAGE // group, runs, group * run]
    strides = [kv.stride_page, kv.stride_head, group * run, kv.stride_run, 1]
    box = (1, 1, pipe.BOX // group, padded // run, group * run)
    return _box(kv, sizes, strides, box, swizzle=0 if run > 1 else 32)


def new_box(kv: KV | None, dim: int, padded: int, shape: Shape, pipe: Pipe) -> TensorDescriptor | None:
    """Descriptor of new keys or values [tokens, heads, dim], in boxes as those of the cache; None: there are none."""
    if kv is None:
        return None
    sizes = [kv.ptr.shape[0], _heads(shape, pipe), dim]
    return _box(kv, sizes, [kv.stride_slot, kv.stride_head, 1], (pipe.BOX, 1, _box_dims(padded)))


def rows_box(rows: Rows, shape: Shape, pipe: Pipe) -> TensorDescriptor:
    """Descriptor of queries: a box has a consumer's tokens x the heads of a group, in the first rows of a slot."""
    most = pipe.COLUMNS if pipe.BESIDE else pipe.ROWS
    box = _box(rows, [*rows.ptr.shape], [rows.stride_token, rows.stride_head, 1], (most, 1, _box_dims(shape.DIM)))
    tokens = shape.BLOCK_Q // pipe.CONSUMERS
    return PartBox(**vars(box), sizes=(tokens, shape.GROUP))
