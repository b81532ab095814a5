"""Kernel arguments from tensors and a plan: the steps of a call, which launch.py takes; nothing is launched here."""

from typing import Any, NamedTuple

import torch

from ...checks.axes import ScaleLike
from ...launching.launch import COUNTERS, STATES, Step
from ...launching.scratch import Need
from ...records import layout
from ...records.rounding import cdiv, next_power_of_2
from ..common.merge import merge_blocks_kernel, merge_states_kernel
from ..common.records import Heads, KeyValues, Modifiers, Rows, Scales, Scratch
from .attention import attention_kernel
from .plan import Launch, Plan

ROOM = Scratch(STATES, COUNTERS)


class Call(NamedTuple):
    """The tensors of one call, as records that every launch of its plan shares."""

    out: Rows
    lse: torch.Tensor | None
    query: Rows
    cache: KeyValues
    new: KeyValues | None
    query_starts: torch.Tensor | None
    seq_lens: torch.Tensor
    page_table: torch.Tensor
    mods: Modifiers
    scales: Scales


def scales(
    softmax: float, query: ScaleLike = None, key: ScaleLike = None, value: ScaleLike = None, out: ScaleLike = None
) -> Scales:
    """Scales as kernels take them: absent is 1; what a tensor has before its last axis is the same for all."""
    given = (query, key, value, out)
    numbers = [float(x) if isinstance(x, (int, float)) else 1.0 for x in given]
    tensors = [None if isinstance(x, (int, float)) else x for x in given]
    strides = [None if x is None else 0 if x.ndim == 0 or x.shape[-1] == 1 else x.stride(-1) for x in tensors]
    return Scales(softmax, *numbers, *tensors, *strides)


def attention(plan: Plan, call: Call) -> list[Step]:
    """The launches of a plan, in order, and behind each the merge of its pieces.

    That of a launch that leads comes behind the next one, which would have to wait for it.
    """
    steps: list[Step] = []
    led: list[Step] = []
    for launch in plan.launches:
        step = _attention(launch, call)
        merges = [] if launch.merge is None else [_merge_blocks(launch, call, step)]
        if launch.shape.LEADS:
            steps, led = [*steps, step], merges
        else:
            steps, led = [*steps, step, *merges, *led], []
    return steps


def _attention(launch: Launch, call: Call) -> Step:
    if launch.pipe is None:
        return _portable(launch, call)
    from ..hopper.arguments import attention as hopper

    return hopper(launch, call, numbers_of(launch, call))


def _portable(launch: Launch, call: Call) -> Step:
    shape, config = launch.shape, launch.config
    # where results must not depend on the kernel, its compiler may not choose which products to round
    options = {"num_warps": config.warps, "enable_fp_fusion": shape.PIECE is None}
    if config.registers is not None:
        options["maxnreg"] = config.registers
    cache = layout.pairs(call.cache, shape.HEAD_DIM) if config.pairs else call.cache
    need = _need(launch) if shape.SPLIT else None
    room = None if need is None else ROOM
    boxes = layout.boxes(call.cache, shape) if config.boxes else (None, None)
    args = (
        call.out, call.lse, room, call.query, cache, *boxes, call.new, *numbers_of(launch, call), call.mods,
        call.scales, shape,
    )  # fmt: skip
    return Step(attention_kernel, launch.grid, args, options, need)


def _merge_blocks(launch: Launch, call: Call, cutting: Step) -> Step:
    """What joins the pieces that another step leaves."""
    shape, merge, need = launch.shape, launch.merge, cutting.need
    assert need is not None
    args = (
        call.out, call.lse, ROOM, call.query_starts, call.seq_lens, call.seq_lens.shape[0], launch.shortest,
        launch.longest, (need.states - launch.cuts) // (shape.DIM + 2), launch.block_tokens * shape.GROUP,
        call.scales, shape, merge.skip, merge.stride, merge.rows, merge.lanes, merge.dependent,
    )  # fmt: skip
    options = {"num_warps": _warps(merge.rows * merge.lanes, shape.DIM), "enable_fp_fusion": shape.PIECE is None}
    if merge.dependent:
        options["launch_pdl"] = True
    return Step(merge_blocks_kernel, merge_grid(launch), args, options, room=cutting.room)


def merge_grid(launch: Launch) -> tuple[int]:
    """Programs of the launch that joins blocks."""
    shape, merge = launch.shape, launch.merge
    return (merge.blocks * cdiv(launch.block_tokens * shape.GROUP, merge.rows) * shape.KV_HEADS,)


def numbers_of(launch: Launch, call: Call) -> tuple[Any, ...]:
    """The ragged batch as a launch sees it: the fields of `kernels.args.Batch` that the host knows, one by one."""
    return (
        call.query_starts,
        call.seq_lens,
        call.page_table,
        call.page_table.stride(0),
        call.seq_lens.shape[0],
        call.query.ptr.shape[0],
        launch.shortest,
        launch.longest,
        launch.least,
        launch.slots,
    )


def merge_states(out: Rows, lse: Any, outs: Any, lses: Any) -> list[Step]:
    """Join [n, tokens, heads, head_dim] contiguous results and their [n, tokens, heads] log-sum-exps."""
    parts, tokens, heads, head_dim = outs.shape
    shape = Heads(KV_HEADS=1, GROUP=heads, HEAD_DIM=head_dim, DIM=max(16, next_power_of_2(head_dim)))
    rows = _rows_per_merge(heads, shape.DIM)
    grid = (tokens, cdiv(heads, rows))
    args = (out, lse, outs, lses, parts, tokens * heads, shape, rows)
    # every program has work here, and more warps were not tried
    return [Step(merge_states_kernel, grid, args, {"num_warps": min(4, _warps(rows, shape.DIM))})]


def _rows_per_merge(live: int, dim: int) -> int:
    """One where few rows are live: programs side by side finish first.  At most what eight states leave room for."""
    return min(next_power_of_2(cdiv(live, 8)), max(1, 1024 // dim))


def _warps(rows: int, dim: int) -> int:
    """Four elements of a state per thread."""
    return max(1, min(8, rows * dim // 128))


def _need(launch: Launch) -> Need:
    """Scratch for cut blocks: its size depends on the device, not on the batch."""
    shape = launch.shape
    states = launch.slots * launch.programs * shape.KV_HEADS * shape.LIVE * (shape.DIM + 2)
    if launch.merge is None:
        return Need(states, launch.programs * shape.KV_HEADS)
    return Need(states + launch.cuts, 0, True)
