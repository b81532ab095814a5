"""Records of a plan and its launches, and of the tables from which planners choose launches.

`docs/regimes.md` is generated from the tables, and `explain` names the row of a call.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..kernels.common.records import Shape
from .problem import Problem

UNBOUNDED = 2**31 - 1  # stands for no upper bound on the query tokens of a sequence


class Config(NamedTuple):
    """Tile shape and compiler options of one launch."""

    rows: int  # query tokens x group
    tile: int  # keys per step
    stages: int
    warps: int
    peel: bool  # a loop without masks for the tiles that all rows see
    resident: int  # programs that a multiprocessor holds at once
    least: int = 8  # fewest tiles of a share; smaller shares cost more to merge than they save
    pieces: int = 0  # if > 0, shares of short blocks may have fewer than `least` tiles, to make this number of pieces
    whole: int = 0  # blocks of up to this number of keys stay whole, if there are more than multiprocessors / 4 blocks
    enough: float = float("inf")  # with at least this number of blocks per multiprocessor, no block is cut
    boxes: bool = False  # full tiles are loaded by TMA, if pages are whole tiles
    pairs: bool = False  # keys and values are read two bytes at a time: two dims, or four of int4
    registers: int | None = None  # most registers of a thread; None: no limit
    head_blocks: int = 1  # parts of a latent cache's query heads; kernels treat each part as a KV head
    piece: int | None = None  # keys are cut only at multiples of this number, a multiple of every tile; None: anywhere


class Merge(NamedTuple):
    """A merge launch, which joins the pieces of the blocks that the launch before it has cut."""

    blocks: int  # upper bound of the blocks of all sequences
    rows: int  # rows that a program joins, all of one block and KV head
    dims: int  # dims of these rows that a program joins
    lanes: int  # number of lanes in which pieces are joined side by side
    skip: int  # rows from a block's first state to its second
    stride: int  # rows from each later state to the next
    dependent: bool  # the merge may begin before the launch ahead has ended


class Launch(NamedTuple):
    """One launch of the attention kernel, and of the merge if shape.SPLIT but not shape.MERGE."""

    shape: Shape
    programs: int  # programs per KV head, one for each block or share; with a pipe, all programs of the launch
    least: int  # fewest tiles of a share
    slots: int  # scratch states of a share; with a pipe, of all programs
    shortest: int  # fewest query tokens of a sequence that the launch serves, inclusive
    longest: int  # most query tokens of such a sequence, inclusive
    block_tokens: int  # most query tokens of a block
    config: Config
    dialect: str  # name of the dialect that has the kernel
    pipe: Any = None  # further constants of the kernel, if its dialect has such a record
    merge: Any = None  # Merge, where shape.SPLIT but not shape.MERGE
    copied: bool = False  # whether the launch reads the call's copies of keys and values, not the cache
    beside: Any = None  # a Launch for few queries, whose work the programs of this launch do, too

    @property
    def parts(self) -> tuple[Any, ...]:
        """The launches whose work the programs do: this launch, and the launch beside it, if there is one."""
        return (self,) if self.beside is None else (self, self.beside)

    @property
    def cuts(self) -> int:
        """Number of int32 numbers in scratch that tell the merge how blocks are cut."""
        return 0 if self.merge is None else 2 * self.merge.blocks * self.shape.KV_HEADS

    @property
    def grid(self) -> tuple[int]:
        return (self.programs if self.pipe is not None else self.programs * self.shape.KV_HEADS,)


class Plan(NamedTuple):
    """The launches of a call, in order."""

    launches: tuple[Launch, ...]
    copies: Any = None  # Copies that launches with `copied` read in place of the cache; None: nothing is copied

    def __str__(self) -> str:
        return "\n".join(
            f"queries {x.shortest}..{x.longest}: {x.grid[0]} programs over {x.shape.KV_HEADS} heads, "
            f"{'keys cut' if x.shape.SPLIT else 'keys whole'}, {x.shape.BLOCK_Q} tokens ({x.shape.ROWS} rows) "
            f"x {x.shape.TILE} keys, {x.config.stages} stages, {x.dialect}"
            for launch in self.launches
            for x in launch.parts
        )


def some(count: int, one: str, many: str) -> str:
    """Return a count with its noun in the singular or plural."""
    return f"{count} {one if count == 1 else many}"


# ---- tables ---------------------------------------------------------------------------------------


class Threshold(NamedTuple):
    """Describes a number, as `Annotated[int, Threshold(...)]`: its unit, its reason, and the measurement behind it."""

    unit: str
    reason: str
    decided: str  # the line of a suite or of benchmarks/NOTES.md, shortened: case, figures


class Regime(NamedTuple):
    """A row of a table; the first row whose condition holds takes the call."""

    name: str
    calls: str  # the calls that this row takes, and no row before it
    kernels: str  # kernel, tile, warps, and what cuts keys
    reason: str
    decided: str  # as in Threshold
    when: Callable[[Problem], bool]
    launches: Callable[[Problem], tuple[Launch, ...]]


def row_of(table: Sequence[Regime], p: Problem) -> Regime:
    """The row that takes a call."""
    return next(row for row in table if row.when(p))
