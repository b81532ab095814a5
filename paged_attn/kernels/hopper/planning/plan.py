"""What the Hopper kernels cover, and which of them take a batch."""

from collections.abc import Callable

import torch

from ....launching.scratch import Need
from ....records.plan import UNBOUNDED, Launch
from ....records.problem import Problem
from ....records.rounding import next_power_of_2
from ...portable.plan import MAX_ROWS_OF_ONE_BLOCK, drafts_apart, few_apart
from . import invariant, score_mod
from .block_items import NONE, TRANSPOSE, block_columns, conversion, many, many_beside, parts_of
from .even_shares import columns_beside, even_shares_end_sooner, few, few_beside
from .shapes import (
    MAX_COLUMNS,
    MAX_FP8_COLUMNS,
    MAX_PACKED_COLUMNS,
    MAX_SEQS_OF_ONE_WARP,
    VALUES_PER_CORE_ROW,
    dim_of,
    is_even,
    rows_of,
)

COUNTERS_PER_LAUNCH = 4  # before those of pieces: items taken, programs done
# Keys of all blocks of 64 rows from which on products of fp8 are better than columns.
MIN_KEYS_WORTH_FP8_PRODUCTS = 1 << 17
MAX_ROWS_OF_EVEN_SHARES = 512  # rows of a sequence and KV head for which even shares are better than a counter
# Query tokens for each sequence from which on uneven queries are taken to be mostly long, more where a sequence's keys
# may be more than its queries; bytes of keys and values up to which all of them share one list.
MIN_TOKENS_PER_LONG_SEQ, MAX_BYTES_OF_ONE_LIST = 128, 128 << 20
# Keys that few rows see up to which the portable kernel's programs of a block each, several of a multiprocessor, are
# better than such blocks one after the other; of large heads in 16 bits.
MAX_PORTABLE_KEYS, MAX_PORTABLE_KEYS_OF_LARGE_HEADS = 256, 128
# Rows for each sequence, if long queries saw 1000 keys, from which on these have something to hide.
MIN_LONG_ROWS_PER_SEQ = 36
# Query tokens of long queries from which on few rows have a list of their own though there is little to read; of one
# KV head few rows would be cut too often.
MIN_LONG_TOKENS = 192
# Rows of a block that no heads fill, and scores of long queries, over 16 bits and over fp8, from which on these are
# blocks of parts of a group, and decodes beside them a launch of their own.
MIN_EMPTY_ROWS_WORTH_PARTS, MIN_SCORES_WORTH_PARTS, MIN_FP8_SCORES_WORTH_PARTS = 16, 80 << 20, 24 << 20
KEYS_BESIDE_A_WINDOW = 16 + 64  # seen by a block of 16 rows, and of a tile with which its keys need not begin


# What must hold, and what a call asks for where it does not; types of 32 bits are told once.
CONDITIONS: tuple[tuple[Callable[[Problem], bool], str], ...] = (
    (
        lambda p: p.compute in (torch.float16, torch.bfloat16) and p.query.itemsize <= 2 and p.cache.itemsize <= 2,
        "float32",
    ),
    (lambda p: p.query.itemsize != 1 or p.cache.itemsize == 1, "fp8 queries over a cache that is not"),
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
    (lambda p: p.value_width == p.head_dim, "values of another width"),
    (
        lambda p: p.heads // p.kv_heads <= 64 or _takes_parts(p),
        "more than 64 heads on a KV head but by long prefills",
    ),
    (lambda p: not _all_see_few_keys(p), "few queries of few keys"),
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
    wanted = [asked for holds, asked in CONDITIONS if not holds(p)]
    if p.score_mod is not None and not wanted and (why := score_mod.why_not(p.score_mod)):
        wanted.append(f"a score_mod that Gluon does not compile ({why})")
    return wanted


def covers(p: Problem) -> bool:
    """Whether these kernels take a call; the rest is left to the portable ones."""
    return not uncovered(p)


def launches(p: Problem) -> tuple[Launch, ...]:
    """Even shares where all sequences have few queries, blocks from a counter where some have many.

    Where many have few beside these, it depends on what the batch waits for, `_one_list_serves_all`,
    `_blocks_hide_few_rows`, and on how heads of a group fill blocks, `_many_heads`, `_decodes_lead_parted_blocks`.
    """
    if p.batch_invariant:
        return invariant.launches(p)
    if p.only == "decode" or not p.ragged:
        return (few(p, 1, 1),)
    shortest = 0 if p.only is None else 2
    if p.heads // p.kv_heads > 64:
        return _many_heads(p, shortest)
    if _decodes_lead_parted_blocks(p):
        return _overlapped(few(p, shortest, 1, leads=True), many(p, 2, False))
    if _even_shares_serve_all(p):
        return (few(p, shortest, UNBOUNDED),)
    if is_even(p) or rows_of(p, UNBOUNDED) <= 64:
        return (many(p, shortest, False),)
    if _decodes_suit_portable(p) and (apart := few_apart(p, shortest)).longest >= shortest:
        return _overlapped(apart, many(p, apart.longest + 1, False))
    if _one_list_serves_all(p):
        return (many(p, shortest, False),)
    group = p.heads // p.kv_heads
    if _blocks_hide_few_rows(p):
        longest = columns_beside(p) // group
        return (many_beside(p, longest + 1)._replace(beside=few_beside(p, shortest, longest)),)
    longest = max(1, MAX_COLUMNS // group)
    if shortest <= longest and _few_rows_can_launch_alone(p) and _few_rows_read_faster_alone(p):
        return _overlapped(few(p, shortest, longest, leads=True), many(p, longest + 1, False))
    return (many(p, shortest, conversion(p) == NONE and not p.packed),)


def _many_heads(p: Problem, shortest: int) -> tuple[Launch, ...]:
    """Blocks of parts of a group of more than 64 heads; beside these the portable kernel has few queries.

    In its blocks, of a token each, a sequence should take twice as long for a token as in blocks of a part for it.
    """
    if p.only is not None or is_even(p) or parts_of(p, False) > 1:
        return (many(p, shortest, False),)
    longest = parts_of(p, True) // 2
    if longest < 2 or p.tokens == p.max_seqlen_q + p.seqs - 1:  # all but one have a token
        return _overlapped(few_apart(p, shortest), many(p, 2, False))
    return (*_overlapped(few_apart(p, shortest), many(p, longest + 1, False)), drafts_apart(p, longest))


def _decodes_lead_parted_blocks(p: Problem) -> bool:
    """Whether long queries beside decodes are blocks of parts of a group, and decodes have a launch of their own.

    Parts leave fewer rows of blocks empty; of decodes they would read each key once for every part.  What they save
    has to be more than a launch takes.
    """
    if (
        p.only is not None
        or is_even(p)
        or parts_of(p, False) > 1
        or parts_of(p, True) == 1
        or not _few_rows_can_launch_alone(p)
    ):
        return False
    scores = (p.tokens - p.seqs) * p.heads * p.keys_seen(p.max_seqlen_q)
    least = MIN_SCORES_WORTH_PARTS if p.cache.itemsize == 2 else MIN_FP8_SCORES_WORTH_PARTS
    return 128 % (p.heads // p.kv_heads) >= MIN_EMPTY_ROWS_WORTH_PARTS and scores >= least


def _few_rows_can_launch_alone(p: Problem) -> bool:
    """Whether few rows have a kernel for a launch of their own: over x-packed caches only where they are columns."""
    return not p.packed or (_packed_rows_fit_columns(p._replace(only="decode")) and not p.new)


def _few_rows_read_faster_alone(p: Problem) -> bool:
    """Whether few rows beside long queries are better read by a launch of their own than from a list of their own.

    A converter is slower than memory, and they do without; x-packed ones are columns of other boxes; and of decodes
    fewer than programs a list cuts each, to have some for all of these, which even shares do better.
    """
    if conversion(p) != NONE or p.packed:
        return True
    return next_power_of_2(p.seqs) * p.kv_heads <= p.device.multiprocessors  # as in `_one_list_serves_all`


def _overlapped(first: Launch, second: Launch) -> tuple[Launch, Launch]:
    """Two launches of different sequences: programs of the second begin wherever some of the first have ended.

    Few rows come first: memory serves some of their programs later than others, and blocks fill what that leaves.
    """
    first = first._replace(shape=first.shape._replace(LEADS=True))
    return first, second._replace(pipe=second.pipe._replace(FOLLOWS=True))


def _even_shares_serve_all(p: Problem) -> bool:
    """Whether even shares suit a batch: a block is all that a sequence has, or there is little to do."""
    if p.only == "decode" or not p.ragged:
        return True
    rows = rows_of(p, UNBOUNDED)
    if p.packed:
        return _packed_rows_fit_columns(p) and not p.new
    if p.cache.itemsize == 1:
        return rows <= MAX_FP8_COLUMNS or (rows <= 64 and _two_blocks_of_columns_pay(p))
    if rows <= 64:
        return True
    if not is_even(p) or p.seqs > MAX_SEQS_OF_ONE_WARP:
        return False
    return rows <= MAX_ROWS_OF_EVEN_SHARES and even_shares_end_sooner(p)


def _all_see_few_keys(p: Problem) -> bool:
    """Whether all sequences have few rows and see few keys."""
    rows = rows_of(p, 1 if p.only == "decode" else UNBOUNDED)
    return rows <= MAX_ROWS_OF_ONE_BLOCK and not p.batch_invariant and _keys_suit_portable(p)


def _keys_suit_portable(p: Problem) -> bool:
    """Whether sequences, or windows, have so few keys that the portable kernel does not cut them, and it suits them.

    Whatever the queries, so that `prepare` meets both sides.
    """
    if p.packed or p.biased:
        return False
    return p.keys_seen(KEYS_BESIDE_A_WINDOW) <= (
        MAX_PORTABLE_KEYS_OF_LARGE_HEADS if p.head_dim > 128 and p.cache.itemsize == 2 else MAX_PORTABLE_KEYS
    )


def _decodes_suit_portable(p: Problem) -> bool:
    """Whether uneven queries of few keys, fewer than are mostly long, may be several decodes for each program.

    Keys of 16 bits outside a window keep memory busy for as long either way; beside large heads decodes are hidden.
    """
    if p.head_dim > 128 or p.tokens >= MIN_TOKENS_PER_LONG_SEQ * p.seqs or not _keys_suit_portable(p):
        return False
    if p.window_left < 0 and p.cache.itemsize == 2 and p.head_dim > 64:
        return False
    return next_power_of_2(p.seqs) * p.kv_heads > 2 * p.device.multiprocessors


def _two_blocks_of_columns_pay(p: Problem) -> bool:
    """Whether two blocks of columns suit a sequence of up to 64 rows, or there are no other blocks for it.

    One block of rows converts or reads keys once for all of them; but few blocks leave programs idle, or are cut.
    """
    is_fp8 = p.cache.itemsize == 1
    if p.packed and is_fp8:
        return True
    if p.packed and p.heads // p.kv_heads > MAX_PACKED_COLUMNS:
        return False
    if p.packed and not _packed_tiles_fit_products(p):
        return True
    blocks = next_power_of_2(p.seqs) * p.kv_heads  # as in `_one_list_serves_all`
    if conversion(p) == TRANSPOSE and blocks * p.max_seqlen_k >= MIN_KEYS_WORTH_FP8_PRODUCTS:  # which waits for nothing
        return False
    most = 4 if conversion(p) == TRANSPOSE or p.head_dim > 128 else 2
    return most * blocks <= p.device.multiprocessors


def _one_list_serves_all(p: Problem) -> bool:
    """Whether sequences of uneven queries are all served as long ones are, in one list.

    Most are, and products take longer than memory; or there is little to read, and few long queries to hide it; or few
    rows have no kernel of their own.  As many keys as a sequence has queries are sure to meet these: of a context that
    is longer the host knows nothing.
    """
    keys = p.keys_seen(p.max_seqlen_q)
    if p.tokens * min(p.max_seqlen_q, keys) >= MIN_TOKENS_PER_LONG_SEQ * p.seqs * keys:
        return True
    # by powers of two, so that for `prepare` as many sequences as it tries stand for those between
    seqs = next_power_of_2(p.seqs)
    if 2 * seqs * keys * p.kv_heads * p.head_dim * p.cache.itemsize < MAX_BYTES_OF_ONE_LIST:
        return p.kv_heads == 1 or p.tokens - p.seqs < MIN_LONG_TOKENS or not _blocks_hide_few_rows(p)
    if p.packed:
        return p.new
    return conversion(p) == NONE and (dim_of(p) > 128 or not block_columns(p)) and not _blocks_hide_few_rows(p)


def _blocks_hide_few_rows(p: Problem) -> bool:
    """Whether few rows are served beside blocks, by the same programs at the same time.

    Where long queries are so little that memory alone decides, as these may be for all that the host knows, two lists
    are better, which leave more of shared memory to few rows: sequences of 1000 keys are what these are taken for.
    """
    group, keys = p.heads // p.kv_heads, p.keys_seen(p.max_seqlen_q)
    if conversion(p) != NONE or p.packed or not p.query_box or columns_beside(p) < group * (1 + (p.only == "prefill")):
        return False
    return (p.tokens - p.seqs) * group * keys >= MIN_LONG_ROWS_PER_SEQ * p.seqs * 1000


def _packed_rows_fit_columns(p: Problem) -> bool:
    """Whether all rows would be columns of products with tiles of an x-packed cache, which take registers."""
    rows = rows_of(p, 1 if p.only == "decode" else UNBOUNDED)
    if dim_of(p) > 128:
        return rows <= MAX_COLUMNS
    return rows <= MAX_PACKED_COLUMNS or (rows <= 64 and _two_blocks_of_columns_pay(p))


def need_of(launch: Launch) -> Need:
    """Scratch of a launch: its size depends on the device, for fixed pieces on bounds, too, and not on lengths."""
    shape, pipe = launch.shape, launch.pipe
    slots = launch.slots if shape.SPLIT else 0
    states = slots * shape.LIVE * (shape.DIM + 2) + launch.cuts
    blocks = launch.programs if pipe.SHARES else slots  # that may be cut at a time
    firsts = slots if pipe.GROUPED else 0  # of groups of pieces
    counters = COUNTERS_PER_LAUNCH + (blocks * pipe.CONSUMERS + firsts if launch.merge is None else 0)
    if launch.beside is not None:
        more = need_of(launch.beside)
        states, counters = states + more.states, counters + more.counters
    return Need(states, counters, launch.merge is not None)


def _takes_parts(p: Problem) -> bool:
    """Whether blocks are of a part of a KV head's query heads, for which few queries have no kernel."""
    return p.ragged and p.only != "decode" and not p.batch_invariant and parts_of(p, not is_even(p)) > 1


def _takes_packed(p: Problem) -> bool:
    """Whether an x-packed cache is read here."""
    return not p.batch_invariant and ((_packed_rows_fit_columns(p) and not p.new) or _packed_tiles_fit_products(p))


def _packed_tiles_fit_products(p: Problem) -> bool:
    """Whether tiles of an x-packed cache can be multiplied as they are."""
    return p.cache.itemsize == 2 and p.page_size % VALUES_PER_CORE_ROW == 0 and p.ragged and p.only != "decode"
