"""Launches of even shares of all tiles: decode, speculation, and what is done soon (`shares.py`)."""

import math
from typing import Annotated, NamedTuple

from ....records.layout import MANTISSA
from ....records.plan import UNBOUNDED, Launch
from ....records.problem import Problem
from ....records.regime import Threshold
from ....records.rounding import cdiv, next_power_of_2
from ..args import Pipe
from . import cost
from .block_tiles import ELEMENTS_OF_TILES_BESIDE, RINGS_OF_FEW_ROWS
from .columns import MAX_COLUMNS, MAX_REGISTER_COLUMNS, MAX_ROWS, columns_beside, columns_of_shares
from .conversion import WIDEN
from .shapes import MAX_BOX_ELEMENTS, dim_of, is_wide, launch_of, merged, rows_of, shape_of, value_dim_of
from .share_tiles import keys_are_soon_read, share_tiles
from .softcap import has_tanh
from .wide_shares import (
    MAX_WIDE_COLUMNS,
    consumers_of,
    halves,
    latent_parts,
    only_columns,
    reads_latents,
    rest_of,
    widened_to,
)

CONVERTER_REGISTERS = {1: 88, 2: 56}  # of a thread of the warpgroup that widens latents, beside so many consumers
MIN_TILES_PER_SHARE: Annotated[
    int,
    Threshold(
        "tiles of a share of blocks of 64 rows",
        "joining a piece of many rows costs as much as two tiles; where there are blocks for all programs, shares of "
        "as many would leave some empty",
        "1 x 16 x 256 14.3 -> 11.9 us, 1 x 16 x 1024 22.9 -> 16.7; 2 tiles: 13.9, 18.2",
    ),
] = 4
MAX_TILES_OF_ONE_SHARE: Annotated[
    int,
    Threshold(
        "tiles of a block of 64 rows that is one share",
        "nothing is joined then; nor is a launch that joins worth it for so few",
        "1 x 16 to 128 x 512 14.4-15.6 -> 13.2-14.0 us; shares of 8 tiles always: 1 x 32 x 1024 15.6, 17.4",
    ),
] = 8
MIN_ROWS_WORTH_A_MERGE: Annotated[
    int,
    Threshold(
        "rows of a block, times dims / 128",
        "many programs join many rows as soon as few, in a launch that takes 2 us to begin",
        "24/1 1 x 32768 20.0 -> 16.2 us, 3 tokens of 8/1 15.8 -> 14.1; of 4 and 8 rows +1 to +3 us",
    ),
] = 16
MIN_STATES_WORTH_A_MERGE: Annotated[
    int,
    Threshold(
        "states of rows that a block's pieces leave, if blocks share all programs",
        "the program of a block's last piece would read as many alone",
        "48/1 1 x 32768 27.1 -> 16.3 us, 3 x 8192 37 -> 35.0; 8 of 4 x 8192 (4 pieces of 32 rows) 41 -> 42.8",
    ),
] = 192
MIN_WAITS_WORTH_A_MERGE: Annotated[
    int,
    Threshold(
        "times that the program of a block's last piece waits for states of 512 dims",
        "each is 0.7 to 0.8 us; a launch of its own costs 3 to 5",
        "latents of 32 heads, 64 x 4096: by a launch 84.4 us, in place 84.3 to 85.2 in another run: no difference seen",
    ),
] = 4
ELEMENTS_JOINED_AT_ONCE = 1 << 14  # 128 of each thread, `layouts.dims_at_once`
ROWS_WORTH_A_COUNT: Annotated[
    int,
    Threshold(
        "rows of pieces that are joined while programs count once more",
        "n pieces take n * rows at once, and in groups 2 * sqrt(n) * rows and this",
        "8/1 1 x 32768 21.6 -> 15.9 us, of 4 tokens 41.7 -> 21.5; few pieces 0 to +6%",
    ),
] = 256
MAX_PIECES_JOINED_BY_8: Annotated[
    int,
    Threshold(
        "pieces of a block of columns",
        "beyond 8 pieces loaded at once joining waits for memory twice",
        "b1 x 8192 (16 pieces) 18.7 -> 17.7 us; b8 x 4096 40.4 -> 41.5, for 10 KB more code",
    ),
] = 8


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


def shares_launch(p: Problem, shortest: int, longest: int, beside: bool = False, leads: bool = False) -> Launch:
    """Even shares of all tiles.  beside: blocks, see `shares_beside_launch`.

    leads: blocks follow.  A merge would come behind these, and was not tried.
    """
    paired = _reads_two_heads_as_one(p, longest)
    if paired:
        p = p._replace(kv_heads=p.kv_heads // 2, head_dim=2 * p.head_dim)  # values are as wide
    parts = latent_parts(p)
    p = p._replace(kv_heads=p.kv_heads * parts)
    if reads_latents(p):
        p = p._replace(compute=widened_to(p))
    group, s = p.heads // p.kv_heads, _layout_of(p, longest, beside)
    programs = s.shares * p.kv_heads
    shape = shape_of(p, s.tile, s.rows // group, s.rows, True)
    shape = shape._replace(
        CLEAR=p.ragged and p.only is None and longest == UNBOUNDED,
        WHOLE=shape.ONE_SCAN and _shares_may_begin_with_sequences(p, s.shares),
        PAIRED=paired,
        HEAD_DIM=p.head_dim // (1 + paired),
        VALUE_DIM=p.value_width // (1 + paired),
        ONE_BLOCK=s.blocks <= 1,
        REST=rest_of(p),
    )
    if shape.REST is not None:
        shape = shape._replace(DIM=shape.VALUE_PADDED)
    live = max(1, min(shape.BLOCK_Q, p.max_seqlen_q)) if p.ragged else 1
    least = _tiles_per_share(p, s)
    pipe = _pipe_of(p, s, least)._replace(PARTS=parts, BRIEF=longest == 1 and _waits_for_code(p, s))
    if s.raw_slots:
        registers = CONVERTER_REGISTERS[pipe.CONSUMERS]
        pipe = pipe._replace(CONVERT=WIDEN, CONVERT_REGISTERS=registers, RAW_STAGES=s.raw_slots)
    launch = launch_of(shape, pipe, programs, least, shortest, longest, live, 2 * programs, s.resident)
    # where two consumers have the columns of a block, neither joins them
    apart = not (beside or leads) and (pipe.CONSUMERS > 1 or _merge_joins_sooner(p, s, rows_of(p, longest)))
    return merged(p, launch, s.shares) if apart else launch


def shares_beside_launch(p: Problem, shortest: int, longest: int) -> Launch:
    """The same in all programs of another launch, by a warpgroup of few registers and what is left of shared memory.

    Items come by letters, and queries as boxes, so that a block begins as soon as the one before is stored.
    """
    launch = shares_launch(p._replace(adjacent=False), shortest, longest, beside=True)
    pipe = launch.pipe._replace(
        BESIDE=True,
        BOX=math.gcd(p.page_size, launch.shape.TILE),
        PREFETCH=False,
        BRIEF=False,
        JOINED=4,
        QUERY_BOX=True,
        QUERY_SLOTS=2,
    )
    programs = p.device.multiprocessors
    return launch._replace(pipe=pipe, programs=programs, slots=2 * programs)


def _layout_of(p: Problem, longest: int, beside: bool) -> ShareLayout:
    """Blocks of few rows as columns, or of 64 rows."""
    asked, group = rows_of(p, longest), p.heads // p.kv_heads
    if (p.cache.itemsize == 1 and not reads_latents(p)) or p.packed:
        asked = min(asked, max(MAX_REGISTER_COLUMNS, group))
    if beside:
        columns, tile = columns_beside(p), ELEMENTS_OF_TILES_BESIDE // dim_of(p)
        (slots, value_slots), raw_slots = RINGS_OF_FEW_ROWS, 0
    else:
        columns = columns_of_shares(p, asked, asked > group)
        tile, slots, value_slots, raw_slots = share_tiles(p, columns)
    rows = columns or MAX_ROWS
    # fp8 leaves room for two programs, which wait in turn
    two = p.cache.itemsize == 1 and columns <= MAX_REGISTER_COLUMNS and dim_of(p) <= 128 and not reads_latents(p)
    resident = 2 if two else 1
    shares = max(1, resident * p.device.multiprocessors // p.kv_heads)
    blocks = cdiv(min(p.max_seqlen_q, longest), rows // group)
    tiles = cdiv(p.keys_seen(p.max_seqlen_q + tile), tile)
    return ShareLayout(columns, rows, tile, slots, value_slots, raw_slots, resident, shares, blocks, tiles)


def _tiles_per_share(p: Problem, s: ShareLayout) -> int:
    """The fewest."""
    if s.rows < MAX_ROWS or p.seqs * s.blocks >= s.shares:
        return 1
    tiles = max(s.tiles, 1) + p.new  # new keys have tiles of their own
    return tiles if tiles <= MAX_TILES_OF_ONE_SHARE else MIN_TILES_PER_SHARE


def _merge_joins_sooner(p: Problem, s: ShareLayout, rows: int) -> bool:
    """Whether a launch of its own joins pieces of `rows` rows: where the last program of a block would take longer."""
    if value_dim_of(p) > 256:
        return _waits_for_wide_states(p, s, rows) >= MIN_WAITS_WORTH_A_MERGE and s.tiles > MAX_TILES_OF_ONE_SHARE
    live = min(rows, s.rows) * value_dim_of(p) // 128
    states = live * s.shares  # of all blocks of a KV head
    return (
        live >= MIN_ROWS_WORTH_A_MERGE
        and states >= MIN_STATES_WORTH_A_MERGE * cost.seqs_tried(p) * s.blocks
        and s.tiles > MAX_TILES_OF_ONE_SHARE
    )


def _reads_two_heads_as_one(p: Problem, longest: int) -> bool:
    """Whether two KV heads of 64 dims are read as one of 128: half as many boxes, each of longer rows.

    A row of queries has zeros where the other head's dims are, so products are twice as many; of more columns, or of
    rows of 64, they would be felt.
    """
    if p.cache.itemsize != 2 or p.packed or p.new or not p.adjacent or is_wide(p):
        return False
    return p.head_dim == 64 and p.kv_heads % 2 == 0 and 2 * rows_of(p, longest) <= MAX_COLUMNS


def _waits_for_code(p: Problem, s: ShareLayout) -> bool:
    """Whether a decode is so small that it waits for machine code; a row of its results is one of a warp or more."""
    brief = s.columns == MAX_COLUMNS and s.slots == s.value_slots and not reads_latents(p)
    return brief and keys_are_soon_read(p) and value_dim_of(p) >= 128


def _shares_may_begin_with_sequences(p: Problem, shares: int) -> bool:
    """Whether such shares are looked for: if sequences and shares are both powers of two, most even ones are such.

    It decides about kernels, and so by nothing that `prepare` does not try.
    """
    return (p.seqs & (p.seqs - 1) | shares & (shares - 1)) > 0


def _pipe_of(p: Problem, s: ShareLayout, least: int) -> Pipe:
    """Of even shares."""
    box = math.gcd(p.page_size, s.tile)
    if p.packed:
        box = min(box, MAX_BOX_ELEMENTS * p.cache.itemsize // 16)
    consumers = consumers_of(p, s.columns)
    pieces = min(s.shares, s.tiles * p.seqs)  # that blocks of all sequences may have
    by_16 = s.columns and p.cache.itemsize == 2 and p.seqs <= 2 and pieces > MAX_PIECES_JOINED_BY_8 * p.seqs
    return Pipe(
        SHARES=True,
        AT_ONCE=s.columns == 0,
        TANH=has_tanh(p) and s.columns == 0,
        CONSUMERS=consumers,
        KEY_STAGES=s.slots,
        VALUE_STAGES=s.value_slots,
        COLUMNS=s.columns // consumers,
        HALVES=halves(p, s.columns),
        PACKED=p.packed,
        # boxes of nothing go where queries will, and large heads leave room for few of those
        PREFETCH=p.cache.itemsize == 2 and not p.packed and box <= _most_rows_of_nothing(p, s),
        FP8=MANTISSA.get(p.cache, 0),
        LOADERS=1,
        JOINED=_pieces_of_wide_states(p, s) if value_dim_of(p) > 256 else 16 if by_16 else 8,
        BOX=box,
        ROWS_PER_PAGE=p.rows_per_page,
        GROUPED=_pieces_joined_at_once(p, s, least),
        SKIP=p.kv_heads * s.rows,
        STRIDE=2 * p.kv_heads * s.rows,
    )


def _pieces_of_wide_blocks(p: Problem, s: ShareLayout) -> int:
    """That most blocks have, where all are alike."""
    return max(2, s.shares // (cost.seqs_tried(p) * max(1, s.blocks)))


def _pieces_of_wide_states(p: Problem, s: ShareLayout) -> int:
    """Pieces that are loaded together: as many as most blocks have, so that there is room for more dims of them."""
    return min(8, next_power_of_2(_pieces_of_wide_blocks(p, s)))


def _waits_for_wide_states(p: Problem, s: ShareLayout, rows: int) -> int:
    """Times that the program of a block's last piece waits for memory while it joins all (`join.join_states`)."""
    together = _pieces_of_wide_states(p, s)
    at_once = max(8, min(rows, s.rows)) * value_dim_of(p) * together
    return cdiv(_pieces_of_wide_blocks(p, s), together) * cdiv(at_once, ELEMENTS_JOINED_AT_ONCE)


def _most_rows_of_nothing(p: Problem, s: ShareLayout) -> int:
    """Of a box that brings nothing, beyond those of queries."""
    if only_columns(p):
        return min(s.columns, MAX_WIDE_COLUMNS) if s.columns else s.rows
    return 32 if s.columns and dim_of(p) > 128 else 64


def _pieces_joined_at_once(p: Problem, s: ShareLayout, least: int) -> int:
    """Pieces of a block beyond which they are joined in groups; 0 where it is not likely to have more."""
    most = int((1 + math.sqrt(1 + ROWS_WORTH_A_COUNT / s.rows)) ** 2)
    # of one sequence's equal blocks each has as many; of others one may have nearly all keys
    pieces = s.shares // max(1, s.blocks) if p.seqs == 1 else s.shares
    return most if min(pieces, cdiv(s.tiles + p.new, least) + 1) > most else 0
