"""Blocks of many rows, items from a counter: warpgroups, slots and programs of a launch, from a problem."""

import math

import torch

from ....records.layout import MANTISSA
from ....records.plan import UNBOUNDED, Launch
from ....records.problem import Problem
from ....records.rounding import cdiv, next_power_of_2
from ..args import Pipe
from .shapes import MAX_COLUMNS, dim_of, has_tanh, is_even, launch_of, loaders_of, merged, shape_of

MIN_TILES_PER_PIECE = 8  # tiles of a piece of a large block: fewer cost more to merge than they balance
# Pieces of each block from which on a launch of its own joins them, of 16 bits and of fp8, which joins otherwise.
MIN_PIECES_WORTH_A_MERGE, MIN_FP8_PIECES_WORTH_A_MERGE = 6, 4
PIECES_PER_PROGRAM = 4  # pieces of cut blocks for every program
# (terms of a polynomial of `CAPS`, least softcap): as coarse as the instruction for tanh, and as special functions.
# The smaller the cap, the higher a row's maximum has to be for it; with these 2.7, of scores.
CAP_AS_TANH, CAP_EXACTLY = (3, 20.0), (5, 23.0)
NONE, WIDEN, TRANSPOSE, WIDEN_VALUES = 0, 1, 2, 3  # convert.py
# (keys, values, raw): slots of the rings, as many as shared memory has room for, and tile, by conversion and head_dim
STAGES = {
    (NONE, 64): (4, 4, 0, 128),
    (NONE, 128): (3, 2, 0, 128),
    (NONE, 256): (2, 2, 0, 64),
    (WIDEN, 64): (4, 4, 4, 128),
    (WIDEN, 128): (2, 2, 2, 128),
    (WIDEN, 256): (2, 2, 1, 64),
    (WIDEN_VALUES, 64): (8, 4, 4, 128),
    (WIDEN_VALUES, 128): (8, 6, 4, 64),
    (TRANSPOSE, 64): (4, 4, 4, 128),
    (TRANSPOSE, 128): (3, 3, 2, 128),
}
# The same four numbers for three consumers of 128 dims, and for one consumer of four warpgroups.
STAGES_OF_THREE_CONSUMERS, STAGES_OF_FOUR_WARPGROUPS = (6, 5, 0, 64), (8, 8, 0, 64)
# Beside few rows: slots of each ring; and numbers of a tile, which few rows have as many of.
SLOTS_BESIDE_FEW_ROWS, TILE_ELEMENTS_BESIDE_FEW_ROWS = 3, 64 * 128
# Keys up to which, of uneven queries, no block is so much longer than others that it has to be cut.
MAX_KEYS_OF_EQUAL_BLOCKS = 4096
MIN_BLOCKS_PER_MULTIPROCESSOR = 4  # blocks for each multiprocessor from which on none is cut
# Part of the places in whole rounds of programs that one sequence's blocks take, from which on none is cut;
# `model.batches_up_to` has to meet both sides.
MIN_FRACTION_OF_PLACES = 0.8
# Keys of a sequence, or a window, up to which tiles of 64 are better; blocks of 16 bits are not cut then.
MAX_KEYS_OF_SMALL_TILES = 1024
# Blocks of four warpgroups for each multiprocessor from which on these are better than two.
MIN_LARGE_BLOCKS_PER_MULTIPROCESSOR = 1.5
MIN_FRACTION_OF_ROWS = 0.95  # part of a block's rows that a KV head's heads fill, from which on they stay together
# Query tokens of a sequence, on average, from which on heads need not stay together; beside decodes, of some sequence.
MIN_TOKENS_PER_PARTED_SEQ = 128
# Query tokens of a sequence from which on copies of a consumer's code pay, which are fetched once.
MIN_TOKENS_WORTH_CODE_COPIES = 4096
MIN_KEYS_WORTH_CODE_COPIES = 8192  # keys of a sequence, for the same, where no score is modified and all are seen


def conversion(p: Problem) -> int:
    """How fp8 keys and values become operands."""
    if p.cache.itemsize == 2:
        return NONE
    both = p.query == p.cache == torch.float8_e4m3fn
    if both and p.query_box and p.head_dim <= 128:
        return TRANSPOSE
    # the tensor cores keep 14 bits of a sum of fp8 products: what a log-sum-exp would show
    in_two = p.query == torch.bfloat16 and p.cache == torch.float8_e4m3fn and not p.lse and p.head_dim <= 128
    return WIDEN_VALUES if in_two else WIDEN


def many(p: Problem, shortest: int, mixed: bool) -> Launch:
    """Blocks of 128, 192 or 256 rows, items from a counter.

    mixed: from two, of sequences of many rows and of few, which no converter serves.
    """
    parts = 1 if mixed else parts_of(p, shortest > 1)
    p = p._replace(kv_heads=p.kv_heads * parts)
    pipe, tile = _block_pipe(p, conversion(p), mixed)
    launch = _blocks_of(p, pipe._replace(PARTS=parts), tile, shortest)
    return merged(p, launch, p.device.multiprocessors // p.kv_heads) if _pieces_are_worth_a_merge(p, launch) else launch


def _pieces_are_worth_a_merge(p: Problem, launch: Launch) -> bool:
    """Whether a launch of its own joins the pieces of blocks: where these are few, they have many.

    Rows of one consumer lie in scratch as in a block.
    """
    shape, pipe = launch.shape, launch.pipe
    if not shape.SPLIT or pipe.MIXED or pipe.CONSUMERS > 1:
        return False
    blocks = next_power_of_2(_likely_blocks(p, shape.BLOCK_Q)) * p.kv_heads
    pieces = MIN_PIECES_WORTH_A_MERGE if p.cache.itemsize == 2 else MIN_FP8_PIECES_WORTH_A_MERGE
    return pieces * blocks <= p.device.multiprocessors


def many_beside(p: Problem, shortest: int) -> Launch:
    """Blocks of 128 rows that leave room for few rows in all programs."""
    pipe, _ = _block_pipe(p, NONE, False)
    tile = TILE_ELEMENTS_BESIDE_FEW_ROWS // dim_of(p)
    pipe = pipe._replace(
        CONSUMERS=1,
        ROWS=128,
        KEY_STAGES=SLOTS_BESIDE_FEW_ROWS,
        VALUE_STAGES=SLOTS_BESIDE_FEW_ROWS,
        LOADERS=1,
        BOX=math.gcd(p.page_size, tile),
        TERMS=0,
        QUERY_SLOTS=1,
        SKIP=128,
        STRIDE=128,
    )
    launch = _blocks_of(p, pipe, tile, shortest)
    programs = p.device.multiprocessors  # also those that no block needs
    pipe = launch.pipe._replace(AHEAD=False, IN_TURN=True)
    return launch._replace(pipe=pipe, programs=programs, slots=2 * PIECES_PER_PROGRAM * programs)


def _blocks_of(p: Problem, pipe: Pipe, tile: int, shortest: int) -> Launch:
    """A launch of such blocks."""
    rows = pipe.CONSUMERS * pipe.ROWS
    tokens = pipe.CONSUMERS * (pipe.ROWS // (p.heads // p.kv_heads))
    blocks = _blocks(p, tokens)
    tiles = cdiv(p.keys_seen(tokens), tile)
    split = (
        tiles > MIN_TILES_PER_PIECE
        and not _wants_small_tiles(p)
        and (pipe.MIXED or not _blocks_suffice_uncut(p, tokens))
    )
    shape = shape_of(p, tile, tokens, rows, split)._replace(CLEAR=p.ragged and p.only is None)
    pipe = pipe._replace(
        AHEAD=_consumer_begins_next_item(p, pipe, split), IN_TURN=_warpgroups_take_turns(p, pipe, split)
    )
    programs = min(p.device.multiprocessors, blocks * p.kv_heads * (tiles if split else 1))
    slots = (
        2 * PIECES_PER_PROGRAM * programs
    )  # a block that is cut has less than twice as many pieces as it has piece sizes
    return launch_of(
        shape, pipe, programs, MIN_TILES_PER_PIECE, shortest, UNBOUNDED, min(tokens, p.max_seqlen_q), slots
    )


def parts_of(p: Problem, apart: bool) -> int:
    """Parts of a KV head's query heads that are blocks of their own; 1: heads stay together.

    Where these would leave many rows of blocks empty, if queries are so many that tokens fill them: parts of a power of
    two.  Few of them would read each key once for every part.
    apart: sequences of one token are no blocks, so that one of many may be all that is; there is one where the caller's
    bound leaves a token for each of the others.
    """
    group = p.heads // p.kv_heads
    parts = group // min(group & -group, 64)
    together = group <= 64 and 128 // group * group >= MIN_FRACTION_OF_ROWS * 128
    if together or parts * p.kv_heads > p.device.multiprocessors:
        return 1
    one_is_long = MIN_TOKENS_PER_PARTED_SEQ <= p.max_seqlen_q <= p.tokens - p.seqs + 1
    return parts if p.tokens >= MIN_TOKENS_PER_PARTED_SEQ * p.seqs or (apart and one_is_long) else 1


def _blocks(p: Problem, tokens: int) -> int:
    """The most of so many tokens that a batch has for a KV head."""
    return p.tokens // tokens + p.seqs


def _likely_blocks(p: Problem, tokens: int) -> int:
    """As many as it has where all sequences have as many queries."""
    return p.seqs * cdiv(p.max_seqlen_q, tokens) if is_even(p) else _blocks(p, tokens)


def _one_block_may_have_most_keys(p: Problem) -> bool:
    """Whether one block may have so many more keys than others that it has to be cut, however many they are."""
    return not is_even(p) and p.max_seqlen_k > MAX_KEYS_OF_EQUAL_BLOCKS


def _blocks_suffice_uncut(p: Problem, tokens: int) -> bool:
    """Whether no block needs to be cut: there are several for each program or, of one sequence, whole rounds."""
    multiprocessors = p.device.multiprocessors
    if p.seqs == 1:
        items = cdiv(p.max_seqlen_q, tokens) * p.kv_heads
        if items >= MIN_FRACTION_OF_PLACES * multiprocessors * cdiv(items, multiprocessors):
            return True
    if _one_block_may_have_most_keys(p):
        return False
    return _blocks(p, tokens) * p.kv_heads >= MIN_BLOCKS_PER_MULTIPROCESSOR * multiprocessors


def _consumers(p: Problem, convert: int, mixed: bool) -> tuple[int, int]:
    """(consumers of blocks, rows of each): two or four warpgroups that share one code, unless copies of it are better.

    For long queries the time to fetch these does not count, but over x-packed caches they gain nothing.  Without a
    polynomial an exact softcap's loop is best run by warpgroups apart.
    """
    # some are long, and an eighth of that on average: without a bound all tokens may be one sequence's
    is_long = (
        convert == NONE
        and not p.packed
        and p.max_seqlen_q >= MIN_TOKENS_WORTH_CODE_COPIES
        and 8 * p.tokens >= MIN_TOKENS_WORTH_CODE_COPIES * p.seqs
    )
    if mixed:  # of few rows one of two consumers has all; as columns of products, keys and dims are for two warpgroups
        return (1, 128) if block_columns(p) and dim_of(p) == 128 else (2, 64)
    if convert == NONE and _suits_four_warpgroups(p):
        return 1, 256
    if is_long and p.softcap > 0 and not has_tanh(p) and not _cap(p, convert):
        return 2, 64
    return (3, 64) if is_long and _suits_three_consumers(p) and not _wants_small_tiles(p) else (1, 128)


def _cap(p: Problem, convert: int) -> int:
    """Terms of the polynomial that caps scores of whole blocks; 0: special functions do, or nothing.

    Beside the products of heads beyond 128 dims special functions are done in time, and the finer polynomial takes
    registers that four warpgroups do not have.
    """
    if p.alibi or p.biased or not p.positive or p.far_cap or convert != NONE or dim_of(p) > 128:
        return 0
    terms, least = CAP_AS_TANH if has_tanh(p) else CAP_EXACTLY
    return terms if p.softcap >= least and (has_tanh(p) or dim_of(p) == 128) else 0


def _consumer_begins_next_item(p: Problem, pipe: Pipe, split: bool) -> bool:
    """Whether a consumer is an item ahead: one alone, with queries of the next item there and registers for its scores.

    What is kept and joined of blocks that are cut needs too many of these.
    """
    alone = pipe.CONSUMERS == 1 and pipe.CONVERT == NONE and not pipe.MIXED and not (p.packed and p.new)
    return alone and pipe.QUERY_BOX and not split and dim_of(p) <= 128


def _warpgroups_take_turns(p: Problem, pipe: Pipe, split: bool) -> bool:
    """Whether two warpgroups are told to send products in turn: where left alone some ran in step.

    Blocks that may be cut, for these are long, scores that are modified, new keys, rows that no group fills and, behind
    a context, log-sum-exps.  Others, and all beside a converter, only lose by it.
    """
    if pipe.ROWS != 128 or pipe.CONVERT != NONE:
        return False
    uneven = 64 % (p.heads // p.kv_heads) != 0
    return split or p.modified or p.new or uneven or (p.lse and p.window_left < 0 and _blocks_are_about_as_long(p))


def block_columns(p: Problem) -> int:
    """Of blocks of few rows in a list of their own; 0: they are rows."""
    return MAX_COLUMNS if p.heads // p.kv_heads <= MAX_COLUMNS else 0


def _blocks_are_about_as_long(p: Problem) -> bool:
    """Whether blocks are about equally long, behind a context or in a window: what counts is how many a program has."""
    return p.window_left >= 0 or p.max_seqlen_k > 2 * p.max_seqlen_q


def _takes_no_more_rounds_than_two(p: Problem, warpgroups: int, blocks: int, of_two: int) -> bool:
    """Whether a program has as many blocks of so many warpgroups as of two, by rows, or fewer."""
    rounds, rounds_of_two = (cdiv(n * p.kv_heads, p.device.multiprocessors) for n in (blocks, of_two))
    return warpgroups * rounds <= 2 * rounds_of_two


def _suits_three_consumers(p: Problem) -> bool:
    """Whether three consumers suit blocks of long queries: so many that none needs to be cut.

    Registers are few, and three loops have to stay close to the multiprocessor:
    no softcap by more than an instruction, bias or new keys, no heads but of 128 dims.
    """
    if dim_of(p) != 128 or (p.softcap > 0 and (not has_tanh(p) or _cap(p, NONE) > 0)):
        return False
    if p.biased or p.new or (p.modified and p.window_left >= 0):
        return False
    if (
        not p.modified and p.window_left < 0 and p.max_seqlen_k < MIN_KEYS_WORTH_CODE_COPIES
    ):  # an item ahead gains as much
        return False
    group = p.heads // p.kv_heads
    of_two, of_three = (_blocks(p, n * (64 // group)) for n in (2, 3))
    enough = (
        not _one_block_may_have_most_keys(p)
        and of_three * p.kv_heads >= MIN_BLOCKS_PER_MULTIPROCESSOR * p.device.multiprocessors
    )
    return enough and (not _blocks_are_about_as_long(p) or _takes_no_more_rounds_than_two(p, 3, of_three, of_two))


def _suits_four_warpgroups(p: Problem) -> bool:
    """Whether four warpgroups suit blocks: up to 64 dims have registers for it.

    They take a ninth less for a row, or more; but few blocks leave programs idle, and short queries rows of a block.
    """
    group = p.heads // p.kv_heads
    of_two, of_four = (_likely_blocks(p, n * (64 // group)) for n in (2, 4))
    if dim_of(p) > 64 or 8 * 2 * of_four > 9 * of_two:
        return False
    if _blocks_are_about_as_long(p):
        return _takes_no_more_rounds_than_two(p, 4, of_four, of_two)
    return of_four * p.kv_heads >= MIN_LARGE_BLOCKS_PER_MULTIPROCESSOR * p.device.multiprocessors


def _window_wants_small_tiles(p: Problem) -> bool:
    """Whether a window shows so few keys that smaller tiles, of which less is masked, are better for blocks."""
    return 0 <= p.window_left < MAX_KEYS_OF_SMALL_TILES


def _wants_small_tiles(p: Problem) -> bool:
    """Whether smaller tiles are better for blocks of 16 bits, and these short enough to be left whole."""
    if p.cache.itemsize != 2 or dim_of(p) > 128 or (p.softcap > 0 and not _cap(p, NONE)):
        return False
    return _window_wants_small_tiles(p) or (
        p.max_seqlen_k <= MAX_KEYS_OF_SMALL_TILES and dim_of(p) == 128 and not p.new
    )


def _block_rings(p: Problem, convert: int, consumers: int, rows: int, mixed: bool) -> tuple[int, int, int, int]:
    """As in STAGES; of a softcap a loop of half the code: see docs/hopper.md."""
    if consumers == 3:
        return STAGES_OF_THREE_CONSUMERS
    if rows == 256:
        return STAGES_OF_FOUR_WARPGROUPS
    keys, values, raw, tile = STAGES[convert, dim_of(p)]
    if convert in (WIDEN, WIDEN_VALUES) and tile == 128 and _window_wants_small_tiles(p):
        return min(2 * keys, 8), 2 * values, 2 * raw, 64  # a ring has no more barriers (`ring.DEPTH`)
    capped = p.softcap > 0 and (p.window_left >= 0 or _cap(p, convert) != CAP_AS_TANH[0])
    if convert == NONE and tile == 128 and not mixed and (capped or _wants_small_tiles(p)):
        return 2 * keys, 2 * values, raw, 64
    return keys, values, raw, tile


def _weighs_at_once(p: Problem, convert: int, tile: int) -> bool:
    """Whether blocks have registers for scores until it is known that these need not be weighed again.

    Beside a converter they are few.  Of two lists what is made again would be too much code as well.
    """
    return convert == NONE or (convert != TRANSPOSE and dim_of(p) <= 128 and (tile == 64 or dim_of(p) == 64))


def _block_pipe(p: Problem, convert: int, mixed: bool) -> tuple[Pipe, int]:
    """(pipe, tile) of blocks."""
    consumers, rows = _consumers(p, convert, mixed)
    keys, values, raw, tile = _block_rings(p, convert, consumers, rows, mixed)
    terms = 0 if mixed else _cap(p, convert)
    loaders = loaders_of(p, tile, p.modified and not (terms and tile == 128))
    boxed = p.query_box and convert in (NONE, TRANSPOSE)  # otherwise queries change their type on their way
    at_once = _weighs_at_once(p, convert, tile) and not mixed
    pipe = Pipe(
        SHARES=False,
        AT_ONCE=at_once,
        MIXED=mixed,
        COLUMNS=block_columns(p) if mixed else 0,
        CONSUMERS=consumers,
        ROWS=rows,
        KEY_STAGES=keys,
        VALUE_STAGES=values,
        CONVERT=convert,
        RAW_STAGES=raw,
        CONVERT_REGISTERS=88 if at_once else 56,  # what consumers of small tiles or heads leave
        FP8=MANTISSA.get(p.cache, 0),
        FP8_KEYS=convert in (TRANSPOSE, WIDEN_VALUES),
        FP8_PRODUCTS=convert == TRANSPOSE,
        COARSE=convert == TRANSPOSE and not p.lse,  # log-sum-exps are as exact as scores
        TANH=has_tanh(p),
        TERMS=terms,
        LOADERS=loaders,
        BOX=math.gcd(p.page_size, tile // loaders),
        PACKED=p.packed,
        ROWS_PER_PAGE=p.rows_per_page,
        QUERY_BOX=boxed,
        QUERY_SLOTS=2 if dim_of(p) <= 128 else 1,  # large heads leave no room
        SKIP=rows * consumers,
        STRIDE=rows * consumers,
    )
    return pipe, tile
