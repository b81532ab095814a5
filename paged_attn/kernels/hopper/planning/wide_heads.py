"""Even shares of few rows of two widths, of more than 256 dims, and of keys that hold their values (latents)."""

from typing import NamedTuple

from ....records.plan import UNBOUNDED
from ....records.problem import Problem
from ....records.rounding import cdiv, next_power_of_2
from .shapes import SHARED_BYTES, in_boxes, is_decode, is_wide, padded_dim, padded_value_dim, rows_of, widest_of

MIN_WIDTH, MAX_WIDTH, MAX_LATENT_WIDTH = 40, 512, 576  # dims of keys and of values; of keys that hold these
MAX_ROWS_OF_TWO_WIDTHS = 64  # up to 256 dims: of a block that is not of columns
MAX_WIDE_COLUMNS = 32  # beyond 256 dims, whose results take 512 / 128 registers of a thread for each column
MAX_LATENT_COLUMNS = 2 * MAX_WIDE_COLUMNS  # of two consumers, which share the tiles
MIN_DIMS_OF_HALVES = 128  # of values whose halves begin with lines of shared memory
# Parts of the heads, and of columns also blocks of a sequence: each reads the keys, most of them from the L2.
MAX_BLOCKS_OF_LATENTS = 4
MAX_SLOTS = 6  # of a ring
MIN_SLOTS_OF_REST = 2  # of dims that keys have behind their values: one is read while the next is on its way
BYTES_OF_BARRIERS = 1 << 10  # and of what partitions are told
TILE_OF_ROWS = 32  # keys of latents that one of two consumers of rows multiplies, while the other weighs
BYTES_OF_FLAGS, BYTES_OF_NUMBERS = 512, 2048  # of a consumer, and of what two consumers of rows tell each other
ROWS_OF_NOTHING = 32  # of queries, where a box that brings nothing may go (`loader.fetch_descriptors`)
MAX_TURNED_COLUMNS = 8  # of results beyond 256 dims that are turned around in shared memory (`columns.is_turned`)


class WideRings(NamedTuple):
    """Slots of both rings of tiles of so many keys; none of values: keys and values take slots of one ring in turn.

    Of keys that hold their values the second ring is that of the dims behind these, if there are any.
    """

    tile: int
    keys: int
    values: int
    raw: int = 0  # of fp8, before they are widened into slots of keys


def shares_take(p: Problem) -> bool:
    """Whether these shares have all rows of a call of two widths or of wide heads."""
    if not is_wide(p) or p.packed or p.batch_invariant or (p.cache.itemsize != 2 and not reads_latents(p)):
        return False
    if not in_boxes(p) or p.head_dim % 8 or p.value_width % 8 or min(p.head_dim, p.value_width) < MIN_WIDTH:
        return False
    most = MAX_LATENT_WIDTH if p.latent else MAX_WIDTH
    rows = rows_of(p, 1 if is_decode(p) else UNBOUNDED)
    if reads_latents(p):
        parts = latent_parts(p)
        blocks = parts if latents_are_rows(p, rows // parts) else _blocks_of_latents(p, rows)
        return p.widest <= most and blocks <= MAX_BLOCKS_OF_LATENTS
    return p.widest <= most and rows <= (MAX_WIDE_COLUMNS if only_columns(p) else MAX_ROWS_OF_TWO_WIDTHS)


def reads_latents(p: Problem) -> bool:
    """Whether keys are read once for themselves and for the values that they hold."""
    return p.latent and is_wide(p)


def latent_parts(p: Problem) -> int:
    """Equal parts that the heads of latents' KV head are cut into, each a KV head to kernels, of up to 64."""
    group = p.heads // p.kv_heads
    if not reads_latents(p):
        return 1
    return next(parts for parts in range(1, group + 1) if group % parts == 0 and group // parts <= MAX_LATENT_COLUMNS)


def _blocks_of_latents(p: Problem, rows: int) -> int:
    """Blocks of a sequence of so many rows, and parts of its heads."""
    group, parts = p.heads // p.kv_heads, latent_parts(p)
    return parts * cdiv(rows // group, MAX_LATENT_COLUMNS * parts // group)


def rest_of(p: Problem) -> int | None:
    """Dims of keys behind those that are their values, as tiles have them; None: values lie elsewhere."""
    if not reads_latents(p):
        return None
    rest = p.head_dim - p.value_width
    return max(64, next_power_of_2(rest)) if rest else 0


def only_columns(p: Problem) -> bool:
    """Whether rows are always columns of products."""
    return widest_of(p) > 256 or reads_latents(p)


def latents_are_rows(p: Problem, rows: int) -> bool:
    """Whether rows against latents, more than one consumer has columns for, are rows of the products of two."""
    dims = padded_value_dim(p)
    return reads_latents(p) and rows > MAX_WIDE_COLUMNS and dims >= MIN_DIMS_OF_HALVES


def wide_columns(p: Problem, rows: int) -> int:
    """Columns of a block of so many rows that are always columns, but for those of many rows of latents: 0."""
    return 0 if latents_are_rows(p, rows) else min(MAX_LATENT_COLUMNS, max(8, next_power_of_2(rows)))


def consumers_of(p: Problem, columns: int) -> int:
    """Consumers of a block.

    Columns are shared out among as many as have registers for them, of wide heads 32 each; of rows of latents each
    consumer has half of the results' dims.
    """
    if not only_columns(p):
        return 1
    return max(1, columns // MAX_WIDE_COLUMNS) if columns else 2


def rings_of_wide_shares(p: Problem, columns: int, half: bool) -> WideRings:
    """As many slots as have room; half: of tiles of 64 keys where others would have 128."""
    rest = rest_of(p)
    tile = 64 if half or widest_of(p) > 128 or (rest is not None and p.cache.itemsize == 1) else 128
    if rest is not None and columns == 0:
        tile = TILE_OF_ROWS
    dims = padded_dim(p), padded_value_dim(p)
    room = SHARED_BYTES - _bytes_beside_rings(p, columns, tile)
    if rest is not None:
        if p.cache.itemsize == 1:
            return _rings_of_fp8_latents(tile, rest, padded_value_dim(p), 1 + halves(p, columns), columns == 0, room)
        if columns == 0:  # both rings have as many
            slots = min(2 * MAX_SLOTS, room // (2 * tile * (padded_value_dim(p) + rest)))
            return WideRings(tile, slots, slots if rest else 0)
        return _rings_of_latents(tile, rest, padded_value_dim(p), 1 + halves(p, columns), room)
    slots = min(MAX_SLOTS, room // (2 * tile * sum(dims)))
    if slots > 1:
        return WideRings(tile, slots, slots)
    return WideRings(tile, room // (2 * tile * max(dims)), 0)


def _rings_of_latents(tile: int, rest: int, dim: int, parts: int, room: int) -> WideRings:
    """As many slots of the dims that are values as leave room for those of the rest; of these one for a tile.

    parts: slots that a tile's values take.
    """
    slot, slot_of_rest = 2 * tile * dim // parts, 2 * tile * rest
    slots = min(MAX_SLOTS, (room - MIN_SLOTS_OF_REST * slot_of_rest) // slot)
    if rest == 0:
        return WideRings(tile, slots, 0)
    return WideRings(tile, slots, min(cdiv(slots, parts), (room - slots * slot) // slot_of_rest))


def _rings_of_fp8_latents(tile: int, rest: int, dim: int, parts: int, rows: bool, room: int) -> WideRings:
    """Slots of 16 bits of two tiles, or of a tile and one more, and of fp8 as many as are left.

    parts: slots that a tile's values take.  The rest is widened last and left first: one slot of 16 bits is enough, but
    beside rows, whose rings go together and of which two tiles are multiplied at a time.
    """
    slot = tile * dim // parts  # of fp8
    columns = ((2 * parts, parts + 1), (parts + 1, parts + 1), (parts + 1, parts))
    for keys, least in ((4, 2), (3, 2)) if rows else columns:
        rests = keys if rows else 1
        left = room - 2 * (keys * slot + rests * tile * rest)
        raw = max((n for n in range(MAX_SLOTS + 1) if n * slot + cdiv(n, parts) * tile * rest <= left), default=0)
        if raw >= least:
            break
    return WideRings(tile, keys, min(rest, rests), raw)


def halves(p: Problem, columns: int) -> bool:
    """Whether the dims of latents that are values come in two slots a tile: of 256 dims a tile is a slot of 32 KB."""
    return reads_latents(p) and columns > 0 and padded_value_dim(p) > 256


def _bytes_beside_rings(p: Problem, columns: int, tile: int) -> int:
    """Of queries, weights, flags, and results that are turned around."""
    rows, rest = columns or MAX_ROWS_OF_TWO_WIDTHS, rest_of(p)
    if widest_of(p) <= 256:
        rows = max(rows, ROWS_OF_NOTHING)
    dims = padded_dim(p) if rest is None else padded_value_dim(p) + rest
    consumers = consumers_of(p, columns)
    turned = consumers == 1 and (padded_value_dim(p) <= 256 or columns <= MAX_TURNED_COLUMNS)
    weights = 2 * tile * (columns or (2 * rows if rest is not None else 0))
    flags = BYTES_OF_NUMBERS if rest is not None and columns == 0 else BYTES_OF_FLAGS * consumers
    return BYTES_OF_BARRIERS + 2 * rows * dims + weights + 4 * columns * padded_value_dim(p) * turned + flags
