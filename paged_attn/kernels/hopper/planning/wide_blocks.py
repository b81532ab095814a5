"""Blocks of many rows over values of another width than keys: which calls these are, and the slots of their rings."""

from ....records.plan import UNBOUNDED
from ....records.problem import Problem
from .block_tiles import MAX_SLOTS, RINGS, RingSizes, loop_has_half_tiles
from .columns import MAX_ROWS, packed_tiles_are_operands
from .conversion import NONE, conversion
from .shapes import SHARED_BYTES, in_boxes, is_decode, padded_dim, padded_value_dim, rows_of, widest_of

BYTES_BESIDE_TILES = 3 << 10  # of shared memory that queries and tiles leave to barriers and what partitions are told
BYTES = 2  # of a number
ROWS = 128  # of a block of wide heads
MAX_DIMS_OF_RESULTS = 256  # for which a thread of a block has registers
MAX_DIMS_OF_WHOLE_TILES = 128  # of values: results of more leave registers for the scores of 64 keys


def blocks_take(p: Problem) -> bool:
    """Whether blocks have a call whose values are of another width: of more rows than few."""
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
    """Whether blocks have heads, or values, beyond 256 dims: of 16 bits, in boxes, of groups that fill a block."""
    boxes = conversion(p) == NONE and not p.packed and p.query_box
    return boxes and p.widest <= 2 * MAX_DIMS_OF_RESULTS and ROWS % (p.heads // p.kv_heads) == 0


def dims_of_results(p: Problem) -> int:
    """Of the values that a launch has; wider ones are those of two launches, which both multiply queries and keys."""
    return min(padded_value_dim(p), MAX_DIMS_OF_RESULTS)


def keys_in_parts(p: Problem) -> bool:
    """Whether keys and queries of blocks are 64 dims three times, and not 256 of which a quarter is zero."""
    return 128 < p.head_dim <= 192 and conversion(p) == NONE and not p.packed and p.query_box and in_boxes(p)


def key_dims_of(p: Problem) -> int:
    """Head dims as tiles of blocks have them."""
    return 192 if keys_in_parts(p) else padded_dim(p)


def rings_of_wide_blocks(p: Problem, rows: int, query_slots: int) -> RingSizes:
    """Of blocks of so many rows: as many slots as queries leave room for, of keys one more where one fits.

    Over fp8 those of the larger width, whose tiles are widened.
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
