"""New keys and values into the cache."""

import triton
import triton.language as tl

from .numerics import decode, encode, factor


@triton.jit
def store_heads(kv, rows, token, kv_head, page, slot, scale, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    """Some heads [H, D] of one token into its slot, scaled and encoded as the cache wants them."""
    dim = tl.arange(0, DIM)
    inside = (kv_head < KV_HEADS)[:, None] & (dim < HEAD_DIM)[None, :]
    ptr = rows.ptr + token * rows.stride_token + kv_head[:, None] * rows.stride_head + dim[None, :]
    x = decode(tl.load(ptr, mask=inside, other=0), rows.FORMAT, tl.float32, False)
    if scale is not None:
        divisor = tl.zeros_like(kv_head).to(tl.float32) + factor(scale, tl.minimum(kv_head, KV_HEADS - 1))
        x = x / divisor[:, None]
    at = page * kv.stride_page + slot * kv.stride_slot + kv_head.to(tl.int64)[:, None] * kv.stride_head
    at += (dim // kv.RUN * kv.stride_run + dim % kv.RUN)[None, :]
    tl.store(kv.ptr + at, encode(x, kv.FORMAT, kv.ptr.dtype.element_ty), mask=inside)


@triton.jit
def write_kv_kernel(new_key, new_value, key, value, slot_mapping, key_scale, value_scale, PAGE: tl.constexpr,
                    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr):  # fmt: skip
    """One token x some of its heads; a negative slot skips the token."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.load(slot_mapping + token).to(tl.int64)
    if at >= 0:
        kv_head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        store_heads(key, new_key, token, kv_head, at // PAGE, at % PAGE, key_scale, KV_HEADS, HEAD_DIM, DIM)
        store_heads(value, new_value, token, kv_head, at // PAGE, at % PAGE, value_scale, KV_HEADS, HEAD_DIM, DIM)
