"""Plans of batch-invariant calls: consumers of 64 rows, tiles of one size, and keys that are cut at fixed places only.

Few rows of a decode go through products of 64 rows, as a prefill's rows do; memory leaves time for that.  Bounds, the
batch and the page table decide which program does what, and never change a result.
"""

import math
from typing import Annotated

from ....records.formats import cdiv, next_power_of_2
from ....records.plan import UNBOUNDED, Launch, Threshold
from ....records.problem import Problem
from ...portable.launches import affordable, cut_by_head, kv_heads_cut_alike, most_pieces
from ...portable.tuning import KEYS_PER_PIECE
from ..args import Pipe
from . import cost
from .shapes import is_even, loaders_of, new_launch, padded_dim, shape_of

ROWS_PER_CONSUMER = 64
MAX_TIME_WITHOUT_PIECES: Annotated[
    float,
    Threshold(
        "times an even share of all work",
        "as for other blocks, but pieces of a fixed size take longer, so blocks stay whole from two for each "
        "multiprocessor on",
        "b4 x 4096 whole 1.25x of the default mode, chunk of 128 at 16384 in pieces 1.43x",
    ),
] = 1.5
MAX_ROWS_BESIDE_LONGER: Annotated[
    int,
    Threshold(
        "rows of a sequence beside longer ones",
        "every sequence of few rows may leave states of its pieces in scratch",
        "batch-invariant 1 x 2048 + 63 decodes 1.07x of the default mode",
    ),
] = 16


def launch_of_one_block(p: Problem, shortest: int, longest: int) -> Launch:
    """Return the launch of one block for each sequence of shortest..longest query tokens, inclusive."""
    return _cut(p, 1, p.seqs, shortest, longest) or _whole(p, p.seqs, shortest, longest)


def launch_of_blocks(p: Problem, shortest: int) -> Launch:
    """Return the launch of whole blocks of two consumers, or of few blocks that are cut.

    Cut blocks have one consumer if scratch then has room for more programs.  shortest: fewest query tokens of a
    sequence.
    """
    blocks = _blocks(p, shortest, 2)
    whole = cost.whole_blocks_suffice(p, blocks, known=False, most=MAX_TIME_WITHOUT_PIECES)
    if not whole and p.max_seqlen_k > KEYS_PER_PIECE:
        cuts = [_cut(p, consumers, _blocks(p, shortest, consumers), shortest, UNBOUNDED) for consumers in (2, 1)]
        if found := [launch for launch in cuts if launch]:
            return max(found, key=lambda launch: launch.programs)
    return _whole(p, blocks, shortest, UNBOUNDED)


def _cut(p: Problem, consumers: int, blocks: int, shortest: int, longest: int) -> Launch | None:
    """Return a launch of even shares of all tiles; None: scratch limits shares to no more than the blocks."""
    queries = max(1, min(p.max_seqlen_q, longest)) if p.ragged else 1
    live = 2 * ROWS_PER_CONSUMER if consumers == 2 else min(ROWS_PER_CONSUMER, next_power_of_2(queries * _group(p)))
    pieces = most_pieces(p, KEYS_PER_PIECE, min(longest, p.max_seqlen_q))
    bytes_of_share = 4 * pieces * p.kv_heads * live * (padded_dim(p) + 2)
    shares = affordable(p.device.multiprocessors // p.kv_heads, blocks, bytes_of_share)
    if not shares:
        return None
    programs = shares * p.kv_heads
    pipe = _pipe(p, consumers, 1)
    step = kv_heads_cut_alike(p) * live
    pipe = pipe._replace(SHARES=True, PREFETCH=pipe.BOX <= 64, SKIP=step, STRIDE=step)
    return _launch(p, pipe, True, programs, shortest, longest, live, pieces * programs)


def _whole(p: Problem, blocks: int, shortest: int, longest: int) -> Launch:
    """Return a launch of whole blocks, with items from a counter."""
    pipe = _pipe(p, 2, loaders_of(p, _tile(p), p.modified))._replace(QUERY_BOX=p.query_box)
    return _launch(
        p, pipe, False, min(p.device.multiprocessors, blocks * p.kv_heads), shortest, longest, 2 * ROWS_PER_CONSUMER, 0
    )


def _launch(
    p: Problem, pipe: Pipe, split: bool, programs: int, shortest: int, longest: int, live: int, slots: int
) -> Launch:
    tokens = _tokens(p, pipe.CONSUMERS)
    shape = shape_of(p, _tile(p), tokens, pipe.CONSUMERS * ROWS_PER_CONSUMER, split)
    clear = p.ragged and p.only is None and longest == UNBOUNDED
    shape = shape._replace(PIECE=KEYS_PER_PIECE, LIVE=live, CLEAR=clear, BY_HEAD=split and cut_by_head(p))
    most = max(1, min(tokens, p.max_seqlen_q, longest)) if p.ragged else 1
    return new_launch(shape, pipe, programs, 1, shortest, longest, most, slots)


def _pipe(p: Problem, consumers: int, loaders: int) -> Pipe:
    """Return the pipe of whole blocks; `_cut` replaces its fields for shares.

    Rings of 256 keys of 128 dims, or of 512 keys of 64 dims, fit shared memory beside the bank of two consumers.
    """
    slots = (2 if padded_dim(p) == 128 else 4) * (128 // _tile(p))
    return Pipe(
        SHARES=False,
        CONSUMERS=consumers,
        KEY_STAGES=slots + (consumers == 1),
        VALUE_STAGES=slots,
        LOADERS=loaders,
        BOX=math.gcd(p.page_size, _tile(p) // loaders),
        ROWS_PER_PAGE=p.rows_per_page,
        SKIP=0,
        STRIDE=0,
        JOINED=16,
    )


def _tile(p: Problem) -> int:
    """Return the number of keys of a tile, which depends on the call's options alone, never on sizes."""
    return 64 if p.softcap else 128


def _group(p: Problem) -> int:
    return p.heads // p.kv_heads


def queries_fit_one_block(p: Problem) -> bool:
    """Whether a block of one consumer has all rows of any sequence."""
    return p.max_seqlen_q <= _tokens(p, 1)


def launches_of_both(p: Problem, shortest: int) -> tuple[Launch, ...]:
    """Return two launches: blocks of long queries, and one block for each sequence of few rows."""
    few = max(1, MAX_ROWS_BESIDE_LONGER // _group(p))
    return (launch_of_blocks(p, few + 1), launch_of_one_block(p, shortest, few))


def _tokens(p: Problem, consumers: int) -> int:
    """Return the query tokens of a block of `consumers` consumers."""
    return consumers * (ROWS_PER_CONSUMER // _group(p))


def _blocks(p: Problem, shortest: int, consumers: int) -> int:
    """Return the maximum number of blocks of sequences of `shortest` tokens or more, for a KV head."""
    tokens = _tokens(p, consumers)
    if is_even(p):
        return p.seqs * cdiv(p.max_seqlen_q, tokens)
    return p.tokens // tokens + min(p.seqs, p.tokens // max(1, shortest))
