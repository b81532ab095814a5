"""Words that dialects and `explain` say of a launch alike."""

from ..records.plan import Launch


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
