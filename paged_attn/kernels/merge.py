"""Merging partial results: the segments of one launch, or states that somebody else made."""

import triton
import triton.language as tl

from .args import State
from .numerics import LOG2E
from .output import quantize
from .schedule import last_at_most
from .softmax import finish, log_sum_exp, merge

CHUNK = tl.constexpr(8)  # states in flight: their loads overlap


@triton.jit
def find_token(batch, index, S: tl.constexpr):
    """(token, whether this launch wrote its states) of a program."""
    if batch.query_starts is None:
        return index.to(tl.int64), True
    else:
        if S.ONE_BLOCK:
            seq = index // S.BLOCK_Q
            token = tl.load(batch.query_starts + seq) + index % S.BLOCK_Q
        else:
            token = index
            seq = last_at_most(batch.query_starts, batch.num_seqs, token, 1, 0)
        begin = tl.load(batch.query_starts + seq)
        end = tl.load(batch.query_starts + seq + 1)
        served = (end - begin >= batch.shortest) & (end - begin <= batch.longest)
        return token.to(tl.int64), served & (token < end)


@triton.jit
def join(parts, at, stride, num_parts, HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    """The states at, at + stride, ... as one, in this order."""
    dim = tl.arange(0, DIM)
    state = State(
        tl.full([DIM], 0.0, tl.float32),
        tl.max(tl.full([1], float("-inf"), tl.float32), 0),
        tl.sum(tl.full([1], 0.0, tl.float32), 0),
    )
    for first in range(0, num_parts, CHUNK):
        part = first + tl.arange(0, CHUNK)
        index = at + part * stride
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
def merge_segments_kernel(out, lse, partial, batch, scales, S: tl.constexpr):
    """Join the segments of one query token x one head."""
    token, served = find_token(batch, tl.program_id(0), S)
    if served:
        HEADS: tl.constexpr = S.KV_HEADS * S.GROUP
        head = tl.program_id(1)
        state = join(partial, (token * HEADS + head) * batch.segments, 1, batch.segments, S.DIM, S.DIM)
        store_token(out, lse, token, head, state, scales, HEADS, S.HEAD_DIM, S.DIM)


@triton.jit
def merge_states_kernel(
    out, lse, parts, num_parts, part_stride, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr
):
    """Join num_parts finished results of one token x one head; a finished result's sum is 1."""
    head = tl.program_id(1)
    token = tl.program_id(0).to(tl.int64)
    state = join(parts, token * HEADS + head, part_stride, num_parts, HEAD_DIM, DIM)
    store_token(out, lse, token, head, state, None, HEADS, HEAD_DIM, DIM)
