"""Merging partial results: the pieces of one launch, or states that somebody else made."""

import triton
import triton.language as tl

from .args import State
from .numerics import LOG2E
from .output import quantize
from .softmax import finish, log_sum_exp, merge

CHUNK = tl.constexpr(8)  # states in flight: their loads overlap


@triton.jit
def join(parts, at, skip, stride, num_parts, HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    """num_parts states as one, in this order: the first at `at`, the others from at + skip on, stride apart."""
    dim = tl.arange(0, DIM)
    state = State(
        tl.full([DIM], 0.0, tl.float32),
        tl.max(tl.full([1], float("-inf"), tl.float32), 0),
        tl.sum(tl.full([1], 0.0, tl.float32), 0),
    )
    for first in range(0, num_parts, CHUNK):
        part = first + tl.arange(0, CHUNK)
        index = at + tl.where(part > 0, skip + (part - 1) * stride, 0)
        row_max = tl.load(parts.max + index, mask=part < num_parts, other=float("-inf"))
        if parts.sum is None:
            row_max *= LOG2E
            row_sum = tl.where(row_max > float("-inf"), 1.0, 0.0)
        else:
            row_sum = tl.load(parts.sum + index, mask=part < num_parts, other=0.0)
        inside = (part < num_parts)[:, None] & (dim < HEAD_DIM)[None, :]
        acc = tl.load(parts.acc + index[:, None] * HEAD_DIM + dim[None, :], mask=inside, other=0.0)
        state = merge(state, acc.to(tl.float32), row_max, row_sum)
    return state


@triton.jit
def store_token(out, lse, token, head, state, scales, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    """Finish one token x one head."""
    dim = tl.arange(0, DIM)
    ptr = out.ptr + token * out.stride_token + head * out.stride_head + dim
    tl.store(ptr, quantize(finish(state.acc, state.sum), scales, out), mask=dim < HEAD_DIM)
    if lse is not None:
        tl.store(lse + token * HEADS + head, log_sum_exp(state.max, state.sum))


@triton.jit
def merge_cuts_kernel(out, lse, partial, scales, S: tl.constexpr):
    """Join the pieces of one query token x one head of the block that a share's end cut, if it cut one."""
    share = tl.program_id(0)
    last = tl.load(partial.cuts + 3 * share)
    index = tl.program_id(1) // (S.KV_HEADS * S.GROUP)
    if (last >= 0) & (index < tl.load(partial.cuts + 3 * share + 2)):
        HEADS: tl.constexpr = S.KV_HEADS * S.GROUP
        SLOT: tl.constexpr = S.KV_HEADS * S.ROWS
        head = tl.program_id(1) % HEADS
        row = head // S.GROUP * S.ROWS + index * S.GROUP + head % S.GROUP
        # slot 1 of this share, slot 0 of those after it
        at = (2 * share + 1) * SLOT + row
        state = join(partial, at, SLOT, 2 * SLOT, last - share + 1, S.DIM, S.DIM)
        token = tl.load(partial.cuts + 3 * share + 1) + index
        store_token(out, lse, token.to(tl.int64), head, state, scales, HEADS, S.HEAD_DIM, S.DIM)


@triton.jit
def merge_states_kernel(
    out, lse, parts, num_parts, part_stride, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr
):
    """Join num_parts finished results of one token x one head; a finished result's sum is 1."""
    head = tl.program_id(1)
    token = tl.program_id(0).to(tl.int64)
    state = join(parts, token * HEADS + head, part_stride, part_stride, num_parts, HEAD_DIM, DIM)
    store_token(out, lse, token, head, state, None, HEADS, HEAD_DIM, DIM)
