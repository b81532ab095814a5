"""Calls whose keys are copied into whole pages first: small pages, and long queries over caches of 8 bits or less."""

from typing import Annotated

import torch

from ....records.copies import Copies, copies_of
from ....records.plan import Threshold
from ....records.problem import Problem
from .conditions import products_outlast_reading
from .launch_order import tokens_of_columns
from .operands import scaled_rows_are_columns
from .shapes import in_boxes, is_decode, is_even

_TIMES = "the portable kernels take twice as long for products as the Hopper kernels"
MIN_SCORES_PER_COPIED_KEY: Annotated[
    int,
    Threshold(
        "scores of a KV head for each key that is copied",
        f"{_TIMES}; reading and writing 8 keys and values of 128 dims takes 2 ns",
        "4 x 128 at 8192 (512) over pages of 4 177 -> 165 us, 4 x 256 345 -> 249",
    ),
] = 512
MIN_SCORES_WORTH_A_COPY: Annotated[
    int,
    Threshold("scores of all heads", f"a launch takes 2 to 3 us; {_TIMES}", "1 x 512 (8 x 2^20) 20.4 -> 18.9 us"),
] = 8 << 20
MAX_BYTES_OF_COPIES: Annotated[
    int,
    Threshold(
        "bytes of whole pages, for as many keys of each sequence as the bounds allow",
        "engines leave a tenth of a GPU's memory beside the cache, 8 GB on the smallest, and every graph keeps its "
        "copies. With 8 heads of 128 dims, 2^30 bytes are 262144 keys",
        "not measured",
    ),
] = 1 << 30


def copies(p: Problem) -> Copies | None:
    """Return the whole pages into which a call's keys are copied first; None: a copy is not needed or not worth it."""
    if (in_16_bits := copies_in_16_bits(p)) is not None or p.slot_scales or p.cache == torch.int8:
        return in_16_bits
    found = copies_of(p)
    return found if _can_be_copied(p) and _is_worth_a_copy(p) and found.bytes <= MAX_BYTES_OF_COPIES else None


def _can_be_copied(p: Problem) -> bool:
    """Whether a call's keys may be copied, and pages of other than a multiple of 8 tokens make a copy necessary.

    False with `batch_invariant`: a copy's worth depends on the batch, which must not select the kernels.  False with
    windows by head: a copy takes all heads at once, and pages outside some head's window may be gone.
    """
    return not (in_boxes(p) or p.packed or p.latent or p.batch_invariant or is_decode(p) or p.head_windows)


def _is_worth_a_copy(p: Problem) -> bool:
    """Whether a call has so many scores for each key that a copy takes less time than it saves.

    If sequences have less than half of max_seqlen_q tokens on average, most may be decodes.  Queries then count as
    seeing at most max_seqlen_q keys.
    """
    most, copied = p.keys_seen(1), p.seqs * p.keys_seen(p.max_seqlen_q)
    seen = most if 2 * p.tokens >= p.seqs * p.max_seqlen_q else min(most, p.max_seqlen_q)
    scores = p.tokens * p.heads * seen
    return scores >= max(MIN_SCORES_WORTH_A_COPY, MIN_SCORES_PER_COPIED_KEY * copied * p.kv_heads)


MIN_TOKENS_OF_A_COPY: Annotated[
    int,
    Threshold(
        "query tokens of a sequence whose keys are copied, if copies of all sequences would be too large",
        "the host knows how many tokens there are, and so how many sequences may have as many as this; the portable "
        "kernel serves those between",
        "not measured",
    ),
] = 128
MIN_SCALED_SCORES_WORTH_A_COPY: Annotated[
    int,
    Threshold(
        "scores of all heads over scales by token, where all sequences have equally many queries",
        "the copy takes a launch more, and the portable kernels take 2.1 ps more for a score (int4: 2.5)",
        "1 x 64 at 512: int4 46 -> 18 us, 1 x 128 at 512: int8 36 -> 18",
    ),
] = 1 << 20
MIN_SCORES_PER_SCALED_KEY: Annotated[
    int,
    Threshold(
        "scores of a KV head for each key that is copied, where all sequences have equally many queries",
        "copying a key of 128 dims to 16 bits takes 0.18 ns, and the portable kernels take 2.1 ps more for a score",
        "1 x 32 at 2048 (128): int8 51 -> 27 us, int4 36 -> 28; 64 x 16 at 512 (64): int8 67 -> 104, int4 77 -> 99",
    ),
] = 128
_CONVERTER = "a converter makes float16 of a key for each block that reads it, a copy once for all"
MIN_FP8_SCORES_WORTH_A_COPY: Annotated[
    int,
    Threshold(
        "scores of all heads over fp8 with one scale, of 128 dims; of other dims as many products",
        f"{_CONVERTER}; the copy takes a launch more",
        "1 x 1024 (32 x 2^20) 31.0 -> 27.8 us, 1 x 512 (8 x 2^20) 16.5 -> 18.0; 1 x 1024 of 64 dims 23.6 -> 24.5",
    ),
] = 32 << 20
MIN_SCORES_PER_FP8_KEY: Annotated[
    int,
    Threshold(
        "scores of a KV head for each key over fp8 with one scale, of 128 dims, where all sequences have equally many "
        "queries; of other dims as many products",
        f"{_CONVERTER}; copying a key takes 0.18 ns",
        "4 x 512 at 8192 (2048) 388 -> 386 us, 1 x 1024 at 8192 193 -> 180; 8 x 256 at 2048 (1024) 116 -> 124",
    ),
] = 2048


def copies_in_16_bits(p: Problem) -> Copies | None:
    """Return the whole pages to which keys of long queries are copied as numbers of 16 bits, times scales by token.

    Decodes and drafts of a few tokens read the cache as it is.  None: there is no copy.  Without a copy, long queries
    over one scale read the cache as it is, too, and the portable kernels serve long queries over scales by token.
    """
    if p.copied or p.cache.itemsize != 1 or p.query.itemsize != 2 or p.head_windows or scaled_rows_are_columns(p):
        return None
    if is_decode(p) or not scaled_rows_are_columns(p._replace(only="decode")) or not _is_worth_16_bits(p):
        return None
    found = copies_of(p)._replace(dtype=p.query)
    if is_even(p) or not in_boxes(p):  # no launch reads pages of other than a multiple of 8 tokens
        worth = is_even(p) or _is_worth_a_copy(p)
        return found if worth and found.bytes <= MAX_BYTES_OF_COPIES else None
    for shortest in (tokens_of_columns(p) + 1, MIN_TOKENS_OF_A_COPY):
        within = found._replace(shortest=shortest, most=max(1, min(p.seqs, p.tokens // shortest)))
        if within.bytes <= MAX_BYTES_OF_COPIES:
            return within
    return None


def _is_worth_16_bits(p: Problem) -> bool:
    """Whether a copy takes less time than it saves.

    Uneven sequences over fp8 with one scale get a copy only if products outlast reading.  Otherwise reading takes most
    of the time, and hides the converter.
    """
    scores, per_key = p.tokens * p.heads * p.keys_seen(1), p.max_seqlen_q * (p.heads // p.kv_heads)
    if p.slot_scales or p.cache == torch.int8:
        least = MIN_SCALED_SCORES_WORTH_A_COPY if p.slot_scales and is_even(p) else MIN_SCORES_WORTH_A_COPY
        return scores >= least and (per_key >= MIN_SCORES_PER_SCALED_KEY or not is_even(p))
    if scores * p.head_dim < MIN_FP8_SCORES_WORTH_A_COPY * 128:
        return False
    return per_key * p.head_dim >= MIN_SCORES_PER_FP8_KEY * 128 if is_even(p) else products_outlast_reading(p)
