"""What a planner decides: the launches of a call, and how each is laid out."""

from typing import Any, NamedTuple

from ..kernels.common.shape import Shape

UNBOUNDED = 2**31 - 1  # query tokens of a sequence


class Config(NamedTuple):
    """Tile shape and compiler options of one launch."""

    rows: int  # query tokens x group
    tile: int  # keys per step
    stages: int
    warps: int
    peel: bool  # a loop without masks for the tiles that all rows see
    resident: int  # programs that a multiprocessor holds at once
    least: int = 8  # tiles of a share: fewer cost more to merge than they save
    pieces: int = 0  # a short block is cut into up to so many pieces, also of fewer tiles than `least`
    whole: int = 0  # keys up to which a block is not cut, where blocks keep a quarter of the multiprocessors busy
    enough: float = float("inf")  # blocks per multiprocessor from which on no share is cut
    boxes: bool = False  # full tiles through the copy engine, where pages are whole tiles
    pairs: bool = False  # fp8 keys and values two dims at a time
    registers: int | None = None  # per thread, at most
    head_blocks: int = 1  # parts that the heads of a latent cache's one KV head are cut into, each a KV head to kernels
    piece: int | None = None  # keys are cut at multiples of this only; a multiple of every tile


class Merge(NamedTuple):
    """A launch behind one that cuts blocks, of which it joins the pieces."""

    blocks: int  # of all sequences, at most
    rows: int  # of a block, of one KV head, that a program joins
    dims: int  # of these rows
    lanes: int  # parts of their pieces that are joined side by side
    skip: int  # from a block's first state to its second, in rows
    stride: int  # and from there on
    dependent: bool  # it may begin before the launch ahead has ended


class Launch(NamedTuple):
    """One launch of the attention kernel, and of the merge if shape.SPLIT but not shape.MERGE."""

    shape: Shape
    programs: int  # per KV head: blocks, or shares of all blocks' work; with a pipe, all programs
    least: int  # tiles of a share
    slots: int  # scratch states of a share; with a pipe, of all programs
    shortest: int  # query lengths served
    longest: int
    block_tokens: int  # the most query tokens that a block can have
    config: Config
    dialect: str  # whose kernel it is
    pipe: Any = None  # what the kernel has besides, if its dialect has such a record
    merge: Any = None  # Merge, where shape.SPLIT but not shape.MERGE
    beside: Any = None  # a Launch of few queries whose work the same programs do beside their own

    @property
    def parts(self) -> tuple[Any, ...]:
        """All that its programs serve, as launches: this one, and what is beside it."""
        return (self,) if self.beside is None else (self, self.beside)

    @property
    def cuts(self) -> int:
        """Numbers that tell a merge how blocks are cut."""
        return 0 if self.merge is None else 2 * self.merge.blocks * self.shape.KV_HEADS

    @property
    def grid(self) -> tuple[int]:
        return (self.programs if self.pipe is not None else self.programs * self.shape.KV_HEADS,)


class Plan(NamedTuple):
    launches: tuple[Launch, ...]
    copies: Any = None  # Copies in whole pages, which the launches read in place of the cache; None: they read that

    def __str__(self) -> str:
        return "\n".join(
            f"queries {x.shortest}..{x.longest}: {x.grid[0]} programs over {x.shape.KV_HEADS} heads, "
            f"{'keys cut' if x.shape.SPLIT else 'keys whole'}, {x.shape.BLOCK_Q} tokens ({x.shape.ROWS} rows) "
            f"x {x.shape.TILE} keys, {x.config.stages} stages, {x.dialect}"
            for launch in self.launches
            for x in launch.parts
        )
