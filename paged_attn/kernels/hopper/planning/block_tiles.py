"""Tile sizes of blocks, and slots of their rings; also for wide heads, and for values of another width than keys."""

from typing import Annotated, NamedTuple

from ....records.plan import UNBOUNDED, Threshold
from ....records.problem import Problem
from .operands import (
    MAX_ROWS,
    NONE,
    TERMS_AS_TANH,
    TRANSPOSE,
    WIDEN,
    WIDEN_VALUES,
    conversion,
    packed_tiles_are_operands,
    terms_of,
)
from .shapes import SHARED_BYTES, in_boxes, is_decode, padded_dim, padded_value_dim, rows_of, widest_of


class RingSizes(NamedTuple):
    """Slots of the rings of blocks, and keys of a tile."""

    keys: int  # slots of the ring of keys
    values: int  # slots of the ring of values
    raw: int  # slots of each ring of fp8 or int8 tiles that a converter reads
    tile: int  # keys of a tile


RINGS = {  # by (conversion, padded head dims)
    (NONE, 64): RingSizes(4, 4, 0, 128),
    (NONE, 128): RingSizes(3, 2, 0, 128),
    (NONE, 256): RingSizes(2, 2, 0, 64),
    (WIDEN, 64): RingSizes(4, 4, 4, 128),
    (WIDEN, 128): RingSizes(2, 2, 2, 128),
    (WIDEN, 256): RingSizes(2, 2, 1, 64),
    (WIDEN_VALUES, 64): RingSizes(8, 4, 4, 128),
    (WIDEN_VALUES, 128): RingSizes(8, 6, 4, 64),
    (TRANSPOSE, 64): RingSizes(4, 4, 4, 128),
    (TRANSPOSE, 128): RingSizes(3, 3, 2, 128),
}
RINGS_OF_THREE_CONSUMERS = RingSizes(6, 5, 0, 64)  # for heads of 128 dims
RINGS_OF_FOUR_WARPGROUPS = RingSizes(8, 8, 0, 64)  # for heads of up to 64 dims
MAX_SLOTS = 8  # maximum number of slots of a ring: gates have no more barriers (`gates.DEPTH`)
# Mixed kernel: (key slots, value slots) of blocks, then of few rows; keys x dims of a tile, equal for both.
RINGS_BESIDE_FEW_ROWS, RINGS_OF_FEW_ROWS, ELEMENTS_OF_TILES_BESIDE = (3, 3), (3, 2), 64 * 128

MAX_KEYS_OF_HALF_TILES: Annotated[
    int,
    Threshold(
        "keys of a sequence, or of a window to the left",
        "with tiles of 64 keys fewer scores are masked, and blocks of so few keys stay whole; over more keys, a loop "
        "of tiles of 128 takes less time for a key",
        "8 x 256, 512 tokens 4 to 10%, 8 x 1024 3%, from 2048 on tiles of 128 are 3 to 4% better; window of 128, 4 x "
        "2048 103 -> 79 us, of 1024, 4 x 4096 423 -> 404, of 2048, 1 x 16384 739 -> 762",
    ),
] = 1024


def window_is_narrow(p: Problem) -> bool:
    """Whether a window has so few keys to the left that tiles of 128 are not worth it."""
    return 0 <= p.window_left < MAX_KEYS_OF_HALF_TILES


def blocks_of_half_tiles(p: Problem) -> bool:
    """Whether blocks over a 16-bit cache have tiles of 64 keys, and stay whole."""
    if p.cache.itemsize != 2 or widest_of(p) > 128 or (p.softcap > 0 and not terms_of(p)):
        return False
    keys_are_few = p.max_seqlen_k <= MAX_KEYS_OF_HALF_TILES and padded_dim(p) == 128 and not p.new
    return window_is_narrow(p) or keys_are_few


def loop_has_half_tiles(p: Problem) -> bool:
    """Whether blocks over a 16-bit cache have tiles of 64 keys: `blocks_of_half_tiles`, and most blocks with a softcap.

    With a softcap, tiles have 128 keys only without a window, and with the short polynomial (TERMS_AS_TANH).
    """
    return (p.softcap > 0 and (p.window_left >= 0 or terms_of(p) != TERMS_AS_TANH)) or blocks_of_half_tiles(p)


def block_rings(p: Problem, consumers: int, rows: int, two_lists: bool) -> RingSizes:
    """Return the rings of blocks of `consumers` x `rows` rows.

    Half tiles halve the loop's code, which most softcaps make long.
    """
    if consumers == 3:
        return RINGS_OF_THREE_CONSUMERS
    if rows == 256:
        return RINGS_OF_FOUR_WARPGROUPS
    convert = conversion(p)
    sizes = RINGS[convert, padded_dim(p)]
    if sizes.tile != 128:
        return sizes
    if convert in (WIDEN, WIDEN_VALUES) and window_is_narrow(p):
        return RingSizes(min(2 * sizes.keys, MAX_SLOTS), 2 * sizes.values, 2 * sizes.raw, 64)
    if convert == NONE and not two_lists and loop_has_half_tiles(p):
        return RingSizes(2 * sizes.keys, 2 * sizes.values, sizes.raw, 64)
    return sizes


BYTES_BESIDE_TILES = 3 << 10  # bytes of shared memory for barriers and arguments of warp partitions
BYTES = 2  # bytes of an element of 16 bits
ROWS = 128  # query rows of a block of wide heads
MAX_DIMS_OF_RESULTS = 256  # maximum value dims of a launch; a thread's registers hold no more results
# Maximum value dims with tiles of 128 keys.  Beside results of more dims, registers hold the scores of 64 keys only.
MAX_DIMS_OF_WHOLE_TILES = 128


def blocks_take(p: Problem) -> bool:
    """Whether blocks serve a call of two widths or wide heads.

    Among other conditions, pages must consist of whole boxes (`in_boxes`), and the bounds must allow a sequence of more
    than MAX_ROWS rows.
    """
    return (
        p.cache.itemsize <= 2
        and (not p.packed or packed_tiles_are_operands(p))
        and not (p.latent or p.batch_invariant or is_decode(p))
        and in_boxes(p)
        and not (p.head_dim % 8 or p.value_width % 8)
        and min(p.head_dim, p.value_width) > 32
        and (p.widest <= 256 or wide_heads_fit(p))
        and rows_of(p, UNBOUNDED) > MAX_ROWS
    )


def wide_heads_fit(p: Problem) -> bool:
    """Whether blocks serve keys or values beyond 256 dims.

    True for up to 512 dims of a 16-bit cache that is not x-packed, if TMA can read the queries.  A block's rows must be
    a multiple of the group's heads.
    """
    boxes = conversion(p) == NONE and not p.packed and p.query_box
    return boxes and p.widest <= 2 * MAX_DIMS_OF_RESULTS and ROWS % (p.heads // p.kv_heads) == 0


def dims_of_results(p: Problem) -> int:
    """Return the value dims of one launch; wider values take two launches, which both multiply queries and keys."""
    return min(padded_value_dim(p), MAX_DIMS_OF_RESULTS)


def keys_in_parts(p: Problem) -> bool:
    """Whether keys and queries of blocks are three parts of 64 dims, rather than padded to 256 dims."""
    return 128 < p.head_dim <= 192 and conversion(p) == NONE and not p.packed and p.query_box and in_boxes(p)


def key_dims_of(p: Problem) -> int:
    """Return the head dims of the tiles of blocks, with padding."""
    return 192 if keys_in_parts(p) else padded_dim(p)


def rings_of_wide_blocks(p: Problem, rows: int, query_slots: int) -> RingSizes:
    """Return the rings of blocks of `rows` rows: as many slots as fit, and one more slot of keys if there is room.

    query_slots: Pipe.QUERY_SLOTS.  Over fp8 and int8, rings are the entry of RINGS for the larger width.
    """
    if conversion(p) != NONE:
        return RINGS[conversion(p), widest_of(p)]
    keys, values = (BYTES * dims for dims in (key_dims_of(p), dims_of_results(p)))
    room = SHARED_BYTES - BYTES_BESIDE_TILES - query_slots * rows * keys
    most = 64 if padded_value_dim(p) > MAX_DIMS_OF_WHOLE_TILES or loop_has_half_tiles(p) else 128
    tile = next(tile for tile in (128, 64, 32) if tile <= most and 2 * tile * (keys + values) <= room)
    slots = min(MAX_SLOTS, room // (tile * (keys + values)))
    more = slots < MAX_SLOTS and room - slots * tile * (keys + values) >= tile * keys
    return RingSizes(slots + more, slots, 0, tile)
