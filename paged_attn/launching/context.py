"""The CUDA context of a thread, which the driver asks for where code is loaded or a descriptor is encoded.

torch makes none current where a thread stays on the first device, and Triton's launcher makes one only as it launches.
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
    """The context of a device that CUDA's runtime, and so torch, works in; null if the driver has none."""
    cuda, device, found = _cuda(), ctypes.c_int(), ctypes.c_void_p()
    if cuda is not None and not cuda.cuDeviceGet(ctypes.byref(device), index):
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(found), device)  # held to the end of the process, as torch does
    return found


def provide() -> None:
    """Make the current device's context this thread's, if it has none."""
    cuda, current = _cuda(), ctypes.c_void_p()
    if cuda is None or cuda.cuCtxGetCurrent(ctypes.byref(current)) or current:
        return
    context = _primary(torch.cuda.current_device())
    if context:
        cuda.cuCtxSetCurrent(context)
