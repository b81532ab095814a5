"""Few queries of few keys: the portable kernel's, whose programs of a block each hide each other's waits."""

from typing import Annotated

from ....records.plan import UNBOUNDED
from ....records.problem import Problem
from ....records.regime import Threshold
from ...portable.plan import MAX_ROWS_OF_ONE_BLOCK
from . import cost, mixed
from .shapes import rows_of

KEYS_BESIDE_A_WINDOW = 16 + 64  # seen by a block of 16 rows, and of a tile with which its keys need not begin
MAX_PORTABLE_KEYS: Annotated[
    int,
    Threshold(
        "keys that few rows see",
        "an item waits for queries, keys and stores one after the other, 2 us with nothing under way; four portable "
        "programs of a multiprocessor hide each other's waits, and cut no keys so few",
        "256 decodes of 64 keys of 64 dims 36.3 -> 16.9 us, 64 x 256 over e4m3 22.4 -> 16.8; 384 keys 0.94 to 1.6x",
    ),
] = 256
MAX_PORTABLE_KEYS_OF_LARGE_HEADS: Annotated[
    int,
    Threshold(
        "keys of 16 bits beyond 128 dims that few rows see",
        "fewer such programs fit a multiprocessor",
        "256 dims: decodes of up to 128 keys 0.85 to 1.07x",
    ),
] = 128
MIN_DECODES_PER_PROGRAM: Annotated[
    int,
    Threshold(
        "sequences x KV heads for each multiprocessor",
        "beside blocks a launch more has to hide waits of several decodes for each program",
        "window of 128: 255 decodes and 256 tokens of 64/8 over e4m3 129 -> 48 us, 63 of 500 and 512 32.6 -> 29.9",
    ),
] = 2


def keys_are_few(p: Problem) -> bool:
    """Whether sequences, or windows, have so few keys that the portable kernel does not cut them, and is the faster.

    Whatever the queries, so that `prepare` meets both sides.
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
    """Whether decodes of few keys beside blocks, of queries that are not mostly long, may be several for each program.

    Keys of 16 bits outside a window keep memory busy for as long either way; beside large heads decodes are hidden.
    """
    if p.head_dim > 128 or p.tokens >= mixed.MIN_TOKENS_PER_LONG_SEQ * p.seqs or not keys_are_few(p):
        return False
    if p.window_left < 0 and p.cache.itemsize == 2 and p.head_dim > 64:
        return False
    return cost.seqs_tried(p) * p.kv_heads > MIN_DECODES_PER_PROGRAM * p.device.multiprocessors
