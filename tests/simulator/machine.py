"""A kernel's PTX, executed by `machine.cpp`."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .ptx import offsets, parse

SOURCES = Path(__file__).parent
BUILD = SOURCES.parents[1] / "build"  # in the clone: nobody else can put code there
FLAGS = ("-std=c++20", "-O2", "-march=native", "-ffp-contract=off", "-shared", "-fPIC")
MOST_PARAMETERS = 16384  # bytes; as in machine.h
ROOM = 4096  # bytes of a message
MOST = 4_000_000_000  # instructions of warps: minutes


class Launch(ctypes.Structure):
    """`Launch` of machine.cpp."""

    _fields_ = (
        ("names", ctypes.c_char_p),
        ("ops", ctypes.c_void_p),
        ("num_ops", ctypes.c_int64),
        ("operands", ctypes.c_void_p),
        ("num_operands", ctypes.c_int64),
        ("constants", ctypes.c_void_p),
        ("num_constants", ctypes.c_int64),
        ("words", ctypes.c_int64),
        ("specials", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("programs", ctypes.c_int64),
        ("shared", ctypes.c_int64),
        ("parameters", ctypes.c_void_p),
        ("memory", ctypes.c_void_p),
        ("num_memory", ctypes.c_int64),
        ("traces", ctypes.c_void_p),
        ("num_traces", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
        ("most", ctypes.c_int64),
    )


def _processor() -> str:
    """What -march=native goes by: a clone may be carried from one machine to another."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


@functools.cache
def _simulate() -> Any:
    """The C++ function, compiled once for each version of its sources and kind of processor."""
    texts = [path.read_bytes() for path in sorted(SOURCES.glob("*.[hc]*"))]
    digest = hashlib.sha256(b"".join(texts) + repr((FLAGS, _processor())).encode()).hexdigest()[:16]
    BUILD.mkdir(exist_ok=True)
    library = BUILD / f"simulator-{digest}.so"
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            made = library.with_suffix(".made")
            subprocess.run(["g++", *FLAGS, str(SOURCES / "machine.cpp"), "-o", str(made)], check=True)
            made.rename(library)
    return ctypes.CDLL(str(library)).simulate


class Kernel:
    """A kernel that can be run again and again."""

    def __init__(self, ptx: str, shared: int = 0, traces: Sequence[int] = ()) -> None:
        """shared: bytes of shared memory of each program; traces: words of which it must leave none there."""
        self.parameters = ctypes.create_string_buffer(MOST_PARAMETERS)
        self.parsed = parsed = parse(ptx)
        self.shared = shared
        self.traces = np.array(traces, np.uint64)
        self.names = "".join(f"{x}\n" for x in parsed.names).encode()
        constants = np.array([(at, value & (1 << 64) - 1) for at, value in parsed.constants.items()], np.uint64)
        self.arrays = np.array(parsed.ops, np.int64), np.array(parsed.operands, np.int64), constants

    def run(self, programs: int, values: Sequence[bytes], memory: Sequence[tuple[int, int]], seed: int = 0) -> None:
        """So many programs with these parameters; memory: ranges of addresses that exist.

        Raises RuntimeError with the line of the source at which something is wrong.
        """
        sizes, parameters = self.parsed.parameters, ctypes.addressof(self.parameters)
        found = list(map(len, values))
        assert (found, len(sizes) - len(found)) in ((sizes, 0), (sizes[:-2], 2)), f"parameters of {sizes}, not {found}"
        for offset, value in zip(offsets(sizes), values, strict=False):
            ctypes.memmove(parameters + offset, value, len(value))
        ranges, parsed = np.array(memory, np.uint64), self.parsed
        pointers = [x for array in self.arrays for x in (array.ctypes.data, len(array))]
        sizes = (parsed.words, parsed.specials, parsed.threads, programs, self.shared)
        words = ranges.ctypes.data, len(ranges), self.traces.ctypes.data, len(self.traces)
        launch = Launch(self.names, *pointers, *sizes, parameters, *words, seed, MOST)
        message, at = ctypes.create_string_buffer(ROOM), ctypes.c_int64()
        if _simulate()(ctypes.byref(launch), message, ctypes.c_int64(ROOM), ctypes.byref(at)):
            raise RuntimeError(self._told(message.value.decode(), at.value))

    def _told(self, message: str, at: int) -> str:
        """Instructions, as @number, with their names and lines of the source."""
        parsed = self.parsed
        if at >= 0:
            message = f"{message}, at @{at}"
        return re.sub(
            r"@(\d+)", lambda x: f"{parsed.names[parsed.ops[int(x[1])][0]]} ({parsed.lines[int(x[1])]})", message
        )
