"""Where kernels run: compiled on a GPU, or by Triton's interpreter on a machine without one.

Decided when this is imported, which is at the first call.  Triton decides at decoration time which of the two a
function becomes: `kernels/__init__` imports all that define some.
"""

import contextlib
import functools
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from .locks import FIRST


class Device(NamedTuple):
    """What the planner may know of a device."""

    arch: str  # "sm90", "gfx942", "interpreter"
    multiprocessors: int

    @property
    def capability(self) -> int:
        """CUDA compute capability as one number, 90 for sm_90; 0 elsewhere."""
        return int(self.arch[2:]) if self.arch.startswith("sm") else 0

    @property
    def dependent(self) -> bool:
        """Whether launches may begin before the one ahead of them has ended, and wait for it."""
        return self.capability >= 90


def _wants_interpreter() -> bool:
    """What the user says by TRITON_INTERPRET, or Triton's knob; otherwise whether the machine lacks a GPU."""
    asked = os.environ.get("TRITON_INTERPRET")
    if asked is not None or triton.knobs.runtime.interpret:
        return bool(triton.knobs.runtime.interpret)
    # counts devices without CUDA, which a forked child could not use after it
    return not (torch.cuda.is_initialized() or torch.cuda.device_count())


INTERPRET = _wants_interpreter()


# Where the interpreter, and we, put other functions: Triton's own of a jit (tl.max, tl.cdiv ...), and its builtins.
_LANGUAGE = (tl, tl.core, tl.standard, tl.math, tl.random, tl.tensor, tl.core.tensor_descriptor_base)


@functools.cache
def _interpreted(function: JITFunction) -> InterpretedFunction:
    return InterpretedFunction(function.fn)


@contextlib.contextmanager
def decorating() -> Iterator[None]:
    """While kernels are defined: Triton's knob as decided."""
    knobs = vars(triton.knobs.runtime)  # set as an attribute it would become an environment variable
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
    """While a kernel of ours is interpreted: one at a time, for the interpreter's state is one for all threads.

    Functions of triton.language that became compiled ones when it was imported are interpreted ones meanwhile.  All is
    as before in the end, or kernels of others would find them so, and also what the interpreter itself leaves.
    """
    with FIRST, decorating():
        before = [(module, dict(vars(module))) for module in _LANGUAGE]
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
    """Make a device the current one, where kernels are launched."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


_pretended: Device | None = None


def pretend(device: Device) -> None:
    """From now on plan for a device like this one, wherever tensors lie."""
    global _pretended
    _pretended = device
    device_of.cache_clear()


@functools.cache
def device_of(device: torch.device) -> Device:
    """Facts of a torch device; raises ValueError where our kernels cannot run."""
    if _pretended is not None:
        return _pretended
    if INTERPRET:
        return Device("interpreter", 2)
    if device.type != "cuda":
        raise ValueError(
            f"q is on {device}, but the kernels of this process are compiled for the GPU: move the tensors to 'cuda', "
            "or start Python with TRITON_INTERPRET=1 to run the same kernels in Triton's interpreter"
        )
    properties = torch.cuda.get_device_properties(device)
    arch = properties.gcnArchName.split(":")[0] if torch.version.hip else f"sm{properties.major}{properties.minor}"
    return Device(arch, properties.multi_processor_count)
