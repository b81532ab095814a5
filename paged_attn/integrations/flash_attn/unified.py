"""unified_attention: the function of vLLM's Triton backend and of AITER."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .call import attend, bound, int32
from .orders import bind


def unified_attention(q: Tensor, k: Tensor, v: Tensor, *args: Any, **keywords: Any) -> Tensor:
    """Attention of ragged queries over pages, in vLLM's and AITER's orders.

    Args:
        q, out: [tokens, heads, head_dim]; out is written and returned.
        k, v: [pages, page_size, kv_heads, head_dim], dtype of q, or fp8.
        cu_seqlens_q [seqs + 1], seqused_k [seqs], block_table [seqs, max_pages]: int32 | int64.
        max_seqlen_q, max_seqlen_k: upper bounds, ints.
        softmax_scale, causal, window_size, softcap, alibi_slopes, qq_bias, sinks: as in paged_attention.
        q_descale, k_descale, v_descale: as in flash_attn_varlen_func.
        output_scale: float or [1] float32, for an fp8 out.

    Returns: out.
    Raises: as flash_attn_varlen_func; refused are also mm_prefix_range, rswa_window, use_alibi_sqrt, chunk_lookback,
        quantisation by token and head, shuffled_kv_cache and skip_reduce.
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
    """Here an output scale may be a tensor of no axis."""
    scale = given.get("out_scale")
    return given | {"out_scale": scale.reshape(1)} if isinstance(scale, Tensor) else given
