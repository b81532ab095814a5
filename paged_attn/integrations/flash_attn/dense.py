"""flash_attn_func: batches in which all sequences have len_q queries and len_k keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...checks.cures import of_shape
from .common_call import FP8, attend, dense, even_starts, latent, rows_as_pages
from .orders import bind

ROWS = ("batch", "len_k", "kv_heads")


def batches(name: str, x: Any, axes: tuple[str, ...]) -> None:
    """Check that x is a tensor with these axes."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor [{', '.join(axes)}], got {type(x).__name__}")
    if x.ndim != len(axes):
        given = f"{list(x.shape)}{of_shape(name, x.shape, axes, {})}"
        raise ValueError(f"{name} must be [{', '.join(axes)}], got {given}")


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *args: Any, **keywords: Any) -> Any:
    """FlashAttention of a dense batch, with the argument order of FlashAttention-2, -3 or -4, told apart by types.

    Args:
        q: [batch, len_q, heads, head_dim].
        k, v: [batch, len_k, kv_heads, head_dim].
        qv: [batch, len_q, heads, rank], for latent attention.

    Dtypes and all other arguments are as in flash_attn_varlen_func.

    Returns: [batch, len_q, heads, head_dim]; the log-sum-exp is [batch, heads, len_q].
    Raises: as flash_attn_varlen_func.
    Source: Dao 2023; Shah et al. 2024.
    """
    given, version = bind("flash_attn_func", args, keywords)
    for name, x, axes in (("q", q, ("batch", "len_q", "heads")), ("k", k, ROWS), ("v", v, ROWS)):
        batches(name, x, (*axes, "head_dim"))
    batch, len_q, heads, _ = q.shape
    q, two_parts = q.flatten(0, 1), given.get("qv") is not None
    if two_parts:
        q, k, v = latent("flash_attn_func", q, k, v, given, own=True)
    q, k, v = dense(q), dense(k), dense(v)
    len_k = k.shape[1]
    lens = torch.full((batch,), len_k, dtype=torch.int32, device=q.device)
    starts = even_starts(batch, len_q, q.device)
    # a page is a whole sequence here, and pages are slower than new keys if their size is no multiple of 8
    new = len_q == len_k and len_k % 8 != 0 and k.dtype not in FP8 and not two_parts
    keys = (k.flatten(0, 1), v.flatten(0, 1)) if new else (k, v)
    table = lens[:, None] if new else rows_as_pages(None, batch, q.device)
    if len_k == 0:  # a cache needs a page of at least one slot, which no query sees
        none = k.new_zeros((1, 1, k.shape[2], max(k.shape[-1], v.shape[-1])))
        keys, table = (none[..., : k.shape[-1]], none[..., : v.shape[-1]]), lens[:, None]
    probs = bool(given.get("return_attn_probs", False))
    wanted = probs or bool(given.get("return_lse", False))
    out, lse = attend(
        q, *keys, table, lens, starts, given, max_seqlen_q=len_q, max_seqlen_k=len_k, new=new, lse=wanted
    )  # fmt: skip
    out = out.view(batch, len_q, heads, v.shape[-1])
    if lse is not None:
        lse = lse.view(batch, len_q, heads).transpose(1, 2).contiguous()
    if version == "FA4":
        return out, lse
    if probs and version == "FA2":
        return out, lse, None
    return (out, lse) if wanted else out
