"""How kernels are launched: through Triton's own call once, and through the compiled kernel from then on.

Triton's call looks at every argument to find the kernel compiled for it, 10 us and more.  A call of known signature
needs none of that: its compiled kernel, its grid and all arguments but addresses are kept (facts as of Triton 3.6).
"""

from collections.abc import Callable, Sequence
from types import BuiltinFunctionType
from typing import Any, NamedTuple

import torch
import triton
from triton.compiler import CompiledKernel

from . import scratch
from .backend import INTERPRET, TESTED_TRITON, current, wait_for_triton
from .template import Argument, Encode, caller, fill, filler

# Places of what a launch needs beside the call's own tensors, from the end of the list of addresses
STATES, INTS, STREAM = Argument(-3), Argument(-2), Argument(-1)
KEEPS = not INTERPRET and triton.__version__.startswith(TESTED_TRITON)
# torch.cuda's own functions first ask whether CUDA is initialised: it is, where a tensor is on the device
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


class Step(NamedTuple):
    """One launch of any kernel.  Every parameter is in args, in order, with an Argument for each tensor."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]
    need: scratch.Need | None = None  # what STATES and INTS are from this step on


def run(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> Any:
    """Every launch that may have to compile goes through here; returns the compiled kernel, if there is one."""
    return kernel[grid](*args, **options)


class Kept(NamedTuple):
    """A step whose kernel is compiled: functions of all addresses, of which STREAM is the last."""

    need: scratch.Need | None
    launch: Callable[[Sequence[int]], object]
    observed: Callable[[Sequence[int]], object]  # the same, and Triton's launch hooks fire


class Launches:
    """The launches of a call: made once with its tensors, and then with those of any call of the same signature.

    `kept` is None where steps are launched through Triton's call: in the interpreter, in untested versions, and before
    the first time.
    """

    __slots__ = ("device", "index", "kept", "steps", "stream")

    def __init__(self, steps: Sequence[Step], device: torch.device) -> None:
        self.steps, self.device, self.index = steps, device, device.index
        self.kept: list[Kept] | None = None
        # the handle of the stream that work is put on now
        self.stream: Callable[[int | None], int] = lambda _: 0
        if device.type == "cuda":
            self.stream = triton.runtime.driver.active.get_current_stream

    def first(self, tensors: tuple[Any, ...]) -> None:
        """Launch with these tensors; compiles what has not been compiled."""
        kept = []
        room = scratch.NONE
        wait_for_triton()
        with current(self.device):
            stream = self.stream(self.index)
            for step in self.steps:
                if step.need is not None:
                    room = scratch.take(step.need, self.device, stream)
                args = fill(step.args, (*tensors, room.states, room.ints, stream))
                compiled = run(step.kernel, step.grid, *args, **step.options)
                if KEEPS and isinstance(compiled, CompiledKernel) and len(step.args) == len(step.kernel.arg_names):
                    kept.append(_kept(step, compiled))
        if len(kept) == len(self.steps):
            self.kept = kept

    def again(self, addresses: tuple[int, ...]) -> None:
        """Launch what is kept, for tensors of the same signature at these addresses."""
        index = self.index
        if index is not None and index != current_device():
            with torch.cuda.device(self.device):
                return self.again(addresses)
        stream = self.stream(index)
        hooks = triton.knobs.runtime
        observed = hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls
        room = scratch.NONE
        for need, launch, launch_observed in self.kept or ():
            if need is not None:
                room = scratch.take(need, self.device, stream)
            (launch_observed if observed else launch)((*addresses, room.states_at, room.ints_at, stream))


def _kept(step: Step, compiled: CompiledKernel) -> Kept:
    """A launch of a compiled kernel from addresses, as JITFunction.run would make it; its pre-run hooks do not fire."""
    run, function, packed = compiled.run, compiled.function, compiled.packed_metadata
    arguments = filler(step.args)
    grid = (*step.grid, 1, 1)[:3]

    def observed(addresses: Sequence[int]) -> None:
        enter, leave = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
        args, stream = arguments(addresses), addresses[-1]
        metadata = compiled.launch_metadata(step.grid, stream, *args)
        run(*grid, stream, function, packed, metadata, enter, leave, *args)

    found = _launcher_in_c(run)
    if found is None:
        return Kept(step.need, caller(run, (*grid, STREAM, function, packed, None, None, None, *step.args)), observed)
    launcher, encode = found
    how = (run.launch_cooperative_grid, run.launch_pdl, None, None, packed, None, None, None)
    return Kept(step.need, caller(launcher, (*grid, STREAM, function, *how, *step.args), encode), observed)


def _launcher_in_c(run: Any) -> tuple[Callable[..., object], Encode | None] | None:
    """The C function behind Triton's CUDA launcher, and how descriptors become its arguments.

    Triton encodes them at every launch, several microseconds each.  None where its launcher is not as expected.
    """
    launch: Any = getattr(run, "launch", None)
    if type(run).__name__ != "CudaLauncher" or run.global_scratch_size or run.profile_scratch_size:
        return None
    if isinstance(launch, BuiltinFunctionType):
        return launch, None
    names = getattr(getattr(launch, "__code__", None), "co_freevars", ())
    if "tensordesc_meta" not in names:
        return None
    cells = dict(zip(names, (cell.cell_contents for cell in launch.__closure__), strict=True))
    from triton.backends.nvidia.driver import make_tensordesc_arg

    metas = cells["tensordesc_meta"]
    return cells["launcher"], lambda descriptor, number: make_tensordesc_arg(descriptor, metas[number])
