"""Kernel arguments from tensors and a plan; allocates nothing but the states of cut blocks."""

from typing import Any, NamedTuple

import torch
import triton

from . import layout
from .kernels.args import Batch, Heads, KeyValues, Modifiers, Partial, Rows, Scales
from .kernels.attention import attention_kernel
from .kernels.merge import merge_cuts_kernel, merge_states_kernel
from .plan import Launch, Plan

ScaleLike = float | torch.Tensor | None


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
    """Scales as kernels take them: absent is 1."""
    given = (query, key, value, out)
    numbers = [1.0 if x is None or isinstance(x, torch.Tensor) else float(x) for x in given]
    tensors = [x if isinstance(x, torch.Tensor) else None for x in given]
    strides = [None if x is None else x.stride(0) if x.numel() > 1 else 0 for x in tensors]
    return Scales(softmax, *numbers, *tensors, *strides)


def run(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Every launch of the library goes through here."""
    kernel[grid](*args, **options)


def attention(plan: Plan, call: Call) -> None:
    """Run the launches of a plan in order."""
    for launch in plan.launches:
        _attention(launch, call)


def _attention(launch: Launch, call: Call) -> None:
    shape, config = launch.shape, launch.config
    if launch.pipe is not None:
        from .hopper import launch as hopper

        return hopper.attention(launch, call)
    batch = batch_of(launch, call)
    # where results must not depend on the kernel, its compiler may not choose which products to round
    fuse = shape.PIECE is None
    partial = _partial(launch, call) if shape.SPLIT else None
    cache = layout.pairs(call.cache, shape.HEAD_DIM) if config.pairs else call.cache
    options = {} if config.registers is None else {"maxnreg": config.registers}
    boxes = layout.boxes(call.cache, shape) if config.boxes else (None, None)
    run(
        attention_kernel,
        launch.grid,
        call.out,
        call.lse,
        partial,
        call.query,
        cache,
        *boxes,
        call.new,
        *batch,
        call.mods,
        call.scales,
        shape,
        num_warps=config.warps,
        enable_fp_fusion=fuse,
        **options,
    )
    if shape.SPLIT:
        live = launch.block_tokens * shape.GROUP
        rows = _rows_per_merge(live, shape.DIM)
        grid = (launch.programs, triton.cdiv(live, rows) * shape.KV_HEADS)
        run(
            merge_cuts_kernel,
            grid,
            call.out,
            call.lse,
            partial,
            launch.slots,
            call.scales,
            shape,
            rows,
            num_warps=_warps(rows, shape.DIM),
            enable_fp_fusion=fuse,
        )


def batch_of(launch: Launch, call: Call) -> Batch:
    """The ragged batch as a launch sees it."""
    return Batch(
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


def merge_states(out: Rows, lse: torch.Tensor, outs: torch.Tensor, lses: torch.Tensor) -> None:
    """Join [n, tokens, heads, head_dim] contiguous results and their [n, tokens, heads] log-sum-exps."""
    parts, tokens, heads, head_dim = outs.shape
    shape = Heads(KV_HEADS=1, GROUP=heads, HEAD_DIM=head_dim, DIM=max(16, triton.next_power_of_2(head_dim)))
    rows = _rows_per_merge(heads, shape.DIM)
    grid = (tokens, triton.cdiv(heads, rows))
    states = Partial(outs, lses, None)
    run(
        merge_states_kernel,
        grid,
        out,
        lse,
        states,
        parts,
        tokens * heads,
        scales(1.0),
        shape,
        rows,
        num_warps=_warps(rows, shape.DIM),
    )


def _rows_per_merge(live: int, dim: int) -> int:
    """One where few rows are live: programs side by side finish first.  At most what eight states leave room for."""
    return min(triton.next_power_of_2(triton.cdiv(live, 8)), max(1, 1024 // dim))


def _warps(rows: int, dim: int) -> int:
    """Four elements of a state per thread."""
    return max(1, min(4, rows * dim // 128))


def _partial(launch: Launch, call: Call) -> Partial:
    """Scratch for the states of cut blocks: its size depends on the device and on bounds, not on the batch."""
    device, shape = call.query.ptr.device, launch.shape
    states = launch.slots * launch.programs * shape.KV_HEADS * shape.LIVE
    buffer = torch.empty(states * (shape.DIM + 2), dtype=torch.float32, device=device)
    cuts = torch.empty(3 * launch.programs, dtype=torch.int32, device=device)
    return Partial(buffer[2 * states :], buffer[:states], buffer[states : 2 * states], cuts)
