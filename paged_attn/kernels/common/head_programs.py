"""Programs of KV heads by what their heads see: where windows differ by head, only the device knows how much that is.

A streaming KV head of few keys needs few programs, and its others had better read what full heads see.  KV heads that
see the same have as many, walk along equal lines, and so still read the tokens of a page side by side.
"""

import triton
import triton.language as tl

from .schedule import QUOTIENT_TOLERANCE, work


@triton.constexpr_function
def heads_at_once(kv_heads):
    """Lanes for all KV heads."""
    return 1 << (kv_heads - 1).bit_length()


@triton.constexpr_function
def seqs_at_once(kv_heads, scan, most):
    """Lanes for sequences, no more than `scan`, where heads times sequences are no more than `most`."""
    return max(1, min(scan, most // (1 << (kv_heads - 1).bit_length())))


@triton.jit
def units_of_heads(batch, first, head, lane, mods, S: tl.constexpr):
    """Units [HEADS, N] of sequences from `first` on, on each KV head's line; head [HEADS] and lane [N] count from 0."""
    seq = (first + lane)[None, :]
    kv_head = tl.minimum(head, S.KV_HEADS - 1)[:, None]
    blocks, tiles = work(batch, seq, seq < batch.num_seqs, mods, S, kv_head)
    return blocks * tiles


@triton.jit
def whole_programs(part, shares, there):
    """Programs of each KV head, one or more, if so many had equal shares; part: of all units that are its."""
    return tl.where(there, tl.maximum(tl.ceil(part * shares - QUOTIENT_TOLERANCE).to(tl.int32), 1), 0)


@triton.jit
def programs_by_work(batch, first, head, lane, mods, S: tl.constexpr):
    """Programs [HEADS] of each KV head, so that none has much more to do than others.

    As many equal shares as can be, if whole programs are to suffice: each lane tries another number of them.
    first: `units_of_heads` of the first sequences, read ahead.
    """
    programs, there = tl.num_programs(0), head < S.KV_HEADS
    units = tl.sum(first, 1)
    for seq in range(lane.shape[0], batch.num_seqs, lane.shape[0]):
        units += tl.sum(units_of_heads(batch, seq, head, lane, mods, S), 1)
    units = tl.where(there, units, 0).to(tl.float32)
    part = units / tl.maximum(tl.sum(units, 0), 1.0)
    STEP: tl.constexpr = tl.cdiv(S.KV_HEADS + 1, lane.shape[0])  # a program less for each KV head suffices
    shares = tl.maximum(programs - lane * STEP, 0)
    count = whole_programs(part[:, None], shares[None, :], there[:, None])
    fewer = tl.min(tl.where(tl.sum(count, 0) <= programs, lane, lane.shape[0]), 0)
    return whole_programs(part, tl.maximum(programs - fewer * STEP, 0), there)


@triton.jit
def next_head(share, count, head):
    """The KV head whose share, of `count` on its line, ends first, the first of several."""
    end = tl.where(count > 0, (share + 1) / tl.maximum(count, 1), 2.0)
    return tl.min(tl.where(end == tl.min(end, 0), head, head.shape[0]), 0)


@triton.jit
def share_by_work(count, head, S: tl.constexpr):
    """(share, KV head, shares of this KV head, programs of KV heads before it) of this program, by those of each.

    Programs follow each other as the shares of all lines end, if these are equally long: neighbours read the same pages
    then.  Those of as many heads as there are come right behind all that end no later than this program's part of all.
    """
    program, programs = tl.program_id(0), tl.sum(count, 0)
    share = program * count // programs
    for _ in range(program - tl.sum(share, 0)):
        share += tl.where(head == next_head(share, count, head), 1, 0)
    # a program that is left over has a share past the last one of a KV head, which is empty
    kv_head = tl.where(program < programs, next_head(share, count, head), S.KV_HEADS - 1)
    ahead = tl.sum(tl.where(head < kv_head, count, 0), 0)
    num_shares = tl.sum(tl.where(head == kv_head, count, 0), 0)
    own = tl.sum(tl.where(head == kv_head, share, 0), 0)
    return tl.where(program < programs, own, num_shares), kv_head, num_shares, ahead
