"""Rows in and out: queries, results, log-sum-exp, the states of pieces."""

import triton
import triton.language as tl

from .numerics import decode, encode, scale_of
from .softmax import finish, log_sum_exp


@triton.jit
def _addresses(rows, tensor, S: tl.constexpr):
    """Addresses [R, D] and which of them exist."""
    dim = tl.arange(0, S.DIM)
    block = tensor.ptr + rows.token * tensor.stride_token + rows.kv_head * S.GROUP * tensor.stride_head
    row = rows.index * tensor.stride_token + rows.member * tensor.stride_head
    return block + row[:, None] + dim[None, :], rows.valid[:, None] & (dim < S.HEAD_DIM)[None, :]


@triton.jit
def load_query(query, rows, S: tl.constexpr):
    """Queries [R, D] in the compute type."""
    ptr, inside = _addresses(rows, query, S)
    return decode(tl.load(ptr, mask=inside, other=0), query.FP8, S.COMPUTE, S.NATIVE_FP8)


@triton.jit
def quantize(x, scales, tensor):
    """Results as elements of the output; an fp8 one holds x / out_scale."""
    if tensor.FP8 > 0:
        x = x / scale_of(scales.out, scales.out_ptr, scales.out_stride, 0)
    return encode(x, tensor.FP8, tensor.ptr.dtype.element_ty)


@triton.jit
def store_rows(out, lse, rows, state, scales, S: tl.constexpr):
    """Finished rows."""
    ptr, inside = _addresses(rows, out, S)
    tl.store(ptr, quantize(finish(state.acc, state.sum[:, None]), scales, out), mask=inside)
    if lse is not None:
        HEADS: tl.constexpr = S.KV_HEADS * S.GROUP
        at = rows.token * HEADS + rows.kv_head * S.GROUP + rows.index * HEADS + rows.member
        tl.store(lse + at, log_sum_exp(state.max, state.sum), mask=rows.valid)


@triton.jit
def store_partial(partial, slot, rows, state, S: tl.constexpr):
    """The state of one piece of a block; where nothing was seen acc is left alone."""
    row = tl.arange(0, S.ROWS)
    dim = tl.arange(0, S.DIM)
    at = (slot * S.KV_HEADS + rows.kv_head) * S.LIVE + row
    valid = rows.valid & (row < S.LIVE)
    tl.store(partial.acc + at[:, None] * S.DIM + dim[None, :], state.acc, mask=(valid & (state.sum > 0))[:, None])
    tl.store(partial.max + at, state.max, mask=valid)
    tl.store(partial.sum + at, state.sum, mask=valid)


@triton.jit
def clear_padding(out, lse, batch, S: tl.constexpr):
    """Rows past the last sequence: output 0, log-sum-exp -inf; all programs share them."""
    HEADS: tl.constexpr = S.KV_HEADS * S.GROUP
    dim = tl.arange(0, S.DIM)
    live = tl.load(batch.query_starts + batch.num_seqs)
    for row in range(live * HEADS + tl.program_id(0), batch.num_tokens * HEADS, tl.num_programs(0)):
        token = tl.cast(row // HEADS, tl.int64)
        head = row % HEADS
        zero = encode(tl.full([S.DIM], 0.0, tl.float32), out.FP8, out.ptr.dtype.element_ty)
        tl.store(out.ptr + token * out.stride_token + head * out.stride_head + dim, zero, mask=dim < S.HEAD_DIM)
        if lse is not None:
            tl.store(lse + token * HEADS + head, float("-inf"))
