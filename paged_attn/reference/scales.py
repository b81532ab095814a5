"""Scales of heads, of tokens and of slots of the cache, zero points of int4, and rounding."""

from __future__ import annotations

import torch
from torch import Tensor

Scale = float | Tensor | None
INT4 = torch.uint8  # dtype of int4 caches: a byte has two dims, the earlier one in its lower bits
# Largest number of each format of at most a byte; larger numbers saturate at it.
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0, INT4: 15.0}


def per_kv_head(scale: Scale, num_kv_heads: int, like: Tensor) -> Tensor:
    """Return a scale as float64 [kv_heads]: None (1), a float, or a tensor [], [1], [kv_heads] or [1, kv_heads]."""
    return per_seq(scale, 1, num_kv_heads, like)[0]


def per_seq(scale: Scale, seqs: int, num_kv_heads: int, like: Tensor) -> Tensor:
    """Return a scale as float64 [seqs, kv_heads].  The scale is as `per_kv_head` takes it, or [seqs, kv_heads]."""
    value = torch.as_tensor(1.0 if scale is None else scale, dtype=torch.float64, device=like.device)
    return value.expand(seqs, num_kv_heads)


def per_token(q_scale: Scale, starts: list[int], num_kv_heads: int, q: Tensor) -> Tensor:
    """Return q_scale as float64 [tokens, kv_heads].  q_scale is as `per_seq` takes it, or has a row for each token.

    With a row for each token, q_scale is [tokens, 1] or [tokens, kv_heads], or, unless queries are fp8, [tokens].  If
    there are as many sequences as tokens, each row belongs to a token.  Sequence s has queries starts[s] to
    starts[s + 1] - 1.  Padding gets 1, unless each row belongs to a token.
    """
    tokens = len(q)
    if isinstance(q_scale, Tensor):
        if q_scale.ndim == 1 and q.dtype.itemsize > 1:
            q_scale = q_scale[:, None]
        if q_scale.ndim == 2 and len(q_scale) == tokens:
            return q_scale.double().expand(tokens, num_kv_heads)
    found = torch.ones(tokens, num_kv_heads, dtype=torch.float64, device=q.device)
    for start, end, scale in zip(starts, starts[1:], per_seq(q_scale, len(starts) - 1, num_kv_heads, q)):
        found[start:end] = scale
    return found


def by_slot(scale: Scale) -> bool:
    """Whether k_scale or v_scale has a number for each slot and KV head of the cache."""
    return isinstance(scale, Tensor) and scale.ndim == 3


def quantised(values: Tensor, like: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(stored numbers [tokens, kv_heads, dims], scales [tokens, kv_heads] in like's dtype) of a cache of this dtype.

    A scale is the largest magnitude of a token's head, divided by the largest number of dtype, in float32.  If like is
    float16, a scale is at most float16's largest number.  Numbers are divided by the scale as stored.  A number that is
    infinite or NaN makes the scale NaN.  Zeros are stored beside a scale of 0 or NaN.  int4: see `quantised_with_zero`.
    """
    if dtype == INT4:
        return quantised_with_zero(values)
    most = values.float().abs().amax(-1)
    scales = most / torch.full_like(
        most, LARGEST[dtype]
    )  # if this were a Python number, torch on a GPU would multiply by its inverse
    scales = torch.where(scales.isfinite(), scales.clamp(max=torch.finfo(like.dtype).max), torch.nan).to(like.dtype)
    by = scales.float()[..., None]
    return narrow(torch.where(by > 0, values.float() / by, 0.0), dtype), scales


def quantised_with_zero(values: Tensor) -> tuple[Tensor, Tensor]:
    """(bytes [tokens, kv_heads, dims / 2], scales [tokens, kv_heads] float32) of an int4 cache.

    number = (stored - zero point) * scale, with stored numbers and zero points 0 to 15.  The range goes from the least
    to the largest of 0 and the numbers of a token's head, so that 0 is exact.  The lowest four bits of a returned scale
    hold the zero point; the scale itself has zeros in their place.  NaN, infinity and a scale of 0 are as in
    `quantised`.
    """
    values = values.float()
    least, most = values.amin(-1).clamp(max=0.0), values.amax(-1).clamp(min=0.0)
    steps = torch.full_like(most, LARGEST[INT4])
    scales = most / steps - least / steps
    whole = values.isfinite().all(-1)
    bits = torch.where(whole, scales, torch.nan).view(torch.int32) & 0x7FFFFFF0
    scales = bits.view(torch.float32)
    by, usable = torch.where(scales > 0, scales, 1.0), scales > 0
    zero = torch.where(usable, (-least / by).round(), 0.0).clamp(0, 15)
    stored = torch.where(usable[..., None], (values / by[..., None]).round() + zero[..., None], 0.0).clamp(0, 15)
    stored = stored.to(torch.uint8).unflatten(-1, (-1, 2))
    return stored[..., 0] | stored[..., 1] << 4, (bits | zero.int()).view(torch.float32)


def scale_and_zero(scales: Tensor) -> tuple[Tensor, Tensor]:
    """(scales, zero points), both float64, from the float32 scales of an int4 cache."""
    bits = scales.contiguous().view(torch.int32)
    return (bits & -16).view(torch.float32).double(), (bits & 15).double()


def narrow(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast to the nearest number of dtype, or to the even one of two that are equally near; one-byte types saturate.

    int8 has no NaN, and stores 0 instead.
    """
    if dtype.itemsize == 1:
        values = values.clamp(-LARGEST[dtype], LARGEST[dtype])
    return values.round().nan_to_num(nan=0.0).to(dtype) if dtype == torch.int8 else values.to(dtype)
