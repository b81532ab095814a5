"""What `explain` says of a launch of the portable kernel, and words that it says of all launches."""

from ...records.plan import Launch


def some(count: int, one: str, many: str) -> str:
    """A number of things, of one or of many."""
    return f"{count} {one if count == 1 else many}"


def size_of(launch: Launch) -> str:
    """The rows and keys of a tile."""
    shape = launch.shape
    live = f", at most {launch.block_tokens * shape.GROUP} live" if launch.block_tokens < shape.BLOCK_Q else ""
    return f"({shape.BLOCK_Q} tokens x {shape.GROUP} heads{live}) x {shape.TILE} keys"


def words_of_pieces(launch: Launch) -> list[str]:
    """That keys are cut at fixed places, if they are."""
    return [f"pieces of {launch.shape.PIECE} keys"] * (launch.shape.PIECE is not None)


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
