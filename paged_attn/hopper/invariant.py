"""Plans of batch-invariant calls: 64 rows of a consumer against tiles of one size, keys cut at fixed places only.

A decode's few rows take a product of 64 rows, as a prefill's do, which memory leaves time for.
"""

import math

import triton

from ..plan import UNBOUNDED, Launch, Problem, affordable, most_pieces
from ..tuning import PIECE
from .args import Pipe
from .shapes import dim_of, is_even, launch_of, shape_of

ENOUGH = 2  # blocks of a multiprocessor from which on none is cut
ROWS = 64  # of a consumer


def launches(p: Problem) -> tuple[Launch, ...]:
    """Sequences whose queries one consumer takes in one launch, the others in another, unless one cannot occur."""
    if p.only == "decode" or not p.ragged:
        return (_few(p, 1, 1),)
    tokens = ROWS // (p.heads // p.kv_heads)
    shortest = 0 if p.only is None else 2
    if p.max_seqlen_q <= tokens:
        return (_few(p, shortest, UNBOUNDED),)
    if is_even(p):
        return (_many(p, shortest),)
    return (_many(p, tokens + 1), _few(p, shortest, tokens))


def _few(p: Problem, shortest: int, longest: int) -> Launch:
    """A block for each sequence, and one consumer."""
    shares = _shares_of(p, 1, p.seqs, longest)
    return _shares(p, 1, shares, shortest, longest) if shares else _whole(p, shortest, longest)


def _many(p: Problem, shortest: int) -> Launch:
    """Blocks of two consumers, cut where there are few."""
    blocks = _blocks(p)
    few = blocks * p.kv_heads < ENOUGH * p.device.multiprocessors and p.max_seqlen_k > PIECE
    shares = _shares_of(p, 2, blocks, UNBOUNDED) if few else 0
    return _shares(p, 2, shares, shortest, UNBOUNDED) if shares else _whole(p, shortest, UNBOUNDED)


def _blocks(p: Problem) -> int:
    return p.tokens // (2 * (ROWS // (p.heads // p.kv_heads))) + p.seqs


def _shares_of(p: Problem, consumers: int, blocks: int, longest: int) -> int:
    """How many shares of the work have room for all pieces of a block; 0 where whole blocks fill the device as well."""
    slots, live = _kept(p, consumers, longest)
    return affordable(p.device.multiprocessors // p.kv_heads, blocks, 4 * slots * p.kv_heads * live * (dim_of(p) + 2))


def _kept(p: Problem, consumers: int, longest: int) -> tuple[int, int]:
    """(states that a block may leave, rows of each)."""
    queries = max(1, min(p.max_seqlen_q, longest)) if p.ragged else 1
    live = triton.next_power_of_2(queries * p.heads // p.kv_heads) if consumers == 1 else 2 * ROWS
    return most_pieces(p, PIECE, min(longest, p.max_seqlen_q)), live


def _whole(p: Problem, shortest: int, longest: int) -> Launch:
    """Items from a counter, none of them cut."""
    pipe = _pipe(p, 2)._replace(SHARES=False, PREFETCH=False, LOADERS=_loaders(p), QUERY_BOX=_boxed(p))
    pipe = pipe._replace(BOX=math.gcd(p.page_size, _tile(p) // pipe.LOADERS))
    programs = min(p.device.multiprocessors, _blocks(p) * p.kv_heads)
    return _launch(p, pipe, False, programs, shortest, longest, 2 * ROWS, 0)


def _shares(p: Problem, consumers: int, shares: int, shortest: int, longest: int) -> Launch:
    """Even shares of all tiles; of blocks that are cut every piece leaves a state."""
    slots, live = _kept(p, consumers, longest)
    programs = shares * p.kv_heads
    pipe = _pipe(p, consumers)._replace(SKIP=p.kv_heads * live, STRIDE=p.kv_heads * live)
    return _launch(p, pipe, True, programs, shortest, longest, live, slots * programs)


def _launch(
    p: Problem, pipe: Pipe, split: bool, programs: int, shortest: int, longest: int, live: int, slots: int
) -> Launch:
    rows = pipe.CONSUMERS * ROWS
    tokens = pipe.CONSUMERS * (ROWS // (p.heads // p.kv_heads))
    shape = shape_of(p, _tile(p), tokens, rows, split)
    clear = p.ragged and p.only is None and longest == UNBOUNDED
    shape = shape._replace(PIECE=PIECE, LIVE=live, CLEAR=clear)
    most = max(1, min(tokens, p.max_seqlen_q, longest)) if p.ragged else 1
    return launch_of(shape, pipe, programs, PIECE // shape.TILE, shortest, longest, most, slots)


def _pipe(p: Problem, consumers: int) -> Pipe:
    """Two consumers and what lies in the bank leave room for two slots of each ring."""
    tile, wide = _tile(p), dim_of(p) == 128
    slots = (2 if wide else 4) * (128 // tile)
    box = math.gcd(p.page_size, tile)
    return Pipe(
        SHARES=True,
        CONSUMERS=consumers,
        KEY_STAGES=slots + (1 if consumers == 1 else 0),
        VALUE_STAGES=slots,
        LOADERS=1,
        BOX=box,
        ROWS_PER_PAGE=p.rows_per_page,
        SKIP=0,
        STRIDE=0,
        JOINED=16,
        PREFETCH=box <= 64,
    )


def _tile(p: Problem) -> int:
    """Keys of a tile: of the call's options alone, not of its sizes."""
    return 64 if p.softcap else 128


def _loaders(p: Problem) -> int:
    return 2 if math.gcd(p.page_size, _tile(p)) < _tile(p) and not p.modified else 1


def _boxed(p: Problem) -> bool:
    return ROWS % (p.heads // p.kv_heads) == 0 and p.query_box
