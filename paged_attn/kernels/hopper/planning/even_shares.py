"""Launches of even shares of all tiles: decode, speculation, and what is done soon (`shares.py`)."""

import math
from typing import NamedTuple

from ....records.layout import MANTISSA
from ....records.plan import UNBOUNDED, Launch
from ....records.problem import Problem
from ....records.rounding import cdiv, next_power_of_2
from ..args import Pipe
from .block_items import TILE_ELEMENTS_BESIDE_FEW_ROWS
from .shapes import (
    MAX_BOX_ELEMENTS,
    MAX_COLUMNS,
    MAX_DRAFT_COLUMNS,
    MAX_FP8_COLUMNS,
    MAX_PACKED_COLUMNS,
    dim_of,
    has_tanh,
    launch_of,
    merged,
    rows_of,
    shape_of,
)

# Tiles of an even share of blocks of 64 rows: fewer cost more to join than they balance.  Where blocks have at most
# MAX_TILES_OF_ONE_SHARE, such a block is a share; where there are blocks for all programs, shares of as many would
# leave some empty.
MIN_TILES_PER_SHARE, MAX_TILES_OF_ONE_SHARE = 4, 8
# Rows of a block, of 128 dims, from which on a launch of its own joins pieces, if each block may have so many in these.
MIN_ROWS_WORTH_A_MERGE, MIN_STATES_WORTH_A_MERGE = 16, 192
ROWS_WORTH_A_COUNT = 256  # rows of pieces that could be joined while programs count once more
# Tiles of 64 keys and rows of a program up to which even shares serve more rows than a block has; twice as many where
# blocks are so few for that many programs that each would be cut into many pieces.
MAX_TILES_PER_PROGRAM, MIN_MULTIPROCESSORS_PER_BLOCK = 32, 16
SLOTS_BESIDE_BLOCKS = 3, 2  # slots of the rings of keys and of values beside blocks
# Bytes of keys and values up to which finer tiles pay, in general and of 128 dims of 16 bits.
MAX_BYTES_OF_FINE_TILES, MAX_BYTES_OF_FINE_TILES_OF_128_DIMS = 64 << 20, 256 << 20


class Shares(NamedTuple):
    """How the tiles of a call are laid out for even shares of them."""

    columns: int  # rows of a block that are columns of products; 0: they are rows
    rows: int  # of a block
    tile: int
    stages: int  # slots of a ring
    resident: int  # programs of a multiprocessor
    shares: int  # of each KV head
    blocks: int  # that a sequence may have
    tiles: int  # that a block may see


def few(p: Problem, shortest: int, longest: int, beside: bool = False, leads: bool = False) -> Launch:
    """Even shares of all tiles.  beside: blocks, see `few_beside`.

    leads: blocks follow.  A merge would come behind these, and was not tried.
    """
    paired = _reads_two_heads_as_one(p, longest)
    if paired:
        p = p._replace(kv_heads=p.kv_heads // 2, head_dim=2 * p.head_dim)
    group, s = p.heads // p.kv_heads, _shares(p, longest, beside)
    programs = s.shares * p.kv_heads
    shape = shape_of(p, s.tile, s.rows // group, s.rows, True)
    shape = shape._replace(
        CLEAR=p.ragged and p.only is None and longest == UNBOUNDED,
        WHOLE=shape.ONE_SCAN and _whole_shares_may_pay(p, s.shares),
        PAIRED=paired,
        HEAD_DIM=p.head_dim // (1 + paired),
        VALUE_DIM=p.head_dim // (1 + paired),
        ONE_BLOCK=s.blocks <= 1,
    )
    live = max(1, min(shape.BLOCK_Q, p.max_seqlen_q)) if p.ragged else 1
    least = 1
    if s.rows >= 64 and p.seqs * s.blocks < s.shares:
        tiles = max(s.tiles, 1) + p.new  # new keys have tiles of their own
        least = tiles if tiles <= MAX_TILES_OF_ONE_SHARE else MIN_TILES_PER_SHARE
    pipe = _share_pipe(p, s, least)._replace(BRIEF=longest == 1 and _waits_for_code(p, s))
    launch = launch_of(shape, pipe, programs, least, shortest, longest, live, 2 * programs, s.resident)
    apart = not (beside or leads) and _pieces_are_worth_a_merge(p, s, rows_of(p, longest))
    return merged(p, launch, s.shares) if apart else launch


def _pieces_are_worth_a_merge(p: Problem, s: Shares, rows: int) -> bool:
    """Whether a launch of its own joins pieces of `rows` rows: where the last program of a block would take longer.

    To begin one takes 2 us, and many programs join a block's many rows, or many pieces, as soon as few.
    """
    live = min(rows, s.rows) * dim_of(p) // 128
    blocks = next_power_of_2(p.seqs) * s.blocks  # as in `plan._one_list_serves_all`
    return (
        live >= MIN_ROWS_WORTH_A_MERGE
        and live * s.shares >= MIN_STATES_WORTH_A_MERGE * blocks
        and s.tiles > MAX_TILES_OF_ONE_SHARE
    )


def columns_beside(p: Problem) -> int:
    """Of few rows beside blocks, whose warpgroup has no registers for more; 0: there is no such warpgroup."""
    if dim_of(p) > 128:
        return 0
    return MAX_COLUMNS if p.heads // p.kv_heads <= MAX_COLUMNS else MAX_DRAFT_COLUMNS


def few_beside(p: Problem, shortest: int, longest: int) -> Launch:
    """The same in all programs of another launch, by a warpgroup of few registers and what is left of shared memory.

    Items come by letters, and queries as boxes, so that a block begins as soon as the one before is stored.
    """
    launch = few(p._replace(adjacent=False), shortest, longest, beside=True)
    pipe = launch.pipe._replace(
        BESIDE=True,
        VALUE_STAGES=SLOTS_BESIDE_BLOCKS[1],
        BOX=math.gcd(p.page_size, launch.shape.TILE),
        PREFETCH=False,
        BRIEF=False,
        JOINED=4,
        QUERY_BOX=True,
        QUERY_SLOTS=2,
    )
    programs = p.device.multiprocessors
    return launch._replace(pipe=pipe, programs=programs, slots=2 * programs)


def _reads_two_heads_as_one(p: Problem, longest: int) -> bool:
    """Whether two KV heads of 64 dims are read as one of 128: half as many boxes, each of longer rows.

    A row of queries has zeros where the other head's dims are, so products are twice as many; of more columns, or of
    rows of 64, they would be felt.
    """
    if p.cache.itemsize != 2 or p.packed or p.new or not p.adjacent:
        return False
    return p.head_dim == 64 and p.kv_heads % 2 == 0 and 2 * rows_of(p, longest) <= MAX_COLUMNS


def _waits_for_code(p: Problem, s: Shares) -> bool:
    """Whether a decode is so small that it waits for machine code; a row of its results is one of a warp or more."""
    return s.columns == MAX_COLUMNS and _fine_tiles_pay(p) and dim_of(p) >= 128


def _fine_tiles_pay(p: Problem) -> bool:
    """Whether there are so few keys and values that finer tiles pay."""
    most = (
        MAX_BYTES_OF_FINE_TILES_OF_128_DIMS if p.cache.itemsize == 2 and dim_of(p) == 128 else MAX_BYTES_OF_FINE_TILES
    )
    return 2 * p.seqs * p.max_seqlen_k * p.kv_heads * p.head_dim * p.cache.itemsize < most


def _share_pipe(p: Problem, s: Shares, least: int) -> Pipe:
    """Of even shares."""
    dim, box = dim_of(p), math.gcd(p.page_size, s.tile)
    if p.packed:
        box = min(box, MAX_BOX_ELEMENTS * p.cache.itemsize // 16)
    long = s.shares > 8 * p.seqs and s.tiles > 8  # a block may have more than 8 pieces
    return Pipe(
        SHARES=True,
        AT_ONCE=s.columns == 0,
        TANH=has_tanh(p) and s.columns == 0,
        CONSUMERS=1,
        KEY_STAGES=s.stages,
        VALUE_STAGES=s.stages,
        COLUMNS=s.columns,
        PACKED=p.packed,
        # boxes of nothing go where queries will, and large heads leave room for few of those
        PREFETCH=p.cache.itemsize == 2 and not p.packed and box <= (32 if s.columns and dim > 128 else 64),
        FP8=MANTISSA.get(p.cache, 0),
        LOADERS=1,
        JOINED=16 if s.columns and p.cache.itemsize == 2 and p.seqs <= 2 and long else 8,  # not two waits for memory
        BOX=box,
        ROWS_PER_PAGE=p.rows_per_page,
        GROUPED=_grouped(p, s, least),
        SKIP=p.kv_heads * s.rows,
        STRIDE=2 * p.kv_heads * s.rows,
    )


def _grouped(p: Problem, s: Shares, least: int) -> int:
    """Pieces of a block beyond which they are joined in groups; 0 where it is not likely to have more.

    n pieces take n * rows at once, and in groups 2 * sqrt(n) * rows + ROWS_WORTH_A_COUNT.
    """
    most = int((1 + math.sqrt(1 + ROWS_WORTH_A_COUNT / s.rows)) ** 2)
    # of one sequence's equal blocks each has as many; of others one may have nearly all keys
    pieces = s.shares // max(1, s.blocks) if p.seqs == 1 else s.shares
    return most if min(pieces, cdiv(s.tiles + p.new, least) + 1) > most else 0


def _share_rings(p: Problem, columns: int) -> tuple[int, int]:
    """(tile, slots of each ring) of even shares with so many columns: as many slots as the queries leave room for."""
    dim, fp8 = dim_of(p), p.cache.itemsize == 1
    if p.packed and fp8 and columns > MAX_COLUMNS:
        return 64, 5
    # an x-packed tile, and the next one on its way for up to 16 columns (`columns.is_early`), leave few registers, and
    # so do more columns of fp8
    crowded = (p.packed and (fp8 or MAX_COLUMNS < columns <= 16)) or (fp8 and columns > 16)
    # rows that end within a line of memory share it with another head's: its program finds it in L2 if not far behind
    odd = p.head_dim % 64 > 0 and columns and not fp8 and not p.packed
    tile, stages = (64, 3) if _fine_tiles_pay(p) or dim > 128 or crowded or odd else (128, 2)
    if tile == 64:
        stages *= 2 // p.cache.itemsize
    if dim == 64:
        return tile, 2 * stages
    return tile, 5 if columns > 32 and dim > 128 else stages


def _most_columns(p: Problem, several: bool) -> int:
    """Rows of a block up to which they are columns, of one token or several."""
    if p.cache.itemsize == 1:
        return 64
    if p.packed:
        return MAX_PACKED_COLUMNS
    return MAX_DRAFT_COLUMNS if several else MAX_COLUMNS


def _shares(p: Problem, longest: int, beside: bool) -> Shares:
    """Blocks of few rows as columns, or of 64 rows."""
    asked, group = rows_of(p, longest), p.heads // p.kv_heads
    if p.cache.itemsize == 1 or p.packed:
        asked = min(asked, max(MAX_FP8_COLUMNS, group))
    if beside:
        columns, tile, stages = columns_beside(p), TILE_ELEMENTS_BESIDE_FEW_ROWS // dim_of(p), SLOTS_BESIDE_BLOCKS[0]
    else:
        columns = max(8, next_power_of_2(asked)) if asked <= _most_columns(p, asked > group) else 0
        tile, stages = _share_rings(p, columns)
    rows = columns or 64
    keys = _keys(p, tile)
    # fp8 leaves room for two programs, which wait in turn
    resident = 2 if p.cache.itemsize == 1 and columns <= 32 and dim_of(p) <= 128 else 1
    places = resident * p.device.multiprocessors
    shares = max(1, places // p.kv_heads)
    blocks = cdiv(min(p.max_seqlen_q, longest), rows // group)
    return Shares(columns, rows, tile, stages, resident, shares, blocks, cdiv(keys, tile))


def _whole_shares_may_pay(p: Problem, shares: int) -> bool:
    """Whether shares that begin with sequences are worth looking for: if both are powers of two, most even ones do.

    It decides about kernels, and so by nothing that `prepare` does not try.
    """
    return (p.seqs & (p.seqs - 1) | shares & (shares - 1)) > 0


def _keys(p: Problem, tile: int) -> int:
    """The most that a block may see."""
    return p.keys_seen(p.max_seqlen_q + tile)


def even_shares_end_sooner(p: Problem) -> bool:
    """Whether even shares of blocks of 64 rows are better than half as many of 128 from a counter: all are done soon.

    What counts then is how much code a launch has to fetch, and how few rows of how few pieces a program has to join.
    """
    multiprocessors = p.device.multiprocessors
    blocks = p.seqs * p.kv_heads * cdiv(p.max_seqlen_q, 64 // (p.heads // p.kv_heads))
    most = (
        2 * MAX_TILES_PER_PROGRAM
        if MIN_MULTIPROCESSORS_PER_BLOCK * blocks <= multiprocessors
        else MAX_TILES_PER_PROGRAM
    )
    return blocks <= multiprocessors and blocks * cdiv(_keys(p, 64), 64) <= most * multiprocessors
