"""Blocks of more than 64 rows that are all done so soon that even shares of them are better than items."""

from typing import Annotated

from ....records.plan import UNBOUNDED
from ....records.problem import Problem
from ....records.regime import Threshold
from ....records.rounding import cdiv
from .columns import MAX_ROWS
from .shapes import MAX_SEQS_OF_ONE_WARP, is_even, rows_of

TILE = 64  # keys, for counting
MAX_ROWS_OF_EVEN_SHARES: Annotated[
    int,
    Threshold(
        "rows of a sequence and KV head",
        "of more a program joins too many",
        "1 x 128 x 16384 144 -> 78 us, 4 x 128 x 2048 63 -> 42 in shares; over 256..32768 161, 172 by the counter",
    ),
] = 512
MAX_TILES_PER_PROGRAM: Annotated[
    int,
    Threshold(
        "tiles of 64 keys and 64 rows for each multiprocessor",
        "until then how much code a launch fetches counts, and how few rows of how few pieces a program joins",
        "3 x 64 x 2048 34.9 -> 30.0 us, 1 x 32 x 16384 44.8 -> 35.9; 64 tiles: 1 x 128 x 8192 44.6, 50.0",
    ),
] = 32
MAX_TILES_PER_PROGRAM_OF_FEW_BLOCKS: Annotated[
    int,
    Threshold(
        "the same, of blocks that are each cut into many pieces",
        "blocks of 128 rows would be cut as much, and these join in groups",
        "8/1 1 x 131072 of 32 tokens 75.8 -> 57.1 us, 1 x 65536 of 64 59.2 -> 53.7",
    ),
] = 64
MIN_PIECES_OF_FEW_BLOCKS: Annotated[
    int,
    Threshold(
        "multiprocessors for each block",
        "so many pieces are joined in groups",
        "8 blocks of 32 tokens 49 us; of 16: 32/4 1 x 32768 of 32 49.3, 51.6, 32/8 4 x 8192 46, 55",
    ),
] = 16


def shares_have_more_rows(p: Problem) -> bool:
    """Whether even shares serve sequences of more rows than a block of theirs has."""
    if not is_even(p) or p.seqs > MAX_SEQS_OF_ONE_WARP:
        return False
    return rows_of(p, UNBOUNDED) <= MAX_ROWS_OF_EVEN_SHARES and even_shares_end_sooner(p)


def even_shares_end_sooner(p: Problem) -> bool:
    """Whether even shares of blocks of 64 rows are better than half as many of 128 from a counter."""
    multiprocessors = p.device.multiprocessors
    blocks = p.seqs * p.kv_heads * cdiv(p.max_seqlen_q, MAX_ROWS // (p.heads // p.kv_heads))
    few = MIN_PIECES_OF_FEW_BLOCKS * blocks <= multiprocessors
    most = MAX_TILES_PER_PROGRAM_OF_FEW_BLOCKS if few else MAX_TILES_PER_PROGRAM
    tiles = cdiv(p.keys_seen(p.max_seqlen_q + TILE), TILE)
    return blocks <= multiprocessors and blocks * tiles <= most * multiprocessors
