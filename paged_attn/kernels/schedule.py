"""Which program does what: query blocks, the keys they may see, and shares of those keys."""

import triton
import triton.language as tl

from .args import Block, RowTile, Span


@triton.jit
def unflatten(batch, S: tl.constexpr):
    """(block, KV head, segment) of this program.

    Decode: the heads of a token lie in one page, so they run side by side.  Prefill: the blocks of one head share its
    keys.
    """
    pid = tl.program_id(0)
    if S.ONE_BLOCK:
        rest = pid // S.KV_HEADS
        return rest // batch.segments, pid % S.KV_HEADS, rest % batch.segments
    else:
        num_blocks = tl.num_programs(0) // (S.KV_HEADS * batch.segments)
        rest = pid // num_blocks
        return pid % num_blocks, rest % S.KV_HEADS, rest // S.KV_HEADS


@triton.jit
def last_at_most(query_starts, num_seqs, value, BLOCK_Q: tl.constexpr, GAP: tl.constexpr):
    """Last sequence i with query_starts[i] // BLOCK_Q + i * GAP <= value, by bisection; -1 if none."""
    left = 0
    right = num_seqs
    while left < right:
        middle = (left + right) // 2
        if tl.load(query_starts + middle) // BLOCK_Q + middle * GAP <= value:
            left = middle + 1
        else:
            right = middle
    return left - 1


@triton.jit
def find_block(batch, block, S: tl.constexpr):
    """The block's queries; query_len is 0 for a block that does not exist or belongs to another launch."""
    if batch.query_starts is None:
        return Block(block, block, 1, tl.load(batch.seq_lens + block), 0)
    else:
        if S.ONE_BLOCK:
            seq = block
            index = 0
        else:
            # sequence i has at most cdiv(query_len, BLOCK_Q) blocks from query_starts[i] // BLOCK_Q + i on
            seq = last_at_most(batch.query_starts, batch.num_seqs, block, S.BLOCK_Q, 1)
            index = block - (tl.load(batch.query_starts + seq) // S.BLOCK_Q + seq)
        first_token = tl.load(batch.query_starts + seq)
        query_len = tl.load(batch.query_starts + seq + 1) - first_token
        num_blocks = tl.cdiv(query_len, S.BLOCK_Q)
        served = (query_len >= batch.shortest) & (query_len <= batch.longest) & (index < num_blocks)
        # the last block of a causal sequence sees the most keys: it goes first
        first = (num_blocks - 1 - index) * S.BLOCK_Q
        return Block(seq, first_token, tl.where(served, query_len, 0), tl.load(batch.seq_lens + seq), first)


@triton.jit
def row_tile(block, kv_head, mods, S: tl.constexpr):
    """Rows of the block: token-major, the group's heads side by side."""
    row = tl.arange(0, S.ROWS)
    index = block.first + row // S.GROUP
    valid = (index < block.query_len) & (row < S.BLOCK_Q * S.GROUP)
    pos = block.seq_len - block.query_len + index
    first_key = tl.zeros_like(pos)
    last_key = tl.zeros_like(pos) + (block.seq_len - 1)
    if mods.left is not None:
        first_key = tl.maximum(pos - mods.left, 0)
    if mods.right is not None:
        last_key = tl.minimum(pos + mods.right, last_key)
    last_key = tl.where(valid, last_key, -1)
    token = (block.first_token + index).to(tl.int64)
    head = kv_head * S.GROUP + row % S.GROUP
    return RowTile(token, head, pos, first_key, last_key, valid, kv_head, block.seq_len - block.query_len)


@triton.jit
def visible_range(block, mods, S: tl.constexpr):
    """Which keys the block's rows see, bounded by the sequence."""
    context_len = block.seq_len - block.query_len
    first_pos = context_len + block.first
    last_pos = context_len + tl.minimum(block.first + S.BLOCK_Q, block.query_len) - 1
    lo = 0
    full_lo = 0
    hi = block.seq_len
    full_hi = block.seq_len
    if mods.left is not None:
        lo = tl.maximum(first_pos - mods.left, 0)
        full_lo = tl.maximum(last_pos - mods.left, 0)
    if mods.right is not None:
        hi = tl.minimum(last_pos + mods.right + 1, hi)
        full_hi = tl.minimum(first_pos + mods.right + 1, full_hi)
    return Span(lo, hi, full_lo, full_hi)


@triton.jit
def segment_range(span, segment, segments, S: tl.constexpr):
    """This segment's share of [lo, hi), whole tiles."""
    start = span.lo // S.TILE * S.TILE
    share = tl.cdiv(tl.cdiv(span.hi - start, S.TILE), segments) * S.TILE
    begin = start + segment * share
    return begin, tl.minimum(begin + share, span.hi)
