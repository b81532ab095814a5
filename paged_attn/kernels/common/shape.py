"""What a kernel is compiled for: every number of it is a constant there, and another one is another kernel."""

from typing import Any, NamedTuple


class Shape(NamedTuple):
    """Everything a kernel is compiled for."""

    GROUP: int  # query heads per KV head
    KV_HEADS: int
    HEAD_DIM: int
    DIM: int  # HEAD_DIM rounded up to a power of two; of keys that hold their values VALUE_PADDED
    VALUE_DIM: int  # of values and results; mostly HEAD_DIM
    VALUE_PADDED: int  # VALUE_DIM rounded up; where that is HEAD_DIM, DIM
    PAGE: int
    BLOCK_Q: int  # query tokens of a block
    ROWS: int  # BLOCK_Q * GROUP rounded up to a power of two, or of Hopper's blocks to 64 for each consumer
    LIVE: int  # rows of a state in scratch
    TILE: int  # keys per step
    CHUNK: int  # keys of a tile that are sure to lie in one page: the largest power of two that divides both
    STAGES: int  # tiles in flight
    COMPUTE: Any  # tl.dtype of the operands of both dots
    PRECISION: str  # of a float32 dot
    ONE_BLOCK: bool  # a sequence's queries fit one block: block = sequence, no search
    SPLIT: bool  # programs take even shares of all work; otherwise a block each
    PIECE: int | None  # keys are cut at multiples of this only; their states are folded in order wherever they lie
    MERGE: int  # rows at a time in which the last piece of a cut block to arrive joins all; 0: a launch of its own does
    SCAN: int  # sequences that the search for a share's begin takes at once
    ONE_SCAN: bool  # these are all
    PEEL: bool  # tiles that every row sees whole run in a loop of their own, without masks
    SCALE_FIRST: bool  # scores are scaled before they are modified and masked, not inside the exponent
    CLEAR: bool  # this launch zeroes the rows past the last sequence
    NATIVE_FP8: bool  # the target converts e4m3 in hardware
    NORMALIZED: bool = False  # queries of any magnitude are brought into float16's range, row by row
    WHOLE: bool = False  # even shares may begin with blocks, where all of these are about as long; wants ONE_SCAN
    PAIRED: bool = False  # KV heads are two each, side by side, read as one of twice the dims: DIM is of both
    LEADS: bool = False  # the call's next launch, of other sequences, need not wait until this one has ended
    FAR_CAP: bool = False  # the softcap is so large that exponentials alone would not do (`scores.softcap`)
    APART: bool = False  # new keys begin a tile of their own, right behind the last of the cache's: no tile holds both
    BY_HEAD: bool = False  # KV heads have programs by what their heads see (`head_programs`), not all as many
    BY_ROW: bool = False  # Hopper's scores have a scale for each row: NORMALIZED, or that of its token
    SCORE_MOD: Any = None  # a user's function, `score_mod.of_this_dialect`
    REST: int | None = None  # values are the first dims of keys, and read once: dims behind them rounded up, 0 = none


class Heads(NamedTuple):
    """What of a Shape is left without a cache: all that storing rows needs."""

    KV_HEADS: int
    GROUP: int
    VALUE_DIM: int
    VALUE_PADDED: int
    PAIRED: bool = False
