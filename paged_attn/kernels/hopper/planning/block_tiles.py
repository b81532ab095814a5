"""Keys of a tile of blocks, and slots of the rings that bring tiles: as many as shared memory has room for."""

from typing import Annotated, NamedTuple

from ....records.problem import Problem
from ....records.regime import Threshold
from .conversion import NONE, TRANSPOSE, WIDEN, WIDEN_VALUES, conversion
from .shapes import padded_dim, widest_of
from .softcap import TERMS_AS_TANH, terms_of


class RingSizes(NamedTuple):
    """Slots of the rings of keys, of values and of what a converter takes, and keys of a tile."""

    keys: int
    values: int
    raw: int
    tile: int


# By conversion and head dims.
RINGS = {
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
RINGS_OF_THREE_CONSUMERS = RingSizes(6, 5, 0, 64)  # of 128 dims
RINGS_OF_FOUR_WARPGROUPS = RingSizes(8, 8, 0, 64)  # of up to 64 dims
MAX_SLOTS = 8  # a ring has no more barriers (`gates.DEPTH`)
# Beside few rows, which have as many numbers of a tile, and the slots that are left.
RINGS_BESIDE_FEW_ROWS, RINGS_OF_FEW_ROWS, ELEMENTS_OF_TILES_BESIDE = (3, 3), (3, 2), 64 * 128

MAX_KEYS_OF_HALF_TILES: Annotated[
    int,
    Threshold(
        "keys of a sequence, or of a window to the left",
        "of tiles of 64 keys less is masked, and such blocks are short enough to be left whole; over more keys a loop "
        "of tiles of 128 costs less for a key",
        "8 x 256, 512 tokens 4 to 10%, 8 x 1024 3%, from 2048 on tiles of 128 are 3 to 4% better; window of 128, 4 x "
        "2048 103 -> 79 us, of 1024, 4 x 4096 423 -> 404, of 2048, 1 x 16384 739 -> 762",
    ),
] = 1024


def window_is_narrow(p: Problem) -> bool:
    """Whether a window shows fewer keys to the left than tiles of 128 are worth."""
    return 0 <= p.window_left < MAX_KEYS_OF_HALF_TILES


def blocks_of_half_tiles(p: Problem) -> bool:
    """Whether blocks of 16 bits have tiles of 64 keys, and stay whole."""
    if p.cache.itemsize != 2 or widest_of(p) > 128 or (p.softcap > 0 and not terms_of(p)):
        return False
    keys_are_few = p.max_seqlen_k <= MAX_KEYS_OF_HALF_TILES and padded_dim(p) == 128 and not p.new
    return window_is_narrow(p) or keys_are_few


def loop_has_half_tiles(p: Problem) -> bool:
    """Whether blocks of 16 bits have tiles of 64 keys, whole or not: a softcap by more than tanh's polynomial, too."""
    return (p.softcap > 0 and (p.window_left >= 0 or terms_of(p) != TERMS_AS_TANH)) or blocks_of_half_tiles(p)


def block_rings(p: Problem, consumers: int, rows: int, two_lists: bool) -> RingSizes:
    """Of blocks of so many consumers, of so many rows each; of a softcap a loop of half the code."""
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
