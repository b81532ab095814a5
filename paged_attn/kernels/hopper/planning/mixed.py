"""Batches of long queries beside few rows: what each waits for, and who serves the few."""

from typing import Annotated

from ....records.problem import Problem
from ....records.regime import Threshold
from . import cost
from .columns import columns_beside, columns_of_list
from .conversion import NONE, conversion
from .shapes import padded_dim

MIN_TOKENS_PER_LONG_SEQ: Annotated[
    int,
    Threshold(
        "query tokens of a sequence, on average; more where its keys may be more than its queries",
        "products take longer than memory: few rows are hidden as blocks",
        "16 prefills of 16..4096 443 -> 421 us, with a softcap 600 -> 485, of 64 dims 362 -> 267; from 48 tokens on: "
        "2000 beside 24 decodes 118 -> 132",
    ),
] = 128
MAX_BYTES_OF_ONE_LIST: Annotated[
    int,
    Threshold(
        "bytes of keys and values, by sequences as long as the longest",
        "reading takes no time that a kernel of few rows would save",
        "512 tokens beside 7 decodes of 1000: 73 -> 46 us in one list, 64 dims 57 -> 42",
    ),
] = 128 << 20
MIN_LONG_TOKENS: Annotated[
    int,
    Threshold(
        "query tokens of long queries, of so few bytes",
        "fewer hide nothing of few rows",
        "512 + 7 decodes of 2000 34 -> 31 us beside blocks; 128 at 1000 + 7 of 1000 22 -> 26",
    ),
] = 192
KEYS_OF_A_DECODE = 1000  # taken of a decode, whose keys the host does not know
MIN_SCORES_PER_KEY: Annotated[
    int,
    Threshold(
        "scores of long queries for each key that decodes of 1000 keys read",
        "products hide reading where there are enough: with 4.5 TB/s and 770 TFLOP/s they take a fifth of its time. "
        "Else memory alone decides, and two lists leave more of shared memory to few rows",
        "1 x 2048 + 63 decodes of 4096 (524) 293 -> 270 us, 4 x 512 + 124 551 -> 473; 216 at 1024 + 40 of 1500 (31) 73 "
        "-> 75, 1 x 64 at 4096 + 63 of 4096 (16) 250 -> 260",
    ),
] = 36


def products_outlast_reading(p: Problem) -> bool:
    """Whether queries are so many for each key that products take longer than memory.

    As many keys as a sequence has queries are sure to meet these: of a context that is longer the host knows nothing.
    """
    keys = p.keys_seen(p.max_seqlen_q)
    return p.tokens * min(p.max_seqlen_q, keys) >= MIN_TOKENS_PER_LONG_SEQ * p.seqs * keys


def products_hide_reading(p: Problem) -> bool:
    """Whether few rows have a warpgroup beside blocks, and these have products enough to hide what it reads."""
    group = p.heads // p.kv_heads
    if conversion(p) != NONE or p.packed or not p.query_box or columns_beside(p) < group * (1 + (p.only == "prefill")):
        return False
    return cost.long_scores(p) >= MIN_SCORES_PER_KEY * p.kv_heads * p.seqs * KEYS_OF_A_DECODE


def reading_takes_no_time(p: Problem) -> bool:
    """Whether there is little to read, and nothing beside it that hides even that.

    Of one KV head few rows beside blocks would be cut too often.
    """
    if cost.bytes_of_keys(p, cost.seqs_tried(p), p.keys_seen(p.max_seqlen_q)) >= MAX_BYTES_OF_ONE_LIST:
        return False
    return p.kv_heads == 1 or cost.long_tokens(p) < MIN_LONG_TOKENS or not products_hide_reading(p)


def few_rows_have_no_columns(p: Problem) -> bool:
    """Whether few rows could only be blocks as well: of new keys beside an x-packed cache, or of 16 bits no columns."""
    if p.packed:
        return p.new
    return conversion(p) == NONE and (padded_dim(p) > 128 or not columns_of_list(p))


def decodes_read_faster_alone(p: Problem) -> bool:
    """Whether few rows beside long queries are better read by a launch of their own than from a list of their own.

    A converter is slower than memory, and they do without; x-packed ones are columns of other boxes; and of decodes
    fewer than programs a list cuts each, to have some for all of these, which even shares do better.
    """
    if conversion(p) != NONE or p.packed:
        return True
    return cost.seqs_tried(p) * p.kv_heads <= p.device.multiprocessors
