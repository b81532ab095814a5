"""Kept launches on CUDA: through the driver itself, with parameters that stay in memory from launch to launch.

Triton's launcher reads every argument out of Python objects each time, which takes as long as the driver's own work.
In a kept launch only addresses and the stream change; they are written where the driver reads them.
Every assumption about Triton is checked, and `triton_version.py` knows what differs between versions.  Where anything
is not as expected, the kernel is launched through Triton.
"""

import ctypes
import functools
import re
import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import BuiltinFunctionType
from typing import Any, ClassVar

import torch

from . import triton_version
from .locks import FIRST
from .template import AtAddress, Descriptors, Hole

FromAddresses = Callable[[Sequence[int]], object]  # takes addresses; the last one is STREAM

WORD, BOX = 8, 128  # bytes of an address, bytes of a TMA descriptor
BOXED = (64 + BOX, 128 + BOX)  # bytes of a Triton object whose last part is a descriptor aligned to 64 or 128 bytes
KNOWN = 256  # most addresses for which a launch keeps copies of a descriptor, one for each layer's cache
KNOWN_TO_ALL = 1 << 15  # most descriptors that all launches keep together, some 15 MB
SCRATCH = (("Q", 0), ("Q", 0))  # Triton's own scratch, a kernel's last two parameters: these kernels need none
FORMATS = {"i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I"}
FORMATS |= {"u64": "Q", "fp32": "f", "fp64": "d"}
PROGRAMMATIC_STREAM_SERIALIZATION = 6  # attribute of a launch that may begin before the launch ahead has ended
DEVICE_POINTER = 3  # attribute of memory: its address for kernels
IN_GRAPHS = 12030  # first CUDA whose graphs hold dependent launches; with older ones, launches are ordinary


class Attribute(ctypes.Structure):
    """CUlaunchAttribute, whose value is one number here."""

    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig.  A dependent launch has one attribute, any other launch none.

    Clusters and cooperative grids would need further attributes, so Triton's launcher launches these.
    """

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


class Places(dict[int, tuple[int, Any]]):
    """Address of a tensor -> (address of its TMA descriptor, the Triton object that ends with the descriptor)."""

    everyones: ClassVar[weakref.WeakSet["Places"]] = weakref.WeakSet()  # the Places of all launches, to clear together
    encodings: ClassVar[int] = 0  # descriptors made since all dicts were cleared
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__, __ne__ = object.__eq__, object.__ne__  # by identity, not by contents

    def __init__(self, encoded: Callable[[int], Sequence[Any]]) -> None:
        self.encoded = encoded
        self.everyones.add(self)

    def __missing__(self, address: int) -> tuple[int, Any]:
        if len(self) >= KNOWN:
            self.clear()
        if Places.encodings >= KNOWN_TO_ALL:
            Places.encodings = 0
            for places in list(self.everyones):
                places.clear()
        Places.encodings += 1
        provide_context()
        box = self.encoded(address)[0]
        self[address] = found = (id(box) + type(box).__basicsize__ - BOX, box)
        return found


def direct_launch(
    compiled: Any, grid: tuple[int, ...], args: tuple[Any, ...], count: int, otherwise: FromAddresses
) -> FromAddresses | None:
    """Return a function that launches a compiled kernel from `count` addresses through the driver.

    The function calls `otherwise` if the driver refuses the launch, or if another thread is inside the function.

    Return None if Triton's launcher, or the kernel's parameters, are not as expected.
    """
    run = compiled.run
    if type(run).__name__ != "CudaLauncher" or 0 in grid:
        return None
    try:
        if run.global_scratch_size or run.profile_scratch_size or run.launch_cooperative_grid:
            return None
        warps, clusters, shared = compiled.packed_metadata
        metas = _metas(run.launch)
        parameters = [*_parameters(tuple(compiled.src.signature.values()), args), *SCRATCH]
        described = [(place, AtAddress(x)) for place, (kind, x) in enumerate(parameters) if kind == "box"]
        if clusters != 1 or metas is None or len(metas) != len(described) or None in metas:
            return None
        if sizes_in(compiled.asm["ptx"]) != sizes_of(parameters) or (described and not _end_with_a_box()):
            return None

        def encode(descriptor: Any, number: int) -> Sequence[Any]:
            encoded: Sequence[Any] = triton_version.encoded(descriptor, metas[number])
            return encoded

        config = LaunchConfig(grid, (32 * warps, 1, 1), shared)
        if run.launch_pdl and _version() >= IN_GRAPHS:
            attribute = Attribute(PROGRAMMATIC_STREAM_SERIALIZATION, 0, (1,))
            config.attributes, config.num_attributes = ctypes.pointer(attribute), 1
        boxes = [(place, x.slot, Places(x.encoded(encode, i))) for i, (place, x) in enumerate(described)]
        return _direct(_start(), compiled.function, config, parameters, boxes, count, otherwise)
    except (LookupError, OSError, AttributeError, TypeError, ValueError, struct.error):
        return None  # a type, a launcher, or a driver that this file does not know


def _metas(launch: Any) -> Sequence[Any] | None:
    """Metadata of descriptors, from the closure around Triton's C launcher; None if the launcher is something else."""
    if isinstance(launch, BuiltinFunctionType):
        return ()
    names = launch.__code__.co_freevars
    if not {"launcher", "tensordesc_meta"} <= set(names):
        return None
    cells = dict(zip(names, (cell.cell_contents for cell in launch.__closure__), strict=True))
    metas: Sequence[Any] = cells["tensordesc_meta"]
    return metas


def _end_with_a_box() -> bool:
    """Whether Triton's descriptor objects have a known size, so that their last BOX bytes are the descriptor."""
    with FIRST:
        from triton.backends.nvidia.driver import PyCUtensorMap

    return PyCUtensorMap.__basicsize__ in BOXED


def sizes_in(ptx: str) -> list[int]:
    """Bytes of each parameter that a kernel's PTX declares."""
    entry = re.search(r"\.entry\s+\w+\s*\(([^)]*)\)", ptx)
    if entry is None:
        return []
    declared = re.findall(r"\.param\s+(?:\.align\s+\d+\s+)?\.[a-z]+(\d+)[^,\[]*(?:\[(\d+)\])?", entry[1])
    return [int(bits) // 8 * int(many or 1) for bits, many in declared]


def sizes_of(parameters: Sequence[tuple[str, Any]]) -> list[int]:
    """Bytes of each parameter that a launch gives a kernel."""
    known = {"slot": WORD, "box": BOX}
    return [known[kind] if kind in known else struct.calcsize(kind) for kind, _ in parameters]


def _parameters(kinds: tuple[Any, ...], args: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """Parameters of a kernel at run time, in order: ("slot", n), ("box", descriptor) or (format, number)."""
    for kind, arg in zip(kinds, args, strict=True):
        if isinstance(kind, tuple):
            yield from _parameters(kind, arg)
        elif isinstance(arg, Hole):
            yield "slot", arg.slot
        elif isinstance(arg, Descriptors):
            yield "box", arg
            yield from (("i", size) for size in arg.shape)
            yield from (("q", stride) for stride in arg.strides)
        elif kind != "constexpr":
            yield FORMATS[kind], arg


def _direct(
    start: Callable[..., int], function: int, config: LaunchConfig, parameters: list[tuple[str, Any]],
    boxes: list[tuple[int, int, Places]], count: int, otherwise: FromAddresses,
) -> FromAddresses:  # fmt: skip
    """Return a function that launches: it writes addresses of tensors and descriptors where the driver reads them."""
    words, constants = (ctypes.c_uint64 * count)(), (ctypes.c_uint64 * len(parameters))()
    places = (ctypes.c_uint64 * len(parameters))()
    for i, (kind, value) in enumerate(parameters):
        if kind == "slot":
            places[i] = ctypes.addressof(words) + value % count * WORD
        elif kind != "box":
            struct.pack_into(kind, constants, i * WORD, value)
            places[i] = ctypes.addressof(constants) + i * WORD
    # converted here, once: a foreign function with argtypes would convert at each call
    passed = ctypes.addressof(config), function, ctypes.addressof(places), None
    how = tuple([ctypes.c_void_p.from_param(x) for x in passed])
    # A thread takes `words` out of this list for the time of its launch.  A second thread finds the list empty, and
    # calls `otherwise`.  A lock would cost four times as much.
    spare: list[Any] = [words]
    held: list[Any] = [None] * len(parameters)  # keeps the latest launch's descriptors: another thread may clear Places

    def direct(addresses: Sequence[int], _alive: object = constants) -> None:
        try:
            mine = spare.pop()
        except IndexError:
            failed = 1
        else:
            try:
                mine[:] = addresses
                for place, slot, box_at in boxes:
                    places[place], held[place] = box_at[addresses[slot]]
                config.stream = addresses[-1]
                failed = start(*how)
            finally:
                spare.append(mine)
        if failed:  # another thread is inside, or the driver refused: no context yet, or an error for Triton to raise
            provide_context()
            otherwise(addresses)

    return direct


@functools.cache
def _version() -> int:
    """The newest CUDA that the driver knows, 12030 for 12.3."""
    version = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value


@functools.cache
def _start() -> Callable[..., int]:
    """The driver's function cuLaunchKernelEx(config, function, parameters, extra)."""
    start: Callable[..., int] = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    return start


# ---- the context of a thread ---------------------------------------------------------------------

# The driver needs a context to load code or to encode a descriptor.  torch makes no context current for a thread that
# stays on the first device.  Triton's launcher makes one current only at launch.


@functools.cache
def _cuda() -> ctypes.CDLL | None:
    """The driver; None on a machine without it."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


@functools.cache
def _primary(index: int) -> ctypes.c_void_p:
    """The primary context of a device, in which CUDA's runtime and torch work; null if the driver has none."""
    cuda, device, found = _cuda(), ctypes.c_int(), ctypes.c_void_p()
    if cuda is not None and not cuda.cuDeviceGet(ctypes.byref(device), index):
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(found), device)  # held to the end of the process, as torch does
    return found


def provide_context() -> None:
    """Make the current device's context this thread's, if the thread has none."""
    cuda, current = _cuda(), ctypes.c_void_p()
    if cuda is None or cuda.cuCtxGetCurrent(ctypes.byref(current)) or current:
        return
    context = _primary(torch.cuda.current_device())
    if context:
        cuda.cuCtxSetCurrent(context)


def mapped(address: int) -> int | None:
    """Address by which kernels reach pinned host memory; None: kernels cannot reach this memory."""
    if torch.version.hip:
        return address
    cuda, found = _cuda(), ctypes.c_uint64()
    provide_context()
    if cuda is None or cuda.cuPointerGetAttribute(ctypes.byref(found), DEVICE_POINTER, ctypes.c_uint64(address)):
        return None
    return found.value
