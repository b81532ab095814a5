"""Conditions of the table of regimes: parts of groups, few rows beside long queries, few keys, short calls."""

from typing import Annotated

from ....records.formats import cdiv
from ....records.plan import UNBOUNDED, Threshold
from ....records.problem import Problem
from ...portable.launches import MAX_ROWS_OF_ONE_BLOCK
from . import cost
from .cost import long_scores
from .operands import MAX_ROWS, NONE, columns_beside, columns_of_list, conversion
from .shapes import MAX_SEQS_OF_ONE_WARP, is_even, padded_dim, rows_of

ROWS_OF_A_BLOCK, MAX_HEADS = 128, 64  # query rows of a block; maximum heads of a group or part that one block serves
MIN_FRACTION_OF_ROWS: Annotated[
    float,
    Threshold(
        "of a block's rows that whole groups fill",
        "parts of a power of two fill all rows, but every part reads all keys",
        "2 x 4096 of 96/8 (120 of 128 rows) 1320 -> 1201 us in parts; 28/4 (126) stays whole",
    ),
] = 0.95
MIN_TOKENS_PER_PARTED_SEQ: Annotated[
    int,
    Threshold(
        "query tokens of a sequence, on average; beside decodes: of the longest sequence",
        "a part's block has up to 128 tokens, and fewer leave its rows empty",
        "71/1 of 64 dims, 2 x 4096 2041 -> 705 us; 300 tokens beside 31 drafts of 4 129 -> 377",
    ),
] = 128
MIN_EMPTY_ROWS_WORTH_PARTS: Annotated[
    int,
    Threshold(
        "rows of a block of 128 that whole groups leave empty",
        "parts of long queries take one more launch, for decodes: as parts these would read keys once a part",
        "1024 at 4096 + 31 decodes of 2048: 48/1 (32 empty) 175 -> 151 us, 24/1 (8) +14%",
    ),
] = 16
_SCORES = "parts have to save more time than one more launch takes"
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
    """Return the number of parts into which a KV head's query heads are cut, each with blocks of its own; 1: not cut.

    The number of a part's heads is a power of two.  A group is cut only if it has more than MAX_HEADS heads or leaves
    too many rows of a block empty.  Queries must also be long enough to fill the parts' blocks, and all KV heads
    together must have at most as many parts as there are multiprocessors.

    apart: sequences of one token have another launch, so one long sequence is enough.  A sequence of max_seqlen_q
    tokens is taken to exist if it would leave at least a token for each other sequence.
    """
    group = p.heads // p.kv_heads
    parts = group // min(group & -group, MAX_HEADS)
    together = group <= MAX_HEADS and ROWS_OF_A_BLOCK // group * group >= MIN_FRACTION_OF_ROWS * ROWS_OF_A_BLOCK
    if together or parts * p.kv_heads > p.device.multiprocessors:
        return 1
    one_is_long = MIN_TOKENS_PER_PARTED_SEQ <= p.max_seqlen_q <= p.tokens - p.seqs + 1
    return parts if p.tokens >= MIN_TOKENS_PER_PARTED_SEQ * p.seqs or (apart and one_is_long) else 1


def blocks_are_parts(p: Problem) -> bool:
    """Whether each block of the call's long queries has a part of a group's heads.

    With more than 64 heads on a KV head, no other Hopper kernel serves the call, except over latents.
    """
    return p.ragged and p.only != "decode" and not p.batch_invariant and parts_of(p, not is_even(p)) > 1


def all_blocks_are_parts(p: Problem) -> bool:
    """Whether blocks of parts, which read keys once for each part, serve every sequence of the call.

    True if sequences are long on average or equally long, or if the call asks for decodes or prefills alone.
    """
    return p.only is not None or is_even(p) or parts_of(p, False) > 1


def parts_save_a_launch(p: Problem) -> bool:
    """Whether parts of long queries save more time than a separate launch of the decodes takes."""
    if all_blocks_are_parts(p) or parts_of(p, True) == 1:
        return False
    least = MIN_SCORES_WORTH_PARTS if p.cache.itemsize == 2 else MIN_FP8_SCORES_WORTH_PARTS
    empty = ROWS_OF_A_BLOCK % (p.heads // p.kv_heads)
    return empty >= MIN_EMPTY_ROWS_WORTH_PARTS and long_scores(p) >= least


MIN_TOKENS_PER_LONG_SEQ: Annotated[
    int,
    Threshold(
        "query tokens of a sequence, on average; more where its keys may outnumber its queries",
        "products take longer than reading, so decodes as blocks cost nothing",
        "16 prefills of 16..4096 443 -> 421 us, with a softcap 600 -> 485, of 64 dims 362 -> 267; from 48 tokens on: "
        "2000 beside 24 decodes 118 -> 132",
    ),
] = 128
MAX_BYTES_OF_ONE_LIST: Annotated[
    int,
    Threshold(
        "bytes of keys and values, if all sequences were as long as the longest",
        "reading takes so little time that a kernel for few rows saves nothing",
        "512 tokens beside 7 decodes of 1000: 73 -> 46 us in one list, 64 dims 57 -> 42",
    ),
] = 128 << 20
MIN_LONG_TOKENS: Annotated[
    int,
    Threshold(
        "query tokens of long queries, where bytes are below MAX_BYTES_OF_ONE_LIST",
        "fewer tokens hide no reading of few rows",
        "512 + 7 decodes of 2000 34 -> 31 us beside blocks; 128 at 1000 + 7 of 1000 22 -> 26",
    ),
] = 192
KEYS_OF_A_DECODE = 1000  # keys that a decode is assumed to have, because the host does not know its length
MIN_SCORES_PER_KEY: Annotated[
    int,
    Threshold(
        "scores of long queries for each key that decodes of 1000 keys read",
        "at 4.5 TB/s and 770 TFLOP/s, products of so many scores take a fifth of the time of reading, and hide that "
        "much. Below, memory alone decides, and two lists leave more shared memory to few rows",
        "1 x 2048 + 63 decodes of 4096 (524) 293 -> 270 us, 4 x 512 + 124 551 -> 473; 216 at 1024 + 40 of 1500 (31) 73 "
        "-> 75, 1 x 64 at 4096 + 63 of 4096 (16) 250 -> 260",
    ),
] = 36


def products_outlast_reading(p: Problem) -> bool:
    """Whether queries are so many for each key that products take longer than reading.

    The mean number of a sequence's query tokens must be at least MIN_TOKENS_PER_LONG_SEQ.  The host does not know which
    sequences have a context.  So if a sequence may see n times as many keys as the longest query has tokens, this
    minimum is n times larger.
    """
    keys = p.keys_seen(p.max_seqlen_q)
    return p.tokens * min(p.max_seqlen_q, keys) >= MIN_TOKENS_PER_LONG_SEQ * p.seqs * keys


def products_hide_reading(p: Problem) -> bool:
    """Whether few rows can have a warpgroup beside blocks, and the blocks' products hide that warpgroup's reading."""
    group = p.heads // p.kv_heads
    if conversion(p) != NONE or p.packed or not p.query_box or columns_beside(p) < group * (1 + (p.only == "prefill")):
        return False
    return cost.long_scores(p) >= MIN_SCORES_PER_KEY * p.kv_heads * p.seqs * KEYS_OF_A_DECODE


def reading_takes_no_time(p: Problem) -> bool:
    """Whether there is little to read, and the mixed kernel, which serves few rows beside blocks, would gain nothing.

    The mixed kernel gains nothing if it cannot serve the call, or if long queries are too few for their products to
    hide the reading.  With one KV head it gains nothing because few rows would be cut into too many pieces.
    """
    if cost.bytes_of_keys(p, cost.seqs_tried(p), p.keys_seen(p.max_seqlen_q)) >= MAX_BYTES_OF_ONE_LIST:
        return False
    return p.kv_heads == 1 or cost.long_tokens(p) < MIN_LONG_TOKENS or not products_hide_reading(p)


def few_rows_have_no_columns(p: Problem) -> bool:
    """Whether few rows become blocks of rows, as long queries do.

    True for new keys beside an x-packed cache.  Over other caches of 16 bits, True if a list has no columns for few
    rows: beyond 128 dims, or with too many heads on a KV head (`columns_of_list`).
    """
    if p.packed:
        return p.new
    return conversion(p) == NONE and (padded_dim(p) > 128 or not columns_of_list(p))


def decodes_read_faster_alone(p: Problem) -> bool:
    """Whether few rows beside long queries are served sooner by their own launch than by their own list.

    True over fp8 and int8: few rows need no converter in their own launch, and a converter is slower than memory.  True
    over x-packed caches: few rows are columns, whose boxes differ from those of blocks.  True if sequences x KV heads
    are no more than multiprocessors: a list would cut every decode to give each program a piece, and even shares do
    that better.
    """
    if conversion(p) != NONE or p.packed:
        return True
    return cost.seqs_tried(p) * p.kv_heads <= p.device.multiprocessors


KEYS_BESIDE_A_WINDOW = 16 + 64  # keys read beyond a window: 16 for a block's tokens, 64 because tiles may begin earlier
MAX_PORTABLE_KEYS: Annotated[
    int,
    Threshold(
        "keys that few rows see",
        "an item waits for queries, keys and stores one after the other, 2 us with nothing under way. Four portable "
        "programs of a multiprocessor hide each other's waits, and so few keys are not cut",
        "256 decodes of 64 keys of 64 dims 36.3 -> 16.9 us, 64 x 256 over e4m3 22.4 -> 16.8; 384 keys 0.94 to 1.6x",
    ),
] = 256
MAX_PORTABLE_KEYS_OF_LARGE_HEADS: Annotated[
    int,
    Threshold(
        "keys of 16 bits beyond 128 dims that few rows see",
        "fewer programs with large heads fit a multiprocessor",
        "256 dims: decodes of up to 128 keys 0.85 to 1.07x",
    ),
] = 128
MIN_DECODES_PER_PROGRAM: Annotated[
    int,
    Threshold(
        "sequences x KV heads for each multiprocessor",
        "one more launch beside blocks is worth it only if each program has several decodes' waits to hide",
        "window of 128: 255 decodes and 256 tokens of 64/8 over e4m3 129 -> 48 us, 63 of 500 and 512 32.6 -> 29.9",
    ),
] = 2


def keys_are_few(p: Problem) -> bool:
    """Whether sequences, or windows, have so few keys that the portable kernel is faster.

    False over x-packed caches, and with a bias or a score_mod.  The answer depends on the bound of keys, not on the
    queries: `prepare` tries small and large bounds for all queries, and so meets both answers.
    """
    if p.packed or p.biased:
        return False
    large = p.head_dim > 128 and p.cache.itemsize == 2
    most = MAX_PORTABLE_KEYS_OF_LARGE_HEADS if large else MAX_PORTABLE_KEYS
    return p.keys_seen(KEYS_BESIDE_A_WINDOW) <= most


def all_rows_are_few(p: Problem) -> bool:
    """Whether all sequences have few rows and see few keys."""
    rows = rows_of(p, 1 if p.only == "decode" else UNBOUNDED)
    return rows <= MAX_ROWS_OF_ONE_BLOCK and not p.batch_invariant and keys_are_few(p)


def portable_hides_waits_beside_blocks(p: Problem) -> bool:
    """Whether decodes of few keys beside blocks get a launch of the portable kernel.

    True only if each multiprocessor may get several of these decodes, and if sequences have fewer than
    MIN_TOKENS_PER_LONG_SEQ query tokens on average.  False for 16-bit keys of more than 64 dims without a window,
    because the portable and the Hopper kernels take equally long to read these keys.  False for heads beyond 128 dims,
    because blocks hide the decodes.
    """
    if p.head_dim > 128 or p.tokens >= MIN_TOKENS_PER_LONG_SEQ * p.seqs or not keys_are_few(p):
        return False
    if p.window_left < 0 and p.cache.itemsize == 2 and p.head_dim > 64:
        return False
    return cost.seqs_tried(p) * p.kv_heads > MIN_DECODES_PER_PROGRAM * p.device.multiprocessors


TILE = 64  # keys of a tile, for the counts below
MAX_ROWS_OF_EVEN_SHARES: Annotated[
    int,
    Threshold(
        "rows of a sequence and KV head",
        "with more rows, a program joins too many of them",
        "1 x 128 x 16384 144 -> 78 us, 4 x 128 x 2048 63 -> 42 in shares; over 256..32768 161, 172 by the counter",
    ),
] = 512
MAX_TILES_PER_PROGRAM: Annotated[
    int,
    Threshold(
        "tiles of 64 keys and 64 rows for each multiprocessor",
        "up to so many tiles, fetching code and joining pieces take most of the time",
        "3 x 64 x 2048 34.9 -> 30.0 us, 1 x 32 x 16384 44.8 -> 35.9; 64 tiles: 1 x 128 x 8192 44.6, 50.0",
    ),
] = 32
MAX_TILES_PER_PROGRAM_OF_FEW_BLOCKS: Annotated[
    int,
    Threshold(
        "tiles of 64 keys and 64 rows for each multiprocessor, where each block is cut into many pieces",
        "blocks of 128 rows would be cut as often, and blocks of 64 rows join their pieces in groups",
        "8/1 1 x 131072 of 32 tokens 75.8 -> 57.1 us, 1 x 65536 of 64 59.2 -> 53.7",
    ),
] = 64
MIN_PIECES_OF_FEW_BLOCKS: Annotated[
    int,
    Threshold(
        "multiprocessors for each block",
        "pieces as many as these are joined in groups",
        "8 blocks of 32 tokens 49 us; of 16: 32/4 1 x 32768 of 32 49.3, 51.6, 32/8 4 x 8192 46, 55",
    ),
] = 16


def shares_have_more_rows(p: Problem) -> bool:
    """Whether even shares serve sequences of equally many queries that have more rows than one block of 64."""
    if not is_even(p) or p.seqs > MAX_SEQS_OF_ONE_WARP:
        return False
    return rows_of(p, UNBOUNDED) <= MAX_ROWS_OF_EVEN_SHARES and even_shares_end_sooner(p)


def even_shares_end_sooner(p: Problem) -> bool:
    """Whether even shares of blocks of 64 rows end sooner than half as many blocks of 128 rows from a counter."""
    multiprocessors = p.device.multiprocessors
    blocks = p.seqs * p.kv_heads * cdiv(p.max_seqlen_q, MAX_ROWS // (p.heads // p.kv_heads))
    few = MIN_PIECES_OF_FEW_BLOCKS * blocks <= multiprocessors
    most = MAX_TILES_PER_PROGRAM_OF_FEW_BLOCKS if few else MAX_TILES_PER_PROGRAM
    tiles = cdiv(p.keys_seen(p.max_seqlen_q + TILE), TILE)
    return blocks <= multiprocessors and blocks * tiles <= most * multiprocessors
