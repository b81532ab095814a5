"""Processes that compile side by side.  None of them uses the device, which this machine may lack.

Functions that need Triton import it when they are called, so `paged_attn.prepare` can be imported without Triton.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..launching import platform, triton_version
from ..launching.locks import FIRST
from ..launching.platform import Device
from ..planning.dialects import DIALECTS, dialect
from .model import Lengths, Model, call_of, distinct
from .other_calls import WRITES, fused_writes, whole_pages, write

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget

Track = Callable[..., Iterable[Any]]
CHUNK = 2048  # fewest batches that a forked process plans at a time


class ModelBatches(NamedTuple):
    """A model, batches of it, and the launches (`WRITES`) that write its keys and values."""

    model: Model
    batches: Sequence[Lengths]
    writes: tuple[str, ...] = WRITES


class Compiled(NamedTuple):
    """A kernel on disk."""

    now: bool  # compiled now; False: it was on disk before
    folder: str  # within Triton's cache


class Pool:
    """Processes that compile for a device.  local: the device is this machine's, so launchers are built, too.

    forked: processes are forks of this process, which must not use CUDA, and whose other threads must hold no lock.
    Otherwise processes are spawned.
    """

    def __init__(self, device: Device, local: bool, processes: int, forked: bool = False) -> None:
        self.device, self.forked = device, forked
        read(device)
        context = multiprocessing.get_context("fork" if forked else "spawn")
        other = not forked and triton_version.assembler_was_another(device.capability)
        self._pool = ProcessPoolExecutor(processes, context, _start, (device, local, other))

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def compile(self, work: Iterable[ModelBatches], track: Track) -> dict[str, Compiled]:
        """Compile every kernel that the work needs; return the kernels by their hashes."""
        started = self.begin(work, track)
        return collect(track(as_completed(started), "compiling", len(started)))

    def begin(self, work: Iterable[ModelBatches], track: Track) -> list[Future[dict[str, Compiled]]]:
        """Start to compile every kernel that the work needs, and return without waiting."""
        tasks = [(one, batch) for one in work for batch in self._chosen(one, track)]
        # kernels of prefills take three times as long as kernels of decodes, and the last tasks should be short
        tasks.sort(key=lambda task: task[1].max_seqlen_q == 1)
        last = {(one.model, name): at for at, (one, _) in enumerate(tasks) for name in one.writes}
        started = []
        with interpreting("0"):  # for spawned processes
            for at, (one, batch) in enumerate(tasks):
                writes = tuple([name for name in one.writes if last[one.model, name] == at])
                started.append(self._pool.submit(compile_call, one.model, batch, writes))
        return started

    def kill(self) -> None:
        """End the processes, whatever they do."""
        for process in [*(getattr(self._pool, "_processes", None) or {}).values()]:
            process.kill()

    def _chosen(self, work: ModelBatches, track: Track) -> list[Lengths]:
        """Batches that together need all kernels.

        If there are many batches, each forked process first plans a part, and drops batches without new kernels.  This
        process then plans the remaining batches of all parts.  Spawned processes do not plan, because they would first
        have to import torch and Triton.
        """
        batches = work.batches
        if self.forked and len(batches) > CHUNK:
            parts = [batches[begin :: len(batches) // CHUNK] for begin in range(len(batches) // CHUNK)]
            found = [self._pool.submit(distinct, work.model, part, self.device) for part in parts]
            batches = [batch for part in found for batch in part.result()]
        return distinct(work.model, track(batches, "planning"), self.device)


def collect(done: Iterable[Future[dict[str, Compiled]]]) -> dict[str, Compiled]:
    """Kernels of finished tasks, by their hashes."""
    found: dict[str, Compiled] = {}
    for one in done:
        for name, kernel in one.result().items():
            known = found.get(name, kernel)
            found[name] = kernel._replace(now=kernel.now or known.now)
    return found


def processors() -> int:
    """Number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read(device: Device) -> None:
    """Do once what every process needs before its first look for a kernel on disk.

    Triton hashes all of its own files, which takes half a second.  Then the kernels for the device are imported.
    """
    with contextlib.suppress(ImportError):  # triton_key has moved from version to version
        with FIRST:
            from triton.runtime.cache import triton_key

        triton_key()
    for name in DIALECTS:
        if dialect(name).why_not_on(device) is None:
            dialect(name).read()


_seen: dict[str, Compiled] = {}


def _start(device: Device, local: bool, other_assembler: bool) -> None:
    """Make this process compile kernels instead of launching them."""
    import triton

    if other_assembler:
        del os.environ[triton_version.ASSEMBLER]

    def listener(*, metadata: dict[str, Any], metadata_group: dict[str, str], cache_hit: bool, **_: Any) -> None:
        folders = {Path(path).parent.name for path in metadata_group.values()}
        _seen[metadata["hash"]] = Compiled(not cache_hit, min(folders, default=""))

    triton.knobs.compilation.listener = listener
    compile_only(device, build_launcher if local else lambda _: None)


def compile_call(model: Model, batch: Lengths, writes: tuple[str, ...]) -> dict[str, Compiled]:
    """Compile the kernels of a batch, and of the launches `writes`, which write keys and values into the cache.

    With any writes, the kernels of whole pages are compiled, too, if the model has `pages=True`.
    """
    from ..api import paged_attention

    call = call_of(model, batch)
    paged_attention(**call)
    for name in writes:
        write(model, call, name)
        if model.qkv is not None:
            fused_writes(model, call, name)
    if model.pages and writes:
        whole_pages(model, call)
    found = dict(_seen)
    _seen.clear()
    return found


@contextlib.contextmanager
def interpreting(value: str) -> Iterator[None]:
    """A scope that sets TRITON_INTERPRET for processes that start inside."""
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


# ---- compiling in place of launching -------------------------------------------------------------


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


def target_of(device: Device) -> GPUTarget:
    """Return Triton's description of the device: backend, architecture and threads of a warp."""
    from triton.backends.compiler import GPUTarget

    if device.capability:
        return GPUTarget("cuda", device.capability, 32)
    return GPUTarget("hip", device.arch, 64)


def compile_only(device: Device, found: Callable[[Any], object]) -> None:
    """From now on, compile each kernel of a launch for this device and pass it to `found` instead of launching."""
    import triton

    from ..launching import launch
    from ..launching.jit_functions import settle, tell_plainly

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
    """Build the kernel's C launcher into Triton's cache, if this Triton has a launcher for each kernel.

    The driver's library must be installed.
    """
    vendor, name = {"cuda": ("nvidia", "CudaLauncher"), "hip": ("amd", "HIPLauncher")}[kernel.metadata.target.backend]
    module = importlib.import_module(f"triton.backends.{vendor}.driver")
    if triton_version.has_stubs(module):
        getattr(module, name)(kernel.src, kernel.metadata)
