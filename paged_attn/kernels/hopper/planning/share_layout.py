"""Layout of a call's tiles for even shares, and the joining of the pieces that shares cut."""

import math
from typing import Annotated, NamedTuple

from ....records.formats import INT4, cdiv, next_power_of_2
from ....records.plan import Threshold
from ....records.problem import Problem
from . import cost
from .block_tiles import ELEMENTS_OF_TILES_BESIDE, RINGS_OF_FEW_ROWS
from .operands import MAX_COLUMNS, MAX_REGISTER_COLUMNS, MAX_ROWS, columns_beside, columns_of_shares
from .shapes import is_wide, padded_dim, padded_value_dim, rows_of
from .wide_heads import reads_latents, rings_of_wide_shares

MAX_BYTES_OF_HALF_TILES: Annotated[
    int,
    Threshold(
        "bytes of keys and values",
        "tiles of 64 keys begin and end sooner; where reading takes long, tiles of 128 take less time for a key",
        "64 dims: 32 x 1024 (67 MB) 23.8 us, 25.2 in tiles of 64; over e4m3 8 x 8192 (134 MB) 41.8, 45.1",
    ),
] = 64 << 20
MAX_BYTES_OF_HALF_TILES_OF_128_DIMS: Annotated[
    int,
    Threshold(
        "bytes of keys and values of 16 bits and 128 dims",
        "tiles of 64 keys begin and end sooner, and their kernel has less code to fetch",
        "b8 x 4096 (134 MB) 39.4 -> 38.6 us, b16 x 2048 37.9 -> 36.5; 128 x 512 (268 MB) 70.7, 73.4",
    ),
] = 256 << 20


class ShareTiles(NamedTuple):
    """Keys of a tile, and slots of the rings of even shares."""

    tile: int  # keys of a tile
    keys: int  # slots of the ring of keys
    values: int  # slots of the ring of values; 0: keys and values alternate in the ring of keys
    raw: int = 0  # slots of fp8 or int8 latents, which are widened into slots of keys


def keys_are_soon_read(p: Problem) -> bool:
    """Whether keys and values are so few bytes that a launch's begin and end take much of its time."""
    large = p.cache.itemsize == 2 and padded_dim(p) == 128
    most = MAX_BYTES_OF_HALF_TILES_OF_128_DIMS if large else MAX_BYTES_OF_HALF_TILES
    return cost.bytes_of_keys(p, p.seqs, p.max_seqlen_k) < most


def columns_leave_few_registers(p: Problem, columns: int) -> bool:
    """Whether registers suffice only for tiles of 64 keys, because keys pass through registers beside the columns.

    x-packed keys of 16 bits: True for 16 columns only.  With more columns, the next tile is not loaded early
    (`columns.is_early`), so registers suffice for tiles of 128 keys.  Keys of fp8, int8 and int4: True for more than 16
    columns, and always if x-packed.
    """
    fp8 = p.cache.itemsize == 1
    return (p.packed and (fp8 or MAX_COLUMNS < columns <= 16)) or (fp8 and columns > 16)


def rows_share_lines(p: Problem, columns: int) -> bool:
    """Whether a KV head's key ends inside a 128-byte line of memory, in a 16-bit cache with query rows as columns.

    In NHD the rest of the line belongs to the next head, whose program soon finds the line in L2.  The result is the
    same in HND, although there the rest of the line belongs to the next slot.  False for x-packed caches.
    """
    return p.head_dim % 64 > 0 and columns > 0 and p.cache.itemsize == 2 and not p.packed


def share_tiles(p: Problem, columns: int) -> ShareTiles:
    """Return tiles and ring slots of even shares with `columns` columns; 0: query rows are rows of products."""
    dim, fp8 = padded_dim(p), p.cache.itemsize == 1
    if p.packed and fp8 and columns > MAX_COLUMNS:
        return ShareTiles(64, 5, 5)
    half = keys_are_soon_read(p) or dim > 128 or columns_leave_few_registers(p, columns) or rows_share_lines(p, columns)
    if is_wide(p):
        return ShareTiles(*rings_of_wide_shares(p, columns, half))
    # beside scales by slot, six slots would leave no shared memory for two programs
    tile, slots = (64, 6 - p.slot_scales if fp8 else 3) if half else (128, 2)
    if p.cache == INT4:  # tiles have half of the bytes
        tile, slots = (64, 8) if half else (128, 4)
    if dim == 64 and not (half and p.cache == INT4):
        slots *= 2
    elif columns > 32 and dim > 128:
        slots = 5
    return ShareTiles(tile, slots, slots)


class ShareLayout(NamedTuple):
    """A block, its tiles and rings, and the even shares of all tiles."""

    columns: int  # query rows of a block, as columns of products; 0: query rows are rows of products
    rows: int  # query rows of a block
    tile: int  # keys of a tile
    slots: int  # slots of the ring of keys
    value_slots: int  # slots of the ring of values; 0: keys and values alternate in the ring of keys
    raw_slots: int  # slots of the ring of fp8 or int8 latents
    resident: int  # programs of a multiprocessor at a time
    shares: int  # shares of each KV head
    blocks: int  # blocks of a sequence, at most
    tiles: int  # tiles that a block sees, at most


def layout_of(p: Problem, longest: int, beside: bool) -> ShareLayout:
    """Return the layout of sequences of up to `longest` query tokens: blocks of few rows as columns, or of 64 rows.

    beside: few rows run beside blocks.
    """
    asked, group = rows_of(p, longest), p.heads // p.kv_heads
    if (p.cache.itemsize == 1 and not reads_latents(p)) or p.packed:
        asked = min(asked, max(MAX_REGISTER_COLUMNS, group))
    if beside:
        columns, tile = columns_beside(p), ELEMENTS_OF_TILES_BESIDE // padded_dim(p)
        (slots, value_slots), raw_slots = RINGS_OF_FEW_ROWS, 0
    else:
        columns = columns_of_shares(p, asked, asked > group)
        tile, slots, value_slots, raw_slots = share_tiles(p, columns)
    rows = columns or MAX_ROWS
    # fp8, int8 and int4 tiles leave shared memory for two programs, which hide each other's waits
    two = p.cache.itemsize == 1 and columns <= MAX_REGISTER_COLUMNS and padded_dim(p) <= 128 and not reads_latents(p)
    resident = 2 if two else 1
    shares = max(1, resident * p.device.multiprocessors // p.kv_heads)
    blocks = cdiv(min(p.max_seqlen_q, longest), rows // group)
    tiles = cdiv(p.keys_seen(p.max_seqlen_q + tile), tile)
    return ShareLayout(columns, rows, tile, slots, value_slots, raw_slots, resident, shares, blocks, tiles)


MIN_TILES_PER_SHARE: Annotated[
    int,
    Threshold(
        "tiles of a share of blocks of 64 rows",
        "joining a piece of many rows takes as long as two tiles; with a block for every program, such large shares "
        "would leave some programs empty",
        "1 x 16 x 256 14.3 -> 11.9 us, 1 x 16 x 1024 22.9 -> 16.7; 2 tiles: 13.9, 18.2",
    ),
] = 4
MAX_TILES_OF_ONE_SHARE: Annotated[
    int,
    Threshold(
        "tiles of a block of 64 rows that is one share",
        "one share for a block leaves nothing to join; nor is a merge launch worth it for so few tiles",
        "1 x 16 to 128 x 512 14.4-15.6 -> 13.2-14.0 us; shares of 8 tiles always: 1 x 32 x 1024 15.6, 17.4",
    ),
] = 8
MIN_ROWS_WORTH_A_MERGE: Annotated[
    int,
    Threshold(
        "rows of a block, times dims / 128",
        "a merge launch, which takes 2 us to begin, has programs enough to join many rows as soon as few",
        "24/1 1 x 32768 20.0 -> 16.2 us, 3 tokens of 8/1 15.8 -> 14.1; of 4 and 8 rows +1 to +3 us",
    ),
] = 16
MIN_STATES_WORTH_A_MERGE: Annotated[
    int,
    Threshold(
        "states of rows that a block's pieces leave, if blocks share all programs",
        "without a merge launch, the program of a block's last piece reads so many states alone",
        "48/1 1 x 32768 27.1 -> 16.3 us, 3 x 8192 37 -> 35.0; 8 of 4 x 8192 (4 pieces of 32 rows) 41 -> 42.8",
    ),
] = 192
MIN_WAITS_WORTH_A_MERGE: Annotated[
    int,
    Threshold(
        "times that the program of a block's last piece waits for states of 512 dims",
        "each wait is 0.7 to 0.8 us; a merge launch takes 3 to 5",
        "latents of 32 heads, 64 x 4096: by a launch 84.4 us, in place 84.3 to 85.2 in another run: no difference seen",
    ),
] = 4
ELEMENTS_JOINED_AT_ONCE = 1 << 14  # elements of states, 128 for each thread (`layouts.dims_at_once`)
ROWS_WORTH_A_COUNT: Annotated[
    int,
    Threshold(
        "rows of pieces, joined in the time of one more count by atomics",
        "joining n pieces at once takes n * rows; in groups it takes 2 * sqrt(n) * rows and this number",
        "8/1 1 x 32768 21.6 -> 15.9 us, of 4 tokens 41.7 -> 21.5; few pieces 0 to +6%",
    ),
] = 256


def tiles_per_share(p: Problem, s: ShareLayout) -> int:
    """Return the fewest tiles that the kernel may give to a share."""
    if s.rows < MAX_ROWS or p.seqs * s.blocks >= s.shares:
        return 1
    tiles = max(s.tiles, 1) + p.new  # new keys have tiles of their own
    return tiles if tiles <= MAX_TILES_OF_ONE_SHARE else MIN_TILES_PER_SHARE


def merge_joins_sooner(p: Problem, s: ShareLayout, rows: int) -> bool:
    """Whether a merge launch joins pieces of `rows` rows sooner than the program of a block's last piece."""
    if padded_value_dim(p) > 256:
        return _waits_for_wide_states(p, s, rows) >= MIN_WAITS_WORTH_A_MERGE and s.tiles > MAX_TILES_OF_ONE_SHARE
    live = min(rows, s.rows) * padded_value_dim(p) // 128
    states = live * s.shares  # rows of all states of a KV head, one state for each share; times dims / 128
    return (
        live >= MIN_ROWS_WORTH_A_MERGE
        and states >= MIN_STATES_WORTH_A_MERGE * cost.seqs_tried(p) * s.blocks
        and s.tiles > MAX_TILES_OF_ONE_SHARE
    )


def _pieces_of_wide_blocks(p: Problem, s: ShareLayout) -> int:
    """Return the number of pieces of each block, at least 2, if all blocks see equally many keys."""
    return max(2, s.shares // (cost.seqs_tried(p) * max(1, s.blocks)))


def pieces_of_wide_states(p: Problem, s: ShareLayout) -> int:
    """Return how many pieces are loaded together: `_pieces_of_wide_blocks`, rounded up to a power of two, at most 8.

    Fewer pieces leave registers for more dims.
    """
    return min(8, next_power_of_2(_pieces_of_wide_blocks(p, s)))


def _waits_for_wide_states(p: Problem, s: ShareLayout, rows: int) -> int:
    """Return how often the program of a block's last piece waits for memory in `join.join_states`."""
    together = pieces_of_wide_states(p, s)
    at_once = max(8, min(rows, s.rows)) * padded_value_dim(p) * together
    return cdiv(_pieces_of_wide_blocks(p, s), together) * cdiv(at_once, ELEMENTS_JOINED_AT_ONCE)


def pieces_joined_at_once(p: Problem, s: ShareLayout, least: int) -> int:
    """Return the largest number of pieces that are joined at once; a block of more pieces is joined in groups.

    The result is 0 if no block is likely to have more pieces than can be joined at once.  Then the kernel never joins
    in groups.
    """
    most = int((1 + math.sqrt(1 + ROWS_WORTH_A_COUNT / s.rows)) ** 2)
    # blocks of a single sequence have equally many pieces; one sequence of several may have nearly all keys
    pieces = s.shares // max(1, s.blocks) if p.seqs == 1 else s.shares
    return most if min(pieces, cdiv(s.tiles + p.new, least) + 1) > most else 0
