"""The kernel that norms queries, keys and values, rotates queries and keys, and writes keys and values into the cache.

A head of D dims is loaded in runs: tiles [H, N] of H heads of one token.  Rotary halves (GPT-NeoX) are two runs, so a
thread holds both dims of a pair; rotary pairs of neighbours (GPT-J) are one run.  Dims without rotation are one more
run.
Weights and angles are loaded for each head of a tile.  They then have the run's layout, and no barrier is needed.
Norm and rotation are float32.  Only the stored result is rounded, as in vLLM's csrc/fused_qknorm_rope_kernel.cu.
Separate operators of norm and rotation, which vLLM has, too, round the norm's result before the rotation.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..common.decoding import decode
from ..common.encoding import (
    encode,
    encode_steps,
    magnitude_of_row,
    over_scale,
    quotient,
    scale_of_magnitude,
    steps_of_range,
    with_zero,
)
from ..common.numerics import in_parts, scale_of, square, sum_in_pairs, together
from ..common.output import MAX_HEADS_OF_NARROW_ROWS


class HeadRuns(NamedTuple):
    """Compile-time constants of the queries, of the keys or of the values."""

    HEADS: int
    BLOCK: int  # heads of a program, a power of two
    FIRST: int  # first of these heads in the tensor; a packed tensor has queries, then keys, then values
    GROUP: int  # heads that share a scale
    DIMS: int
    AT: int  # first of these dims in a head of the cache; the rest of a latent key lies behind the values
    STARTS: tuple[int, ...]  # first dim of each run
    SIZES: tuple[int, ...]  # dims of each run
    PADDED: tuple[int, ...]  # SIZES rounded up to powers of two


class Pairs(NamedTuple):
    """Compile-time constants of the rotary embedding."""

    INTERLEAVED: bool  # dims 0 and 1 are a pair (GPT-J); False: dims 0 and PAIRS (GPT-NeoX)
    PAIRS: int
    PADDED: int  # PAIRS rounded up to a power of two
    HEIGHT: Any  # mRoPE: first pair with positions[1]; None: one position for all pairs
    WIDTH: Any  # first pair with positions[2]


@triton.jit
def dims_of(H: tl.constexpr, i: tl.constexpr, TOGETHER: tl.constexpr = 1):
    """(elements [N] of run i, mask [N] of elements that exist); an element has TOGETHER dims."""
    element = tl.arange(0, H.PADDED[i] // TOGETHER)
    return H.STARTS[i] // TOGETHER + element, element < H.SIZES[i] // TOGETHER


@triton.jit
def load_heads(rows, token, head, H: tl.constexpr):
    """Load heads [H] of one token: a tuple of float32 runs [H, N]."""
    at = head + H.FIRST
    if H.FIRST + H.HEADS > MAX_HEADS_OF_NARROW_ROWS or rows.WIDE is not None:
        at = at.to(tl.int64)
    source = rows.ptr + token * rows.stride_token + (at * rows.stride_head)[:, None]
    runs = ()
    for i in tl.static_range(len(H.SIZES)):
        dim, inside = dims_of(H, i)
        x = tl.load(source + dim[None, :], mask=(head < H.HEADS)[:, None] & inside[None, :], other=0)
        runs = runs + (decode(x, rows.FP8, tl.float32, False),)  # type: ignore[assignment]
    return runs


@triton.jit
def normed(runs, norm, head, H: tl.constexpr, of: tl.constexpr):
    """RMS norm of each head, with statistics in float32.  norm: a Norm, or None for no norm.  of: type of the rows."""
    if norm is None:
        return runs
    else:
        squares = sum_in_pairs(square(runs[0], of))
        for i in tl.static_range(1, len(H.SIZES)):
            squares += sum_in_pairs(square(runs[i], of))
        inverse = tl.rsqrt(squares / H.DIMS + norm.eps)
        done = ()
        for i in tl.static_range(len(H.SIZES)):
            dim, inside = dims_of(H, i)
            at = (norm.weight + dim)[None, :] + tl.zeros_like(head)[:, None]
            weight = decode(tl.load(at, mask=inside[None, :], other=0), 0, tl.float32, False)
            done = done + (runs[i] * inverse[:, None] * (weight + norm.offset),)  # type: ignore[assignment]
        return done


@triton.jit
def angles_of(rotary, token, head, T: tl.constexpr):
    """(cosines [H, N], sines [H, N]) of one token, float32, the same for all heads [H]; () where nothing is rotated.

    Positions outside the table take its nearest row.
    """
    if T is None:
        return ()
    else:
        pair = tl.arange(0, T.PADDED)
        if rotary.positions is None:
            row = token
        else:
            at = rotary.positions + token
            if T.HEIGHT is not None:
                section = tl.where(pair < T.HEIGHT, 0, tl.where(pair < T.WIDTH, 1, 2))
                at += section.to(tl.int64) * rotary.positions_stride
            row = tl.minimum(tl.maximum(tl.load(at).to(tl.int64), 0), rotary.length - 1)
        at = (rotary.table + row * rotary.stride + pair)[None, :] + tl.zeros_like(head)[:, None]
        inside = (pair < T.PAIRS)[None, :]
        cos = tl.load(at, mask=inside, other=0)
        sin = tl.load(at + T.PAIRS, mask=inside, other=0)
        return decode(cos, 0, tl.float32, False), decode(sin, 0, tl.float32, False)


@triton.jit
def rotated(runs, angles, T: tl.constexpr):
    """Rotate the first runs by the angles (cosines, sines) [H, N]; T is None where nothing is rotated."""
    if T is None:
        return runs
    else:
        cos, sin = angles
        if T.INTERLEAVED:
            a, b = in_parts(runs[0], 2)
            done = (together((a * cos - b * sin, b * cos + a * sin)),)
        else:
            done = (runs[0] * cos - runs[1] * sin, runs[1] * cos + runs[0] * sin)  # type: ignore[assignment]
        for i in tl.static_range(len(done), len(runs)):
            done = done + (runs[i],)  # type: ignore[assignment]
        return done


@triton.jit
def stored(x, head, number, ptr, stride, H: tl.constexpr, FP8: tl.constexpr, dtype: tl.constexpr):
    """A run [H, N] as elements of a tensor, rounded to nearest even; fp8 and int8 elements are x / scale, clamped."""
    if FP8 > 0:
        scale = scale_of(number, ptr, stride, tl.minimum(head, H.HEADS - 1) // H.GROUP)
        x = quotient(x, (tl.zeros_like(head).to(tl.float32) + scale)[:, None])
    return encode(x, FP8, dtype)


@triton.jit
def store_queries(out, runs, token, head, scales, H: tl.constexpr):
    """Store the queries [H, D] of one token."""
    at = head
    if H.HEADS > MAX_HEADS_OF_NARROW_ROWS or out.WIDE is not None:
        at = at.to(tl.int64)
    target = out.ptr + token * out.stride_token + (at * out.stride_head)[:, None]
    for i in tl.static_range(len(H.SIZES)):
        dim, inside = dims_of(H, i)
        x = stored(
            runs[i], head, scales.query, scales.query_ptr, scales.query_stride, H, out.FP8, out.ptr.dtype.element_ty
        )
        tl.store(target + dim[None, :], x, mask=(head < H.HEADS)[:, None] & inside[None, :])


@triton.jit
def store_scales(kv, runs, page, slot, head, H: tl.constexpr):
    """Compute the scales [H] of heads, a tuple of runs [H, N], store them into the token's slot, and return them.

    Returns (scales,), for int4 (scales, zero points).
    """
    magnitude = magnitude_of_row(runs[0])
    for i in tl.static_range(1, len(runs)):
        magnitude = tl.maximum(magnitude, magnitude_of_row(runs[i]))
    if kv.FP8 == 4:
        least, most = tl.min(runs[0], 1), tl.max(runs[0], 1)
        for i in tl.static_range(1, len(runs)):
            least, most = tl.minimum(least, tl.min(runs[i], 1)), tl.maximum(most, tl.max(runs[i], 1))
        of_slot = steps_of_range(least, most, magnitude)
        scale = with_zero(of_slot[0], of_slot[1])
    else:
        scale = scale_of_magnitude(magnitude, kv.FP8, kv.scale_ptr.dtype.element_ty)
        of_slot = (scale,)
    to = kv.scale_ptr + page * kv.scale_stride_page + slot * kv.scale_stride_slot
    tl.store(to + head.to(tl.int64) * kv.scale_stride_head, scale, mask=head < H.HEADS)
    return of_slot


@triton.jit
def store_scaled(kv, runs, of_slot, page, slot, head, H: tl.constexpr):
    """Store keys or values [H, D] of one token into its slot, divided by their scales `of_slot` (`store_scales`)."""
    TOGETHER: tl.constexpr = 2 if kv.FP8 == 4 else 1
    target = kv.ptr + page * kv.stride_page + slot * kv.stride_slot + (head.to(tl.int64) * kv.stride_head)[:, None]
    for i in tl.static_range(len(H.SIZES)):
        element, inside = dims_of(H, i, TOGETHER)
        element += H.AT // TOGETHER
        at = target + (element // kv.RUN * kv.stride_run + element % kv.RUN)[None, :]
        if kv.FP8 == 4:
            x = encode_steps(runs[i], of_slot[0], of_slot[1])
        else:
            x = encode(over_scale(runs[i], of_slot[0]), kv.FP8, kv.ptr.dtype.element_ty)
        tl.store(at, x, mask=(head < H.HEADS)[:, None] & inside[None, :])


@triton.jit
def store_new(kv, runs, page, slot, head, number, ptr, stride, H: tl.constexpr):
    """Store keys or values [H, D] of one token into its slot."""
    target = kv.ptr + page * kv.stride_page + slot * kv.stride_slot + (head.to(tl.int64) * kv.stride_head)[:, None]
    for i in tl.static_range(len(H.SIZES)):
        dim, inside = dims_of(H, i)
        dim += H.AT
        x = stored(runs[i], head, number, ptr, stride, H, kv.FP8, kv.ptr.dtype.element_ty)
        at = target + (dim // kv.RUN * kv.stride_run + dim % kv.RUN)[None, :]
        tl.store(at, x, mask=(head < H.HEADS)[:, None] & inside[None, :])


@triton.jit
def write_queries(query, out, token, head, rotary, norm, scales, Q: tl.constexpr, T: tl.constexpr):
    """Norm, rotate and store query heads [H] of one token."""
    runs = load_heads(query, token, head, Q)
    angles = angles_of(rotary, token, head, T)
    runs = normed(runs, norm, head, Q, query.ptr.dtype.element_ty)
    store_queries(out, rotated(runs, angles, T), token, head, scales, Q)


@triton.jit
def write_new(
    new_key, new_value, cache, slot_mapping, token, head, rotary, key_norm, value_norm, scales,
    PAGE: tl.constexpr, K: tl.constexpr, V: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Norm and rotate keys, and norm values, of KV heads [H] of one token, and store both into the token's slot."""
    keys = load_heads(new_key, token, head, K)
    values = () if cache.value.ptr is None else load_heads(new_value, token, head, V)
    at = tl.load(slot_mapping + token).to(tl.int64)
    angles = angles_of(rotary, token, head, T)
    if at >= 0:
        page, slot = at // PAGE, at % PAGE
        keys = rotated(normed(keys, key_norm, head, K, new_key.ptr.dtype.element_ty), angles, T)
        if cache.value.ptr is not None:
            values = normed(values, value_norm, head, V, new_value.ptr.dtype.element_ty)
        if cache.key.SCALED:
            whole = keys + values if K.AT > 0 else keys  # a latent and its rotated part have one scale
            of_keys = store_scales(cache.key, whole, page, slot, head, K)
            store_scaled(cache.key, keys, of_keys, page, slot, head, K)
            if K.AT > 0:
                store_scaled(cache.value, values, of_keys, page, slot, head, V)
        else:
            store_new(cache.key, keys, page, slot, head, scales.key, scales.key_ptr, scales.key_stride, K)
        if cache.value.ptr is not None:
            if not cache.value.SCALED:
                store_new(cache.value, values, page, slot, head, scales.value, scales.value_ptr, scales.value_stride, V)
            elif K.AT == 0:
                of_values = store_scales(cache.value, values, page, slot, head, V)
                store_scaled(cache.value, values, of_values, page, slot, head, V)


@triton.jit
def write_qkv_kernel(
    query, new_key, new_value, out, cache, slot_mapping, rotary, query_norm, key_norm, value_norm, scales,
    PAGE: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, T: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write some query heads of one token, or some of its KV heads.

    A negative slot skips the keys and values of a token, not its queries.  Values are not written if their cache has a
    ptr of None.
    A program issues its loads early.  If positions are given, it waits for memory twice: for the position, then for the
    position's angles.
    DEPENDENT: a dependent launch, which begins before the previous launch ends, and lets the next one do the same.
    """
    QUERIES: tl.constexpr = (Q.HEADS + Q.BLOCK - 1) // Q.BLOCK
    PROGRAMS: tl.constexpr = QUERIES + (K.HEADS + K.BLOCK - 1) // K.BLOCK
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = (tl.program_id(0) // PROGRAMS).to(tl.int64)
    block = tl.program_id(0) % PROGRAMS
    if block < QUERIES:
        write_queries(query, out, token, block * Q.BLOCK + tl.arange(0, Q.BLOCK), rotary, query_norm, scales, Q, T)
    else:
        write_new(
            new_key, new_value, cache, slot_mapping, token, (block - QUERIES) * K.BLOCK + tl.arange(0, K.BLOCK),
            rotary, key_norm, value_norm, scales, PAGE, K, V, T,
        )  # fmt: skip
