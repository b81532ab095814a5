"""unified_attention: the function of vLLM's Triton backend and of AITER."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .call import attend, bound, int32, window_of
from .orders import bind


def unified_attention(q: Tensor, k: Tensor, v: Tensor, *args: Any, **keywords: Any) -> Tensor:
    """Attention of ragged queries over pages, in vLLM's and AITER's orders.

    Args:
        q, out: [tokens, heads, head_dim]; out is written and returned.
        k, v: [pages, page_size, kv_heads, head_dim], dtype of q, or fp8.
        cu_seqlens_q [seqs + 1], seqused_k [seqs], block_table [seqs, max_pages]: int32 | int64.
        max_seqlen_q, max_seqlen_k: upper bounds, ints.
        softmax_scale, softcap, alibi_slopes, qq_bias, sinks: as in paged_attention.
        causal: True, False, or bool [seqs].
        window_size: (left, _): a query sees so many keys before it, and where it is not causal as many behind it.
        mm_prefix_range: [seqs, R, 2] int32 | int64; ranges, their last number included, whose queries see each other;
            a window bounds them where mm_prefix_clamp_sliding_window is True.  Of one token or none: no range.
        rswa_prefix_lens [seqs], rswa_window: keys that stay visible behind a window of so many keys.
        q_descale, k_descale, v_descale: as in flash_attn_varlen_func.
        output_scale: float or [1] float32, for an fp8 out.

    Returns: out.
    Raises: as flash_attn_varlen_func; refused are also use_alibi_sqrt, chunk_lookback, quantisation by token and
        head, shuffled_kv_cache and skip_reduce.
    Source: vLLM's triton_unified_attention, AITER's unified_attention (their arguments).
    """
    given, _ = bind("unified_attention", args, keywords)
    for name in ("out", "cu_seqlens_q", "seqused_k", "page_table"):
        if name not in given:
            raise TypeError(f"unified_attention() needs {'block_table' if name == 'page_table' else name}")
    out, _ = attend(
        q, k, v, given["page_table"], int32(given["seqused_k"]), int32(given["cu_seqlens_q"]), _behind(given),
        max_seqlen_q=bound(given.get("max_seqlen_q")), max_seqlen_k=bound(given.get("max_seqlen_k")),
    )  # fmt: skip
    return out


def _behind(given: dict[str, Any]) -> dict[str, Any]:
    """What has another form here: scales of no axis, windows of what is not causal, prefixes and ranges."""
    changed: dict[str, Any] = {}
    scale, left = given.get("out_scale"), window_of(given)[0]
    if isinstance(scale, Tensor):
        changed["out_scale"] = scale.reshape(1)
    if given.get("rswa_window") is not None and given.get("rswa_prefix_lens") is not None:
        changed["prefix_lens"] = int32(given["rswa_prefix_lens"])
        left = int(given["rswa_window"]) - 1
    causal = given.get("causal", False)
    # Without causality, of all sequences or of some, a window looks as far ahead as back; it never hides later keys
    # of a range.
    changed["window_size"] = (left, -1 if causal is True else left)
    if given.get("mm_prefix_range") is not None:
        changed["spans"] = spans_of(given["mm_prefix_range"])
        changed["clip_spans"] = bool(given.get("mm_prefix_clamp_sliding_window", False))
    return given | changed


def spans_of(ranges: Tensor) -> Tensor:
    """vLLM's ranges [seqs, R, 2], their last number included, as spans; of one token or none: no span."""
    first, last = ranges.unbind(-1)
    there = first < last
    return torch.stack([torch.where(there, first, -1), torch.where(there, last + 1, -1)], -1)
