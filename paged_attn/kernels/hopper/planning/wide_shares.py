"""Even shares of few rows whose values have another width than their keys, or whose heads have more than 256 dims."""

from typing import NamedTuple

from ....records.plan import UNBOUNDED
from ....records.problem import Problem
from ....records.rounding import next_power_of_2
from . import wide
from .gathering import in_boxes
from .shapes import dim_of, is_decode, rows_of, value_dim_of, widest_of

MIN_WIDTH, MAX_WIDTH = 40, 512  # dims of keys and of values
MAX_ROWS_OF_TWO_WIDTHS = 64  # up to 256 dims: of a block that is not of columns
MAX_WIDE_COLUMNS = 16  # beyond 256 dims, whose results take 512 / 128 registers of a thread for each column
BYTES_OF_RINGS = 192 << 10  # beside these queries, weights and the turning around of results fit
MAX_SLOTS = 6  # of a ring


class WideRings(NamedTuple):
    """Slots of both rings of tiles of so many keys; none of values: keys and values take slots of one ring in turn."""

    tile: int
    keys: int
    values: int


def shares_take(p: Problem) -> bool:
    """Whether these shares have all rows of a call of two widths or of wide heads."""
    if not (wide.ASKED and wide.is_wide(p)) or p.latent or p.packed or p.batch_invariant or p.cache.itemsize != 2:
        return False
    widths = p.head_dim, p.value_width
    if not in_boxes(p) or any(x % 8 or not MIN_WIDTH <= x <= MAX_WIDTH for x in widths):
        return False
    return rows_of(p, 1 if is_decode(p) else UNBOUNDED) <= _most_rows(p)


def _most_rows(p: Problem) -> int:
    """Of a block."""
    return MAX_ROWS_OF_TWO_WIDTHS if widest_of(p) <= 256 else MAX_WIDE_COLUMNS


def wide_columns(rows: int) -> int:
    """Columns of a block of so many rows of wide heads, which are never rows."""
    return max(8, next_power_of_2(rows))


def wide_rings(p: Problem, half: bool) -> WideRings:
    """As many slots as have room; half: of tiles of 64 keys where others would have 128."""
    tile = 64 if half or widest_of(p) > 128 else 128
    keys, values = (2 * tile * dim for dim in (dim_of(p), value_dim_of(p)))
    slots = min(MAX_SLOTS, BYTES_OF_RINGS // (keys + values))
    if slots > 1:
        return WideRings(tile, slots, slots)
    return WideRings(tile, BYTES_OF_RINGS // keys, 0)
