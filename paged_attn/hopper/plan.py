"""What the Hopper kernels cover, and their shapes."""

import math

import torch
import triton

from ..kernels.args import Shape
from ..plan import UNBOUNDED, Launch, Problem
from ..tuning import Config
from .args import Pipe

CONSUMERS = 2
LEAST = 8  # tiles of a piece: fewer cost more to merge than they balance
PIECES = 4  # at most so many pieces for every program, beyond one for each block


def covers(p: Problem) -> bool:
    """Whether boxes of the caches and queries can be cut, in 16-bit types; the rest is left to the portable kernels."""
    group = p.heads // p.kv_heads
    return (
        p.compute in (torch.float16, torch.bfloat16)
        and p.cache_itemsize == 2
        and p.rows_per_page > 0
        and p.page_size % 8 == 0
        and p.head_dim % 8 == 0
        and 32 < p.head_dim <= 256
        and p.query_box
        and 64 % group == 0
        and not p.new
        and not p.qq_bias
    )


def many(p: Problem, shortest: int) -> Launch:
    """Blocks of 128 rows."""
    group = p.heads // p.kv_heads
    dim = max(64, triton.next_power_of_2(p.head_dim))
    tile = 128 if dim <= 128 else 64
    block_q = CONSUMERS * (64 // group)
    blocks = p.tokens // block_q + p.seqs
    tiles = triton.cdiv(p.max_seqlen_k, tile)
    even = p.seqs == 1 or p.tokens >= p.seqs * p.max_seqlen_q
    split = tiles > LEAST and not (even and blocks * p.kv_heads >= 4 * p.device.multiprocessors)
    loaders = 2 if math.gcd(p.page_size, tile) < tile else 1
    stages = {64: (4, 4), 128: (3, 2), 256: (2, 2)}[dim]
    pipe = Pipe(
        CONSUMERS=CONSUMERS,
        KEY_STAGES=stages[0],
        VALUE_STAGES=stages[1],
        LOADERS=loaders,
        BOX=math.gcd(p.page_size, tile // loaders),
        ROWS_PER_PAGE=p.rows_per_page,
        OUT_BOX=p.out_box and dim <= 128,
    )
    shape = Shape(
        GROUP=group,
        KV_HEADS=p.kv_heads,
        HEAD_DIM=p.head_dim,
        DIM=dim,
        PAGE=p.page_size,
        BLOCK_Q=block_q,
        ROWS=64 * CONSUMERS,
        TILE=tile,
        CHUNK=pipe.BOX,
        STAGES=0,
        COMPUTE=None,
        PRECISION="ieee",
        ONE_BLOCK=False,
        SPLIT=split,
        SCAN=32,
        PEEL=False,
        SCALE_FIRST=p.modified,
        CLEAR=p.ragged and p.only is None,
        NATIVE_FP8=True,
    )
    config = Config(rows=shape.ROWS, tile=tile, stages=stages[0], warps=4, peel=False, resident=1, least=LEAST)
    programs = min(p.device.multiprocessors, max(1, blocks) * p.kv_heads * (tiles if split else 1))
    return Launch(shape, programs, LEAST, shortest, UNBOUNDED, min(block_q, p.max_seqlen_q), config, pipe)
