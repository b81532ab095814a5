"""Loads and stores of rows: queries, results, log-sum-exps, states of pieces."""

import triton
import triton.language as tl

from .decoding import decode
from .encoding import encode, quotient
from .numerics import LOG2E, in_parts, normalize, opaque, scale_of
from .records import Query, RowTile
from .softmax import finish, log_sum_exp

MAX_HEADS_OF_NARROW_ROWS = tl.constexpr(128)  # offsets of more heads may exceed 32 bits (`layout.FAR_HEADS`)


@triton.jit
def addresses(rows, dim, tensor, HEAD_DIM: tl.constexpr, S: tl.constexpr):
    """(addresses [R, D] in a Rows tensor, mask [R, D] of the elements that exist)."""
    return places(rows, dim, tensor.ptr, tensor.stride_token, tensor.stride_head, tensor.WIDE, HEAD_DIM, S)


@triton.jit
def places(rows, dim, ptr, stride_token, stride_head, WIDE: tl.constexpr, HEAD_DIM: tl.constexpr, S: tl.constexpr):
    """(addresses [R, D], mask [R, D] of the elements that exist); with PAIRED heads, a row has only one half of D."""
    head = rows.kv_head * S.GROUP
    if S.KV_HEADS * S.GROUP > MAX_HEADS_OF_NARROW_ROWS or WIDE is not None:
        head = tl.cast(head, tl.int64)
    block = ptr + rows.token * stride_token + head * stride_head
    if WIDE is not None:
        row = rows.index.to(tl.int64) * stride_token + rows.member.to(tl.int64) * stride_head
    else:
        row = rows.index * stride_token + rows.member * stride_head
    if S.PAIRED:
        of_row = dim[None, :] - (rows.member // (S.GROUP // 2) * HEAD_DIM)[:, None]
        return block + row[:, None] + of_row, rows.valid[:, None] & (of_row >= 0) & (of_row < HEAD_DIM)
    else:
        return block + row[:, None] + dim[None, :], rows.valid[:, None] & (dim < HEAD_DIM)[None, :]


@triton.jit
def load_query(query, rows, dim, PARTS: tl.constexpr, S: tl.constexpr):
    """Load a Query of rows [R, D] in the compute type; PARTS: number of parts of the keys."""
    ptr, inside = addresses(rows, dim, query, S.HEAD_DIM, S)
    x = tl.load(ptr, mask=inside, other=0)
    if S.NORMALIZED or (x.dtype == tl.bfloat16 and tl.bfloat16 != S.COMPUTE):
        x, unit = normalize(decode(x, query.FP8, tl.float32, S.NATIVE_FP8))
        return Query(in_parts(x.to(S.COMPUTE), PARTS), unit)
    else:
        x = decode(x, query.FP8, S.COMPUTE, S.NATIVE_FP8)
        if query.FP8 > 0 and PARTS > 1 and S.NATIVE_FP8:
            # without `opaque`, the compiler would derive a layout of bytes for the keys, too, and load single bytes
            x = opaque(x)
        return Query(in_parts(x, PARTS), tl.where(rows.valid, 1.0, 1.0))


@triton.jit
def rows_from(token, kv_head, row, valid, S: tl.constexpr):
    """A RowTile with the fields that storing rows [R] needs.

    token: int64, the token of row 0.  row [R]: index * GROUP + head of the group, for token `token` + index.
    """
    return RowTile(token, kv_head, row // S.GROUP, row % S.GROUP, row, row, row, row, valid, 0, 0, 0, 0, 0, 0, 0)


@triton.jit
def quantize(x, scales, tensor):
    """Convert float32 results to elements of the output; an fp8 output holds x / out_scale."""
    if tensor.FP8 > 0:
        x = quotient(x, scale_of(scales.out, scales.out_ptr, scales.out_stride, 0))
    return encode(x, tensor.FP8, tensor.ptr.dtype.element_ty)


@triton.jit
def store_lse(lse, rows, state, S: tl.constexpr):
    """Store the log-sum-exps [R] of a state of finished rows."""
    HEADS: tl.constexpr = S.KV_HEADS * S.GROUP
    at = rows.token * HEADS + rows.kv_head * S.GROUP + rows.index * HEADS + rows.member
    tl.store(lse + at, log_sum_exp(state.max, state.sum), mask=rows.valid)


@triton.jit
def times_logistic(x, power):
    """x / (1 + 2^power); where x is 0, x itself, even if power is NaN."""
    return tl.where(x == 0, x, x / (1 + tl.exp2(power)))


@triton.jit
def gated(x, rows, dim, scales, S: tl.constexpr, TIMES_LOGISTIC: tl.constexpr = times_logistic):
    """Results [R, D] times the logistic function of their gate; a result of 0 stays 0, even if the gate is NaN."""
    if scales.gate_ptr is not None:
        WIDE: tl.constexpr = True  # strides of the gate may have any size
        ptr, inside = places(
            rows, dim, scales.gate_ptr, scales.gate_stride_token, scales.gate_stride_head, WIDE, S.VALUE_DIM, S
        )
        gate = tl.load(ptr, mask=inside, other=0.0).to(tl.float32)
        x = TIMES_LOGISTIC(x, gate * -LOG2E)
    return x


@triton.jit
def store_results(out, rows, dim, x, scales, S: tl.constexpr):
    """Store results [R, D] of finished rows."""
    ptr, inside = addresses(rows, dim, out, S.VALUE_DIM, S)
    tl.store(ptr, quantize(x, scales, out), mask=inside)


@triton.jit
def store_rows(
    out, lse, rows, dim, state, scales, S: tl.constexpr, TIMES_LOGISTIC: tl.constexpr = times_logistic
):  # fmt: skip
    """Finish the rows of a state, and store results and, if asked for, log-sum-exps."""
    x = gated(finish(state.acc, state.sum[:, None]), rows, dim, scales, S, TIMES_LOGISTIC)
    store_results(out, rows, dim, x, scales, S)
    if lse is not None:
        store_lse(lse, rows, state, S)


@triton.jit
def store_partial(partial, at, valid, dim, state, S: tl.constexpr, ALL: tl.constexpr = False):
    """Store one piece's state in scratch rows `at` [R]; without ALL, rows that saw no key store no accumulators."""
    seen = valid
    if not ALL:
        seen &= state.sum != 0  # True for NaN
    tl.store(partial.acc + at[:, None] * S.VALUE_PADDED + dim[None, :], state.acc, mask=seen[:, None])
    tl.store(partial.max + at, state.max, mask=valid)
    tl.store(partial.sum + at, state.sum, mask=valid)


@triton.jit
def tokens_of(batch):
    """Number of query tokens of all sequences; later tokens of the call are padding."""
    return tl.load(batch.query_starts + batch.num_seqs).to(tl.int32)


@triton.jit
def clear_padding(out, lse, batch, live, dim, S: tl.constexpr):
    """Write output 0 and log-sum-exp -inf to tokens from `live` on, which are padding; programs share the rows."""
    HEADS: tl.constexpr = S.KV_HEADS * S.GROUP
    for row in range(live * HEADS + tl.program_id(0), batch.num_tokens * HEADS, tl.num_programs(0)):
        token = tl.cast(row // HEADS, tl.int64)
        head = row % HEADS
        if HEADS > MAX_HEADS_OF_NARROW_ROWS or out.WIDE is not None:
            head = tl.cast(head, tl.int64)
        zero = encode(dim * 0.0, out.FP8, out.ptr.dtype.element_ty)
        tl.store(out.ptr + token * out.stride_token + head * out.stride_head + dim, zero, mask=dim < S.VALUE_DIM)
        if lse is not None:
            tl.store(lse + token * HEADS + head, float("-inf"))
