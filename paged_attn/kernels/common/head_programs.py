"""Programs for each KV head in proportion to the tiles that its query heads see, if windows differ by head.

Only the device knows the windows.  KV heads with narrow windows need few programs, and KV heads that see all keys get
the others.  KV heads that see equally many tiles get equally many programs, which walk along equal lines and read the
same pages at the same time.
"""

import triton
import triton.language as tl

from .schedule import QUOTIENT_TOLERANCE, work


@triton.constexpr_function
def heads_at_once(kv_heads):
    """Number of lanes for all KV heads: kv_heads rounded up to a power of two."""
    return 1 << (kv_heads - 1).bit_length()


@triton.constexpr_function
def seqs_at_once(heads, scan, most):
    """Number of sequences that are read at a time: at most `scan`, at most `most` // `heads`, and at least one."""
    return max(1, min(scan, most // heads))


@triton.jit
def work_of_heads(batch, head, lane, mods, S: tl.constexpr):
    """Units [HEADS] of each KV head's line; 0 behind the last KV head.  head [HEADS] and lane [N] count from 0."""
    kv_head = tl.minimum(head, S.KV_HEADS - 1)[:, None]
    units = head * 0
    for first in range(0, batch.num_seqs, lane.shape[0]):
        seq = (first + lane)[None, :]
        blocks, tiles = work(batch, seq, seq < batch.num_seqs, mods, S, kv_head)
        units += tl.sum(blocks * tiles, 1)
    return tl.where(head < S.KV_HEADS, units, 0)


@triton.jit
def whole_programs(part, shares, there):
    """Programs of each KV head, at least one, so that none has more than 1 / `shares` of all units; 0 if not `there`.

    part: the KV head's fraction of all units.
    """
    return tl.where(there, tl.maximum(tl.ceil(part * shares - QUOTIENT_TOLERANCE).to(tl.int32), 1), 0)


@triton.jit
def programs_by_work(batch, head, lane, mods, S: tl.constexpr):
    """Programs [HEADS] of each KV head, so that no program has much more work than others.

    Each lane tries another number of equal shares of all units.  The largest number for which the launch has enough
    programs is taken.
    """
    programs, there = tl.num_programs(0), head < S.KV_HEADS
    units = work_of_heads(batch, head, lane, mods, S).to(tl.float32)
    part = units / tl.maximum(tl.sum(units, 0), 1.0)
    # programs - KV_HEADS shares always fit: rounding adds at most one program for each KV head
    STEP: tl.constexpr = tl.cdiv(S.KV_HEADS + 1, lane.shape[0])
    shares = tl.maximum(programs - lane * STEP, 0)
    count = whole_programs(part[:, None], shares[None, :], there[:, None])
    fewer = tl.min(tl.where(tl.sum(count, 0) <= programs, lane, lane.shape[0]), 0)
    return whole_programs(part, tl.maximum(programs - fewer * STEP, 0), there)


@triton.jit
def share_by_work(count, head, S: tl.constexpr):
    """(share, KV head, shares of this KV head, programs of the KV heads before it) of this program.

    count [HEADS]: programs of each KV head.  Programs are ordered by the ends of their shares, with all lines scaled to
    one length, so that neighbours read the same pages.  Shares that surely end before this program's share are passed
    at once.  The few other shares before this program's are passed one by one.
    """
    program, programs = tl.program_id(0), tl.sum(count, 0)
    length = 1.0 / tl.maximum(count, 1)  # a share's part of its KV head's line
    passed = tl.maximum(count * (program * 1.0 / programs) - QUOTIENT_TOLERANCE, 0.0).to(tl.int32)
    passed = tl.minimum(passed, count)
    kv_head = program * 0
    for _ in range(program + 1 - tl.sum(passed, 0)):
        end = tl.where(passed < count, (passed + 1) * length, 2.0)
        kv_head = tl.min(tl.where(end == tl.min(end, 0), head, S.KV_HEADS - 1), 0)
        passed += tl.where(head == kv_head, 1, 0)
    # a program beyond those of `count` gets an empty share behind the last share of the first KV head
    ahead = tl.sum(tl.where(head < kv_head, count, 0), 0)
    num_shares = tl.sum(tl.where(head == kv_head, count, 0), 0)
    return tl.sum(tl.where(head == kv_head, passed, 0), 0) - 1, kv_head, num_shares, ahead
