"""Kernels of an engine, compiled before its first request: what all hosts that know their sizes beforehand do alike.

A host says what it serves.  Of the processes of a machine that want the same kernels one compiles them, and the others
wait for it; kernels that lie on disk cost no more than a look.
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

from paged_attn.launching.backend import INTERPRET, Device, device_of, in_torch
from paged_attn.preparation import manifest, subprocess
from paged_attn.preparation.engine_steps import Padded, Served, plain
from paged_attn.preparation.manifest import Asked
from paged_attn.preparation.model import Model, distinct
from paged_attn.preparation.prepare import Summary
from paged_attn.preparation.processes import CHUNK, ModelBatches, Pool, collect, processors
from paged_attn.preparation.score_mod_ref import named
from paged_attn.records.formats import is_fp8

VARIABLE = "PAGED_ATTN_PREPARE"
# Hosts round a bound on keys up to it, so that calls of successive steps are of few kinds: what is new is checked and
# planned, which takes the host some hundred times as long.
BUCKET = 1024
SECONDS = 600.0  # that a first call waits for kernels, at most: a hundred times what they take many processors
LATER = "paged_attn: kernels will be compiled when a call first needs them: {}: {}"
OF_HOST: dict[str, dict[str, Any]] = {"vllm": dict(kv_layout="HND", side_by_side=True)}  # of all its layers' calls
_done: set[Served | Padded] = set()  # by this process: hosts make their batches' builders more than once


def ready(
    served: Callable[[], Iterable[Served]], device: torch.device | Device, tell: Callable[[str], object],
    warn: Callable[[str], object],
) -> Summary | None:  # fmt: skip
    """Wait for kernels of usual steps, and have those of the others compiled meanwhile; say so in one line.

    Nothing is done where kernels are interpreted, where VARIABLE says 0, and on other devices than CUDA's.  What goes
    wrong is only told: kernels are then compiled when a call first needs them.

    Returns: what was done; None: nothing.
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
    except Exception as error:  # no engine is to stop for it
        warn(LATER.format(type(error).__name__, error))
        return None
    more = "; those of steps of few new tokens follow meanwhile" if meanwhile else ""
    tell(f"paged_attn: {done.kernels} kernels, {done.compiled} of them compiled now, in {done.seconds:.1f} s{more}")
    return done


class Begun:
    """Kernels that forked processes compile while this process goes on; a thread here hears when they are done.

    A fork has torch and Triton from its first moment, which a process of its own imports for seconds.  It uses no CUDA.
    """

    def __init__(self, asked: Asked, work: list[ModelBatches], tell: Callable[[str], object],
                 warn: Callable[[str], object]) -> None:  # fmt: skip
        self._asked, self._tell, self._warn, self._began = asked, tell, warn, monotonic()
        self._done = threading.Event()
        count = sum(len(one.batches) for one in work)
        self._pool = Pool(asked.device, asked.local, min(processors(), count), forked=True)
        with warnings.catch_warnings():  # Python 3.12 warns of threads: locks that a child needs survive, by locks.py
            warnings.simplefilter("ignore", DeprecationWarning)
            self._tasks = self._pool.begin(work, lambda items, *_: items)
        threading.Thread(target=self._hear, name="paged_attn.prepare", daemon=True).start()

    def wait(self, seconds: float = SECONDS) -> None:
        """Until the kernels are there; after so many seconds the processes are ended."""
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
    """Have the kernels compiled while the host goes on; else as ready().

    Returns: what to wait for before the first launch; None: nothing.
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
    except Exception as error:  # no engine is to stop for it
        warn(LATER.format(type(error).__name__, error))
        return None


def _on_the_cpu() -> AbstractContextManager[object]:
    """Examples of calls lie there, also where the user makes tensors on a GPU, which forked processes cannot use."""
    return contextlib.nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


def _few(work: ModelBatches, facts: Device) -> ModelBatches:
    """As few of the batches as need all kernels, to begin no process for nothing; many are left to processes."""
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
    """What was done, and whether more is being done meanwhile."""
    count = manifest.found(asked)
    if count is not None:
        return Summary(count, 0, 0.0), False
    usual = asked._replace(usual=True)
    with manifest.turn(usual, wait=True):
        count = manifest.found(usual)  # by whoever had the turn before
        done = subprocess.prepare(usual) if count is None else Summary(count, 0, 0.0)
    with manifest.turn(asked, wait=False) as turn:
        if turn is not None:
            subprocess.prepare_meanwhile(asked, turn)
    return done, True


def prepare_for(host: str, told: dict[str, Any], drafts: int, device: Device | None) -> Summary:
    """What a host's plug-in will ask for of one kind of layers, prepared for an image, say, and found by it then.

    told: keywords of paged_attn.prepare().
    """
    given, sizes = dict(told), {name: told[name] for name in ("max_seqs", "max_tokens", "max_seqlen")}
    given["score_mod"] = named(given.get("score_mod"), given.get("score_mod_args", ()))
    if given["scales"] == "number" and (is_fp8(given["cache_dtype"]) or is_fp8(given["out_dtype"])):
        given["scales"] = "tensor"  # as hosts hold them
    model = plain(**{name: given[name] for name in Model._fields if name in given} | OF_HOST[host])
    page, most = model.page_size, sizes["max_seqlen"]
    served = Served(model, **sizes | {"max_seqlen": -(-most // page) * page}, bucket=BUCKET, decode=1 + drafts)
    facts = device_of(torch.device("cuda")) if device is None else device
    return subprocess.prepare(Asked((served,), facts, local=device is None))
