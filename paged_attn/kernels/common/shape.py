"""The compile-time constants of a kernel; another Shape is another kernel."""

from typing import Any, NamedTuple


class Shape(NamedTuple):
    """Compile-time constants of a kernel."""

    GROUP: int  # query heads per KV head
    KV_HEADS: int
    HEAD_DIM: int
    DIM: int  # HEAD_DIM rounded up to a power of two; latents: VALUE_PADDED
    VALUE_DIM: int  # of values and results; mostly HEAD_DIM
    VALUE_PADDED: int  # VALUE_DIM rounded up; DIM if VALUE_DIM is HEAD_DIM
    PAGE: int
    BLOCK_Q: int  # query tokens of a block
    ROWS: int  # BLOCK_Q * GROUP rounded up to a power of two; Hopper's blocks: 64 for each warpgroup
    LIVE: int  # rows of a state in scratch
    TILE: int  # keys per step
    CHUNK: int  # keys of a tile that are sure to lie in one page: the largest power of two that divides both
    STAGES: int  # tiles in flight
    COMPUTE: Any  # tl.dtype of the operands of both products
    PRECISION: str  # of a float32 dot
    ONE_BLOCK: bool  # a sequence's queries fit one block: block = sequence, no search
    SPLIT: bool  # programs take even shares of all work; otherwise a block each
    PIECE: int | None  # keys are cut only at multiples of this, and states are folded in order; None: anywhere
    MERGE: int  # rows at a time that the program of a block's last piece joins; 0: a merge launch joins
    SCAN: int  # sequences that the search for a share's begin reads at once
    ONE_SCAN: bool  # SCAN covers all sequences
    PEEL: bool  # tiles that every row sees completely run in a loop of their own, without masks
    SCALE_FIRST: bool  # scores are scaled before they are modified and masked, not inside the exponent
    CLEAR: bool  # this launch zeroes the rows behind the last sequence
    NATIVE_FP8: bool  # the target converts e4m3 in hardware
    NORMALIZED: bool = False  # queries of any magnitude are brought into float16's range, row by row
    WHOLE: bool = False  # even shares may begin with blocks, if blocks are about equally long; needs ONE_SCAN
    PAIRED: bool = False  # two neighbouring KV heads are read as one of twice the dims, which DIM counts
    LEADS: bool = False  # the call's next launch, of other sequences, need not wait for the end of this one
    FAR_CAP: bool = False  # the softcap is too large for exponentials alone (`scores.softcap`)
    APART: bool = False  # new keys begin a tile of their own behind the cache's last tile
    BY_HEAD: bool = False  # KV heads have programs in proportion to the keys that their heads see (`head_programs`)
    BY_ROW: bool = False  # Hopper: scores have a scale for each row, by NORMALIZED or by token scales
    SCORE_MOD: Any = None  # a user's function, `score_mod.of_this_dialect`
    WORLD: int = 1  # ranks that keys lie over (`shards.py`)
    STRIPE: int | None = None  # consecutive positions that lie with one rank
    REST: int | None = None  # latents: padded key dims behind the values, 0: none; None: not latents


class Heads(NamedTuple):
    """Fields of a Shape that storing rows needs, without a cache."""

    KV_HEADS: int
    GROUP: int
    VALUE_DIM: int
    VALUE_PADDED: int
    PAIRED: bool = False
