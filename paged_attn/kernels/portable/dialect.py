"""The dialect of the portable Triton kernels: every call on every device, and the interpreter."""

from ...launching.launch import Step
from ...launching.platform import Device
from ...launching.scratch import Need
from ...records import layout
from ...records.layout import ROOM, Call
from ...records.plan import Launch
from ...records.problem import Problem
from ..shared_steps import numbers_of
from .attention_kernel import attention_kernel
from .regimes import launches, regime

__all__ = ["launches", "regime"]  # functions of the protocol Dialect that other files define

TITLE = "portable"


def why_not_on(device: Device) -> str | None:
    """Return None: the portable kernels run on every device."""
    return None


def uncovered(problem: Problem) -> list[str]:
    """Return no words: the portable kernels take every call."""
    return []


def read() -> None:
    """Do nothing: this module has imported the kernels."""


def copies(problem: Problem) -> None:
    """Return None: the portable kernels read pages of any size."""
    return


def step(launch: Launch, call: Call) -> Step:
    """Return the step of a launch: kernel, grid and arguments."""
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
    """Scratch for states of cut blocks and counters; its size depends on the plan, not on lengths of sequences."""
    shape = launch.shape
    states = launch.slots * launch.programs * shape.KV_HEADS * shape.LIVE * (shape.VALUE_PADDED + 2)
    if launch.merge is None:
        return Need(states, launch.programs * shape.KV_HEADS)
    return Need(states + launch.cuts, 0, True)


def multiplies_fp8(launch: Launch) -> bool:
    """Return False: operands of products have 16 bits or more."""
    return False


def compiled(launch: Launch) -> tuple[object, ...]:
    """Return the key of a launch's compiled kernel, without `least` and `slots`, which do not specialise it."""
    return (launch.shape, launch.config, launch.shortest, launch.longest)


# ---- in the words of `explain` -------------------------------------------------------------------


def size_of(launch: Launch) -> str:
    """Describe the rows and keys of a tile."""
    shape = launch.shape
    live = f", at most {launch.block_tokens * shape.GROUP} live" if launch.block_tokens < shape.BLOCK_Q else ""
    return f"({shape.BLOCK_Q} tokens x {shape.GROUP} heads{live}) x {shape.TILE} keys"


def words_of_pieces(launch: Launch) -> list[str]:
    """Describe pieces of a fixed size, if keys are cut into such pieces."""
    return [f"pieces of {launch.shape.PIECE} keys"] * (launch.shape.PIECE is not None)


def warps_of(launch: Launch) -> int:
    """Warps of a program."""
    return launch.config.warps


def tiles_of(launch: Launch) -> str:
    """Describe a program's rows, stages and loads."""
    config = launch.config
    notes = [f"{config.stages} stages"] + ["boxes of whole tiles"] * config.boxes + ["bytes in pairs"] * config.pairs
    notes += ["keys that are their values read once"] * (launch.shape.REST is not None)
    return f"{launch.shape.ROWS} rows {size_of(launch)}, " + ", ".join(notes + words_of_pieces(launch))


def heads_of(launch: Launch) -> str:
    """Describe the heads, or parts of heads, that have blocks of their own."""
    if launch.config.head_blocks > 1:
        return f"{launch.shape.KV_HEADS} parts of {launch.shape.GROUP} heads, on one KV head"
    return f"{launch.shape.KV_HEADS} KV heads"


def kernel_of(launch: Launch) -> str:
    """Name of the kernel."""
    return "attention_kernel"
