"""Kinds of blocks: how many warpgroups multiply, how many rows each has, and which ones share a copy of the code."""

from collections.abc import Callable
from fractions import Fraction
from typing import Annotated, NamedTuple

from ....records.plan import Threshold
from ....records.problem import Problem
from . import cost
from .block_tiles import blocks_of_half_tiles
from .operands import NONE, columns_of_list, conversion, has_tanh, terms_of
from .shapes import is_even, is_wide, padded_dim, widest_of

MIN_TOKENS_WORTH_CODE_COPIES: Annotated[
    int,
    Threshold(
        "query tokens of some sequence",
        "copies of a consumer's code are fetched once, which long queries make up for",
        "three copies, one code: b4 x 4096 800, 812 us, window 485, 535; b8 x 1024 159, 151, b16 x 512 123, 107",
    ),
] = 4096
MIN_MEAN_TOKENS_WORTH_CODE_COPIES: Annotated[
    int,
    Threshold(
        "query tokens of a sequence, on average",
        "without the caller's bound, max_seqlen_q is the number of all tokens",
        "an eighth of the number above; not measured by itself",
    ),
] = 512
MIN_KEYS_WORTH_CODE_COPIES: Annotated[
    int,
    Threshold(
        "keys of a sequence, of unmodified scores without a window",
        "with fewer keys, one consumer that begins the next item ahead gains as much",
        "three copies, one ahead: 4 x 4096 879, 859 us, 8 x 8192 6273, 6361, 1 x 16384 2999, 3079",
    ),
] = 8192
MAX_KEYS_OF_EQUAL_BLOCKS: Annotated[
    int,
    Threshold(
        "keys of a sequence, of uneven queries",
        "with so few keys, no block is so much longer than others that it has to be cut, however many blocks there are",
        "16 prefills of 16..4096: may be cut 444 us, may not 414; with a softcap 499, 474",
    ),
] = 4096
MIN_ROUNDS_OF_LARGE_BLOCKS: Annotated[
    float,
    Threshold(
        "blocks of 256 rows for each multiprocessor",
        "fewer leave programs idle",
        "64 dims: 4 x 4096 636 -> 578 us by four warpgroups; 1 x 1024 (0.97) stays with two",
    ),
] = 1.5
TIME_OF_LARGE_ROWS: Annotated[
    Fraction,
    Threshold(
        "of the time that two warpgroups take for a row",
        "each of four schedulers has four warps of one loop to choose from; rows without a query may lose that gain",
        "64 dims: prefills 9 to 20% less; 64 x 288 tokens are 5 blocks of 64 tokens for 9 of 32: a tenth of the rows",
    ),
] = Fraction(8, 9)
MAX_QUERIES_SHARE: Annotated[
    float,
    Threshold(
        "of a sequence's keys that are its queries",
        "without a context, the last blocks of a sequence see the most keys, and the first blocks fill the gaps. "
        "Behind a longer context, all blocks see about equally many keys, so the number of blocks a program counts",
        "1 x 4096 behind 131072 keys: 6 rounds of 192 rows, 8 of 128",
    ),
] = 1 / 2


class BlockKind(NamedTuple):
    """One row of `KINDS` or `KINDS_OF_TWO_LISTS`: a kind of block, and the calls that get this kind."""

    name: str
    consumers: int  # consumers, each of which has its own copy of the code
    rows: int  # query rows of each consumer, 64 for each of its warpgroups
    when: Callable[[Problem], bool]
    reason: str
    decided: str


def block_kind(p: Problem, two_lists: bool) -> BlockKind:
    """Return the first kind whose condition holds; two_lists: long and short queries have a list each."""
    return next(kind for kind in (KINDS_OF_TWO_LISTS if two_lists else KINDS) if kind.when(p))


def _queries_are_long(p: Problem) -> bool:
    """Whether queries are so long that it costs nothing to fetch a copy of the code for each consumer.

    False with a converter, and over x-packed caches, which gain nothing.
    """
    return (
        conversion(p) == NONE
        and not p.packed
        and p.max_seqlen_q >= MIN_TOKENS_WORTH_CODE_COPIES
        and p.tokens >= MIN_MEAN_TOKENS_WORTH_CODE_COPIES * p.seqs
    )


def cap_takes_exponentials(p: Problem) -> bool:
    """Whether a softcap takes an exponential and a reciprocal for each score."""
    return p.softcap > 0 and not has_tanh(p) and not terms_of(p)


def blocks_see_as_many_keys(p: Problem) -> bool:
    """Whether all blocks see about equally many keys, because of a long context or a window."""
    return p.window_left >= 0 or p.max_seqlen_q < MAX_QUERIES_SHARE * p.max_seqlen_k


def one_block_may_see_most_keys(p: Problem) -> bool:
    """Whether one block may have far more keys than the others, and has to be cut, however many blocks there are."""
    return not is_even(p) and p.max_seqlen_k > MAX_KEYS_OF_EQUAL_BLOCKS


def _rounds_by_rows(p: Problem, warpgroups: int, blocks: int) -> int:
    """Return a program's time, counted in blocks of 64 rows, if all blocks take equally long: rounds * warpgroups."""
    return warpgroups * cost.rounds(p, blocks)


def four_warpgroups_have_room(p: Problem) -> bool:
    """Whether registers suffice for four warpgroups: keys and values of up to 64 dims, and no converter."""
    return conversion(p) == NONE and widest_of(p) <= 64


def four_warpgroups_end_sooner(p: Problem) -> bool:
    """Whether blocks of 256 rows save more than they lose by rows without a query and programs without a block."""
    group = p.heads // p.kv_heads
    of_two, of_four = (cost.blocks_likely(p, n * (64 // group)) for n in (2, 4))
    if 2 * of_four * TIME_OF_LARGE_ROWS > of_two:
        return False
    if blocks_see_as_many_keys(p):
        return _rounds_by_rows(p, 4, of_four) <= _rounds_by_rows(p, 2, of_two)
    return of_four * p.kv_heads >= MIN_ROUNDS_OF_LARGE_BLOCKS * p.device.multiprocessors


def three_copies_have_room(p: Problem) -> bool:
    """Whether three copies of the loop fit registers and the instruction cache.

    True for heads of 65 to 128 dims, except with a bias, a score_mod, new keys, modified scores in a window, or a
    softcap that takes more than tanh's instruction.
    """
    if is_wide(p) or padded_dim(p) != 128 or (p.softcap > 0 and (not has_tanh(p) or terms_of(p) > 0)):
        return False
    return not p.biased and not p.new and not (p.modified and p.window_left >= 0)


def three_copies_end_sooner(p: Problem) -> bool:
    """Whether blocks of 192 rows are so many that none is cut, and end sooner than blocks of 128 rows.

    If all blocks see about equally many keys, rounds of 192 rows must not take more time.  False for unmodified scores
    of few keys without a window (MIN_KEYS_WORTH_CODE_COPIES).
    """
    if not p.modified and p.window_left < 0 and p.max_seqlen_k < MIN_KEYS_WORTH_CODE_COPIES:
        return False
    group = p.heads // p.kv_heads
    of_two, of_three = (cost.blocks_at_most(p, n * (64 // group)) for n in (2, 3))
    if one_block_may_see_most_keys(p) or not cost.whole_blocks_suffice(p, of_three, known=False):
        return False
    return not blocks_see_as_many_keys(p) or _rounds_by_rows(p, 3, of_three) <= _rounds_by_rows(p, 2, of_two)


KINDS_OF_TWO_LISTS = (
    BlockKind(
        "two warpgroups beside columns",
        1,
        128,
        lambda p: columns_of_list(p) > 0 and padded_dim(p) == 128,
        "with few rows as columns, keys and dims are the rows of products: both warpgroups run one code on them",
        "1 x 2048 + 63 decodes 312 -> 298 us, chunk of 216 + 40 85 -> 71",
    ),
    BlockKind(
        "two copies, one of which has few rows",
        2,
        64,
        lambda p: True,
        "one warpgroup alone takes all few rows",
        "4 x 512 + 124 decodes of one list 641 -> 607 us",
    ),
)
KINDS = (
    BlockKind(
        "four warpgroups",
        1,
        256,
        lambda p: four_warpgroups_have_room(p) and four_warpgroups_end_sooner(p),
        "each scheduler has four warps, all in one loop of 8 KB; registers hold results of up to 64 dims",
        "64 dims, prefills 9 to 20%: b4 x 4096 636 -> 578 us",
    ),
    BlockKind(
        "two copies",
        2,
        64,
        lambda p: _queries_are_long(p) and cap_takes_exponentials(p) and p.widest <= 256,
        "a softcap by exponentials makes the loop long, and warpgroups with code of their own run it best",
        "exact softcap, b4 x 4096 5% less than by one code",
    ),
    BlockKind(
        "three copies",
        3,
        64,
        lambda p: (
            _queries_are_long(p)
            and three_copies_have_room(p)
            and three_copies_end_sooner(p)
            and not blocks_of_half_tiles(p)
        ),
        "three softmaxes hide each other's products; long queries make up for fetching three loops",
        "b1 x 16384 3061 -> 2941 us, in a window 576 -> 514, with ALiBi 1064 -> 1014",
    ),
    BlockKind(
        "two warpgroups",
        1,
        128,
        lambda p: True,
        "both share one code: little is fetched, and a single consumer may begin the next item ahead",
        "b1 x 1024 36 -> 32.1 us, b8 x 1024 159 -> 151",
    ),
)
