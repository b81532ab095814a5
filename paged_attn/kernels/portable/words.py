"""What `explain` says of a launch of the portable kernel."""

from ...records.plan import Launch
from ..words import size_of, words_of_pieces


def warps_of(launch: Launch) -> int:
    """Warps of a program."""
    return launch.config.warps


def tiles_of(launch: Launch) -> str:
    """How a program holds its tiles."""
    config = launch.config
    notes = [f"{config.stages} stages"] + ["boxes of whole tiles"] * config.boxes + ["fp8 in pairs"] * config.pairs
    notes += ["keys that are their values read once"] * (launch.shape.REST is not None)
    return f"{launch.shape.ROWS} rows {size_of(launch)}, " + ", ".join(notes + words_of_pieces(launch))


def heads_of(launch: Launch) -> str:
    """What has blocks of its own."""
    if launch.config.head_blocks > 1:
        return f"{launch.shape.KV_HEADS} parts of {launch.shape.GROUP} heads, on one KV head"
    return f"{launch.shape.KV_HEADS} KV heads"


def kernel_of(launch: Launch) -> str:
    """The name of the kernel."""
    return "attention_kernel"
