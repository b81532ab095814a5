"""Launches of even shares of all tiles: decodes, drafts, and short calls (`shares.py`)."""

import math
from typing import Annotated

from ....records.formats import MANTISSA
from ....records.plan import UNBOUNDED, Launch, Threshold
from ....records.problem import Problem
from ...portable.launches import cut_by_head, kv_heads_cut_alike
from ..args import Pipe
from .operands import MAX_COLUMNS, WIDEN, has_tanh
from .shapes import MAX_BOX_ELEMENTS, is_wide, merged, new_launch, padded_dim, padded_value_dim, rows_of, shape_of
from .share_layout import (
    ShareLayout,
    keys_are_soon_read,
    layout_of,
    merge_joins_sooner,
    pieces_joined_at_once,
    pieces_of_wide_states,
    tiles_per_share,
)
from .wide_heads import MAX_WIDE_COLUMNS, consumers_of, halves, latent_parts, only_columns, reads_latents, rest_of

CONVERTER_REGISTERS = {1: 88, 2: 56}  # by number of consumers: registers of a thread that widens latents
MAX_PIECES_JOINED_BY_8: Annotated[
    int,
    Threshold(
        "pieces of a block of columns",
        "8 pieces are loaded at once; with more, joining waits for memory twice",
        "b1 x 8192 (16 pieces) 18.7 -> 17.7 us; b8 x 4096 40.4 -> 41.5, for 10 KB more code",
    ),
] = 8


def shares_launch(p: Problem, shortest: int, longest: int, beside: bool = False, leads: bool = False) -> Launch:
    """Return the launch of even shares of all tiles, for sequences of shortest..longest query tokens, inclusive.

    beside: few rows run beside blocks, see `shares_beside_launch`.  leads: a launch of blocks follows.  With either,
    there is no merge launch, which would begin only after the blocks.
    """
    paired = _reads_two_heads_as_one(p, longest)
    if paired:
        p = p._replace(kv_heads=p.kv_heads // 2, head_dim=2 * p.head_dim)  # values are as wide as keys
    parts = latent_parts(p)
    p = p._replace(kv_heads=p.kv_heads * parts)
    group, s = p.heads // p.kv_heads, layout_of(p, longest, beside)
    # where windows differ by head, KV heads may have different numbers of programs
    programs = s.resident * p.device.multiprocessors if cut_by_head(p) else s.shares * p.kv_heads
    shape = shape_of(p, s.tile, s.rows // group, s.rows, True)
    shape = shape._replace(
        CLEAR=p.ragged and p.only is None and longest == UNBOUNDED,
        WHOLE=shape.ONE_SCAN and _shares_may_begin_with_sequences(p, s.shares),
        PAIRED=paired,
        HEAD_DIM=p.head_dim // (1 + paired),
        VALUE_DIM=p.value_width // (1 + paired),
        ONE_BLOCK=s.blocks <= 1,
        BY_HEAD=cut_by_head(p),
        REST=rest_of(p),
    )
    if shape.REST is not None:
        shape = shape._replace(DIM=shape.VALUE_PADDED)
    live = max(1, min(shape.BLOCK_Q, p.max_seqlen_q)) if p.ragged else 1
    least = tiles_per_share(p, s)
    pipe = _pipe_of(p, s, least)._replace(PARTS=parts, BRIEF=longest == 1 and _waits_for_code(p, s))
    if s.raw_slots:
        registers = CONVERTER_REGISTERS[pipe.CONSUMERS]
        pipe = pipe._replace(CONVERT=WIDEN, CONVERT_REGISTERS=registers, RAW_STAGES=s.raw_slots)
    launch = new_launch(shape, pipe, programs, least, shortest, longest, live, 2 * programs, s.resident)
    # two consumers that share a block never join its pieces
    apart = not (beside or leads) and (pipe.CONSUMERS > 1 or merge_joins_sooner(p, s, rows_of(p, longest)))
    return merged(p, launch, s.shares) if apart else launch


def shares_beside_launch(p: Problem, shortest: int, longest: int) -> Launch:
    """Return even shares that run inside a launch of blocks: one warpgroup with few registers in each program.

    Items come as letters, and queries by TMA, so each block begins as soon as the previous block is stored.
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


def _reads_two_heads_as_one(p: Problem, longest: int) -> bool:
    """Whether two KV heads of 64 dims are read as one head of 128: half as many boxes, with longer rows.

    A query row has zeros in the other head's dims, and a product has the rows of both heads.  Up to 8 columns, this
    costs nothing, because a product has at least 8.  With more columns, or with 64 rows, products would take more time.
    """
    if p.cache.itemsize != 2 or p.packed or p.new or not p.adjacent or is_wide(p):
        return False
    return p.head_dim == 64 and p.kv_heads % 2 == 0 and 2 * rows_of(p, longest) <= MAX_COLUMNS


def _waits_for_code(p: Problem, s: ShareLayout) -> bool:
    """Whether a decode of up to MAX_COLUMNS rows reads so little that it waits for machine code.

    False for latents, scales by slot, results of less than 128 dims, and rings of different depths.
    """
    brief = s.columns == MAX_COLUMNS and s.slots == s.value_slots and not reads_latents(p) and not p.slot_scales
    return brief and keys_are_soon_read(p) and padded_value_dim(p) >= 128


def _shares_may_begin_with_sequences(p: Problem, shares: int) -> bool:
    """Whether the kernel looks for shares that begin with sequences.

    False if the numbers of sequences and of shares are both powers of two: most even shares then begin with sequences
    anyhow.

    The answer selects a kernel, and so must depend only on what `prepare` enumerates.
    """
    return (p.seqs & (p.seqs - 1) | shares & (shares - 1)) > 0


def _pipe_of(p: Problem, s: ShareLayout, least: int) -> Pipe:
    """Return the pipe of even shares; least: fewest tiles of a share."""
    box = math.gcd(p.page_size, s.tile)
    if p.packed:
        box = min(box, MAX_BOX_ELEMENTS * p.cache.itemsize // 16)
    consumers = consumers_of(p, s.columns)
    pieces = min(s.shares, s.tiles * p.seqs)  # maximum number of pieces of a KV head
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
        # the box that fetches descriptors lands where the queries will lie, and must fit there
        PREFETCH=p.cache.itemsize == 2 and not p.packed and box <= _most_rows_of_nothing(p, s),
        FP8=MANTISSA.get(p.cache, 0),
        SLOT_SCALES=p.slot_scales,
        LOADERS=1,
        JOINED=pieces_of_wide_states(p, s) if padded_value_dim(p) > 256 else 16 if by_16 else 8,
        BOX=box,
        ROWS_PER_PAGE=p.rows_per_page,
        GROUPED=pieces_joined_at_once(p, s, least),
        SKIP=kv_heads_cut_alike(p) * s.rows,
        STRIDE=2 * kv_heads_cut_alike(p) * s.rows,
    )


def _most_rows_of_nothing(p: Problem, s: ShareLayout) -> int:
    """Return the maximum rows of the box that fetches descriptors (Pipe.PREFETCH) and lands where queries will lie."""
    if only_columns(p):
        return min(s.columns, MAX_WIDE_COLUMNS) if s.columns else s.rows
    return 32 if s.columns and padded_dim(p) > 128 else 64
