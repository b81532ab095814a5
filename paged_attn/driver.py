"""Kept launches on CUDA: through the driver itself, with parameters that lie in memory from launch to launch.

Triton's launcher reads every argument out of Python objects each time, which takes as long as the driver does.  Of a
kept launch nothing changes but addresses and the stream: they are written where the driver reads them.
Facts as of Triton 3.6; where its launcher is not as expected, the kernel is launched through it.
"""

import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from types import BuiltinFunctionType
from typing import Any

from .template import STREAM, Argument, AtAddress, Descriptors, caller

Launch = Callable[[Sequence[int]], object]  # from addresses, of which STREAM is the last

WORD, BOX, LINE = 8, 128, 64  # bytes: of an address, of a descriptor of the copy engine, and what that is aligned to
FORMATS = {"i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I"}
FORMATS |= {"u64": "Q", "fp32": "f", "fp64": "d"}


class Config(ctypes.Structure):
    """CUlaunchConfig; clusters, cooperative and dependent launches would have attributes."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


def launch_of(compiled: Any, grid: tuple[int, ...], args: tuple[Any, ...], count: int) -> Launch | None:
    """A launch of a compiled kernel from so many addresses; None where Triton's launcher is not the one for CUDA."""
    run, packed = compiled.run, compiled.packed_metadata
    if type(run).__name__ != "CudaLauncher" or run.global_scratch_size or run.profile_scratch_size:
        return None
    function, metas = _inside(run.launch)
    if function is None:
        return None
    from triton.backends.nvidia.driver import make_tensordesc_arg

    def encode(descriptor: Any, number: int) -> Sequence[Any]:
        return make_tensordesc_arg(descriptor, metas[number])

    cooperative, dependent = run.launch_cooperative_grid, run.launch_pdl
    how = (compiled.function, cooperative, dependent, None, None, packed, None, None, None)
    through_triton = caller(function, (*grid, STREAM, *how, *args), encode)
    warps, clusters, shared = packed
    if clusters > 1 or cooperative or dependent or 0 in grid or None in metas:
        return through_triton
    try:
        config = Config(grid, (32 * warps, 1, 1), shared)
        parameters = list(_parameters(tuple(compiled.src.signature.values()), args))
        described = [AtAddress(x) for kind, x in parameters if kind == "box"]
        boxes = [(x.slot, _bytes_of(x.encoded(encode, number))) for number, x in enumerate(described)]
        return _direct(_start(), compiled.function, config, parameters, boxes, count, through_triton)
    except (LookupError, OSError, AttributeError, struct.error):  # a type, or a driver, that is not known here
        return through_triton


def _inside(launch: Any) -> tuple[Any, list[Any]]:
    """The C function behind Triton's launcher, and what it knows of descriptors, which it would encode each time."""
    if isinstance(launch, BuiltinFunctionType):
        return launch, []
    names = getattr(getattr(launch, "__code__", None), "co_freevars", ())
    if "tensordesc_meta" not in names:
        return None, []
    cells = dict(zip(names, (cell.cell_contents for cell in launch.__closure__), strict=True))
    return cells["launcher"], cells["tensordesc_meta"]


def _parameters(kinds: tuple[Any, ...], args: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """What a kernel takes at run time, in order: ("slot", n), ("box", descriptor) or (format, number)."""
    for kind, arg in zip(kinds, args, strict=True):
        if isinstance(kind, tuple):
            yield from _parameters(kind, arg)
        elif isinstance(arg, Argument):
            yield "slot", arg.slot
        elif isinstance(arg, Descriptors):
            yield "box", arg
            yield from (("i", size) for size in arg.shape)
            yield from (("q", stride) for stride in arg.strides)
        elif kind != "constexpr":
            yield FORMATS[kind], arg


def _direct(
    start: Callable[..., int], function: int, config: Config, parameters: list[tuple[str, Any]],
    boxes: list[tuple[int, Callable[[int], bytes]]], count: int, otherwise: Launch,
) -> Launch:  # fmt: skip
    """Lay parameters out as addresses, boxes, constants; write addresses and boxes at each launch."""
    boxes_at = -(-count * WORD // LINE) * LINE
    constants_at = boxes_at + len(boxes) * BOX
    parameters = [*parameters, ("Q", 0), ("Q", 0)]  # Triton's own scratch: these kernels need none
    memory = ctypes.create_string_buffer(constants_at + len(parameters) * WORD + LINE)
    start_at = -ctypes.addressof(memory) % LINE
    next_box, next_constant, places = boxes_at, constants_at, []
    for kind, value in parameters:
        if kind == "slot":
            places.append(value % count * WORD)
        elif kind == "box":
            places.append(next_box)
            next_box += BOX
        else:
            struct.pack_into(kind, memory, start_at + next_constant, value)
            places.append(next_constant)
            next_constant += WORD
    base = ctypes.addressof(memory) + start_at
    pointers = (ctypes.c_void_p * len(places))(*[base + place for place in places])
    how = ctypes.addressof(config), function, ctypes.addressof(pointers), None
    write = struct.Struct(f"={count}Q{boxes_at - count * WORD}x" + f"{BOX}s" * len(boxes)).pack_into
    lock = threading.Lock()

    def direct(addresses: Sequence[int], _alive: object = pointers) -> object:
        if not lock.acquire(False):  # another thread is about to launch from this memory
            return otherwise(addresses)
        try:
            write(memory, start_at, *addresses, *[of(addresses[slot]) for slot, of in boxes])
            config.stream = addresses[-1]
            failed = start(*how)
        finally:
            lock.release()
        # Triton's launcher gives a thread a context that has none yet, or says what is wrong
        return otherwise(addresses) if failed else None

    return direct


def _bytes_of(encoded: Callable[[int], Sequence[Any]]) -> Callable[[int], bytes]:
    """A descriptor's own bytes: the end of the object that Triton holds them in."""

    @functools.lru_cache(maxsize=256)
    def at(address: int) -> bytes:
        box = encoded(address)[0]
        return ctypes.string_at(id(box) + type(box).__basicsize__ - BOX, BOX)

    return at


@functools.cache
def _start() -> Callable[..., int]:
    """cuLaunchKernelEx(config, function, parameters, extra)."""
    start = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    start.argtypes = [ctypes.c_void_p] * 4
    return start
