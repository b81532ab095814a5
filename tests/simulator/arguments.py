"""What a compiled kernel takes at run time, from the arguments of its launch."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import torch

from paged_attn.template import Descriptors

BOX = 128  # bytes of a descriptor of the copy engine
SWIZZLES = (0, 32, 64, 128)  # bytes, by the number that Triton gives the driver
NUMBERS = {"i1": ctypes.c_int8, "i8": ctypes.c_int8, "i16": ctypes.c_int16, "i32": ctypes.c_int32}
NUMBERS |= {"i64": ctypes.c_int64, "u1": ctypes.c_uint8, "u8": ctypes.c_uint8, "u16": ctypes.c_uint16}
NUMBERS |= {"u32": ctypes.c_uint32, "u64": ctypes.c_uint64, "fp32": ctypes.c_float, "fp64": ctypes.c_double}


class Box(ctypes.Structure):
    """`Box` of machine.h."""

    _fields_ = (
        ("base", ctypes.c_uint64),
        ("element", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("sizes", ctypes.c_int64 * 5),
        ("strides", ctypes.c_int64 * 5),
        ("box", ctypes.c_int32 * 5),
        ("swizzle", ctypes.c_uint32),
    )


def values_of(compiled: Any, args: tuple[Any, ...]) -> list[Any]:
    """ctypes' numbers, in order; two pointers to scratch memory may follow that these kernels do not use."""
    boxes = iter(compiled.metadata.tensordesc_meta or [])
    return list(_values(tuple(compiled.src.signature.values()), args, boxes))


def memory_of(args: Any) -> list[tuple[int, int]]:
    """The memory of all tensors among the arguments: (first address, the one behind) each."""
    found = []
    for arg in args:
        tensor = arg.base if isinstance(arg, Descriptors) else arg
        if isinstance(tensor, torch.Tensor):
            storage = tensor.untyped_storage()
            found.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
        elif isinstance(arg, tuple):
            found += memory_of(arg)
    return found


def _values(kinds: tuple[Any, ...], args: tuple[Any, ...], boxes: Iterator[Any]) -> Iterator[Any]:
    for kind, arg in zip(kinds, args, strict=True):
        if isinstance(kind, tuple):
            yield from _values(kind, arg, boxes)
        elif isinstance(arg, Descriptors):
            yield _box(arg, next(boxes))
            yield from map(ctypes.c_int32, arg.shape)
            yield from map(ctypes.c_int64, arg.strides)
        elif isinstance(arg, torch.Tensor):
            yield ctypes.c_uint64(arg.data_ptr())
        elif kind != "constexpr":
            yield NUMBERS[kind](arg)


def _box(descriptor: Any, meta: dict[str, Any]) -> Any:
    rank, element = len(descriptor.shape), meta["elem_size"]
    box = Box(descriptor.base.data_ptr(), element, rank, swizzle=SWIZZLES[meta["swizzle"]])
    box.sizes[:rank] = descriptor.shape[::-1]
    box.strides[:rank] = [x * element for x in descriptor.strides[::-1]]
    box.box[:rank] = meta["block_size"][::-1]
    assert box.base % 16 == 0
    assert all(x % 16 == 0 for x in box.strides[1:rank])
    assert not box.swizzle or box.box[0] * element <= box.swizzle
    return (ctypes.c_uint8 * BOX).from_buffer_copy(bytes(box).ljust(BOX, b"\0"))
