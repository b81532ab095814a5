"""What a call costs by count: bytes of its keys, scores of its queries, blocks, and rounds in which these are done.

Of lengths the host knows bounds.  Sequences count by powers of two where `prepare` compiles for these only.
"""

from typing import Annotated

from ....records.problem import Problem
from ....records.regime import Threshold
from ....records.rounding import cdiv, next_power_of_2
from .shapes import is_even
from .wide_heads import reads_latents

MAX_TIME_OF_WHOLE_BLOCKS: Annotated[
    float,
    Threshold(
        "times an even share of all work",
        "whole blocks are done in rounds, the last of them not full; blocks that may be cut end together, but no "
        "consumer begins the next item before the last one is stored. Of one sequence the rounds are known, of several "
        "one may be empty: that is four blocks for each multiprocessor",
        "chunk of 2048 at 4096 (0.97 of four rounds) 160.5 -> 153.2 us whole; of 8192 keys 1300 tokens (0.83) 264.2 -> "
        "256.7, 1200 (0.77) 258.7 -> 260.4",
    ),
] = 1.25


def seqs_tried(p: Problem) -> int:
    """Sequences, by powers of two."""
    return next_power_of_2(p.seqs)


def bytes_of_keys(p: Problem, seqs: int, keys: int) -> int:
    """Bytes of keys and values of so many sequences of so many keys each."""
    dims = p.head_dim + (0 if reads_latents(p) else p.value_width)
    return seqs * keys * p.kv_heads * dims * p.cache.itemsize


def long_tokens(p: Problem) -> int:
    """Query tokens beyond one for each sequence: those of long queries beside decodes."""
    return p.tokens - p.seqs


def long_scores(p: Problem) -> int:
    """Scores of these tokens in all heads, by the keys that the longest query is sure to see."""
    return long_tokens(p) * p.heads * p.keys_seen(p.max_seqlen_q)


def blocks_at_most(p: Problem, tokens: int) -> int:
    """The most blocks of so many tokens that a batch has for a KV head."""
    return p.tokens // tokens + p.seqs


def blocks_likely(p: Problem, tokens: int) -> int:
    """As many as it has where all sequences have as many queries."""
    return p.seqs * cdiv(p.max_seqlen_q, tokens) if is_even(p) else blocks_at_most(p, tokens)


def rounds(p: Problem, blocks: int) -> int:
    """In which all programs have done so many blocks of each KV head, an item a round."""
    return cdiv(blocks * p.kv_heads, p.device.multiprocessors)


def whole_blocks_suffice(p: Problem, blocks: int, known: bool, most: float | None = None) -> bool:
    """Whether so many blocks of each KV head are done soon enough whole.

    known: whether there are as many, or up to as many.
    """
    items, programs = blocks * p.kv_heads, p.device.multiprocessors
    time = rounds(p, blocks) * programs if known else items + programs
    return time <= (MAX_TIME_OF_WHOLE_BLOCKS if most is None else most) * items
