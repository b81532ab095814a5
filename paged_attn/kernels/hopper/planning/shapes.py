"""Shapes and launches of all Hopper plans, from a problem and the numbers that a plan chose."""

import math

import torch
import triton

from ....records.formats import INT4, next_power_of_2
from ....records.plan import Config, Launch
from ....records.problem import Problem
from ...common.records import Shape
from ...common.score_mod import of_this_dialect
from ...portable.launches import merge_of
from ...portable.tuning import SHARED_MEMORY
from ..args import Pipe

# Maximum number of sequences with Shape.ONE_SCAN.  A program then computes the work of all sequences once and keeps it.
MAX_SEQS_OF_ONE_SCAN = 128
MAX_SEQS_OF_ONE_WARP = 32  # maximum number of sequences that a warp holds with one in each lane
SHARED_BYTES = SHARED_MEMORY["sm90"]  # bytes of shared memory of a program
MAX_BOX_ELEMENTS = 256  # maximum number of elements of a TMA box along an axis
# Operands of blocks over an x-packed cache.  A core matrix of keys has 8 keys x 8 dims.  A row of values in shared
# memory has the values of 16 keys in one dim.
KEYS_PER_CORE_MATRIX, VALUES_PER_CORE_ROW = 8, 16


def is_even(p: Problem) -> bool:
    """Whether all sequences have equally many query tokens."""
    return p.seqs == 1 or p.tokens >= p.seqs * p.max_seqlen_q


def in_boxes(p: Problem) -> bool:
    """Whether pages can be cut into TMA boxes of 8 slots or more."""
    return p.page_size % 8 == 0


def is_decode(p: Problem) -> bool:
    """Whether all sequences that the call asks for have one query token."""
    return p.only == "decode" or not p.ragged


def others_are_decodes(p: Problem) -> bool:
    """Whether all sequences except the longest have one query token, if max_seqlen_q is exact."""
    return p.tokens == p.max_seqlen_q + p.seqs - 1


def loaders_of(p: Problem, tile: int, modified: bool) -> int:
    """Return the number of loader warps of each ring in a launch of blocks; tile: keys of a tile."""
    # two warps send small boxes faster, but code for them and for modifiers does not all stay in the instruction cache
    return 2 if math.gcd(p.page_size, tile) < tile and not modified else 1


def padded_dim(p: Problem) -> int:
    """Return the head dims of a tile, with padding."""
    return max(64, next_power_of_2(p.head_dim))


def padded_value_dim(p: Problem) -> int:
    """Return the dims of values and results in a tile, with padding."""
    return max(64, next_power_of_2(p.value_width))


def widest_of(p: Problem) -> int:
    """Return the larger of both padded widths."""
    return max(padded_dim(p), padded_value_dim(p))


def is_wide(p: Problem) -> bool:
    """Whether values have another width than keys, or either has more than 256 dims."""
    return p.value_width != p.head_dim or p.widest > 256


def rows_of(p: Problem, longest: int) -> int:
    """Return the maximum number of query rows, for a KV head, of a sequence of up to `longest` query tokens."""
    return (max(1, min(p.max_seqlen_q, longest)) if p.ragged else 1) * (p.heads // p.kv_heads)


def _is_normalized(p: Problem) -> bool:
    """Whether query rows are brought into float16's range.

    Over int4, float16 rows are brought into range, too, because their odd dims are divided by 16
    (`queries.scatter_int4`).
    """
    return p.compute == torch.float16 and (p.query == torch.bfloat16 or (p.query == torch.float16 and p.cache == INT4))


def shape_of(p: Problem, tile: int, tokens: int, rows: int, split: bool) -> Shape:
    """Return the Shape of blocks of `tokens` query tokens and `rows` rows; callers replace the rarer fields."""
    return Shape(
        GROUP=p.heads // p.kv_heads,
        KV_HEADS=p.kv_heads,
        HEAD_DIM=p.head_dim,
        DIM=padded_dim(p),
        VALUE_DIM=p.value_width,
        VALUE_PADDED=padded_value_dim(p),
        PAGE=p.page_size,
        BLOCK_Q=tokens,
        ROWS=rows,
        LIVE=rows,
        TILE=tile,
        CHUNK=0,
        STAGES=0,
        COMPUTE=triton.language.float16 if p.compute == torch.float16 else triton.language.bfloat16,
        PRECISION="ieee",
        ONE_BLOCK=False,
        SPLIT=split,
        PIECE=None,
        MERGE=1,
        SCAN=next((size for size in (MAX_SEQS_OF_ONE_WARP, MAX_SEQS_OF_ONE_SCAN) if p.seqs <= size), 1024),
        ONE_SCAN=p.seqs <= MAX_SEQS_OF_ONE_SCAN,
        PEEL=False,
        # fp8 queries: one factor turns scores of all rows into exponents, so token scales are applied to scores first
        SCALE_FIRST=p.rescaled if p.query.itemsize == 1 else p.modified,
        CLEAR=False,
        NATIVE_FP8=True,
        NORMALIZED=_is_normalized(p),
        BY_ROW=p.token_scales or _is_normalized(p),
        FAR_CAP=p.far_cap,
        SCORE_MOD=of_this_dialect(p.score_mod),
        **(p.stripes._asdict() if p.stripes else {}),
        APART=p.new,
    )


def merged(p: Problem, launch: Launch, shares: int) -> Launch:
    """Return the launch with a merge launch after it; each of up to `shares` programs may have a piece of a block."""
    shape, pipe = launch.shape._replace(MERGE=0), launch.pipe._replace(GROUPED=0)
    merge = merge_of(p, shape, launch.block_tokens, shares, pipe.SKIP, pipe.STRIDE)
    return launch._replace(shape=shape, pipe=pipe, merge=merge)


def new_launch(
    shape: Shape, pipe: Pipe, programs: int, least: int, shortest: int, longest: int, tokens: int, slots: int,
    resident: int = 1,
) -> Launch:  # fmt: skip
    """Return a launch of `programs` programs, `resident` on each multiprocessor.

    A piece or share has at least `least` tiles.  The launch serves sequences of shortest..longest query tokens,
    inclusive.  A block has at most `tokens` query tokens of its sequence.  Scratch has `slots` states of pieces.
    """
    registers = None if resident == 1 else 128
    config = Config(
        rows=shape.ROWS, tile=shape.TILE, stages=pipe.KEY_STAGES, warps=pipe.ROWS // 16, peel=False, resident=resident,
        registers=registers,
    )  # fmt: skip
    return Launch(shape, programs, least, slots, shortest, longest, tokens, config, "hopper", pipe)
