"""This machine's GPU and torch build, found without importing torch, which takes seconds, except on ROCm."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from pathlib import Path
from typing import NamedTuple

MULTIPROCESSORS, MAJOR, MINOR = 16, 75, 76  # numbers of CUdevice_attribute


class Torch(NamedTuple):
    """CUDA or HIP version for which torch was built, from torch's version.py.  Both are None in a build for CPUs."""

    cuda: str | None
    hip: str | None


class Found(NamedTuple):
    """A GPU: its name, then the fields of platform.Device."""

    name: str
    arch: str
    multiprocessors: int


def torch_build() -> Torch:
    spec = importlib.util.find_spec("torch")
    path = Path((spec and spec.origin) or ".").parent / "version.py"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    found = {name: re.search(rf"^{name}\b[^=\n]*= *'([^']*)'", text, re.M) for name in ("cuda", "hip")}
    return Torch(*(match and match[1] for match in found.values()))


def gpu(build: Torch) -> Found | None:
    """The first GPU that torch would see."""
    if build.hip:  # ROCm's driver has no short way to ask
        return _asked_of_torch()
    return _asked_of_cuda() if build.cuda else None


def asked() -> str:
    """PAGED_ATTN_DIALECT in lower case.  If it is not set, "interpreter" if TRITON_INTERPRET is on, else ""."""
    said = os.environ.get("PAGED_ATTN_DIALECT", "").lower()
    interpret = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
    return said or ("interpreter" if interpret else "")


def interpreted(triton: bool) -> bool:
    """Whether calls run in Triton's interpreter."""
    return triton and asked() == "interpreter"


def in_torch(found: Found | None, triton: bool) -> bool:
    """Whether all calls run in plain torch, as asked, or because there is no GPU or no Triton."""
    return asked() == "torch" or (not interpreted(triton) and (found is None or not triton))


def _asked_of_torch() -> Found | None:
    import torch

    from paged_attn.launching.platform import INTERPRET, device_of

    if INTERPRET or not torch.cuda.is_available():
        return None
    return Found(torch.cuda.get_device_name(), *device_of(torch.device("cuda")))


def _asked_of_cuda() -> Found | None:
    """The first GPU of CUDA's driver, which obeys CUDA_VISIBLE_DEVICES as torch does."""
    try:
        cuda = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError:
        return None
    device, number, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(256)
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0) or cuda.cuDeviceGetName(name, 256, device):
        return None
    facts = []
    for attribute in (MAJOR, MINOR, MULTIPROCESSORS):
        cuda.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
        facts.append(number.value)
    return Found(name.value.decode(), f"sm{facts[0]}{facts[1]}", facts[2])
