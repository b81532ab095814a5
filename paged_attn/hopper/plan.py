"""What the Hopper kernels cover, and their shapes."""

import math
from collections.abc import Callable

import torch
import triton

from ..layout import MANTISSA
from ..plan import UNBOUNDED, Launch, Problem
from ..scratch import Need
from . import invariant
from .args import Pipe
from .even_shares import few, has_little
from .shapes import (
    COLUMNS,
    FP8_COLUMNS,
    ONE_WARP,
    PACKED_COLUMNS,
    ROW_VALUES,
    dim_of,
    has_tanh,
    is_boxed,
    is_even,
    launch_of,
    loaders_of,
    rows_of,
    shape_of,
)  # fmt: skip

LEAST = 8  # tiles of a piece of a large block: fewer cost more to merge than they balance
TAKEN = 4  # counters before those of pieces: items taken, programs done
PIECES = 4  # of blocks that are cut, so many for every program


# What must hold, and what a call asks for where it does not; types of 32 bits are told once.
CONDITIONS: tuple[tuple[Callable[[Problem], bool], str], ...] = (
    (
        lambda p: p.compute in (torch.float16, torch.bfloat16) and p.query.itemsize <= 2 and p.cache.itemsize <= 2,
        "float32",
    ),
    (lambda p: p.query.itemsize != 1 or p.cache.itemsize == 1, "fp8 queries over a cache that is not"),
    # words of four dims make 128 rows of a product
    (
        lambda p: p.cache.itemsize != 1 or p.head_dim > 64 or not _few_rows(p),
        "an fp8 cache of head_dim up to 64, few queries",
    ),
    (
        lambda p: not p.packed or p.cache.itemsize > 2 or p.batch_invariant or _takes_packed(p),
        "more than few rows or new keys over an x-packed cache, but by prefills over 16 bits in pages of 16 n tokens",
    ),
    (lambda p: not p.packed or not p.batch_invariant, "batch_invariant over an x-packed cache"),
    (
        lambda p: p.rows_per_page > 0 or p.cache.itemsize > 2 or (p.packed and not _takes_packed(p)),
        "a cache not in steps of 16 bytes",
    ),
    (lambda p: p.page_size % 8 == 0, "pages of other than a multiple of 8 tokens"),
    (lambda p: p.head_dim % 8 == 0 and 32 < p.head_dim <= 256, "a head_dim other than 40..256 in steps of 8"),
    (lambda p: p.heads // p.kv_heads <= 64, "more than 64 heads on a KV head"),
    (lambda p: p.kv_heads <= p.device.multiprocessors, "more KV heads than multiprocessors"),
    (
        lambda p: not p.new or p.new_box,
        "keys outside the cache of another type than those in it, or not in steps of 16 bytes",
    ),
    # of a piece's results and those before it, larger heads would leave no room for keys
    (
        lambda p: not p.batch_invariant or (p.cache.itemsize == 2 and p.head_dim <= 128),
        "batch_invariant over an fp8 cache, or of head_dim above 128",
    ),
)


def uncovered(p: Problem) -> list[str]:
    """What a call asks for that these kernels do not have."""
    return [asked for holds, asked in CONDITIONS if not holds(p)]


def covers(p: Problem) -> bool:
    """Whether these kernels take a call; the rest is left to the portable ones."""
    return not uncovered(p)


def launches(p: Problem) -> tuple[Launch, ...]:
    """Even shares where all sequences have few queries, blocks from a counter where some have many.

    Where many have few beside these, it depends on what the batch waits for: `_are_long`.
    """
    if p.batch_invariant:
        return invariant.launches(p)
    if p.only == "decode" or not p.ragged:
        return (few(p, 1, 1),)
    shortest = 0 if p.only is None else 2
    if _few_rows(p):
        return (few(p, shortest, UNBOUNDED),)
    if is_even(p) or rows_of(p, UNBOUNDED) <= 64 or _are_long(p):
        return (many(p, shortest, False),)
    if _conversion(p) not in (WIDEN, WIDEN_VALUES) and not p.packed:
        return (many(p, shortest, True),)
    # a converter is slower than memory, and few rows do without one; x-packed, these are columns of other boxes
    longest = max(1, COLUMNS // (p.heads // p.kv_heads))
    apart = (few(p, shortest, longest),) if shortest <= longest else ()
    return (many(p, max(shortest, longest + 1), False), *apart)


def _few_rows(p: Problem) -> bool:
    """Whether even shares suit a batch: a block is all that a sequence has, or there is little to do."""
    if p.only == "decode" or not p.ragged:
        return True
    rows = rows_of(p, UNBOUNDED)
    if p.packed:
        return _is_packed_for_few(p) and not p.new
    if p.cache.itemsize == 1:
        return rows <= FP8_COLUMNS or (rows <= 64 and _suit_columns(p))
    if rows <= 64:
        return True
    if not is_even(p) or p.seqs > ONE_WARP:
        return False
    return rows <= MOST_ROWS and has_little(p)


def _suit_columns(p: Problem) -> bool:
    """Whether two blocks of columns suit a sequence of up to 64 rows, or there are no other blocks for it.

    One block of rows converts or reads keys once for all of them; but few blocks leave programs idle, or are cut.
    """
    is_fp8 = p.cache.itemsize == 1
    if p.packed and is_fp8:
        return True
    if p.head_dim <= 64 and is_fp8:
        return False
    if p.packed and p.heads // p.kv_heads > PACKED_COLUMNS:
        return False
    if p.packed and not _is_packed_for_blocks(p):
        return True
    blocks = triton.next_power_of_2(p.seqs) * p.kv_heads  # as in `_are_long`
    if _conversion(p) == TRANSPOSE and blocks * p.max_seqlen_k >= FP8_SCORES:  # which waits for nothing
        return False
    most = 4 if _conversion(p) == TRANSPOSE or p.head_dim > 128 else 2
    return most * blocks <= p.device.multiprocessors


def _are_long(p: Problem) -> bool:
    """Whether sequences of uneven queries are all served as long ones are, in one list.

    Most are, and products take longer than memory; or there is little to read; or few rows have no kernel of their own.
    As many keys as a sequence has queries are sure to meet these: of a context that is longer the host knows nothing.
    """
    keys = p.max_seqlen_k if p.window_left < 0 else min(p.max_seqlen_k, p.window_left + p.max_seqlen_q)
    if p.tokens * min(p.max_seqlen_q, keys) >= MOSTLY_LONG * p.seqs * keys:
        return True
    # by powers of two, so that for `prepare` as many sequences as it tries stand for those between
    seqs = triton.next_power_of_2(p.seqs)
    if 2 * seqs * keys * p.kv_heads * p.head_dim * p.cache.itemsize < LITTLE_TO_READ:
        return True
    if p.packed:
        return p.new
    convert = _conversion(p)
    if convert == NONE:
        return dim_of(p) > 128 or not _block_columns(p, convert)
    return dim_of(p) == 64 and convert != TRANSPOSE


def _is_packed_for_few(p: Problem) -> bool:
    """Whether all rows would be columns of products with tiles of an x-packed cache, which take registers."""
    rows = rows_of(p, 1 if p.only == "decode" else UNBOUNDED)
    if dim_of(p) > 128:
        return rows <= COLUMNS
    return rows <= PACKED_COLUMNS or (rows <= 64 and _suit_columns(p))


def need_of(launch: Launch) -> Need:
    """Scratch of a launch: its size depends on the device, for fixed pieces on bounds, too, and not on lengths."""
    shape, pipe = launch.shape, launch.pipe
    slots = launch.slots if shape.SPLIT else 0
    blocks = launch.programs if pipe.SHARES else slots  # that may be cut at a time
    return Need(slots * shape.LIVE * (shape.DIM + 2), 0, TAKEN + blocks * pipe.CONSUMERS)


def _takes_packed(p: Problem) -> bool:
    """Whether an x-packed cache is read here."""
    return not p.batch_invariant and ((_is_packed_for_few(p) and not p.new) or _is_packed_for_blocks(p))


def _is_packed_for_blocks(p: Problem) -> bool:
    """Whether tiles of an x-packed cache can be multiplied as they are."""
    return p.cache.itemsize == 2 and p.page_size % ROW_VALUES == 0 and p.ragged and p.only != "decode"


def many(p: Problem, shortest: int, mixed: bool) -> Launch:
    """Blocks of 128, 192 or 256 rows, items from a counter; mixed: from two, of sequences of many rows and of few."""
    pipe, tile = _block_pipe(p, _conversion(p), mixed)
    rows = pipe.CONSUMERS * pipe.ROWS
    tokens = pipe.CONSUMERS * (pipe.ROWS // (p.heads // p.kv_heads))
    blocks = _blocks(p, tokens)
    tiles = triton.cdiv(p.max_seqlen_k, tile)
    split = tiles > LEAST and not _is_short(p) and (mixed or not _are_enough(p, tokens))
    shape = shape_of(p, tile, tokens, rows, split)._replace(CLEAR=p.ragged and p.only is None)
    pipe = pipe._replace(AHEAD=_is_ahead(p, pipe, split))
    programs = min(p.device.multiprocessors, blocks * p.kv_heads * (tiles if split else 1))
    slots = 2 * PIECES * programs  # a block that is cut has less than twice as many pieces as it has piece sizes
    return launch_of(shape, pipe, programs, LEAST, shortest, UNBOUNDED, min(tokens, p.max_seqlen_q), slots)


def _blocks(p: Problem, tokens: int) -> int:
    """The most of so many tokens that a batch has for a KV head."""
    return p.tokens // tokens + p.seqs


def _likely_blocks(p: Problem, tokens: int) -> int:
    """As many as it has where all sequences have as many queries."""
    return p.seqs * triton.cdiv(p.max_seqlen_q, tokens) if is_even(p) else _blocks(p, tokens)


def _may_be_longer(p: Problem) -> bool:
    """Whether one block may have so many more keys than others that it has to be cut, however many they are."""
    return not is_even(p) and p.max_seqlen_k > UNEVEN


def _are_enough(p: Problem, tokens: int) -> bool:
    """Whether no block needs to be cut: there are several for each program or, of one sequence, whole rounds."""
    multiprocessors = p.device.multiprocessors
    if p.seqs == 1:
        items = triton.cdiv(p.max_seqlen_q, tokens) * p.kv_heads
        if items >= FULL * multiprocessors * triton.cdiv(items, multiprocessors):
            return True
    if _may_be_longer(p):
        return False
    return _blocks(p, tokens) * p.kv_heads >= UNCUT * multiprocessors


def _consumers(p: Problem, convert: int, mixed: bool) -> tuple[int, int]:
    """(consumers of blocks, rows of each): two or four warpgroups that share one code, unless copies of it are better.

    For long queries the time to fetch these does not count, but over x-packed caches they gain nothing.  Without a
    polynomial an exact softcap's loop is best run by warpgroups apart.
    """
    # some are long, and an eighth of that on average: without a bound all tokens may be one sequence's
    is_long = convert == NONE and not p.packed and p.max_seqlen_q >= LONG and 8 * p.tokens >= LONG * p.seqs
    if mixed:  # of few rows one of two consumers has all; as columns of products, keys and dims are for two warpgroups
        return (1, 128) if _block_columns(p, convert) and dim_of(p) == 128 else (2, 64)
    if convert == NONE and _is_for_four(p):
        return 1, 256
    if is_long and p.softcap > 0 and not has_tanh(p) and not _cap(p, convert):
        return 2, 64
    return (3, 64) if is_long and _is_for_three(p) else (1, 128)


def _cap(p: Problem, convert: int) -> int:
    """Terms of the polynomial that caps scores of whole blocks; 0: special functions do, or nothing.

    Beside the products of heads beyond 128 dims special functions are done in time, and the finer polynomial takes
    registers that four warpgroups do not have.
    """
    if p.alibi or p.qq_bias or not p.positive or convert != NONE or dim_of(p) > 128:
        return 0
    terms, least = CAP_AS_TANH if has_tanh(p) else CAP_EXACTLY
    return terms if p.softcap >= least and (has_tanh(p) or dim_of(p) == 128) else 0


def _is_ahead(p: Problem, pipe: Pipe, split: bool) -> bool:
    """Whether a consumer is an item ahead: one alone, with queries of the next item there and registers for its scores.

    What is kept and joined of blocks that are cut needs too many of these.
    """
    alone = pipe.CONSUMERS == 1 and pipe.CONVERT == NONE and not pipe.MIXED and not (p.packed and p.new)
    return alone and pipe.QUERY_BOX and not split and dim_of(p) <= 128


def _block_columns(p: Problem, convert: int) -> int:
    """Of blocks of few rows in mixed batches; 0: they are rows."""
    return COLUMNS if p.heads // p.kv_heads <= COLUMNS and convert == NONE else 0


def _are_alike(p: Problem) -> bool:
    """Whether blocks are about equally long, behind a context or in a window: what counts is how many a program has."""
    return p.window_left >= 0 or p.max_seqlen_k > 2 * p.max_seqlen_q


def _are_fewer(p: Problem, warpgroups: int, blocks: int, of_two: int) -> bool:
    """Whether a program has as many blocks of so many warpgroups as of two, by rows, or fewer."""
    rounds, rounds_of_two = (triton.cdiv(n * p.kv_heads, p.device.multiprocessors) for n in (blocks, of_two))
    return warpgroups * rounds <= 2 * rounds_of_two


def _is_for_three(p: Problem) -> bool:
    """Whether three consumers suit blocks of long queries: so many that none needs to be cut.

    Registers are few, and three loops have to stay close to the multiprocessor:
    no softcap by more than an instruction, bias or new keys, no heads but of 128 dims.
    """
    if dim_of(p) != 128 or (p.softcap > 0 and (not has_tanh(p) or _cap(p, NONE) > 0)):
        return False
    if p.qq_bias or p.new or (p.modified and p.window_left >= 0):
        return False
    if not p.modified and p.window_left < 0 and p.max_seqlen_k < LONGER:  # an item ahead gains as much
        return False
    group = p.heads // p.kv_heads
    of_two, of_three = (_blocks(p, n * (64 // group)) for n in (2, 3))
    enough = not _may_be_longer(p) and of_three * p.kv_heads >= UNCUT * p.device.multiprocessors
    return enough and (not _are_alike(p) or _are_fewer(p, 3, of_three, of_two))


def _is_for_four(p: Problem) -> bool:
    """Whether four warpgroups suit blocks: up to 64 dims have registers for it.

    They take a ninth less for a row, or more; but few blocks leave programs idle, and short queries rows of a block.
    """
    group = p.heads // p.kv_heads
    of_two, of_four = (_likely_blocks(p, n * (64 // group)) for n in (2, 4))
    if dim_of(p) > 64 or 8 * 2 * of_four > 9 * of_two:
        return False
    if _are_alike(p):
        return _are_fewer(p, 4, of_four, of_two)
    return of_four * p.kv_heads >= FOUR * p.device.multiprocessors


def _is_short(p: Problem) -> bool:
    """Whether sequences have so few keys that smaller tiles, of which less is masked, are better for blocks."""
    plain = not p.new and (p.softcap == 0 or _cap(p, NONE) > 0)
    return p.max_seqlen_k <= SHORT and dim_of(p) == 128 and p.cache.itemsize == 2 and plain


def _block_rings(p: Problem, convert: int, consumers: int, rows: int, mixed: bool) -> tuple[int, int, int, int]:
    """As in STAGES; of a softcap a loop of half the code: see DESIGN.md."""
    if consumers == 3:
        return STAGES_OF_THREE
    if rows == 256:
        return STAGES_OF_FOUR
    keys, values, raw, tile = STAGES[convert, dim_of(p)]
    capped = p.softcap > 0 and (p.window_left >= 0 or _cap(p, convert) != CAP_AS_TANH[0])
    if convert == NONE and tile == 128 and not mixed and (capped or _is_short(p)):
        return 2 * keys, 2 * values, raw, 64
    return keys, values, raw, tile


def _weighs_at_once(p: Problem, convert: int, tile: int) -> bool:
    """Whether blocks have registers for scores until it is known that these need not be weighed again.

    Beside a converter they are few.  In mixed batches what is made again would be too much code as well.
    """
    return convert == NONE or (convert != TRANSPOSE and dim_of(p) <= 128 and (tile == 64 or dim_of(p) == 64))


def _block_pipe(p: Problem, convert: int, mixed: bool) -> tuple[Pipe, int]:
    """(pipe, tile) of blocks."""
    consumers, rows = _consumers(p, convert, mixed)
    keys, values, raw, tile = _block_rings(p, convert, consumers, rows, mixed)
    terms = 0 if mixed else _cap(p, convert)
    loaders = loaders_of(p, tile, p.modified and not (terms and tile == 128))
    boxed = is_boxed(p) and convert in (NONE, TRANSPOSE)  # otherwise queries change their type on their way
    at_once = _weighs_at_once(p, convert, tile) and not mixed
    pipe = Pipe(
        SHARES=False,
        AT_ONCE=at_once,
        MIXED=mixed,
        COLUMNS=_block_columns(p, convert) if mixed else 0,
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
        SKIP=rows * consumers,
        STRIDE=rows * consumers,
    )
    return pipe, tile


# (terms of a polynomial of asm.CAPS, least softcap): as coarse as the instruction for tanh, and as special functions.
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
# likewise, of three consumers of 128 dims, and of one of four warpgroups; tiles for fewer registers
STAGES_OF_THREE, STAGES_OF_FOUR = (6, 5, 0, 64), (8, 8, 0, 64)
FP8_SCORES = 1 << 17  # keys of all blocks of 64 rows from which on products of fp8 are better than columns
MOST_ROWS = 512  # of a sequence and KV head for which even shares are better than a counter
# Uneven queries are taken to be mostly long from so many tokens for each sequence on, more where its keys may
# be more than its queries; and up to so many bytes of keys and values.
MOSTLY_LONG, LITTLE_TO_READ = 128, 128 << 20
UNEVEN = 4096  # keys up to which, of uneven queries, no block is so much longer than others that it has to be cut
UNCUT = 4  # blocks for each multiprocessor from which on none is cut
FULL = 0.8  # of the places in rounds of one sequence's blocks, likewise; `model.batches_up_to` has to meet both sides
SHORT = 1024  # keys of a sequence up to which tiles of 64 are better than of 128, and no block is cut
FOUR = 1.5  # blocks of four warpgroups for each multiprocessor from which on these are better than two
LONG = 4096  # query tokens of a sequence from which on copies of a consumer's code pay, which are fetched once
LONGER = 8192  # and its keys, where nothing is modified and all are seen


def _conversion(p: Problem) -> int:
    """How fp8 keys and values become operands."""
    if p.cache.itemsize == 2:
        return NONE
    both = p.query == p.cache == torch.float8_e4m3fn
    if both and is_boxed(p) and p.head_dim <= 128:
        return TRANSPOSE
    # the tensor cores keep 14 bits of a sum of fp8 products: what a log-sum-exp would show
    in_two = p.query == torch.bfloat16 and p.cache == torch.float8_e4m3fn and not p.lse and p.head_dim <= 128
    return WIDEN_VALUES if in_two else WIDEN
