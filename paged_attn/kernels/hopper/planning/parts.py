"""Parts of a KV head's query heads as blocks of their own, where whole groups would leave rows of blocks empty."""

from typing import Annotated

from ....records.problem import Problem
from ....records.regime import Threshold
from .cost import long_scores
from .shapes import is_even

ROWS_OF_A_BLOCK, MAX_HEADS = 128, 64  # heads of a group that a consumer has rows for
MIN_FRACTION_OF_ROWS: Annotated[
    float,
    Threshold(
        "of a block's rows that whole groups fill",
        "parts of a power of two fill all rows, but each reads the keys for itself",
        "2 x 4096 of 96/8 (120 of 128 rows) 1320 -> 1201 us in parts; 28/4 (126) stays whole",
    ),
] = 0.95
MIN_TOKENS_PER_PARTED_SEQ: Annotated[
    int,
    Threshold(
        "query tokens of a sequence, on average; beside decodes of the longest",
        "a part's block has up to 128 tokens, and fewer leave its rows empty",
        "71/1 of 64 dims, 2 x 4096 2041 -> 705 us; 300 tokens beside 31 drafts of 4 129 -> 377",
    ),
] = 128
MIN_EMPTY_ROWS_WORTH_PARTS: Annotated[
    int,
    Threshold(
        "rows of a block of 128 that whole groups leave empty",
        "parts of long queries take a launch more for decodes, which would read keys once a part",
        "1024 at 4096 + 31 decodes of 2048: 48/1 (32 empty) 175 -> 151 us, 24/1 (8) +14%",
    ),
] = 16
_SCORES = "what parts save has to be more than a launch takes"
MIN_SCORES_WORTH_PARTS: Annotated[
    int,
    Threshold("scores of long queries", _SCORES, "48/1: 1024 at 4096 + 31 of 2048 175 -> 151 us, 512 + 7 of 1000 +15%"),
] = 80 << 20
MIN_FP8_SCORES_WORTH_PARTS: Annotated[
    int,
    Threshold(
        "scores of long queries over fp8",
        f"{_SCORES}; decodes no longer pass the converter",
        "48/1 over e4m3: 512 at 2048 + 7 of 1000 82 -> 74 us",
    ),
] = 24 << 20


def parts_of(p: Problem, apart: bool) -> int:
    """Parts of a KV head's query heads that are blocks of their own; 1: heads stay together.

    Parts of a power of two, if queries are so many that tokens fill them.
    apart: sequences of one token are no blocks, so that one of many may be all that is; there is one where the caller's
    bound leaves a token for each of the others.
    """
    group = p.heads // p.kv_heads
    parts = group // min(group & -group, MAX_HEADS)
    together = group <= MAX_HEADS and ROWS_OF_A_BLOCK // group * group >= MIN_FRACTION_OF_ROWS * ROWS_OF_A_BLOCK
    if together or parts * p.kv_heads > p.device.multiprocessors:
        return 1
    one_is_long = MIN_TOKENS_PER_PARTED_SEQ <= p.max_seqlen_q <= p.tokens - p.seqs + 1
    return parts if p.tokens >= MIN_TOKENS_PER_PARTED_SEQ * p.seqs or (apart and one_is_long) else 1


def blocks_are_parts(p: Problem) -> bool:
    """Whether a call's blocks are of parts of a group, for which few queries have no Hopper kernel."""
    return p.ragged and p.only != "decode" and not p.batch_invariant and parts_of(p, not is_even(p)) > 1


def all_blocks_are_parts(p: Problem) -> bool:
    """Whether no sequence is so short that blocks of parts would read its keys too often."""
    return p.only is not None or is_even(p) or parts_of(p, False) > 1


def parts_save_a_launch(p: Problem) -> bool:
    """Whether parts of long queries save more than decodes take as a launch of their own."""
    if all_blocks_are_parts(p) or parts_of(p, True) == 1:
        return False
    least = MIN_SCORES_WORTH_PARTS if p.cache.itemsize == 2 else MIN_FP8_SCORES_WORTH_PARTS
    empty = ROWS_OF_A_BLOCK % (p.heads // p.kv_heads)
    return empty >= MIN_EMPTY_ROWS_WORTH_PARTS and long_scores(p) >= least
