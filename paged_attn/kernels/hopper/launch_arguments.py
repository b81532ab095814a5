"""Arguments of the Hopper kernels from tensors and a plan; TMA descriptors of caches, new keys and queries."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from ...launching.launch import Step
from ...records.formats import MANTISSA
from ...records.layout import ROOM
from ...records.plan import Launch
from ..common.records import KV, Rows, Shape
from .args import Pipe, dim_parts, dims_of_element
from .blocks import blocks_kernel
from .mixed import mixed_kernel
from .planning.coverage import need_of
from .planning.shapes import KEYS_PER_CORE_MATRIX, MAX_BOX_ELEMENTS, VALUES_PER_CORE_ROW
from .shares import shares_kernel
from .shim import TensorDescriptor, gl


def _boxes(launch: Launch, call: Any) -> list[Any]:
    """Return TMA descriptors of keys, values, new keys, new values and, except for the shares kernel, queries.

    None stands for an absent tensor, or for queries that do not come through TMA.
    """
    shape, pipe = launch.shape, launch.pipe
    if shape.REST is not None:
        return _latent_boxes(launch, call)
    widths = (shape.HEAD_DIM, shape.DIM), (shape.VALUE_DIM, shape.VALUE_PADDED)
    together = int(dims_of_element(pipe.FP8))
    boxes: list[Any] = [
        cache_box(kv, dim // together, padded // together, shape, pipe) for kv, (dim, padded) in zip(call.cache, widths)
    ]
    boxes += [new_box(kv, *width, shape, pipe) for kv, width in zip(call.new or (None, None), widths)]
    if not pipe.SHARES or pipe.BESIDE:
        boxes.append(rows_box(call.query, shape, pipe) if pipe.QUERY_BOX else None)
    return boxes


def _latent_boxes(launch: Launch, call: Any) -> list[Any]:
    """Return `_boxes` of latents: boxes of value dims (of half of them with HALVES) in place of boxes of keys.

    Boxes of the key dims behind the values take the place of boxes of values; None if there are no such dims.
    """
    shape, pipe = launch.shape, launch.pipe
    widths = [(shape.VALUE_DIM, shape.DIM // (1 + pipe.HALVES))]
    if shape.REST:
        widths.append((shape.HEAD_DIM, shape.REST))
    new = call.new and call.new.key
    boxes: list[Any] = [cache_box(call.cache.key, *width, shape, pipe) for width in widths]
    new_boxes: list[Any] = [new_box(new, *width, shape, pipe) for width in widths]
    nothing: list[Any] = [None] * (2 - len(widths))
    return [*boxes, *nothing, *new_boxes, *nothing]


def attention(launch: Launch, call: Any, numbers: tuple[Any, ...]) -> Step:
    """Return the step of one launch, with all arguments of its kernel."""
    shape, pipe, beside = launch.shape, launch.pipe, launch.beside
    boxes, compiled = _boxes(launch, call), [shape, pipe]
    kernel = shares_kernel if pipe.SHARES else blocks_kernel
    if beside is not None:
        kernel = mixed_kernel
        boxes += _boxes(beside, call)
        numbers += (beside.shortest, beside.least, beside.slots)
        compiled += [beside.shape, beside.pipe]
    scales = call.scales._replace(**_of_slots("key", call.cache.key), **_of_slots("value", call.cache.value))
    args = (call.out, call.lse, ROOM, call.query, *boxes, *numbers, call.mods, scales, *compiled)
    # batch-invariant results must not depend on the compiler's choice of fused products
    options = {"num_warps": pipe.ROWS // 16, "enable_fp_fusion": shape.PIECE is None, "launch_pdl": True}
    if launch.config.registers is not None:
        options["maxnreg"] = launch.config.registers
    room = int(pipe.FOLLOWS and not pipe.SHARES)  # shares follow a copy, which needs no scratch
    return Step(kernel, launch.grid, args, options, need_of(launch), room=room)


def _of_slots(name: str, kv: KV) -> dict[str, Any]:
    """Return the fields of Scales for scales by slot, if there are any.  name: "key" or "value"."""
    if not kv.SCALED:
        return {}
    strides = {axis: getattr(kv, f"scale_stride_{axis}") for axis in ("page", "slot", "head")}
    return {f"slot_{name}_ptr": kv.scale_ptr} | {f"slot_{name}_stride_{axis}": x for axis, x in strides.items()}


# ---- TMA descriptors -----------------------------------------------------------------------------


_GLUON = {
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
    torch.int8: gl.int8,
    torch.uint8: gl.uint8,
}
_FP8 = {0: None} | {bits: dtype for dtype, bits in MANTISSA.items()}


@dataclass
class PartBox(TensorDescriptor):
    """A descriptor of boxes that fill only the first rows of a slot.

    sizes: box sizes along the first axes, which need not be powers of two.
    """

    sizes: tuple[int, ...] = ()


@functools.cache
def _layout(shape: tuple[int, ...], dtype: torch.dtype, swizzle: int) -> gl.NVMMASharedLayout:
    if len(shape) > 3:  # x-packed: boxes keep the order of memory; only values that are right operands are swizzled
        return gl.NVMMASharedLayout(swizzle, dtype.itemsize * 8, len(shape))
    return gl.NVMMASharedLayout.get_default_for(list(shape), _GLUON[dtype])


def _box(
    stored: KV | Rows, sizes: list[int], strides: list[int], box: tuple[int, ...], swizzle: int = 0
) -> TensorDescriptor:
    fp8 = _FP8[stored.FP8.value]
    tensor = stored.ptr if fp8 is None else stored.ptr.view(fp8)
    return TensorDescriptor(tensor, sizes, strides, list(box), _layout(box, tensor.dtype, swizzle))


def _heads(shape: Shape, pipe: Pipe) -> int:
    """Number of KV heads along a descriptor's axis of heads; with PAIRED, number of pairs of KV heads."""
    return shape.KV_HEADS // pipe.PARTS


def _box_dims(padded: int) -> int:
    """Dims of one box: all `padded` dims, or the 64 dims of a part (`args.dim_parts`)."""
    return padded // int(dim_parts(padded))


def cache_box(kv: KV, dim: int, padded: int, shape: Shape, pipe: Pipe) -> TensorDescriptor:
    """Descriptor of a cache as [rows, heads, dim]: rows are a slot's stride apart, and pages ROWS_PER_PAGE rows apart.

    dim: number of elements of a key or value.  An element of int4 has two dims.  padded: number of elements of a box's
    row, unless boxes have parts of 64 dims (`_box_dims`).  PAIRED: the descriptor has half as many heads of
    twice the dims.  x-packed caches have other axes (`_packed_box`, `_core_box`).
    """
    if pipe.PACKED:
        return (_packed_box if pipe.SHARES else _core_box)(kv, dim, padded, shape, pipe)
    rows = (kv.ptr.shape[0] - 1) * pipe.ROWS_PER_PAGE + shape.PAGE
    together = 1 + shape.PAIRED
    sizes = [rows, _heads(shape, pipe), together * dim]
    return _box(kv, sizes, [kv.stride_slot, together * kv.stride_head, 1], (pipe.BOX, 1, _box_dims(padded)))


def _packed_box(kv: KV, dim: int, padded: int, shape: Shape, pipe: Pipe) -> TensorDescriptor:
    """Descriptor of an x-packed cache as [pages, heads, runs, page_size * run], for left operands.

    A run is a key's neighbouring elements; values have runs of one element.  A box that is a whole contiguous page is
    loaded as rows of MAX_BOX_ELEMENTS elements.
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
    """Descriptor of an x-packed cache as [pages, heads, groups of keys, runs, group * run], for right operands.

    The last two axes are core matrices of 8 keys x 16 bytes or, for values, a row of 32 bytes for each dim.
    """
    run = kv.RUN.value
    group = KEYS_PER_CORE_MATRIX if run > 1 else VALUES_PER_CORE_ROW
    pages, runs = kv.ptr.shape[0], dim // run
    sizes = [pages, _heads(shape, pipe), shape.PAGE // group, runs, group * run]
    strides = [kv.stride_page, kv.stride_head, group * run, kv.stride_run, 1]
    box = (1, 1, pipe.BOX // group, padded // run, group * run)
    return _box(kv, sizes, strides, box, swizzle=0 if run > 1 else 32)


def new_box(kv: KV | None, dim: int, padded: int, shape: Shape, pipe: Pipe) -> TensorDescriptor | None:
    """Descriptor of new keys or values [tokens, heads, dim], with boxes as in `cache_box`, but never x-packed.

    None if kv is None.
    """
    if kv is None:
        return None
    sizes = [kv.ptr.shape[0], _heads(shape, pipe), dim]
    return _box(kv, sizes, [kv.stride_slot, kv.stride_head, 1], (pipe.BOX, 1, _box_dims(padded)))


def rows_box(rows: Rows, shape: Shape, pipe: Pipe) -> TensorDescriptor:
    """Descriptor of queries: a box has a consumer's tokens x a group's heads, and fills the first rows of a slot."""
    most = pipe.COLUMNS if pipe.BESIDE else pipe.ROWS
    box = _box(rows, [*rows.ptr.shape], [rows.stride_token, rows.stride_head, 1], (most, 1, _box_dims(shape.DIM)))
    tokens = shape.BLOCK_Q // pipe.CONSUMERS
    return PartBox(**vars(box), sizes=(tokens, shape.GROUP))
