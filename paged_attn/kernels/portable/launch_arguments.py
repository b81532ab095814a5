"""Arguments of the portable kernel from tensors and a plan."""

from ...launching.launch import Step
from ...launching.scratch import Need
from ...records import layout
from ...records.call import ROOM, Call
from ...records.plan import Launch
from ..shared_arguments import numbers_of
from .attention_kernel import attention_kernel


def attention(launch: Launch, call: Call) -> Step:
    """Return the step of one launch, with all arguments of the kernel."""
    shape, config = launch.shape, launch.config
    # batch-invariant results must not depend on the compiler's choice of fused products
    options = {"num_warps": config.warps, "enable_fp_fusion": shape.PIECE is None}
    if config.registers is not None:
        options["maxnreg"] = config.registers
    cache = layout.pairs(call.cache, shape.HEAD_DIM, shape.VALUE_DIM) if config.pairs else call.cache
    new = call.new
    if shape.REST is not None:
        cache = layout.of_known_steps(cache)
    if config.head_blocks > 1:  # the kernel sees several KV heads, and the cache has one
        cache, new = layout.of_one_head(cache), new and layout.of_one_head(new)
    need = need_of(launch) if shape.SPLIT else None
    room = None if need is None else ROOM
    boxes = layout.boxes(call.cache, shape) if config.boxes else (None, None)
    args = (
        call.out, call.lse, room, call.query, cache, *boxes, new, *numbers_of(launch, call), call.mods,
        call.scales, shape,
    )  # fmt: skip
    return Step(attention_kernel, launch.grid, args, options, need)


def need_of(launch: Launch) -> Need:
    """Scratch of cut blocks, whose size depends on the device and not on the batch."""
    shape = launch.shape
    states = launch.slots * launch.programs * shape.KV_HEADS * shape.LIVE * (shape.VALUE_PADDED + 2)
    if launch.merge is None:
        return Need(states, launch.programs * shape.KV_HEADS)
    return Need(states + launch.cuts, 0, True)
