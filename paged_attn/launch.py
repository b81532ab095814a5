"""How kernels are launched: through Triton's own call once, and through the compiled kernel from then on.

Triton's call looks at every argument to find the kernel compiled for it, 10 us and more.  A call of known signature
needs none of that: its compiled kernel, its grid and all arguments but addresses are kept (facts as of Triton 3.6).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from triton.compiler import CompiledKernel

from . import scratch
from .backend import INTERPRET, TESTED_TRITON, current, wait_for_triton
from .template import Argument, fill, filler

# Places of what a launch needs beside the call's own tensors, from the end of the list of tensors
STATES, INTS = Argument(-2), Argument(-1)
KEEPS = not INTERPRET and triton.__version__.startswith(TESTED_TRITON)


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


class Launches:
    """The launches of a call: made once with its tensors, and then with those of any call of the same signature.

    `kept` is one function of (addresses, stream) per step, or None where steps are launched through Triton's call: in
    the interpreter, in untested versions, and before the first time.
    """

    __slots__ = ("device", "index", "kept", "steps", "stream")

    def __init__(self, steps: Sequence[Step], device: torch.device) -> None:
        self.steps, self.device, self.index = steps, device, device.index
        self.kept: list[tuple[scratch.Need | None, Callable[[Sequence[int], int], None]]] | None = None
        # the handle of the stream that work is put on now
        self.stream: Callable[[int | None], int] = lambda _: 0
        if device.type == "cuda":
            self.stream = triton.runtime.driver.active.get_current_stream

    def first(self, tensors: tuple[Any, ...]) -> None:
        """Launch with these tensors, None where an optional one is absent; compiles what has not been compiled."""
        kept = []
        room: tuple[Any, ...] = ()
        wait_for_triton()
        with current(self.device):
            for step in self.steps:
                if step.need is not None:
                    room = scratch.take(step.need, self.device, self.stream(self.index))
                compiled = run(step.kernel, step.grid, *fill(step.args, (*tensors, *room)), **step.options)
                if KEEPS and isinstance(compiled, CompiledKernel) and len(step.args) == len(step.kernel.arg_names):
                    kept.append((step.need, _kept(step, compiled)))
        if len(kept) == len(self.steps):
            self.kept = kept

    def again(self, addresses: tuple[int, ...]) -> None:
        """Launch what is kept, for tensors of the same signature at these addresses, 0 where one is absent."""
        if self.index is not None and self.index != torch.cuda.current_device():
            with torch.cuda.device(self.device):
                return self.again(addresses)
        stream = self.stream(self.index)
        for need, launch in self.kept or ():
            if need is not None:
                states, ints = scratch.take(need, self.device, stream)
                addresses = (*addresses, states.data_ptr(), ints.data_ptr())
            launch(addresses, stream)


def _kept(step: Step, compiled: CompiledKernel) -> Callable[[Sequence[int], int], None]:
    """A launch of a compiled kernel from addresses, as JITFunction.run would make it; its pre-run hooks do not fire."""
    arguments = filler(step.args)
    launch, function, packed = compiled.run, compiled.function, compiled.packed_metadata
    x, y, z = (*step.grid, 1, 1)[:3]
    hooks = triton.knobs.runtime
    direct = _direct(step, compiled)

    def again(addresses: Sequence[int], stream: int) -> None:
        enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
        if enter.calls or leave.calls:
            args = arguments(addresses)
            metadata = compiled.launch_metadata(step.grid, stream, *args)
            launch(x, y, z, stream, function, packed, metadata, enter, leave, *args)
        elif direct is not None:
            direct(addresses, stream)
        else:
            launch(x, y, z, stream, function, packed, None, None, None, *arguments(addresses))

    return again


def _direct(step: Step, compiled: CompiledKernel) -> Callable[[Sequence[int], int], None] | None:
    """The C function behind Triton's CUDA launcher, called with descriptors that were encoded before.

    Triton encodes them at every launch, several microseconds each.  None where its launcher is not as expected.
    """
    launcher = compiled.run
    wrapped: Any = getattr(launcher, "launch", None)
    names = getattr(getattr(wrapped, "__code__", None), "co_freevars", ())
    if "tensordesc_meta" not in names or launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    cells = dict(zip(names, (cell.cell_contents for cell in wrapped.__closure__), strict=True))
    from triton.backends.nvidia.driver import make_tensordesc_arg

    metas, launch, function, packed = (
        cells["tensordesc_meta"],
        cells["launcher"],
        compiled.function,
        compiled.packed_metadata,
    )
    arguments = filler(step.args, lambda descriptor, number: make_tensordesc_arg(descriptor, metas[number]))
    x, y, z = (*step.grid, 1, 1)[:3]
    cooperative, pdl = launcher.launch_cooperative_grid, launcher.launch_pdl

    def direct(addresses: Sequence[int], stream: int) -> None:
        launch(x, y, z, stream, function, cooperative, pdl, None, None, packed, None, None, None, *arguments(addresses))

    return direct
