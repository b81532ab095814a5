"""Blocks of a sequence's queries: which block of which sequence a number means.

A sequence has cdiv(query_len, BLOCK_Q) blocks; a launch serves those of sequences whose queries are neither too few nor
too many for it.
"""

import triton
import triton.language as tl

from .numerics import load_int
from .records import Block


@triton.jit
def block_of(batch, seq, index, kv_head, S: tl.constexpr):
    """Block number index of a sequence; query_len is 0 where there is none or it belongs to another launch."""
    if batch.query_starts is None:
        return Block(seq, seq, 1, load_int(batch.seq_lens + seq), 0, kv_head)
    else:
        first_token = load_int(batch.query_starts + seq)
        query_len = load_int(batch.query_starts + seq + 1) - first_token
        num_blocks = tl.cdiv(query_len, S.BLOCK_Q)
        served = (query_len >= batch.shortest) & (query_len <= batch.longest) & (index < num_blocks)
        # the last block of a causal sequence sees the most keys: it goes first
        first = (num_blocks - 1 - index) * S.BLOCK_Q
        query_len = tl.where(served, query_len, 0)
        return Block(seq, first_token, query_len, load_int(batch.seq_lens + seq), first, kv_head)


@triton.jit
def last_at_most(query_starts, num_seqs, value, BLOCK_Q: tl.constexpr):
    """Last sequence i with query_starts[i] // BLOCK_Q + i <= value, by bisection."""
    left = 0
    right = num_seqs
    while left < right:
        middle = (left + right) // 2
        if load_int(query_starts + middle) // BLOCK_Q + middle <= value:
            left = middle + 1
        else:
            right = middle
    return left - 1


@triton.jit
def find_block(batch, block, kv_head, S: tl.constexpr):
    """The block that a number means when every sequence counts."""
    if S.ONE_BLOCK:
        return block_of(batch, block, 0, kv_head, S)
    else:
        # sequence i has at most cdiv(query_len, BLOCK_Q) blocks from query_starts[i] // BLOCK_Q + i on
        seq = last_at_most(batch.query_starts, batch.num_seqs, block, S.BLOCK_Q)
        return block_of(batch, seq, block - (load_int(batch.query_starts + seq) // S.BLOCK_Q + seq), kv_head, S)
