"""Kernels of an engine, compiled before its first request: what all hosts that know their sizes beforehand do alike.

A host says what it serves.  Of the processes of a machine that want the same kernels one compiles them, and the others
wait for it; kernels that lie on disk cost no more than a look.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch

from paged_attn.launching.backend import INTERPRET, Device, device_of
from paged_attn.preparation import manifest, subprocess
from paged_attn.preparation.engine_steps import Served, plain
from paged_attn.preparation.manifest import Asked
from paged_attn.preparation.model import Model
from paged_attn.preparation.prepare import Summary
from paged_attn.preparation.score_mod_ref import named
from paged_attn.records.layout import is_fp8

VARIABLE = "PAGED_ATTN_PREPARE"
# Hosts round a bound on keys up to it, so that calls of successive steps are of few kinds: what is new is checked and
# planned, which takes the host some hundred times as long.
BUCKET = 1024
OF_HOST: dict[str, dict[str, Any]] = {"vllm": dict(kv_layout="HND", side_by_side=True)}  # of all its layers' calls
_done: set[Served] = set()  # by this process: hosts make their batches' builders more than once


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
        warn(f"paged_attn: kernels will be compiled when a call first needs them: {type(error).__name__}: {error}")
        return None
    more = "; those of steps of few new tokens follow meanwhile" if meanwhile else ""
    tell(f"paged_attn: {done.kernels} kernels, {done.compiled} of them compiled now, in {done.seconds:.1f} s{more}")
    return done


def wanted(device: torch.device | Device) -> bool:
    if os.environ.get(VARIABLE, "") == "0":
        return False
    if isinstance(device, Device):
        return True
    return not INTERPRET and device.type == "cuda" and torch.version.hip is None


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
