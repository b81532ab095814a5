"""Tiles of even shares: keys of each, and slots of the rings, as many as the queries leave room for."""

from typing import Annotated, NamedTuple

from ....records.problem import Problem
from ....records.regime import Threshold
from . import cost
from .columns import MAX_COLUMNS
from .shapes import is_wide, padded_dim
from .wide_shares import rings_of_wide_shares

MAX_BYTES_OF_HALF_TILES: Annotated[
    int,
    Threshold(
        "bytes of keys and values",
        "tiles of 64 keys begin and end sooner; where reading takes long, tiles of 128 cost less for a key",
        "64 dims: 32 x 1024 (67 MB) 23.8 us, 25.2 in tiles of 64; over e4m3 8 x 8192 (134 MB) 41.8, 45.1",
    ),
] = 64 << 20
MAX_BYTES_OF_HALF_TILES_OF_128_DIMS: Annotated[
    int,
    Threshold(
        "bytes of keys and values of 16 bits and 128 dims",
        "the same, and a kernel of tiles of 64 keys has less code to fetch",
        "b8 x 4096 (134 MB) 39.4 -> 38.6 us, b16 x 2048 37.9 -> 36.5; 128 x 512 (268 MB) 70.7, 73.4",
    ),
] = 256 << 20


class ShareTiles(NamedTuple):
    """Keys of a tile, and slots of the rings of keys and of values."""

    tile: int
    keys: int
    values: int  # 0: values take those of keys in turn
    raw: int = 0  # of what is widened into slots of keys


def keys_are_soon_read(p: Problem) -> bool:
    """Whether keys and values are so few bytes that a launch's begin and end count."""
    large = p.cache.itemsize == 2 and padded_dim(p) == 128
    most = MAX_BYTES_OF_HALF_TILES_OF_128_DIMS if large else MAX_BYTES_OF_HALF_TILES
    return cost.bytes_of_keys(p, p.seqs, p.max_seqlen_k) < most


def columns_leave_few_registers(p: Problem, columns: int) -> bool:
    """Whether columns, and keys that pass through registers, leave room for tiles of 64 keys only.

    So do an x-packed tile, and the next one on its way for up to 16 columns (`columns.is_early`).
    """
    fp8 = p.cache.itemsize == 1
    return (p.packed and (fp8 or MAX_COLUMNS < columns <= 16)) or (fp8 and columns > 16)


def rows_share_lines(p: Problem, columns: int) -> bool:
    """Whether rows end within a line of memory: another head's program finds the rest in L2 if not far behind."""
    return p.head_dim % 64 > 0 and columns > 0 and p.cache.itemsize == 2 and not p.packed


def share_tiles(p: Problem, columns: int) -> ShareTiles:
    """Of even shares with so many columns."""
    dim, fp8 = padded_dim(p), p.cache.itemsize == 1
    if p.packed and fp8 and columns > MAX_COLUMNS:
        return ShareTiles(64, 5, 5)
    half = keys_are_soon_read(p) or dim > 128 or columns_leave_few_registers(p, columns) or rows_share_lines(p, columns)
    if is_wide(p):
        return ShareTiles(*rings_of_wide_shares(p, columns, half))
    tile, slots = (64, 6 if fp8 else 3) if half else (128, 2)
    if dim == 64:
        slots *= 2
    elif columns > 32 and dim > 128:
        slots = 5
    return ShareTiles(tile, slots, slots)
