"""Rows in and out: queries, results, log-sum-exp, the states of pieces."""

import triton
import triton.language as tl

from .numerics import LOG2E, decode, encode, in_parts, normalize, opaque, quotient, scale_of
from .records import Query, RowTile
from .softmax import finish, log_sum_exp

MAX_HEADS_OF_NARROW_ROWS = tl.constexpr(128)  # times a stride of rows that are not WIDE (layout.FAR_HEADS) fits 32 bits


@triton.jit
def addresses(rows, dim, tensor, HEAD_DIM: tl.constexpr, S: tl.constexpr):
    """Addresses [R, D] in Rows, and which of them exist."""
    return places(rows, dim, tensor.ptr, tensor.stride_token, tensor.stride_head, tensor.WIDE, HEAD_DIM, S)


@triton.jit
def places(rows, dim, ptr, stride_token, stride_head, WIDE: tl.constexpr, HEAD_DIM: tl.constexpr, S: tl.constexpr):
    """Addresses [R, D] and which of them exist: of PAIRED heads a row has one half of the dims."""
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
    """Queries in the compute type, in as many parts as the keys."""
    ptr, inside = addresses(rows, dim, query, S.HEAD_DIM, S)
    x = tl.load(ptr, mask=inside, other=0)
    if x.dtype == tl.bfloat16 and tl.bfloat16 != S.COMPUTE:
        x, unit = normalize(decode(x, query.FP8, tl.float32, S.NATIVE_FP8))
        return Query(in_parts(x.to(S.COMPUTE), PARTS), unit)
    else:
        x = decode(x, query.FP8, S.COMPUTE, S.NATIVE_FP8)
        if query.FP8 > 0 and PARTS == 2 and S.NATIVE_FP8:
            # from queries that were bytes it would conclude that keys are, and read them byte by byte, too
            x = opaque(x)
        return Query(in_parts(x, PARTS), tl.where(rows.valid, 1.0, 1.0))


@triton.jit
def rows_from(token, kv_head, row, valid, S: tl.constexpr):
    """Just enough of a RowTile to store rows [R], counted from a token on; token is int64."""
    return RowTile(token, kv_head, row // S.GROUP, row % S.GROUP, row, row, row, row, valid, 0, 0, 0, 0, 0, 0, 0)


@triton.jit
def quantize(x, scales, tensor):
    """Results as elements of the output; an fp8 one holds x / out_scale."""
    if tensor.FP8 > 0:
        x = quotient(x, scale_of(scales.out, scales.out_ptr, scales.out_stride, 0))
    return encode(x, tensor.FP8, tensor.ptr.dtype.element_ty)


@triton.jit
def store_lse(lse, rows, state, S: tl.constexpr):
    """Log-sum-exp of finished rows."""
    HEADS: tl.constexpr = S.KV_HEADS * S.GROUP
    at = rows.token * HEADS + rows.kv_head * S.GROUP + rows.index * HEADS + rows.member
    tl.store(lse + at, log_sum_exp(state.max, state.sum), mask=rows.valid)


@triton.jit
def times_logistic(x, power):
    """x / (1 + 2^power); x where that is 0."""
    return tl.where(x == 0, x, x / (1 + tl.exp2(power)))


@triton.jit
def gated(x, rows, dim, scales, S: tl.constexpr, TIMES_LOGISTIC: tl.constexpr = times_logistic):
    """Results [R, D] times the logistic function of their gate; 0, as of rows that saw nothing, whatever that holds."""
    if scales.gate_ptr is not None:
        WIDE: tl.constexpr = True  # its strides may be of any size
        ptr, inside = places(
            rows, dim, scales.gate_ptr, scales.gate_stride_token, scales.gate_stride_head, WIDE, S.VALUE_DIM, S
        )
        gate = tl.load(ptr, mask=inside, other=0.0).to(tl.float32)
        x = TIMES_LOGISTIC(x, gate * -LOG2E)
    return x


@triton.jit
def store_results(out, rows, dim, x, scales, S: tl.constexpr):
    """Results [R, D] of finished rows."""
    ptr, inside = addresses(rows, dim, out, S.VALUE_DIM, S)
    tl.store(ptr, quantize(x, scales, out), mask=inside)


@triton.jit
def store_rows(
    out, lse, rows, dim, state, scales, S: tl.constexpr, TIMES_LOGISTIC: tl.constexpr = times_logistic
):  # fmt: skip
    """Finished rows."""
    x = gated(finish(state.acc, state.sum[:, None]), rows, dim, scales, S, TIMES_LOGISTIC)
    store_results(out, rows, dim, x, scales, S)
    if lse is not None:
        store_lse(lse, rows, state, S)


@triton.jit
def store_partial(partial, at, valid, dim, state, S: tl.constexpr, ALL: tl.constexpr = False):
    """The state of one piece of a block at rows at [R]; where nothing was seen acc is left alone, unless ALL."""
    seen = valid
    if not ALL:
        seen &= state.sum != 0  # also where it is not a number
    tl.store(partial.acc + at[:, None] * S.VALUE_PADDED + dim[None, :], state.acc, mask=seen[:, None])
    tl.store(partial.max + at, state.max, mask=valid)
    tl.store(partial.sum + at, state.sum, mask=valid)


@triton.jit
def tokens_of(batch):
    """Query tokens of all sequences; what a call has beyond them is padding."""
    return tl.load(batch.query_starts + batch.num_seqs).to(tl.int32)


@triton.jit
def clear_padding(out, lse, batch, live, dim, S: tl.constexpr):
    """Rows past the last sequence's, of `live` tokens: output 0, log-sum-exp -inf; all programs share them."""
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
