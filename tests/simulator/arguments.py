"""What a compiled kernel takes at run time, from the arguments of its launch."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from typing import Any

import torch

from paged_attn.launching.driver import BOX, FORMATS
from paged_attn.launching.template import Descriptors

SWIZZLES = (0, 32, 64, 128)  # bytes, by the number that Triton gives the driver


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


def values_of(compiled: Any, args: tuple[Any, ...]) -> list[bytes]:
    """In order; two pointers to scratch memory may follow that these kernels do not use."""
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


def _values(kinds: tuple[Any, ...], args: tuple[Any, ...], boxes: Iterator[Any]) -> Iterator[bytes]:
    for kind, arg in zip(kinds, args, strict=True):
        if isinstance(kind, tuple):
            yield from _values(kind, arg, boxes)
        elif isinstance(arg, Descriptors):
            yield _box(arg, next(boxes))
            yield from (struct.pack("i", size) for size in arg.shape)
            yield from (struct.pack("q", stride) for stride in arg.strides)
        elif isinstance(arg, torch.Tensor):
            yield struct.pack("Q", arg.data_ptr())
        elif kind != "constexpr":
            yield struct.pack(FORMATS[kind], arg)


def _box(descriptor: Any, meta: dict[str, Any]) -> bytes:
    rank, element = len(descriptor.shape), meta["elem_size"]
    box = Box(descriptor.base.data_ptr(), element, rank, swizzle=SWIZZLES[meta["swizzle"]])
    box.sizes[:rank] = descriptor.shape[::-1]
    box.strides[:rank] = [x * element for x in descriptor.strides[::-1]]
    box.box[:rank] = meta["block_size"][::-1]
    assert box.base % 16 == 0
    assert all(x % 16 == 0 for x in box.strides[1:rank])
    assert box.box[0] * element % 16 == 0
    assert max(box.box[:rank]) <= 256
    assert not box.swizzle or box.box[0] * element <= box.swizzle
    return bytes(box).ljust(BOX, b"\0")
