"""Launches of the portable kernels, from shapes, dtypes, bounds and the device."""

import math
from typing import Annotated

import torch
import triton

from ...records.formats import INT4, cdiv, next_power_of_2
from ...records.plan import UNBOUNDED, Config, Launch, Merge, Threshold
from ...records.problem import Problem
from ..common.records import Shape
from ..common.score_mod import loads_by_score, of_this_dialect
from .tuning import (
    MAX_SCRATCH_BYTES,
    WIDE,
    decode_config,
    fit,
    invariant_config,
    most_rows,
    of_rows,
    padded_dims,
    pair_config,
    prefill_config,
    split_config,
)

MAX_ROWS_OF_ONE_BLOCK: Annotated[
    int,
    Threshold(
        "rows of a sequence and KV head",
        "a block with all queries of a sequence reads the keys once, at the memory's speed",
        "b16 x 8192 of one token 133 us, of 8 tokens (32 rows) 159",
    ),
] = 64
PIECES_AT_ONCE = 8  # pieces that one step of joining loads
MIN_JOIN_STEPS_WORTH_A_LAUNCH: Annotated[
    int,
    Threshold(
        "steps of joining",
        "each step waits for memory once, about 0.7 us; a merge launch takes 3 to 5",
        "joined by the last piece: b1 x 512 13.9 -> 10.5 us, b1 x 8192 21.3 -> 18",
    ),
] = 6
MAX_SEQS_OF_EQUAL_HEADS: Annotated[
    int,
    Threshold(
        "sequences, by powers of two",
        "with windows by head, counting the keys that heads see takes 2.5 us, and half of the multiprocessors read "
        "nearly as fast as all",
        "every other KV head of window 1024, 1 x 8192 14.9 -> 17.8 us, 4 x 8192 29.3 -> 32.5; of eight one full head, "
        "64 x 8192 261 -> 129",
    ),
] = 4
# Accumulator elements of a program of the merge launch: four for each thread of 8 warps.
ELEMENTS_PER_MERGE_PROGRAM = 1024
# A merge program joins all dims of rows of up to 256 dims, and 64 dims of wider rows.
MAX_DIMS_PER_MERGE_PROGRAM, DIMS_OF_WIDE_ROWS = 256, 64


def one_block(p: Problem, shortest: int, longest: int) -> tuple[Launch, ...]:
    """A launch of one block for each sequence, with a decode's rows; shortest, longest: query tokens, inclusive."""
    return (_few(p, _few_config(p), shortest, longest),)


def one_block_of_all_rows(p: Problem, shortest: int) -> tuple[Launch, ...]:
    """A launch of one block for each sequence, with enough rows for max_seqlen_q query tokens."""
    config, group = _few_config(p), p.heads // p.kv_heads
    rows = max(config.rows, next_power_of_2(p.max_seqlen_q * group))
    return (_few(p, config._replace(rows=rows), shortest, UNBOUNDED),)


def blocks(p: Problem, shortest: int) -> tuple[Launch, ...]:
    """A launch of blocks for all query tokens of each sequence."""
    return (_many(p, shortest),)


def blocks_and_few(p: Problem) -> tuple[Launch, ...]:
    """Two launches: blocks of long queries, and one block for each other sequence."""
    config = _few_config(p)
    tokens = _few_tokens(p, config)
    return (_many(p, tokens + 1), _few(p, config, 0, tokens))


def rows_fit_one_block(p: Problem) -> bool:
    """Whether one block can have all rows of any sequence.

    With batch_invariant, or with float32 on a GPU, the block must have no more rows than a decode's block.
    """
    config = _few_config(p)
    widens = not p.batch_invariant and (p.compute.itemsize == 2 or p.device.arch == "interpreter")
    most = MAX_ROWS_OF_ONE_BLOCK if widens else config.rows
    if p.latent and p.widest > WIDE:
        most = min(most, most_rows(p))
    return p.max_seqlen_q <= max(_few_tokens(p, config), most // (p.heads // p.kv_heads))


def few_apart(p: Problem, shortest: int) -> Launch:
    """The portable launch of sequences with few queries, beside another dialect's launch of the others."""
    config = _few_config(p)
    return _few(p, config, shortest, _few_tokens(p, config))


def drafts_apart(p: Problem, longest: int, shortest: int = 2) -> Launch:
    """The portable launch of sequences with shortest..longest query tokens, inclusive, beside another dialect's launch.

    With more than 64 heads on a KV head, a block has one query token.
    """
    return _many(p, shortest, longest)


def _few_config(p: Problem) -> Config:
    """Config of sequences with few queries."""
    return invariant_config(p)._replace(enough=math.inf) if p.batch_invariant else decode_config(p)


def _few_tokens(p: Problem, config: Config) -> int:
    """Maximum query tokens of a sequence of few queries: up to 16 rows, because every block may leave states."""
    return max(1, min(config.rows, 16) * p.kv_heads // p.heads)


def _few(p: Problem, config: Config, shortest: int, longest: int) -> Launch:
    """A launch of one block for each sequence."""
    return _launch(p, config, p.seqs, True, shortest, longest)


def _many(p: Problem, shortest: int, longest: int = UNBOUNDED) -> Launch:
    """A launch of blocks for all query tokens of each sequence."""
    config = invariant_config(p) if p.batch_invariant else prefill_config(p)
    block_q = max(1, config.rows * p.kv_heads // p.heads)
    return _launch(p, config, p.tokens // block_q + p.seqs, False, shortest, longest)


def _holds_tiles_ahead(p: Problem, rows: int) -> bool:
    """Whether Triton can pipeline the loop over keys; with wgmma, it cannot if a score_mod's loads depend on scores."""
    return p.score_mod is None or p.device.arch != "sm90" or rows < 64 or not loads_by_score(p.score_mod)


def _launch(p: Problem, config: Config, blocks: int, one_block: bool, shortest: int, longest: int) -> Launch:
    group = p.heads // p.kv_heads
    rows = max(config.rows, next_power_of_2(group))
    block_q = rows // group
    config = of_rows(p, config, rows)
    config = config if p.batch_invariant else pair_config(p, config)
    config = fit(p, config._replace(pairs=config.pairs or p.cache == INT4))  # int4 is read in no other way
    tokens = max(1, min(block_q, p.max_seqlen_q, longest)) if p.ragged else 1
    dim, value_padded, rest = padded_dims(p)
    tiles = cdiv(p.keys_seen(block_q + config.tile), config.tile)
    shares, live, slots = _shares(p, config, blocks, tiles), rows, 2
    if config.piece is not None:
        live = min(rows, next_power_of_2(tokens * group))
        slots = most_pieces(p, config.piece, min(longest, p.max_seqlen_q))
        shares = affordable(shares, blocks, 4 * slots * p.kv_heads * live * (value_padded + 2))
    elif shares:
        config = split_config(p, config)
    shape = Shape(
        GROUP=group,
        KV_HEADS=p.kv_heads,
        HEAD_DIM=p.head_dim,
        DIM=dim,
        VALUE_DIM=p.value_width,
        VALUE_PADDED=value_padded,
        PAGE=p.page_size,
        BLOCK_Q=block_q,
        ROWS=rows,
        LIVE=live,
        TILE=config.tile,
        CHUNK=math.gcd(config.tile, p.page_size),
        STAGES=config.stages if _holds_tiles_ahead(p, rows) else 1,
        COMPUTE=_TRITON_DTYPES[p.compute],
        # tf32x3: three tensor-core products of split operands are about as exact as one float32 product
        PRECISION="tf32x3" if p.device.capability >= 80 else "ieee",
        ONE_BLOCK=one_block,
        SPLIT=shares > 0,
        PIECE=config.piece,
        MERGE=_merge_rows(p, config, shares, slots if config.piece else shares // max(1, blocks) + 2, tokens * group),
        SCAN=128 if p.seqs <= 128 else 1024,
        ONE_SCAN=False,  # keeping all lengths would spill registers
        PEEL=config.peel and (p.packed or p.window_left < 0) and not p.gap,
        SCALE_FIRST=p.rescaled,
        CLEAR=p.ragged and p.only is None and longest == UNBOUNDED,
        NATIVE_FP8=p.device.converts_fp8,
        NORMALIZED=p.query == torch.bfloat16 and p.compute == torch.float16,
        FAR_CAP=p.far_cap,
        SCORE_MOD=of_this_dialect(p.score_mod),
        **(p.stripes._asdict() if p.stripes else {}),
        BY_HEAD=shares > 0 and cut_by_head(p),
        REST=rest,
    )
    skip, merge = kv_heads_cut_alike(p) * live, None
    if shares and not shape.MERGE:
        # a share has two slots, so later states are two slots apart; pieces of a fixed size lie side by side
        merge = merge_of(p, shape, tokens, shares, skip, 2 * skip if config.piece is None else skip)
    return Launch(
        shape,
        shares or blocks,
        _least_tiles(config, tiles),
        slots,
        shortest,
        longest,
        tokens,
        config,
        "portable",
        merge=merge,
    )


def merge_of(p: Problem, shape: Shape, tokens: int, shares: int, skip: int, stride: int) -> Merge:
    """Return the merge launch of blocks of up to `tokens` tokens; each of `shares` shares may have a piece of a block.

    Programs divide the rows.  If rows are too few, lanes of a program divide the pieces, too, but not pieces of a fixed
    size, which are folded in order.  Programs also divide the dims of wide rows, because one program with all dims
    could load only few pieces at a time.  skip, stride: scratch rows between states, as in `merge.join`.
    """
    blocks = p.seqs if shape.ONE_BLOCK else p.tokens // shape.BLOCK_Q + p.seqs
    # numbers are rounded up to powers of two, because `prepare` tries only some numbers (Hopper's `cost.seqs_tried`)
    live = next_power_of_2(tokens * shape.GROUP)
    dims = shape.VALUE_PADDED if shape.VALUE_PADDED <= MAX_DIMS_PER_MERGE_PROGRAM else DIMS_OF_WIDE_ROWS
    at_once = max(1, ELEMENTS_PER_MERGE_PROGRAM // dims)
    pieces = shares
    if p.seqs == 1:
        pieces = min(shares, cdiv(shares, next_power_of_2(p.tokens // shape.BLOCK_Q + 1)) + 1)
    lanes = min(at_once, next_power_of_2(cdiv(pieces, PIECES_AT_ONCE))) if shape.PIECE is None else 1
    most = 2 * p.device.multiprocessors // (next_power_of_2(blocks) * shape.KV_HEADS)  # programs of a block
    while lanes > 1 and cdiv(live, at_once // lanes) * (shape.VALUE_PADDED // dims) > most:
        lanes //= 2
    rows = min(at_once // lanes, live)
    return Merge(blocks, rows, dims, lanes, skip, stride, p.device.dependent)


def cut_by_head(p: Problem) -> bool:
    """Whether KV heads get numbers of shares in proportion to the keys that their heads see, if there are shares."""
    return p.head_windows and p.seqs > MAX_SEQS_OF_EQUAL_HEADS


def kv_heads_cut_alike(p: Problem) -> int:
    """Number of KV heads that are cut alike, whose states lie side by side (`schedule.slot_of`)."""
    return 1 if cut_by_head(p) else p.kv_heads


def _shares(p: Problem, config: Config, blocks: int, tiles: int) -> int:
    """Shares of a KV head that fill the device evenly, whatever the lengths; 0: one program for each block."""
    programs = blocks * p.kv_heads
    if tiles <= config.least or programs >= config.enough * p.device.multiprocessors:
        return 0
    if tiles * config.tile <= config.whole and 4 * programs > p.device.multiprocessors:
        return 0
    fill = max(1, config.resident * p.device.multiprocessors // p.kv_heads)
    return min(fill, cdiv(blocks * tiles, _least_tiles(config, tiles)))


def _least_tiles(config: Config, tiles: int) -> int:
    """The fewest tiles of a share, for blocks of up to `tiles` tiles."""
    return max(1, min(config.least, tiles // config.pieces)) if config.pieces else config.least


def most_pieces(p: Problem, piece: int, query_len: int) -> int:
    """Maximum number of pieces of `piece` keys that `query_len` queries of a sequence can see."""
    most = max(1, cdiv(p.max_seqlen_k, piece))
    return most if p.window_left < 0 or p.prefix or p.spans else min(most, cdiv(query_len + p.window_left, piece) + 1)


def affordable(shares: int, blocks: int, share_bytes: int) -> int:
    """Return `shares` if their states fit MAX_SCRATCH_BYTES, else as many as fit, or 0 if no more than `blocks` fit."""
    most = MAX_SCRATCH_BYTES // share_bytes
    return shares if shares <= most else most if most > blocks else 0


def _merge_rows(p: Problem, config: Config, shares: int, pieces: int, live: int) -> int:
    """Rows that a block's last program joins at a time; 0: a merge launch joins the pieces, or no block is cut."""
    # accumulator elements for which there are registers, for each of the pieces that are loaded together
    elements = 1024 if config.registers is None else 512
    at_once = min(config.rows, max(1, elements // next_power_of_2(p.value_width)))
    steps = cdiv(live, at_once) * cdiv(pieces, PIECES_AT_ONCE)
    large = config.piece is not None and p.value_width > 128  # 64 rows of more than 128 dims leave no registers
    if shares == 0 or config.rows > MAX_ROWS_OF_ONE_BLOCK or steps > MIN_JOIN_STEPS_WORTH_A_LAUNCH or large:
        return 0
    return at_once


_TRITON_DTYPES = {
    torch.float16: triton.language.float16,
    torch.bfloat16: triton.language.bfloat16,
    torch.float32: triton.language.float32,
}
