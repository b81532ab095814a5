"""Kernels of an engine, compiled before its first request, for every host that knows its sizes beforehand.

A host says which calls it serves.  `ready` waits for the kernels of usual steps, `begin` waits for none.  If all
kernels are on disk, nothing is planned or compiled: a manifest names their folders.  If several processes of a machine
call `ready` for equal kernels, one process compiles and the others wait.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import as_completed
from contextlib import AbstractContextManager
from time import monotonic
from typing import Any

import torch

from paged_attn.integrations import BUCKET
from paged_attn.launching.platform import INTERPRET, Device, device_of, in_torch
from paged_attn.preparation import manifest, subprocess
from paged_attn.preparation.engine_steps import Padded, Served, plain
from paged_attn.preparation.manifest import Asked
from paged_attn.preparation.model import Model, distinct
from paged_attn.preparation.prepare import Summary
from paged_attn.preparation.processes import CHUNK, ModelBatches, Pool, collect, processors
from paged_attn.preparation.score_mod_ref import named
from paged_attn.records.formats import is_scaled

VARIABLE = "PAGED_ATTN_PREPARE"
SECONDS = 600.0  # a first call waits at most this long for kernels; a host of many processors needs about 1% of it
LATER = "paged_attn: kernels will be compiled when a call first needs them: {}: {}"
# Host -> values of fields of Model, which `prepare_for` assumes for all layers in this host.
OF_HOST: dict[str, dict[str, Any]] = {"vllm": dict(kv_layout="HND", side_by_side=True)}
_done: set[Served | Padded] = set()  # kinds of layers seen before: a host may ask for one kind more than once


def ready(
    served: Callable[[], Iterable[Served]], device: torch.device | Device, tell: Callable[[str], object],
    warn: Callable[[str], object],
) -> Summary | None:  # fmt: skip
    """Compile the kernels of usual steps and wait; compile all other kernels in the background; report in one line.

    Nothing happens if VARIABLE is 0.  With a torch.device, nothing happens either if kernels are interpreted, if calls
    run in plain torch, or if the device is no NVIDIA GPU.  An error is only reported: kernels are then compiled when a
    call first needs them.

    served: returns the kinds of layers.  tell, warn: write a line to the host's log.

    Returns: what was done before this function returned.  None: nothing was to be done, or an error came.
    """
    if not wanted(device):
        return None
    try:
        new = [x for x in dict.fromkeys(served()) if x not in _done]
        if not new:
            return None
        _done.update(new)
        local = not isinstance(device, Device)
        facts = device if isinstance(device, Device) else device_of(device)
        done, meanwhile = _prepare(Asked(tuple(new), facts, local))
    except Exception as error:  # must not stop an engine
        warn(LATER.format(type(error).__name__, error))
        return None
    more = "; those of steps of few new tokens follow meanwhile" if meanwhile else ""
    tell(f"paged_attn: {done.kernels} kernels, {done.compiled} of them compiled now, in {done.seconds:.1f} s{more}")
    return done


class Begun:
    """Kernels that forked processes compile while this process goes on; a thread of this process collects the results.

    A fork has torch and Triton already; a new process would need seconds to import them.  The forks use no CUDA.
    """

    def __init__(self, asked: Asked, work: list[ModelBatches], tell: Callable[[str], object],
                 warn: Callable[[str], object]) -> None:  # fmt: skip
        self._asked, self._tell, self._warn, self._began = asked, tell, warn, monotonic()
        self._done = threading.Event()
        count = sum(len(one.batches) for one in work)
        self._pool = Pool(asked.device, asked.local, min(processors(), count), forked=True)
        with warnings.catch_warnings():  # Python 3.12 warns of forks beside threads; locks.py keeps locks usable
            warnings.simplefilter("ignore", DeprecationWarning)
            self._tasks = self._pool.begin(work, lambda items, *_: items)
        threading.Thread(target=self._hear, name="paged_attn.prepare", daemon=True).start()

    def wait(self, seconds: float = SECONDS) -> None:
        """Wait until the kernels are compiled; after `seconds` the processes are killed."""
        if not self._done.wait(seconds):
            self._pool.kill()
            self._done.wait()

    def _hear(self) -> None:
        try:
            kernels = collect(as_completed(self._tasks))
            manifest.keep(self._asked, {kernel.folder for kernel in kernels.values()})
            done = Summary(len(kernels), sum(x.now for x in kernels.values()), monotonic() - self._began)
            self._tell(
                f"paged_attn: {done.kernels} kernels, {done.compiled} of them compiled now, in {done.seconds:.1f} s"
            )
        except Exception as error:
            self._warn(LATER.format(type(error).__name__, error))
        finally:
            self._done.set()
            self._pool.__exit__()


def begin(
    served: Callable[[], Iterable[Padded]], device: torch.device | Device, tell: Callable[[str], object],
    warn: Callable[[str], object],
) -> Begun | None:  # fmt: skip
    """Start to compile the kernels without waiting for them.  Conditions, errors and arguments are as in ready().

    On a system without fork, nothing happens.

    Returns: an object to wait for before the first launch.  None: nothing is being compiled.
    """
    if not wanted(device) or "fork" not in multiprocessing.get_all_start_methods():
        return None
    try:
        new = [x for x in dict.fromkeys(served()) if not _covered(x)]
        _done.update(new)
        local = not isinstance(device, Device)
        facts = device if isinstance(device, Device) else device_of(device)
        asked = Asked(tuple(new), facts, local)
        if not new or manifest.found(asked) is not None:
            return None
        with _on_the_cpu():
            work = [_few(x.work(), facts) for x in new]
            return Begun(asked, work, tell, warn)
    except Exception as error:  # must not stop an engine
        warn(LATER.format(type(error).__name__, error))
        return None


def _on_the_cpu() -> AbstractContextManager[object]:
    """A scope in which new tensors are on the CPU: forked processes cannot use a GPU that is torch's default device."""
    return contextlib.nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


def _few(work: ModelBatches, facts: Device) -> ModelBatches:
    """Drop batches that need only kernels of earlier batches.  If there are more than CHUNK, the pool does so."""
    return work if len(work.batches) > CHUNK else work._replace(batches=distinct(work.model, work.batches, facts))


def _covered(new: Padded) -> bool:
    return new in _done or any(isinstance(x, Padded) and x.covers(new) for x in _done)


def wanted(device: torch.device | Device) -> bool:
    if os.environ.get(VARIABLE, "") == "0":
        return False
    if isinstance(device, Device):
        return True
    if INTERPRET or device.type != "cuda" or torch.version.hip is not None:
        return False
    return not in_torch(device)


def _prepare(asked: Asked) -> tuple[Summary, bool]:
    """Compile the kernels of usual steps; return what was done, and whether another process compiles the rest."""
    count = manifest.found(asked)
    if count is not None:
        return Summary(count, 0, 0.0), False
    usual = asked._replace(usual=True)
    with manifest.turn(usual, wait=True):
        count = manifest.found(usual)  # perhaps compiled by the process that had the turn before
        done = subprocess.prepare(usual) if count is None else Summary(count, 0, 0.0)
    with manifest.turn(asked, wait=False) as turn:
        if turn is not None:
            subprocess.prepare_meanwhile(asked, turn)
    return done, True


def prepare_for(host: str, told: dict[str, Any], drafts: int, device: Device | None) -> Summary:
    """Compile the kernels that a host's plug-in will ask for, for one kind of layers, into Triton's cache.

    told: keywords of paged_attn.prepare().  drafts: draft tokens of a sequence in a decode.  device: None for this
        machine's GPU.
    """
    given, sizes = dict(told), {name: told[name] for name in ("max_seqs", "max_tokens", "max_seqlen")}
    given["score_mod"] = named(given.get("score_mod"), given.get("score_mod_args", ()))
    if given["scales"] == "number" and (is_scaled(given["cache_dtype"]) or is_scaled(given["out_dtype"])):
        given["scales"] = "tensor"  # hosts hold scales as tensors
    model = plain(**{name: given[name] for name in Model._fields if name in given} | OF_HOST[host])
    page, most = model.page_size, sizes["max_seqlen"]
    served = Served(model, **sizes | {"max_seqlen": -(-most // page) * page}, bucket=BUCKET, decode=1 + drafts)
    facts = device_of(torch.device("cuda")) if device is None else device
    return subprocess.prepare(Asked((served,), facts, local=device is None))
