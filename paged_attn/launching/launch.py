"""How kernels are launched: through Triton's own call once, and through the compiled kernel from then on.

Triton's call looks at every argument to find the compiled kernel, which takes 10 us and more.  A call of known
signature skips this search: its compiled kernel, its grid and all arguments but addresses are kept.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from triton.compiler import CompiledKernel
from triton.runtime.interpreter import InterpretedFunction

from . import driver, platform, scratch, triton_trial, triton_version
from .jit_functions import settle, tell_plainly
from .locks import FIRST
from .platform import INTERPRET, current, interpreting
from .template import STREAM, Descriptors, Hole, Placed, caller, fill, filler

# Addresses of a launch are, in order: a call's tensors, the call's own memory, STATES, COUNTERS, STREAM.
STATES, COUNTERS = Hole(-3), Hole(-2)
KEEPS = not INTERPRET
# torch.cuda's own functions first ask whether CUDA is initialised.  It is, because a tensor is on the device.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


class Step(NamedTuple):
    """One launch of any kernel.  Every parameter is in args, in order, with a Hole for each tensor."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]
    # sizes of STATES and COUNTERS; None: the step uses the scratch of an earlier step with the same `room`, or none
    need: scratch.Need | None = None
    room: int = 0  # number of the stream's room; steps that run at the same time have different rooms
    # meta tensors, in the call's first step only: each call allocates memory for them, which all of its steps share
    own: tuple[torch.Tensor, ...] = ()


def own(likes: Sequence[torch.Tensor]) -> list[Any]:
    """Arguments of a kernel that stand for the tensors of `Step.own`, until a launch gives them memory."""
    return [Placed(STATES.slot - len(likes) + number, like) for number, like in enumerate(likes)]


def run(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> Any:
    """Launch a kernel that may not be compiled yet; return the compiled kernel, or None in the interpreter.

    One thread compiles or interprets at a time, because it holds FIRST.  A launch on a GPU does not hold FIRST, so no
    other thread waits for the launch.
    """
    if isinstance(kernel, InterpretedFunction):
        with interpreting():
            return kernel[grid](*args, **options)
    with FIRST:
        driver.provide_context()
        tell_plainly(kernel)
        settle(kernel)
        compiled = kernel.warmup(*args, grid=grid, **options)
        if any(hasattr(arg, "sizes") for arg in args):
            resize(compiled, args)
        load(compiled)
    return kernel[grid](*args, **options)


def load(compiled: Any) -> None:
    """Load a kernel's code and make its launcher, which Triton would do at launch, perhaps in two threads at once."""
    getattr(compiled, "_init_handles", lambda: None)()


def resize(compiled: Any, args: Sequence[Any]) -> None:
    """Give a kernel's TMA boxes their `sizes`; Triton's types allow powers of two only.

    The launcher reads box sizes from the kernel's metadata.  The copy instructions in the kernel have no box sizes.
    """
    boxes = [arg for arg in args if isinstance(arg, Descriptors)]
    metas = getattr(compiled.metadata, "tensordesc_meta", None)
    if not metas:
        raise RuntimeError(f"Triton {triton.__version__} keeps sizes of boxes elsewhere: set PAGED_ATTN_HOPPER=0")
    for box, meta in zip(boxes, metas, strict=True):
        sizes = getattr(box, "sizes", ())
        meta["block_size"] = [*sizes, *meta["block_size"][len(sizes) :]]


class Kept(NamedTuple):
    """A step whose kernel is compiled.  Both functions take a list of all addresses, with STREAM at its end."""

    need: scratch.Need | None
    room: int
    launch: Callable[[Sequence[int]], object]
    observed: Callable[[Sequence[int]], object]  # also launches, and calls Triton's launch hooks


class Launches:
    """The launches of a call: first with the call's own tensors, then with tensors of any call of equal signature.

    `kept` is None where steps are launched through Triton's call: in the interpreter, with a Triton that
    `triton_trial` does not trust, and before the first launch.
    """

    in_torch = False
    __slots__ = ("apart", "device", "index", "kept", "latent", "own", "steps", "stream", "value_dim")

    def __init__(
        self, steps: Sequence[Step], device: torch.device, value_dim: int | None = None, latent: bool = False
    ) -> None:
        self.steps, self.device, self.index = steps, device, device.index
        self.latent = latent  # keys and values of the cache begin at the same address
        self.apart: set[Any] = set()  # for call_cache.apart
        self.value_dim = value_dim  # dims of results; None: dims of queries
        self.own = scratch.side_by_side(steps[0].own) if steps and steps[0].own else None
        self.kept: list[Kept] | None = None
        # index of a device -> handle of its current stream
        self.stream: Callable[[int | None], int] = lambda _: 0
        if device.type == "cuda":
            self.stream = triton.runtime.driver.active.get_current_stream

    def first(self, tensors: tuple[Any, ...]) -> None:
        """Launch with these tensors; compile kernels that are not compiled yet."""
        kept = []
        rooms: dict[int, scratch.Room] = {}  # held until all steps are launched, so that nobody else gets the memory
        common = triton_version.options(KEEPS and platform.device_of(self.device).capability > 0)
        with current(self.device):
            stream = self.stream(self.index)
            if self.own is not None:
                tensors = (*tensors, *scratch.own(self.own, self.device))
            for step in self.steps:
                if step.need is not None:
                    rooms[step.room] = scratch.take(step.need, self.device, stream, step.room)
                room = rooms.get(step.room, scratch.NONE)
                everything = (*tensors, room.states, room.counters, stream)
                options = common | step.options
                compiled = run(step.kernel, step.grid, *fill(step.args, everything), **options)
                if KEEPS and isinstance(compiled, CompiledKernel) and len(step.args) == len(step.kernel.arg_names):
                    kept.append(_kept(step, compiled, len(everything)))
        if len(kept) == len(self.steps) and not triton_trial.why_untrusted(platform.device_of(self.device).arch):
            self.kept = kept

    def again(self, addresses: Sequence[int]) -> None:
        """Launch the kept steps for tensors of equal signature at these addresses."""
        index = self.index
        if index is not None and index != current_device():
            with torch.cuda.device(self.device):
                return self.again(addresses)
        stream = self.stream(index)
        if self.own is not None:
            memory = scratch.memory_of(self.own, self.device)
            first = memory.data_ptr()
            addresses = [*addresses, *[first + begin for begin in self.own.begins]]
        hooks = triton.knobs.runtime
        observed = hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls
        rooms: dict[int, scratch.Room] = {}
        for need, number, launch, launch_observed in self.kept or ():
            if need is not None:
                rooms[number] = scratch.take(need, self.device, stream, number)
            room = rooms.get(number, scratch.NONE)
            (launch_observed if observed else launch)([*addresses, room.states_at, room.counters_at, stream])


def _kept(step: Step, compiled: CompiledKernel, count: int) -> Kept:
    """Make the Kept of a step and its compiled kernel; its functions launch from a list of `count` addresses.

    The functions do what JITFunction.run does, but call no pre-run hooks.
    """
    run, function, packed = compiled.run, compiled.function, compiled.packed_metadata
    arguments = filler(step.args)
    grid = (*step.grid, 1, 1)[:3]

    def observed(addresses: Sequence[int]) -> None:
        enter, leave = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
        args, stream = arguments(addresses), addresses[-1]
        metadata = compiled.launch_metadata(step.grid, stream, *args)
        run(*grid, stream, function, packed, metadata, enter, leave, *args)

    through_triton = caller(run, (*grid, STREAM, function, packed, None, None, None, *step.args))
    direct = driver.direct_launch(compiled, grid, step.args, count, through_triton)
    # `observed` also holds the compiled kernel: Triton 3.8 unloads a kernel that nobody holds
    return Kept(step.need, step.room, direct or through_triton, observed)
