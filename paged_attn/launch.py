"""Kernel arguments from tensors and a plan; allocates nothing but the states of segments."""

from typing import NamedTuple

import torch

from . import layout
from .kernels.args import KV, Batch, Modifiers, Partial, Rows, Scale, Scales
from .kernels.attention import attention_kernel
from .kernels.merge import merge_segments_kernel
from .plan import Launch, Plan


class Call(NamedTuple):
    """The tensors of one call, as records that every launch of its plan shares."""

    out: Rows
    lse: torch.Tensor | None
    query: Rows
    cache: layout.Cache
    new_key: KV | None
    new_value: KV | None
    query_starts: torch.Tensor | None
    seq_lens: torch.Tensor
    page_table: torch.Tensor
    mods: Modifiers
    scales: Scales


def scale(value: float | torch.Tensor | None) -> Scale | None:
    """A float, a [1] or a [kv_heads] tensor as kernels take it."""
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        return Scale(1.0, value, value.stride(0) if value.numel() > 1 else 0)
    return Scale(float(value))


def attention(plan: Plan, call: Call) -> None:
    """Run the launches of a plan in order."""
    for launch in plan.launches:
        _attention(launch, call)


def _attention(launch: Launch, call: Call) -> None:
    shape, config = launch.shape, launch.config
    batch = Batch(
        call.query_starts,
        call.seq_lens,
        call.page_table,
        call.page_table.stride(0),
        call.seq_lens.shape[0],
        call.query.ptr.shape[0],
        launch.shortest,
        launch.longest,
        launch.segments,
    )
    partial = _partial(launch, call) if shape.SPLIT else None
    options = {"num_warps": config.warps}
    if config.max_registers is not None:
        options["maxnreg"] = config.max_registers
    attention_kernel[launch.grid](
        call.out,
        call.lse,
        partial,
        call.query,
        call.cache.key,
        call.cache.value,
        call.new_key,
        call.new_value,
        batch,
        call.mods,
        call.scales,
        shape,
        **options,
    )
    if shape.SPLIT:
        rows = launch.blocks * shape.BLOCK_Q if shape.ONE_BLOCK and call.query_starts is not None else batch.num_tokens
        grid = (rows, shape.KV_HEADS * shape.GROUP)
        merge_segments_kernel[grid](call.out, call.lse, partial, batch, call.scales, shape, num_warps=1)


def _partial(launch: Launch, call: Call) -> Partial:
    tokens, heads = call.query.ptr.shape[:2]
    states = tokens * heads * launch.segments
    buffer = torch.empty(states * (launch.shape.DIM + 2), dtype=torch.float32, device=call.query.ptr.device)
    return Partial(buffer[2 * states :], buffer[:states], buffer[states : 2 * states])
