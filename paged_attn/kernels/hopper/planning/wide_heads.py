"""Even shares of few rows for keys and values of two widths, more than 256 dims, and latents (values within keys)."""

from typing import NamedTuple

from ....records.formats import cdiv, next_power_of_2
from ....records.plan import UNBOUNDED
from ....records.problem import Problem
from .shapes import SHARED_BYTES, in_boxes, is_decode, is_wide, padded_dim, padded_value_dim, rows_of, widest_of

MIN_WIDTH, MAX_WIDTH, MAX_LATENT_WIDTH = 40, 512, 576  # dims of keys and of values; maximum dims of latent keys
MAX_ROWS_OF_TWO_WIDTHS = 64  # query rows of a block, up to 256 dims
MAX_WIDE_COLUMNS = 32  # columns of a consumer beyond 256 dims: 512 dims take 4 registers of a thread for each column
MAX_LATENT_COLUMNS = 2 * MAX_WIDE_COLUMNS  # columns of two consumers, which share the tiles
MIN_DIMS_OF_HALVES = 128  # fewest value dims that two consumers divide: each half fills 128-byte lines of shared memory
# Maximum number of blocks of a sequence: parts of the heads, times blocks of tokens if rows are columns.  Each block
# reads the keys, mostly from the L2.
MAX_BLOCKS_OF_LATENTS = 4
MAX_SLOTS = 6  # maximum number of slots of a ring; latent rows: twice as many, because tiles are half as large
MIN_SLOTS_OF_REST = 2  # slots of the dims behind the values: one slot is read while the next one arrives
BYTES_OF_BARRIERS = 1 << 10  # bytes of barriers and of arguments of warp partitions
TILE_OF_ROWS = 32  # keys of a tile of latents, if query rows are rows of products
BYTES_OF_FLAGS, BYTES_OF_NUMBERS = 512, 2048  # flags of a consumer of columns; numbers that two consumers exchange
ROWS_OF_NOTHING = 32  # query rows over which a box of zeros may be written (`loader.fetch_descriptors`)
MAX_TURNED_COLUMNS = 8  # columns up to which results beyond 256 dims pass shared memory (`columns.is_turned`)


class WideRings(NamedTuple):
    """Keys of a tile, and slots of the rings."""

    tile: int  # keys of a tile
    keys: int  # slots of the ring of keys
    # slots of the ring of values; 0: keys and values alternate in one ring.  Latents: slots of the ring of the key dims
    # behind the values, 0 if there are none
    values: int
    raw: int = 0  # slots of fp8 or int8 tiles, which are widened into slots of keys


def shares_take(p: Problem) -> bool:
    """Whether even shares serve all query rows of a call with values of another width, or with wide heads."""
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
    """Whether latents are read once, as keys and as values."""
    return p.latent and is_wide(p)


def latent_parts(p: Problem) -> int:
    """Return the number of equal parts of latents' query heads; without latents 1.

    Each part has up to 64 heads, and kernels schedule a part like a KV head.
    """
    group = p.heads // p.kv_heads
    if not reads_latents(p):
        return 1
    return next(parts for parts in range(1, group + 1) if group % parts == 0 and group // parts <= MAX_LATENT_COLUMNS)


def _blocks_of_latents(p: Problem, rows: int) -> int:
    """Return the number of blocks of a sequence of `rows` rows, in all parts of the heads."""
    group, parts = p.heads // p.kv_heads, latent_parts(p)
    return parts * cdiv(rows // group, MAX_LATENT_COLUMNS * parts // group)


def rest_of(p: Problem) -> int | None:
    """Return the padded key dims behind a latent's values; 0 if a key is its value, None without latents."""
    if not reads_latents(p):
        return None
    rest = p.head_dim - p.value_width
    return max(64, next_power_of_2(rest)) if rest else 0


def only_columns(p: Problem) -> bool:
    """Whether few rows are columns of products, whatever their number, except where `latents_are_rows`."""
    return widest_of(p) > 256 or reads_latents(p)


def latents_are_rows(p: Problem, rows: int) -> bool:
    """Whether `rows` query rows against latents are rows of products of two consumers.

    True if one consumer has too few columns for these rows, and two consumers can divide the value dims.
    """
    dims = padded_value_dim(p)
    return reads_latents(p) and rows > MAX_WIDE_COLUMNS and dims >= MIN_DIMS_OF_HALVES


def wide_columns(p: Problem, rows: int) -> int:
    """Return the columns of a block of `rows` query rows, if `only_columns`; 0 if `latents_are_rows`."""
    return 0 if latents_are_rows(p, rows) else min(MAX_LATENT_COLUMNS, max(8, next_power_of_2(rows)))


def consumers_of(p: Problem, columns: int) -> int:
    """Return the number of consumers of a block.

    Registers allow a consumer 32 columns of wide heads.  Rows of latents have two consumers, each with half of the
    value dims.
    """
    if not only_columns(p):
        return 1
    return max(1, columns // MAX_WIDE_COLUMNS) if columns else 2


def rings_of_wide_shares(p: Problem, columns: int, half: bool) -> WideRings:
    """Return rings of as many slots as fit shared memory; half: take tiles of 64 keys even if 128 are possible."""
    rest = rest_of(p)
    tile = 64 if half or widest_of(p) > 128 or (rest is not None and p.cache.itemsize == 1) else 128
    if rest is not None and columns == 0:
        tile = TILE_OF_ROWS
    dims = padded_dim(p), padded_value_dim(p)
    room = SHARED_BYTES - _bytes_beside_rings(p, columns, tile)
    if rest is not None:
        if p.cache.itemsize == 1:
            return _rings_of_fp8_latents(tile, rest, padded_value_dim(p), 1 + halves(p, columns), columns == 0, room)
        if columns == 0:  # both rings have equally many slots
            slots = min(2 * MAX_SLOTS, room // (2 * tile * (padded_value_dim(p) + rest)))
            return WideRings(tile, slots, slots if rest else 0)
        return _rings_of_latents(tile, rest, padded_value_dim(p), 1 + halves(p, columns), room)
    slots = min(MAX_SLOTS, room // (2 * tile * sum(dims)))
    if slots > 1:
        return WideRings(tile, slots, slots)
    return WideRings(tile, room // (2 * tile * max(dims)), 0)


def _rings_of_latents(tile: int, rest: int, dim: int, parts: int, room: int) -> WideRings:
    """Return rings of as many slots as fit, for 16-bit latents against columns.

    Slots of value dims leave room for MIN_SLOTS_OF_REST slots of the rest.  A tile takes `parts` slots of value dims,
    and one slot of the rest.  room: bytes for both rings.
    """
    slot, slot_of_rest = 2 * tile * dim // parts, 2 * tile * rest
    slots = min(MAX_SLOTS, (room - MIN_SLOTS_OF_REST * slot_of_rest) // slot)
    if rest == 0:
        return WideRings(tile, slots, 0)
    return WideRings(tile, slots, min(cdiv(slots, parts), (room - slots * slot) // slot_of_rest))


def _rings_of_fp8_latents(tile: int, rest: int, dim: int, parts: int, rows: bool, room: int) -> WideRings:
    """Return rings of fp8 or int8 latents: few 16-bit slots, and as many raw slots as fit beside the 16-bit slots.

    A tile takes `parts` slots of value dims, and one slot of the rest.  room: bytes for all rings.

    Columns: the 16-bit slots hold two tiles, or a tile and one slot more.  The rest is widened last and released first,
    so a single 16-bit slot of the rest suffices.

    rows: query rows are rows of products.  Both 16-bit rings then have four or three slots, and two tiles are
    multiplied at a time.
    """
    slot = tile * dim // parts  # bytes of a raw slot of value dims
    columns = ((2 * parts, parts + 1), (parts + 1, parts + 1), (parts + 1, parts))
    for keys, least in ((4, 2), (3, 2)) if rows else columns:
        rests = keys if rows else 1
        left = room - 2 * (keys * slot + rests * tile * rest)
        raw = max((n for n in range(MAX_SLOTS + 1) if n * slot + cdiv(n, parts) * tile * rest <= left), default=0)
        if raw >= least:
            break
    return WideRings(tile, keys, min(rest, rests), raw)


def halves(p: Problem, columns: int) -> bool:
    """Whether a tile's values take two slots of 32 KB in 16 bits: for columns against latents beyond 256 value dims."""
    return reads_latents(p) and columns > 0 and padded_value_dim(p) > 256


def _bytes_beside_rings(p: Problem, columns: int, tile: int) -> int:
    """Return bytes of queries, weights, flags, barriers, and results that are transposed in shared memory."""
    rows, rest = columns or MAX_ROWS_OF_TWO_WIDTHS, rest_of(p)
    if widest_of(p) <= 256:
        rows = max(rows, ROWS_OF_NOTHING)
    dims = padded_dim(p) if rest is None else padded_value_dim(p) + rest
    consumers = consumers_of(p, columns)
    turned = consumers == 1 and (padded_value_dim(p) <= 256 or columns <= MAX_TURNED_COLUMNS)
    weights = 2 * tile * (columns or (2 * rows if rest is not None else 0))
    flags = BYTES_OF_NUMBERS if rest is not None and columns == 0 else BYTES_OF_FLAGS * consumers
    return BYTES_OF_BARRIERS + 2 * rows * dims + weights + 4 * columns * padded_value_dim(p) * turned + flags
