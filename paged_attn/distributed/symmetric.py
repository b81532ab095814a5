"""Memory that all ranks of one host can write: torch's symmetric memory, which only this file calls.

torch says that the interface of symmetric memory "may change without notice".  If the interface is not as expected, or
ranks do not reach each other's memory, `share` returns the reason, and merges use collectives.  Kernels need no
multicast, so it is switched off before memory is shared, unless NO_MULTICAST is set already.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


class Shared(NamedTuple):
    """Memory of this rank, and the addresses of all ranks' memory, in the order of the ranks."""

    own: Tensor
    addresses: list[int]
    handle: Any  # torch's handle, which keeps the memory of peers mapped


def _module() -> Any:
    """Return torch's module of symmetric memory; None if torch lacks it, or a function in it that is called here."""
    try:
        import torch.distributed._symmetric_memory as found
    except ImportError:
        return None
    return found if hasattr(found, "empty") and hasattr(found, "rendezvous") else None


def share(count: int, device: torch.device, group: Any) -> Shared | str:
    """Make memory of `count` int64 zeros on each rank that all ranks can write, or return why this is not possible.

    Every rank of the group calls this function with an equal count.  Either all ranks share memory, or all return the
    same reason.
    """
    found = _first([_why_not_here(device), _where(device)], group) or _try(count, device, group)
    if isinstance(found, Shared):
        found.own.zero_()
        torch.cuda.synchronize(device)
        dist.barrier(group)  # no rank writes before all memory holds zeros
    return found


def _try(count: int, device: torch.device, group: Any) -> Shared | str:
    """Share memory by torch; if this fails on one rank, every rank returns that rank's reason."""
    os.environ.setdefault(NO_MULTICAST, "1")
    symmetric, shared, error = _module(), None, None
    try:
        own = symmetric.empty(count, dtype=torch.int64, device=device)
        handle = symmetric.rendezvous(own, group)
        shared = Shared(own, [int(x) for x in handle.buffer_ptrs], handle)
    except Exception as found:  # whatever it is, because other ranks wait for this rank's answer
        error = f"torch could not share memory: {type(found).__name__} {found}"
    return _first([error, None], group) or shared or ""


def _first(own: list[Any], group: Any) -> str | None:
    """Return the first reason against sharing, which is the same on all ranks; None if there is none.

    own: [reason of this rank or None, (host, device) of this rank or None].
    """
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
    """Return (host, device) of this rank; without CUDA, (host, process id).

    All containers of a machine that can read /proc give the same host.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            host = file.read().strip()
    except OSError:
        host = os.uname().nodename
    if device.type != "cuda":
        return host, os.getpid()
    return host, str(getattr(torch.cuda.get_device_properties(device), "uuid", device.index))


def _why_not_here(device: torch.device) -> str | None:
    """Return a reason against sharing that this rank finds without other ranks; None if it finds none."""
    if device.type != "cuda" or torch.version.hip:
        return f"memory is shared between CUDA devices, not on {device}"
    others = [i for i in range(torch.cuda.device_count()) if i != device.index]
    if not all(torch.cuda.can_device_access_peer(device, i) for i in others):
        return "devices do not reach each other's memory"
    return None if _module() else f"torch {torch.__version__} has no symmetric memory as it was known"
