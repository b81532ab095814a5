"""Memory that all ranks of a host can write: torch's symmetric memory, which only this file touches.

The interface of symmetric memory "may change without notice".  Where it is not as expected, or ranks do not reach
each other's memory, `share` says so and collectives take its place.  Only addresses of peers are used: multicast is
switched off before memory is shared.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


class Shared(NamedTuple):
    """Memory of this rank, and where that of every rank lies, this one's too."""

    own: Tensor
    addresses: list[int]
    handle: Any  # keeps the memory of peers mapped


def _module() -> Any:
    """torch's module, or None where it is another than this file knows."""
    try:
        import torch.distributed._symmetric_memory as found
    except ImportError:
        return None
    return found if hasattr(found, "empty") and hasattr(found, "rendezvous") else None


def share(count: int, device: torch.device, group: Any) -> Shared | str:
    """So many zeroed float32 of each rank, or why ranks cannot share memory.

    Every rank of the group calls it with the same count, and all get the same answer.
    """
    found = _first([_why_not_here(device), _where(device)], group) or _try(count, device, group)
    if isinstance(found, Shared):
        found.own.zero_()
        torch.cuda.synchronize(device)
        dist.barrier(group)  # nobody writes before all is zero
    return found


def _try(count: int, device: torch.device, group: Any) -> Shared | str:
    """Share memory as torch does; if that fails on one rank, no rank has shared memory."""
    os.environ.setdefault(NO_MULTICAST, "1")
    symmetric, shared, error = _module(), None, None
    try:
        own = symmetric.empty(count, dtype=torch.float32, device=device)
        handle = symmetric.rendezvous(own, group)
        shared = Shared(own, [int(x) for x in handle.buffer_ptrs], handle)
    except Exception as found:  # whatever it is: the others wait for this rank
        error = f"torch could not share memory: {type(found).__name__} {found}"
    return _first([error, None], group) or shared or ""


def _first(own: list[Any], group: Any) -> str | None:
    """Return the first reason of any rank; own: [reason of this rank or None, (host, device) of this rank or None]."""
    answers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(answers, own, group=group)
    places = [place for _, place in answers if place is not None]
    if len(hosts := {host for host, _ in places}) > 1:
        return f"ranks are on {len(hosts)} hosts"
    reason = next((f"rank {rank}: {why}" for rank, (why, _) in enumerate(answers) if why), None)
    if reason is None and len({*places}) < len(places):
        return "several ranks have one device: call torch.cuda.set_device first"
    return reason


def _where(device: torch.device) -> tuple[Any, Any]:
    """(host, device) of this rank; containers of one host are one host."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            host = file.read().strip()
    except OSError:
        host = os.uname().nodename
    if device.type != "cuda":
        return host, os.getpid()
    return host, str(getattr(torch.cuda.get_device_properties(device), "uuid", device.index))


def _why_not_here(device: torch.device) -> str | None:
    """What this rank knows of it."""
    if device.type != "cuda" or torch.version.hip:
        return f"memory is shared between CUDA devices, not on {device}"
    others = [i for i in range(torch.cuda.device_count()) if i != device.index]
    if not all(torch.cuda.can_device_access_peer(device, i) for i in others):
        return "devices do not reach each other's memory"
    return None if _module() else f"torch {torch.__version__} has no symmetric memory as it was known"
