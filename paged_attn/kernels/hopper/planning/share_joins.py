"""How few tiles a share has, who joins the pieces of blocks that shares cut, and how many at once."""

import math
from typing import Annotated

from ....records.problem import Problem
from ....records.regime import Threshold
from ....records.rounding import cdiv, next_power_of_2
from . import cost
from .columns import MAX_ROWS
from .shapes import padded_value_dim
from .share_layout import ShareLayout

MIN_TILES_PER_SHARE: Annotated[
    int,
    Threshold(
        "tiles of a share of blocks of 64 rows",
        "joining a piece of many rows costs as much as two tiles; where there are blocks for all programs, shares of "
        "as many would leave some empty",
        "1 x 16 x 256 14.3 -> 11.9 us, 1 x 16 x 1024 22.9 -> 16.7; 2 tiles: 13.9, 18.2",
    ),
] = 4
MAX_TILES_OF_ONE_SHARE: Annotated[
    int,
    Threshold(
        "tiles of a block of 64 rows that is one share",
        "nothing is joined then; nor is a launch that joins worth it for so few",
        "1 x 16 to 128 x 512 14.4-15.6 -> 13.2-14.0 us; shares of 8 tiles always: 1 x 32 x 1024 15.6, 17.4",
    ),
] = 8
MIN_ROWS_WORTH_A_MERGE: Annotated[
    int,
    Threshold(
        "rows of a block, times dims / 128",
        "many programs join many rows as soon as few, in a launch that takes 2 us to begin",
        "24/1 1 x 32768 20.0 -> 16.2 us, 3 tokens of 8/1 15.8 -> 14.1; of 4 and 8 rows +1 to +3 us",
    ),
] = 16
MIN_STATES_WORTH_A_MERGE: Annotated[
    int,
    Threshold(
        "states of rows that a block's pieces leave, if blocks share all programs",
        "the program of a block's last piece would read as many alone",
        "48/1 1 x 32768 27.1 -> 16.3 us, 3 x 8192 37 -> 35.0; 8 of 4 x 8192 (4 pieces of 32 rows) 41 -> 42.8",
    ),
] = 192
MIN_WAITS_WORTH_A_MERGE: Annotated[
    int,
    Threshold(
        "times that the program of a block's last piece waits for states of 512 dims",
        "each is 0.7 to 0.8 us; a launch of its own costs 3 to 5",
        "latents of 32 heads, 64 x 4096: by a launch 84.4 us, in place 84.3 to 85.2 in another run: no difference seen",
    ),
] = 4
ELEMENTS_JOINED_AT_ONCE = 1 << 14  # 128 of each thread, `layouts.dims_at_once`
ROWS_WORTH_A_COUNT: Annotated[
    int,
    Threshold(
        "rows of pieces that are joined while programs count once more",
        "n pieces take n * rows at once, and in groups 2 * sqrt(n) * rows and this",
        "8/1 1 x 32768 21.6 -> 15.9 us, of 4 tokens 41.7 -> 21.5; few pieces 0 to +6%",
    ),
] = 256


def tiles_per_share(p: Problem, s: ShareLayout) -> int:
    """The fewest."""
    if s.rows < MAX_ROWS or p.seqs * s.blocks >= s.shares:
        return 1
    tiles = max(s.tiles, 1) + p.new  # new keys have tiles of their own
    return tiles if tiles <= MAX_TILES_OF_ONE_SHARE else MIN_TILES_PER_SHARE


def merge_joins_sooner(p: Problem, s: ShareLayout, rows: int) -> bool:
    """Whether a launch of its own joins pieces of `rows` rows: where the last program of a block would take longer."""
    if padded_value_dim(p) > 256:
        return _waits_for_wide_states(p, s, rows) >= MIN_WAITS_WORTH_A_MERGE and s.tiles > MAX_TILES_OF_ONE_SHARE
    live = min(rows, s.rows) * padded_value_dim(p) // 128
    states = live * s.shares  # of all blocks of a KV head
    return (
        live >= MIN_ROWS_WORTH_A_MERGE
        and states >= MIN_STATES_WORTH_A_MERGE * cost.seqs_tried(p) * s.blocks
        and s.tiles > MAX_TILES_OF_ONE_SHARE
    )


def _pieces_of_wide_blocks(p: Problem, s: ShareLayout) -> int:
    """That most blocks have, where all are alike."""
    return max(2, s.shares // (cost.seqs_tried(p) * max(1, s.blocks)))


def pieces_of_wide_states(p: Problem, s: ShareLayout) -> int:
    """Pieces that are loaded together: as many as most blocks have, so that there is room for more dims of them."""
    return min(8, next_power_of_2(_pieces_of_wide_blocks(p, s)))


def _waits_for_wide_states(p: Problem, s: ShareLayout, rows: int) -> int:
    """Times that the program of a block's last piece waits for memory while it joins all (`join.join_states`)."""
    together = pieces_of_wide_states(p, s)
    at_once = max(8, min(rows, s.rows)) * padded_value_dim(p) * together
    return cdiv(_pieces_of_wide_blocks(p, s), together) * cdiv(at_once, ELEMENTS_JOINED_AT_ONCE)


def pieces_joined_at_once(p: Problem, s: ShareLayout, least: int) -> int:
    """Pieces of a block beyond which they are joined in groups; 0 where it is not likely to have more."""
    most = int((1 + math.sqrt(1 + ROWS_WORTH_A_COUNT / s.rows)) ** 2)
    # of one sequence's equal blocks each has as many; of others one may have nearly all keys
    pieces = s.shares // max(1, s.blocks) if p.seqs == 1 else s.shares
    return most if min(pieces, cdiv(s.tiles + p.new, least) + 1) > most else 0
