"""The kernel that writes new keys and values into the cache."""

import triton
import triton.language as tl

from ..common.decoding import decode
from ..common.encoding import encode, encode_steps, over_scale, quotient, scales_by_row, steps_by_row, with_zero
from ..common.numerics import scale_of
from ..common.output import MAX_HEADS_OF_NARROW_ROWS


@triton.jit
def store_heads(
    kv, rows, token, kv_head, page, slot, number, ptr, stride,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Store heads [H, D] of one token into its slot, divided by the scale, if there is one, in the cache's type.

    Scales by slot are computed here, and stored, too; heads whose scale is 0 or NaN count as zeros.  A byte of int4 has
    two dims, and the lowest four bits of an int4 scale are the zero point.
    """
    dim = tl.arange(0, DIM)
    inside = (kv_head < KV_HEADS)[:, None] & (dim < HEAD_DIM)[None, :]
    head = kv_head.to(tl.int64) if KV_HEADS > MAX_HEADS_OF_NARROW_ROWS or rows.WIDE is not None else kv_head
    source = rows.ptr + token * rows.stride_token + head[:, None] * rows.stride_head + dim[None, :]
    x = decode(tl.load(source, mask=inside, other=0), rows.FP8, tl.float32, False)
    if kv.SCALED:
        if kv.FP8 == 4:
            step, zero = steps_by_row(x)
            by_slot = with_zero(step, zero)
        else:
            by_slot = scales_by_row(x, kv.FP8, kv.scale_ptr.dtype.element_ty)
        to = kv.scale_ptr + page * kv.scale_stride_page + slot * kv.scale_stride_slot
        tl.store(to + kv_head.to(tl.int64) * kv.scale_stride_head, by_slot, mask=kv_head < KV_HEADS)
        if kv.FP8 == 4:
            dim = tl.arange(0, DIM // 2)  # bytes, each of two dims
            inside = (kv_head < KV_HEADS)[:, None] & (dim < HEAD_DIM // 2)[None, :]
            x = encode_steps(x, step, zero)
        else:
            x = over_scale(x, by_slot)
    elif kv.FP8 > 0:
        scale = tl.zeros_like(kv_head).to(tl.float32) + scale_of(number, ptr, stride, tl.minimum(kv_head, KV_HEADS - 1))
        x = quotient(x, scale[:, None])
    at = page * kv.stride_page + slot * kv.stride_slot + kv_head.to(tl.int64)[:, None] * kv.stride_head
    at += (dim // kv.RUN * kv.stride_run + dim % kv.RUN)[None, :]
    tl.store(kv.ptr + at, encode(x, kv.FP8, kv.ptr.dtype.element_ty), mask=inside)


@triton.jit
def write_kv_kernel(
    new_key, new_value, cache, slot_mapping, scales,
    PAGE: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr, BLOCK_HEADS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write one token x BLOCK_HEADS of its KV heads.

    A negative slot skips the token.  Keys or values whose cache has a ptr of None are not written.
    DEPENDENT: a dependent launch, which begins before the previous launch ends, and lets the next one do the same.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    at = tl.load(slot_mapping + token).to(tl.int64)
    if at >= 0:
        kv_head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        if cache.key.ptr is not None:
            store_heads(
                cache.key, new_key, token, kv_head, at // PAGE, at % PAGE,
                scales.key, scales.key_ptr, scales.key_stride, KV_HEADS, HEAD_DIM, DIM,
            )  # fmt: skip
        if cache.value.ptr is not None:
            store_heads(
                cache.value, new_value, token, kv_head, at // PAGE, at % PAGE,
                scales.value, scales.value_ptr, scales.value_stride, KV_HEADS, VALUE_DIM, VALUE_PADDED,
            )  # fmt: skip
