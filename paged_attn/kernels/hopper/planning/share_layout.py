"""How the tiles of a call are laid out for even shares of them."""

from typing import NamedTuple

from ....records.problem import Problem
from ....records.rounding import cdiv
from .block_tiles import ELEMENTS_OF_TILES_BESIDE, RINGS_OF_FEW_ROWS
from .columns import MAX_REGISTER_COLUMNS, MAX_ROWS, columns_beside, columns_of_shares
from .shapes import padded_dim, rows_of
from .share_tiles import share_tiles
from .wide_shares import reads_latents


class ShareLayout(NamedTuple):
    """How the tiles of a call are laid out for even shares of them."""

    columns: int  # rows of a block that are columns of products; 0: they are rows
    rows: int  # of a block
    tile: int
    slots: int  # of the ring of keys
    value_slots: int  # of that of values; 0: both take those of one in turn
    raw_slots: int  # of that of fp8 latents
    resident: int  # programs of a multiprocessor
    shares: int  # of each KV head
    blocks: int  # that a sequence may have
    tiles: int  # that a block may see


def layout_of(p: Problem, longest: int, beside: bool) -> ShareLayout:
    """Blocks of few rows as columns, or of 64 rows."""
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
    # fp8 leaves room for two programs, which wait in turn
    two = p.cache.itemsize == 1 and columns <= MAX_REGISTER_COLUMNS and padded_dim(p) <= 128 and not reads_latents(p)
    resident = 2 if two else 1
    shares = max(1, resident * p.device.multiprocessors // p.kv_heads)
    blocks = cdiv(min(p.max_seqlen_q, longest), rows // group)
    tiles = cdiv(p.keys_seen(p.max_seqlen_q + tile), tile)
    return ShareLayout(columns, rows, tile, slots, value_slots, raw_slots, resident, shares, blocks, tiles)
