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
def seqs_at_once(heads, scan, most):
    """Lanes for sequences, no more than `scan`, where heads times sequences are no more than `most`."""
    return max(1, min(scan, most // heads))


@triton.jit
def work_of_heads(batch, head, lane, mods, S: tl.constexpr):
    """Units [HEADS] on each KV head's line; lanes past the last have none.  head [HEADS] and lane [N] count from 0."""
    kv_head = tl.minimum(head, S.KV_HEADS - 1)[:, None]
    units = head * 0
    for first in range(0, batch.num_seqs, lane.shape[0]):
        seq = (first + lane)[None, :]
        blocks, tiles = work(batch, seq, seq < batch.num_seqs, mods, S, kv_head)
        units += tl.sum(blocks * tiles, 1)
    return tl.where(head < S.KV_HEADS, units, 0)


@triton.jit
def whole_programs(part, shares, there):
    """Programs of each KV head, one or more, if so many had equal shares; part: of all units that are its."""
    return tl.where(there, tl.maximum(tl.ceil(part * shares - QUOTIENT_TOLERANCE).to(tl.int32), 1), 0)


@triton.jit
def programs_by_work(batch, head, lane, mods, S: tl.constexpr):
    """Programs [HEADS] of each KV head, so that none has much more to do than others.

    As many equal shares as can be, if whole programs are to suffice: each lane tries another number of them.
    """
    programs, there = tl.num_programs(0), head < S.KV_HEADS
    units = work_of_heads(batch, head, lane, mods, S).to(tl.float32)
    part = units / tl.maximum(tl.sum(units, 0), 1.0)
    STEP: tl.constexpr = tl.cdiv(S.KV_HEADS + 1, lane.shape[0])  # a program less for each KV head suffices
    shares = tl.maximum(programs - lane * STEP, 0)
    count = whole_programs(part[:, None], shares[None, :], there[:, None])
    fewer = tl.min(tl.where(tl.sum(count, 0) <= programs, lane, lane.shape[0]), 0)
    return whole_programs(part, tl.maximum(programs - fewer * STEP, 0), there)


@triton.jit
def share_by_work(count, head, S: tl.constexpr):
    """(share, KV head, shares of this KV head, programs of KV heads before it) of this program, by those of each.

    Programs follow each other as the shares of all lines end, if these are equally long: neighbours read the same pages
    then.  All shares that end before this program's part of all are passed at once, and the last few one by one.
    """
    program, programs = tl.program_id(0), tl.sum(count, 0)
    length = 1.0 / tl.maximum(count, 1)  # of a share
    passed = tl.maximum(count * (program * 1.0 / programs) - QUOTIENT_TOLERANCE, 0.0).to(tl.int32)
    passed = tl.minimum(passed, count)
    kv_head = program * 0
    for _ in range(program + 1 - tl.sum(passed, 0)):
        end = tl.where(passed < count, (passed + 1) * length, 2.0)
        kv_head = tl.min(tl.where(end == tl.min(end, 0), head, S.KV_HEADS - 1), 0)
        passed += tl.where(head == kv_head, 1, 0)
    # a program that is left over has a share past the last one of the first KV head, which is empty
    ahead = tl.sum(tl.where(head < kv_head, count, 0), 0)
    num_shares = tl.sum(tl.where(head == kv_head, count, 0), 0)
    return tl.sum(tl.where(head == kv_head, passed, 0), 0) - 1, kv_head, num_shares, ahead
