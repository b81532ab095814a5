"""Where calls run: by kernels compiled for a GPU, in Triton's interpreter, or in plain torch, which needs no Triton.

The choice is made when this file is imported, at the first call.  Triton decides at decoration time whether a function
is compiled or interpreted, so `kernels/decorated` imports, in one scope, all kernels that may be interpreted.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from .gpus import GPU
from .locks import FIRST

if TYPE_CHECKING:
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

DIALECTS = ("torch", "interpreter")  # values of PAGED_ATTN_DIALECT
YES = ("1", "true", "yes", "on", "y")  # values that Triton takes for true


class Device(GPU):
    """What the planner may know of a device.

    arch may also be "interpreter" or, in plain torch, torch's device type, like "cpu" or "mps".  In plain torch,
    multiprocessors is the number of threads.
    """

    __slots__ = ()

    @property
    def in_torch(self) -> bool:
        """Whether plain torch serves the device's calls, without Triton."""
        return self.arch != "interpreter" and not self.arch.startswith(("sm", "gfx"))

    @property
    def capability(self) -> int:
        """CUDA compute capability as one number, 90 for sm_90; 0 elsewhere."""
        return int(self.arch[2:]) if self.arch.startswith("sm") else 0

    @property
    def converts_fp8(self) -> bool:
        """Whether the device has instructions that convert e4m3 and e5m2."""
        return self.capability >= 89

    @property
    def dependent(self) -> bool:
        """Whether a launch may begin before the launch ahead has ended, and wait for it (dependent launches)."""
        return self.capability >= 90


def _asked() -> str | None:
    """Value of PAGED_ATTN_DIALECT; if it is unset, what Triton is told to do: "interpreter" or "compiled".

    None: the variable is unset, and Triton is told nothing or not installed.
    """
    said = os.environ.get("PAGED_ATTN_DIALECT", "").lower()
    if said and said not in DIALECTS:
        raise ValueError(f"PAGED_ATTN_DIALECT must be torch or interpreter, got {said}")
    if said == "interpreter" and not HAS_TRITON:
        raise ImportError("PAGED_ATTN_DIALECT is interpreter, which takes Triton: pip install triton")
    if said or not HAS_TRITON:
        return said or None
    told = os.environ.get("TRITON_INTERPRET")
    knobs = getattr(sys.modules.get("triton"), "knobs", None)
    interpret = knobs.runtime.interpret if knobs is not None else (told or "").lower() in YES
    return "interpreter" if interpret else "compiled" if told is not None else None


def _wants_interpreter() -> bool:
    """Whether Triton kernels are interpreted: if asked for, or by default on a machine without a GPU."""
    if ASKED in ("interpreter", "compiled"):
        return ASKED == "interpreter"
    # device_count() does not initialise CUDA, which a forked child could not use afterwards
    return not (torch.cuda.is_initialized() or torch.cuda.device_count())


HAS_TRITON = importlib.util.find_spec("triton") is not None
ASKED = _asked()
INTERPRET = HAS_TRITON and _wants_interpreter()


def in_torch(device: torch.device) -> bool:
    """Whether calls with tensors on a device are made in plain torch."""
    if ASKED in DIALECTS:
        return ASKED == "torch"
    return device.type != "cuda" or not HAS_TRITON


def under_triton(function: Any) -> bool:
    """Whether a function is decorated with @triton.jit, not with Gluon's decorator; this imports no Triton."""
    made = any(x.__module__ in ("triton.runtime.jit", "triton.runtime.interpreter") for x in type(function).__mro__)
    return made and hasattr(function, "fn") and not getattr(function, "is_gluon", bool)()


@functools.cache
def _language() -> tuple[Any, ...]:
    """Modules and classes whose builtins the interpreter replaces, and whose jit functions (tl.max) this file does."""
    import triton.language as tl

    return (tl, tl.core, tl.standard, tl.math, tl.random, tl.tensor, tl.core.tensor_descriptor_base)


@functools.cache
def _interpreted(function: JITFunction) -> InterpretedFunction:
    from triton.runtime.interpreter import InterpretedFunction

    return InterpretedFunction(function.fn)


@contextlib.contextmanager
def decorating() -> Iterator[None]:
    """A scope for definitions of kernels; with INTERPRET, Triton's knob makes them interpreted."""
    import triton

    knobs = vars(triton.knobs.runtime)  # setting the attribute would also set an environment variable
    with FIRST:
        before = knobs.copy()
        if INTERPRET:
            knobs["interpret"] = True
        try:
            yield
        finally:
            knobs.clear()
            knobs.update(before)


@contextlib.contextmanager
def interpreting() -> Iterator[None]:
    """A scope in which a kernel is interpreted, one at a time, because all threads share the interpreter's state.

    Functions of triton.language that were decorated as compiled ones are replaced by interpreted ones.  At the end,
    all names are restored, also those that the interpreter replaced: other packages' kernels must find the originals.
    """
    from triton.runtime.jit import JITFunction

    with FIRST, decorating():
        before = [(module, dict(vars(module))) for module in _language()]
        for module, names in before:
            for name, value in names.items():
                if isinstance(value, JITFunction):
                    setattr(module, name, _interpreted(value))
        try:
            yield
        finally:
            for module, names in before:
                for name, value in names.items():
                    if vars(module).get(name) is not value:
                        setattr(module, name, value)


def current(device: torch.device) -> AbstractContextManager[object]:
    """A scope in which a device is the current one, on which kernels are launched."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def child_environment(*without: str) -> dict[str, str]:
    """Environment of a child that finds this process's packages, interprets no kernel and lacks variables `without`."""
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path),
    }
    for name in without:
        environment.pop(name, None)
    return environment


_pretended: Device | None = None


def pretend(device: Device) -> None:
    """From now on plan for this device, whatever device the tensors are on."""
    global _pretended
    _pretended = device
    device_of.cache_clear()


@functools.cache
def device_of(device: torch.device) -> Device:
    """Facts of a torch device, as planners and the choice of a dialect take them."""
    if _pretended is not None:
        return _pretended
    if in_torch(device):
        return Device(device.type, torch.get_num_threads())
    if INTERPRET:
        return Device("interpreter", 2)
    properties = torch.cuda.get_device_properties(device)
    arch = properties.gcnArchName.split(":")[0] if torch.version.hip else f"sm{properties.major}{properties.minor}"
    return Device(arch, properties.multi_processor_count)
