"""Arguments of the Hopper kernels from tensors and a plan."""

from __future__ import annotations

import torch

from .. import launch as portable
from ..kernels.args import Partial
from .blocks import blocks_kernel
from .boxes import cache_box, rows_box
from .shares import shares_kernel


def attention(launch: portable.Launch, call: portable.Call) -> None:
    """Run one launch of this dialect."""
    shape, pipe = launch.shape, launch.pipe
    device = call.query.ptr.device
    blocks = not pipe.SHARES
    boxes = [cache_box(call.cache.key, shape, pipe), cache_box(call.cache.value, shape, pipe)]
    if blocks:
        boxes.append(rows_box(call.query, shape, pipe) if pipe.QUERY_BOX else None)
        boxes.append(rows_box(call.out, shape, pipe) if pipe.OUT_BOX else None)
    portable.run(
        blocks_kernel if blocks else shares_kernel,
        (launch.programs,),
        call.out,
        call.lse,
        _partial(launch, device) if shape.SPLIT else None,
        call.query,
        *boxes,
        *([_counters(device, 2)] if blocks else []),
        *portable.batch_of(launch, call),
        call.mods,
        call.scales,
        shape,
        pipe,
        num_warps=4,
    )


_KEPT: dict = {}


def _counters(device: torch.device, count: int) -> torch.Tensor:
    key = (device, count)
    if key not in _KEPT:
        _KEPT[key] = torch.zeros(count, dtype=torch.int32, device=device)
    return _KEPT[key]


def _partial(launch: portable.Launch, device: torch.device) -> Partial:
    """Scratch for the states of pieces: its size depends on the device, not on the batch."""
    shape = launch.shape
    rows = launch.slots * shape.ROWS
    buffer = torch.empty(rows * (shape.DIM + 2), dtype=torch.float32, device=device)
    counters = _counters(device, 2 * launch.slots + 2)
    return Partial(buffer[2 * rows :], buffer[:rows], buffer[rows : 2 * rows], None, counters)
