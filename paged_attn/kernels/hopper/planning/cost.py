"""A call's cost in numbers: bytes of keys, scores of queries, blocks, and rounds of blocks.

The host knows only bounds of lengths.  Conditions that select a kernel mostly round the number of sequences up to a
power of two (`seqs_tried`), because `prepare` tries only some numbers, among them all powers of two.
"""

from typing import Annotated

from ....records.formats import INT4, cdiv, next_power_of_2
from ....records.plan import Threshold
from ....records.problem import Problem
from .shapes import is_even
from .wide_heads import reads_latents

MAX_TIME_OF_WHOLE_BLOCKS: Annotated[
    float,
    Threshold(
        "times an even share of all work",
        "whole blocks are done in rounds, and the last round is not full. Blocks that may be cut end together, but no "
        "consumer begins the next item before the last one is stored. With one sequence the rounds are known. With "
        "several, one round more is assumed, so blocks stay whole from four for each multiprocessor on",
        "chunk of 2048 at 4096 (0.97 of four rounds) 160.5 -> 153.2 us whole; of 8192 keys 1300 tokens (0.83) 264.2 -> "
        "256.7, 1200 (0.77) 258.7 -> 260.4",
    ),
] = 1.25


def seqs_tried(p: Problem) -> int:
    """Return the number of sequences, rounded up to a power of two."""
    return next_power_of_2(p.seqs)


def bytes_of_keys(p: Problem, seqs: int, keys: int) -> int:
    """Return bytes of keys and values of `seqs` sequences with `keys` keys each; latents count once."""
    dims = p.head_dim + (0 if reads_latents(p) else p.value_width)
    return seqs * keys * p.kv_heads * dims * p.cache.itemsize // (2 if p.cache == INT4 else 1)


def long_tokens(p: Problem) -> int:
    """Return query tokens beyond one for each sequence: about the tokens of long queries, if the others are decodes."""
    return p.tokens - p.seqs


def long_scores(p: Problem) -> int:
    """Return scores of `long_tokens` in all heads, if each sees the keys that a block of max_seqlen_q tokens sees."""
    return long_tokens(p) * p.heads * p.keys_seen(p.max_seqlen_q)


def blocks_at_most(p: Problem, tokens: int) -> int:
    """Return the maximum number of blocks of `tokens` tokens that a batch may have for a KV head."""
    return p.tokens // tokens + p.seqs


def blocks_likely(p: Problem, tokens: int) -> int:
    """Return the number of blocks of `tokens` tokens for a KV head: exact if `is_even`, otherwise the maximum."""
    return p.seqs * cdiv(p.max_seqlen_q, tokens) if is_even(p) else blocks_at_most(p, tokens)


def rounds(p: Problem, blocks: int) -> int:
    """Return the number of rounds for `blocks` blocks of each KV head; a multiprocessor does one block in a round."""
    return cdiv(blocks * p.kv_heads, p.device.multiprocessors)


def whole_blocks_suffice(p: Problem, blocks: int, known: bool, most: float | None = None) -> bool:
    """Whether `blocks` blocks of each KV head need no cut: whole blocks take at most `most` times an even share's time.

    known: the number of blocks is exact; otherwise there may be fewer, and one round more is assumed.  The default of
    `most` is MAX_TIME_OF_WHOLE_BLOCKS.
    """
    items, programs = blocks * p.kv_heads, p.device.multiprocessors
    time = rounds(p, blocks) * programs if known else items + programs
    return time <= (MAX_TIME_OF_WHOLE_BLOCKS if most is None else most) * items
