"""What all plans of Hopper kernels share: shapes and launches from a problem and the numbers that a plan chose."""

import math

import torch
import triton

from ....records.plan import Config, Launch
from ....records.problem import Problem
from ....records.rounding import next_power_of_2
from ...common.score_mod import of_this_dialect
from ...common.shape import Shape
from ...portable.launches import merge_of
from ...portable.tuning import SHARED_MEMORY
from ..args import Pipe

MAX_SEQS_OF_ONE_SCAN = 128  # that are searched in one step, which also adds up their work
MAX_SEQS_OF_ONE_WARP = 32  # that a warp searches in one step
SHARED_BYTES = SHARED_MEMORY["sm90"]  # of a program
MAX_BOX_ELEMENTS = 256  # elements of a box along an axis
# Of an x-packed cache, side by side for a product: keys, of 8 dims each, and values of a dim.
KEYS_PER_CORE_MATRIX, VALUES_PER_CORE_ROW = 8, 16


def is_even(p: Problem) -> bool:
    """Whether all sequences have as many queries."""
    return p.seqs == 1 or p.tokens >= p.seqs * p.max_seqlen_q


def in_boxes(p: Problem) -> bool:
    """Whether pages are cut into boxes of 8 rows and more."""
    return p.page_size % 8 == 0


def is_decode(p: Problem) -> bool:
    """Whether all sequences that are asked for have one query token."""
    return p.only == "decode" or not p.ragged


def others_are_decodes(p: Problem) -> bool:
    """Whether all sequences but the longest have a token."""
    return p.tokens == p.max_seqlen_q + p.seqs - 1


def loaders_of(p: Problem, tile: int, modified: bool) -> int:
    """Warps for each ring of blocks."""
    # two would send small boxes faster, but have twice the code, and beside that of modifiers it does not stay at hand
    return 2 if math.gcd(p.page_size, tile) < tile and not modified else 1


def padded_dim(p: Problem) -> int:
    """Head dims as tiles have them."""
    return max(64, next_power_of_2(p.head_dim))


def padded_value_dim(p: Problem) -> int:
    """Dims of values, and of results, as tiles have them."""
    return max(64, next_power_of_2(p.value_width))


def widest_of(p: Problem) -> int:
    """The larger of both, which decides what registers leave room for."""
    return max(padded_dim(p), padded_value_dim(p))


def is_wide(p: Problem) -> bool:
    """Whether values have another width than keys, or either has more dims than the other kernels' tiles."""
    return p.value_width != p.head_dim or p.widest > 256


def rows_of(p: Problem, longest: int) -> int:
    """The most rows that a sequence of up to so many queries has for a KV head."""
    return (max(1, min(p.max_seqlen_q, longest)) if p.ragged else 1) * (p.heads // p.kv_heads)


def shape_of(p: Problem, tile: int, tokens: int, rows: int, split: bool) -> Shape:
    """Of blocks of so many tokens; what is rarer is put in by the caller."""
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
        SCALE_FIRST=p.rescaled if p.query.itemsize == 1 else p.modified,  # products of fp8 weigh by one scale for all
        CLEAR=False,
        NATIVE_FP8=True,
        NORMALIZED=p.query == torch.bfloat16 and p.compute == torch.float16,
        BY_ROW=p.token_scales or (p.query == torch.bfloat16 and p.compute == torch.float16),
        FAR_CAP=p.far_cap,
        SCORE_MOD=of_this_dialect(p.score_mod),
        APART=p.new,
    )


def merged(p: Problem, launch: Launch, shares: int) -> Launch:
    """The launch with another behind it, by which the pieces are joined that up to so many programs have of a block."""
    shape, pipe = launch.shape._replace(MERGE=0), launch.pipe._replace(GROUPED=0)
    merge = merge_of(p, shape, launch.block_tokens, shares, pipe.SKIP, pipe.STRIDE)
    return launch._replace(shape=shape, pipe=pipe, merge=merge)


def new_launch(
    shape: Shape, pipe: Pipe, programs: int, least: int, shortest: int, longest: int, tokens: int, slots: int,
    resident: int = 1,
) -> Launch:  # fmt: skip
    """A launch of so many programs, `resident` of them on a multiprocessor."""
    registers = None if resident == 1 else 128
    config = Config(
        rows=shape.ROWS, tile=shape.TILE, stages=pipe.KEY_STAGES, warps=pipe.ROWS // 16, peel=False, resident=resident,
        registers=registers,
    )  # fmt: skip
    return Launch(shape, programs, least, slots, shortest, longest, tokens, config, "hopper", pipe)
