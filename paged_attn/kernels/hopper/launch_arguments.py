"""Arguments of the Hopper kernels from tensors and a plan."""

from __future__ import annotations

from typing import Any

from ...launching.launch import Step
from ...records.call import ROOM
from ...records.plan import Launch
from .blocks import blocks_kernel
from .loading.boxes import cache_box, new_box, rows_box
from .mixed import mixed_kernel
from .planning.coverage import need_of
from .shares import shares_kernel


def _boxes(launch: Launch, call: Any) -> list[Any]:
    """Return TMA descriptors of keys, values, new keys, new values and, for blocks or beside them, queries."""
    shape, pipe = launch.shape, launch.pipe
    if shape.REST is not None:
        return _latent_boxes(launch, call)
    widths = (shape.HEAD_DIM, shape.DIM), (shape.VALUE_DIM, shape.VALUE_PADDED)
    boxes: list[Any] = [cache_box(kv, *width, shape, pipe) for kv, width in zip(call.cache, widths)]
    boxes += [new_box(kv, *width, shape, pipe) for kv, width in zip(call.new or (None, None), widths)]
    if not pipe.SHARES or pipe.BESIDE:
        boxes.append(rows_box(call.query, shape, pipe) if pipe.QUERY_BOX else None)
    return boxes


def _latent_boxes(launch: Launch, call: Any) -> list[Any]:
    """Return `_boxes` of latents: boxes of the value dims, or half of them, and boxes of the dims behind them."""
    shape, pipe = launch.shape, launch.pipe
    widths = [(shape.VALUE_DIM, shape.DIM // (1 + pipe.HALVES))]
    if shape.REST:
        widths.append((shape.HEAD_DIM, shape.REST))
    new = call.new and call.new.key
    boxes: list[Any] = [cache_box(call.cache.key, *width, shape, pipe) for width in widths]
    new_boxes: list[Any] = [new_box(new, *width, shape, pipe) for width in widths]
    nothing: list[Any] = [None] * (2 - len(widths))
    return [*boxes, *nothing, *new_boxes, *nothing]


def attention(launch: Launch, call: Any, numbers: tuple[Any, ...]) -> Step:
    """Return the step of one launch, with all arguments of its kernel."""
    shape, pipe, beside = launch.shape, launch.pipe, launch.beside
    boxes, compiled = _boxes(launch, call), [shape, pipe]
    kernel = shares_kernel if pipe.SHARES else blocks_kernel
    if beside is not None:
        kernel = mixed_kernel
        boxes += _boxes(beside, call)
        numbers += (beside.shortest, beside.least, beside.slots)
        compiled += [beside.shape, beside.pipe]
    args = (call.out, call.lse, ROOM, call.query, *boxes, *numbers, call.mods, call.scales, *compiled)
    # batch-invariant results must not depend on the compiler's choice of fused products
    options = {"num_warps": pipe.ROWS // 16, "enable_fp_fusion": shape.PIECE is None, "launch_pdl": True}
    if launch.config.registers is not None:
        options["maxnreg"] = launch.config.registers
    return Step(kernel, launch.grid, args, options, need_of(launch), room=int(pipe.FOLLOWS))
