"""Words of `explain` about a launch of the portable kernel, and words that all dialects share."""

from ...records.plan import Launch


def some(count: int, one: str, many: str) -> str:
    """Return a count with its noun in the singular or plural."""
    return f"{count} {one if count == 1 else many}"


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
    notes = [f"{config.stages} stages"] + ["boxes of whole tiles"] * config.boxes + ["fp8 in pairs"] * config.pairs
    notes += ["keys that are their values read once"] * (launch.shape.REST is not None)
    return f"{launch.shape.ROWS} rows {size_of(launch)}, " + ", ".join(notes + words_of_pieces(launch))


def heads_of(launch: Launch) -> str:
    """Describe the heads that have blocks of their own."""
    if launch.config.head_blocks > 1:
        return f"{launch.shape.KV_HEADS} parts of {launch.shape.GROUP} heads, on one KV head"
    return f"{launch.shape.KV_HEADS} KV heads"


def kernel_of(launch: Launch) -> str:
    """The name of the kernel."""
    return "attention_kernel"
