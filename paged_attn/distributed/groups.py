"""The process group of a caller's `group`, collectives, and a check that ranks have equal values."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..checks.options import kind, refused


def process_group(group: Any) -> Any:
    """Return the process group of a ProcessGroup, a DeviceMesh or Peers.  None: the group of all processes."""
    if group is None:
        return dist.group.WORLD
    if hasattr(group, "process_group"):
        return group.process_group
    if hasattr(group, "mesh_dim_names") or hasattr(group, "get_group"):  # a DeviceMesh
        if group.ndim != 1:
            raise refused("group", "a mesh of one dimension", f"{group.ndim} dimensions: pass mesh[name]")
        return group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        name, wanted = "group", "a torch.distributed process group, a DeviceMesh of one dimension, Peers or None"
        raise TypeError(f"{name} must be {wanted}, got {kind(group)}")
    return group


def rank_and_world(group: Any) -> tuple[int, int]:
    """Return (rank of this process, number of ranks) of a process group."""
    return dist.get_rank(group), dist.get_world_size(group)


def gather(x: Tensor, group: Any) -> Tensor:
    """All-gather x, sent as bytes -> [world, *x.shape]; entry r is the tensor of rank r."""
    x = x.contiguous()
    found = x.new_empty((dist.get_world_size(group), *x.shape))
    together = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 renames it
    together(found.flatten().view(torch.uint8), x.flatten().view(torch.uint8), group=group)
    return found


def exchange(x: Tensor, group: Any) -> Tensor:
    """All-to-all of x [world, ...]: x[r] goes to rank r, and entry r of the result comes from rank r."""
    found = torch.empty_like(x)
    dist.all_to_all_single(found, x, group=group)
    return found


def agree(group: Any, **numbers: Tensor | Any) -> None:
    """Raise ValueError naming the first value that differs between a rank and this rank.

    Values are tensors of integers, or anything with an equal repr on all ranks.  The call costs an all-gather of
    hashes, a host sync for it, and a host sync for each tensor on a GPU.
    """
    names, own = list(numbers), [_hash(value) for value in numbers.values()]
    device = next((x.device for x in numbers.values() if isinstance(x, Tensor)), torch.device("cpu"))
    everybody = gather(torch.tensor(own, dtype=torch.int64, device=device), group).tolist()
    for rank, theirs in enumerate(everybody):
        for name, mine, other in zip(names, own, theirs):
            if mine != other:
                here = dist.get_rank(group)
                raise ValueError(f"{name} must be the same on all ranks, but rank {rank} has others than rank {here}")


def _hash(value: Any) -> int:
    """Return a hash of a tensor's integers in their order, or of another value's repr, that is equal in every process.

    Sums and products wrap around at 64 bits.
    """
    if not isinstance(value, Tensor):
        text = repr(value).encode()
        value = torch.frombuffer(bytearray(text or b" "), dtype=torch.uint8)
    numbers = torch.cat([torch.tensor([value.numel()]), value.detach().cpu().long().flatten()])
    weights = torch.arange(1, len(numbers) + 1) * 0x9E3779B97F4A7C1 + 0x632BE5AB
    mixed = numbers * weights
    return int((mixed ^ (mixed >> 29)).sum())
