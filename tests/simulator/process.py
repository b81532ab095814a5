"""A process in which the library plans for a Hopper GPU, and its launches are simulated."""

from __future__ import annotations

import collections
import functools
import math
import os
import zlib
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.nvidia.compiler import CUDABackend

from paged_attn.kernels.hopper.asm.barriers import TAG
from paged_attn.kernels.hopper.loading.gates import KINDS
from paged_attn.launching import launch, platform, scratch
from paged_attn.preparation import processes

from .arguments import memory_of, values_of
from .machine import Kernel

MULTIPROCESSORS = 33  # a quarter of an H200's
TAGS = [TAG.value + i for i in range(KINDS.value + 1)]  # by which a program finds addresses


def edit(ptx: str) -> str:
    """What is run instead: tests of the simulator put another function here."""
    return ptx


@functools.cache
def simulate() -> None:
    """From now on, in this process."""
    device = platform.Device("sm90", MULTIPROCESSORS)
    kernels: dict[tuple[str, int], Kernel] = {}
    launches: collections.Counter[str] = collections.Counter()

    def run(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        compiled = kernel.warmup(*args, grid=grid, **options)
        if any(hasattr(arg, "sizes") for arg in args):
            launch.resize(compiled, args)
        key = edit(compiled.asm["ptx"]), compiled.metadata.shared
        if key not in kernels:
            kernels[key] = Kernel(*key, TAGS)
        # the same turns whenever a test is run, whatever runs beside it
        test = os.environ.get("PYTEST_CURRENT_TEST", "")
        launches[test] += 1
        seed = zlib.crc32(f"{test} {launches[test]}".encode())
        try:
            kernels[key].run(math.prod(grid), values_of(compiled, args), memory_of(args), seed)
        except RuntimeError:
            scratch._rooms.clear()  # counters are as a launch left them that did not end
            raise
        if any(room.counters is not None and room.counters.any() for room in scratch._rooms.values()):
            scratch._rooms.clear()
            raise AssertionError("a launch has left counters that are not zero")

    # PTX is all that is needed; kept apart from kernels with machine code
    CUDABackend.make_cubin = lambda *_: b""
    triton.knobs.cache.dir = str(Path(triton.knobs.cache.dir) / "simulated")
    triton.runtime.driver.set_active(processes.CompileOnly(processes.target_of(device)))
    platform.pretend(device)
    launch.run = run
    scratch._empty = _poisoned
    torch.set_num_threads(1)


def _poisoned(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    poison = math.nan if dtype.is_floating_point else torch.iinfo(dtype).max  # bytes are NaN in all types of caches
    return torch.full((count,), poison, dtype=dtype, device=device)
