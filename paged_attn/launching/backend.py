"""Where calls run: by kernels compiled for a GPU, in Triton's interpreter, or in plain torch, which needs no Triton.

Decided when this is imported, which is at the first call.  Triton decides at decoration time whether a function is
compiled or interpreted: `kernels/decorated` imports all that define some.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .locks import FIRST

if TYPE_CHECKING:
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

DIALECTS = ("torch", "interpreter")  # what PAGED_ATTN_DIALECT may ask for
YES = ("1", "true", "yes", "on", "y")  # as Triton reads its variables


class Device(NamedTuple):
    """What the planner may know of a device."""

    arch: str  # "sm90", "gfx942", "interpreter"; in plain torch what torch calls the device, "cpu", "mps"
    multiprocessors: int  # in plain torch: threads

    @property
    def in_torch(self) -> bool:
        """Whether plain torch serves its calls, without Triton."""
        return self.arch != "interpreter" and not self.arch.startswith(("sm", "gfx"))

    @property
    def capability(self) -> int:
        """CUDA compute capability as one number, 90 for sm_90; 0 elsewhere."""
        return int(self.arch[2:]) if self.arch.startswith("sm") else 0

    @property
    def dependent(self) -> bool:
        """Whether launches may begin before the one ahead of them has ended, and wait for it."""
        return self.capability >= 90


def _asked() -> str | None:
    """What PAGED_ATTN_DIALECT says, or else TRITON_INTERPRET and Triton's knob, if they ask for the interpreter."""
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
    """Whether kernels of Triton are interpreted: as is asked for, or otherwise where the machine lacks a GPU."""
    if ASKED in ("interpreter", "compiled"):
        return ASKED == "interpreter"
    # counts devices without CUDA, which a forked child could not use after it
    return not (torch.cuda.is_initialized() or torch.cuda.device_count())


HAS_TRITON = importlib.util.find_spec("triton") is not None
ASKED = _asked()
INTERPRET = HAS_TRITON and _wants_interpreter()


def in_torch(device: torch.device) -> bool:
    """Whether calls whose tensors lie there are made in plain torch."""
    if ASKED in DIALECTS:
        return ASKED == "torch"
    return device.type != "cuda" or not HAS_TRITON


def under_triton(function: Any) -> bool:
    """Whether a function is under @triton.jit, asked without importing Triton; Gluon's are not."""
    made = any(x.__module__ in ("triton.runtime.jit", "triton.runtime.interpreter") for x in type(function).__mro__)
    return made and hasattr(function, "fn") and not getattr(function, "is_gluon", bool)()


@functools.cache
def _language() -> tuple[Any, ...]:
    """Where the interpreter, and we, put other functions: Triton's own of a jit (tl.max, tl.cdiv), and its builtins."""
    import triton.language as tl

    return (tl, tl.core, tl.standard, tl.math, tl.random, tl.tensor, tl.core.tensor_descriptor_base)


@functools.cache
def _interpreted(function: JITFunction) -> InterpretedFunction:
    from triton.runtime.interpreter import InterpretedFunction

    return InterpretedFunction(function.fn)


@contextlib.contextmanager
def decorating() -> Iterator[None]:
    """While kernels are defined: Triton's knob as decided."""
    import triton

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
