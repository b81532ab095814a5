"""Arguments of the Hopper kernels from tensors and a plan."""

from __future__ import annotations

import torch

from .. import launch as portable
from ..kernels.args import Partial
from .attention import blocks_kernel
from .boxes import cache_box, rows_box
from .plan import PIECES


def attention(launch: portable.Launch, call: portable.Call) -> None:
    """Run one launch of this dialect."""
    shape, pipe = launch.shape, launch.pipe
    portable.run(
        blocks_kernel,
        (launch.programs,),
        call.out,
        call.lse,
        _partial(launch, call.query.ptr.device) if shape.SPLIT else None,
        cache_box(call.cache.key, shape, pipe),
        cache_box(call.cache.value, shape, pipe),
        rows_box(call.query, shape, pipe),
        rows_box(call.out, shape, pipe) if pipe.OUT_BOX else None,
        _counters(call.query.ptr.device, 2),
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
    # a block that is cut has less than twice as many pieces as it has piece sizes
    slots = 2 * PIECES * launch.programs
    rows = slots * shape.ROWS
    buffer = torch.empty(rows * (shape.DIM + 2), dtype=torch.float32, device=device)
    return Partial(buffer[2 * rows :], buffer[:rows], buffer[rows : 2 * rows], None, _counters(device, 2 * slots + 2))
