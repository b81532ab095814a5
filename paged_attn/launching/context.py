"""The CUDA context of a thread.  The driver needs a context to load code or to encode a descriptor.

torch makes no context current for a thread that stays on the first device.  Triton's launcher does so only at launch.
"""

import ctypes
import functools

import torch


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


def provide() -> None:
    """Make the current device's context this thread's, if the thread has none."""
    cuda, current = _cuda(), ctypes.c_void_p()
    if cuda is None or cuda.cuCtxGetCurrent(ctypes.byref(current)) or current:
        return
    context = _primary(torch.cuda.current_device())
    if context:
        cuda.cuCtxSetCurrent(context)
