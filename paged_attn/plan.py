"""Which kernels a call launches, and how: from shapes, dtypes and device only.

Pure Python and cached by key: every layer of a model reuses one plan, nothing is read back from the device,
and a plan made while a CUDA graph is captured is right for every replay.
"""

import functools
import math
from typing import NamedTuple

import torch
import triton

from .backend import Device
from .kernels.args import Shape
from .tuning import Config, decode_config, fit, prefill_config, split_config


class Problem(NamedTuple):
    """What decides a plan."""

    tokens: int
    seqs: int
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    max_seqlen_q: int  # upper bounds, not readings
    max_seqlen_k: int
    window_left: int  # -1: none
    ragged: bool  # cu_seqlens_q given
    modified: bool  # scores meet more than a positive scale and a mask
    qq_bias: bool
    only: str | None
    compute: torch.dtype
    cache_itemsize: int
    packed: bool  # x-packed
    boxable: bool  # the copy engine can read the caches
    device: Device


class Launch(NamedTuple):
    """One launch of the attention kernel, and of the merge if shape.SPLIT but not shape.MERGE."""

    shape: Shape
    programs: int  # per KV head: blocks, or shares of all blocks' work
    least: int  # tiles of a share
    shortest: int  # query lengths served
    longest: int
    block_tokens: int  # the most query tokens that a block can have
    config: Config

    @property
    def grid(self) -> tuple[int]:
        return (self.programs * self.shape.KV_HEADS,)


class Plan(NamedTuple):
    launches: tuple[Launch, ...]

    def __str__(self) -> str:
        return "\n".join(
            f"queries {x.shortest}..{x.longest}: {x.programs} {'shares' if x.shape.SPLIT else 'blocks'} "
            f"x {x.shape.KV_HEADS} heads, {x.shape.BLOCK_Q} tokens ({x.shape.ROWS} rows) x {x.shape.TILE} keys, "
            f"{x.config.warps} warps, {x.shape.STAGES} stages"
            for x in self.launches
        )


UNBOUNDED = 2**31 - 1
# Up to this many rows a block of a whole sequence's queries reads the keys once, at the memory's speed.
FEW_ROWS = 64
# A step of joining, 8 pieces of some rows, waits for memory once, about 0.7 us; a launch of its own costs 3-5 us.
PIECES_AT_ONCE = 8
JOIN_STEPS = 6


@functools.lru_cache(maxsize=4096)
def plan(problem: Problem) -> Plan:
    """Sequences of few queries (decode, speculation) in one launch, the others in another, unless one cannot occur."""
    p = problem
    group = p.heads // p.kv_heads
    few = decode_config(p)
    few_tokens = max(1, few.rows // group)
    if p.only == "prefill" and not p.ragged:
        return Plan(())
    if p.only == "decode" or not p.ragged:
        return Plan((_few(p, few, 1, 1),))
    # float32 operands leave no registers for more rows
    few_rows = FEW_ROWS if p.compute.itemsize == 2 or p.device.arch == "interpreter" else few.rows
    if p.max_seqlen_q <= max(few_tokens, few_rows // group):
        rows = max(few.rows, triton.next_power_of_2(p.max_seqlen_q * group))
        return Plan((_few(p, few._replace(rows=rows), 0 if p.only is None else 2, UNBOUNDED),))
    if p.only == "prefill":
        return Plan((_many(p, 2),))
    if p.seqs == 1 or p.tokens >= p.seqs * p.max_seqlen_q:
        return Plan((_many(p, 0),))
    return Plan((_many(p, few_tokens + 1), _few(p, few, 0, few_tokens)))


def _few(p: Problem, config: Config, shortest: int, longest: int) -> Launch:
    """One block per sequence."""
    return _launch(p, config, p.seqs, True, shortest, longest)


def _many(p: Problem, shortest: int) -> Launch:
    """As many blocks per sequence as its queries fill."""
    config = prefill_config(p)
    block_q = max(1, config.rows * p.kv_heads // p.heads)
    return _launch(p, config, p.tokens // block_q + p.seqs, False, shortest, UNBOUNDED)


def _launch(p: Problem, config: Config, blocks: int, one_block: bool, shortest: int, longest: int) -> Launch:
    group = p.heads // p.kv_heads
    rows = max(config.rows, triton.next_power_of_2(group))
    block_q = rows // group
    config = fit(p, config._replace(rows=rows))
    shares = _shares(p, config, blocks, block_q)
    if shares:
        config = split_config(p, config)
    tokens = max(1, min(block_q, p.max_seqlen_q)) if p.ragged else 1
    shape = Shape(
        GROUP=group,
        KV_HEADS=p.kv_heads,
        HEAD_DIM=p.head_dim,
        DIM=max(16, triton.next_power_of_2(p.head_dim)),
        PAGE=p.page_size,
        BLOCK_Q=block_q,
        ROWS=rows,
        TILE=config.tile,
        CHUNK=math.gcd(config.tile, p.page_size),
        STAGES=config.stages,
        COMPUTE=_TRITON_DTYPES[p.compute],
        # three tensor-core products of split operands come within rounding of float32's own
        PRECISION="tf32x3" if p.device.capability >= 80 else "ieee",
        ONE_BLOCK=one_block,
        SPLIT=shares > 0,
        MERGE=_merge_rows(p, shares, blocks, rows, tokens * group),
        SCAN=128 if p.seqs <= 128 else 1024,
        PEEL=config.peel and (p.packed or p.window_left < 0),
        SCALE_FIRST=p.modified,
        CLEAR=p.ragged and p.only is None and longest == UNBOUNDED,
        NATIVE_FP8=p.device.capability >= 89,
    )
    return Launch(shape, shares or blocks, config.least, shortest, longest, tokens, config)


def _shares(p: Problem, config: Config, blocks: int, block_q: int) -> int:
    """Shares that fill the device evenly, whatever the lengths are; 0 where a program per block does."""
    keys = p.max_seqlen_k
    if p.window_left >= 0:
        keys = min(keys, p.window_left + block_q + config.tile)
    tiles = triton.cdiv(keys, config.tile)
    if tiles <= config.least or blocks * p.kv_heads >= config.enough * p.device.multiprocessors:
        return 0
    fill = max(1, config.resident * p.device.multiprocessors // p.kv_heads)
    return min(fill, triton.cdiv(blocks * tiles, config.least))


def _merge_rows(p: Problem, shares: int, blocks: int, rows: int, live: int) -> int:
    """Rows that the last piece's program joins at a time; 0 where it would take so long that others should help."""
    at_once = min(rows, max(1, 1024 // triton.next_power_of_2(p.head_dim)))
    steps = triton.cdiv(live, at_once) * triton.cdiv(shares // max(1, blocks) + 2, PIECES_AT_ONCE)
    return at_once if shares > 0 and rows <= FEW_ROWS and steps <= JOIN_STEPS else 0


_TRITON_DTYPES = {
    torch.float16: triton.language.float16,
    torch.bfloat16: triton.language.bfloat16,
    torch.float32: triton.language.float32,
}
