"""Compiling for a device that this process does not use, or that this machine lacks."""

import importlib
from collections.abc import Callable
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from ..launching import launch, platform, triton_version
from ..launching.jit_functions import settle, tell_plainly


class CompileOnly:
    """Stands in for Triton's driver: has a target, but no device."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def target_of(device: platform.Device) -> GPUTarget:
    """What Triton calls the device's architecture."""
    if device.capability:
        return GPUTarget("cuda", device.capability, 32)
    return GPUTarget("hip", device.arch, 64)


def compile_only(device: platform.Device, found: Callable[[Any], object]) -> None:
    """From now on, compile each kernel of a launch for this device and pass it to `found` instead of launching."""
    if platform.INTERPRET:
        raise RuntimeError("kernels are interpreted in this process: start it with TRITON_INTERPRET=0")

    def run(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        tell_plainly(kernel)
        settle(kernel)
        found(kernel.warmup(*args, grid=grid, **options))

    triton.runtime.driver.set_active(CompileOnly(target_of(device)))
    platform.pretend(device)
    launch.run = run


def build_launcher(kernel: Any) -> None:
    """Build the C stub between Python and a compiled kernel, into Triton's cache; needs the driver's library."""
    vendor, name = {"cuda": ("nvidia", "CudaLauncher"), "hip": ("amd", "HIPLauncher")}[kernel.metadata.target.backend]
    module = importlib.import_module(f"triton.backends.{vendor}.driver")
    if triton_version.has_stubs(module):
        getattr(module, name)(kernel.src, kernel.metadata)
