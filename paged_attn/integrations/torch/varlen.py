"""The call that torch makes to a FlashAttention implementation, as one call of paged_attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...api import paged_attention
from ..flash_attn.common_call import dense, told
from ..flash_attn.varlen import Keys, ragged, same

# An argument's name in errors of paged_attention -> its name in varlen_attn.
NAMES = {
    "q": "query", "k_cache": "key", "v_cache": "value", "k_new": "key", "v_new": "value", "page_table": "block_table",
    "seq_lens": "seqused_k", "cu_seqlens_q": "cu_seq_q", "max_seqlen_q": "max_q", "max_seqlen_k": "max_k",
    "softmax_scale": "scale",
}  # fmt: skip


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    out: Tensor | None = None,
    **unknown: Any,
) -> tuple[Tensor, Tensor]:
    """Return (out [tokens, heads, head_dim], LSE [heads, tokens]) for the arguments of aten::_flash_attention_forward.

    Raises: NotImplementedError naming a feature that this library lacks, or an argument of a later torch.
    """
    refused = refusal(cum_seq_q, dropout_p, return_debug_mask, unknown)
    if refused:
        raise NotImplementedError(f"paged_attn as torch's flash attention: {refused}")
    assert cum_seq_q is not None
    invariant = num_splits == 1  # torch's callers thus ask for results that do not depend on the batch
    query, key, value = dense(query), dense(key), dense(value)
    keys, seq_lens = _keys(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, seqused_k, block_table, invariant)
    left, right = (-1 if x is None or x < 0 else x for x in (window_size_left, window_size_right))
    nothing_ahead = max_q == 1 or is_causal or right == 0
    # A causal mask becomes a window, because causal=True of paged_attention needs at least as many keys as queries.
    result = told(
        NAMES,
        paged_attention,
        query,
        keys.k,
        keys.v,
        keys.page_table,
        seq_lens,
        cum_seq_q,
        max_seqlen_q=max_q,
        max_seqlen_k=max_k,
        k_new=keys.k.squeeze(1) if keys.new else None,
        v_new=keys.v.squeeze(1) if keys.new else None,
        softmax_scale=scale,
        causal=False,
        window_size=(left, 0 if is_causal else right),
        alibi_slopes=alibi_slopes,
        alibi_symmetric=alibi_slopes is not None and not nothing_ahead,
        out=out,
        return_lse=True,
        batch_invariant=invariant,
    )
    return result[0], result[1].t().contiguous()


def refusal(cum_seq_q: Tensor | None, dropout_p: float, debug: bool, unknown: dict[str, Any]) -> str | None:
    """Reason why this library does not serve a call, in torch's names; None if it does."""
    if cum_seq_q is None:
        return "cum_seq_q is None; batches without it, of scaled_dot_product_attention, are not served"
    if dropout_p:
        return f"there is no dropout, got dropout_p = {dropout_p}"
    if debug:
        return "there is no debug mask, got return_debug_mask = True"
    for name, given in unknown.items():
        if given is not None and given is not False:
            return f"this torch's argument {name} is not known"
    return None


def _keys(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor, cum_seq_k: Tensor | None, max_q: int, max_k: int,
    seqused_k: Tensor | None, block_table: Tensor | None, invariant: bool,
) -> tuple[Keys, Tensor]:  # fmt: skip
    """Keys and values as paged_attention reads them, and the number of keys of each sequence [seqs]."""
    if block_table is not None:
        if seqused_k is None:
            raise NotImplementedError("paged_attn as torch's flash attention: block_table needs seqused_k")
        return Keys(key, value, block_table), seqused_k
    if cum_seq_k is None:
        raise NotImplementedError("paged_attn as torch's flash attention: cum_seq_k is None without a block_table")
    lens = cum_seq_k[1:] - cum_seq_k[:-1] if seqused_k is None else seqused_k
    # Kernels read new keys (k_new) in place.  Batch-invariant calls take no new keys, so their keys are read as pages.
    if seqused_k is None and not invariant and query.shape[0] == key.shape[0] and same(cum_seq_q, cum_seq_k):
        return Keys(key.unsqueeze(1), value.unsqueeze(1), lens[:, None], new=True), lens
    rows = max_q * (query.shape[1] // max(key.shape[1], 1))
    return ragged(key, value, cum_seq_k, min(max_k, key.shape[0]), rows), lens


def rest(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the operator's last three results: two states of dropout, and a debug mask.  No caller reads them."""
    state = torch.empty(2, dtype=torch.uint64, device=query.device)
    return state, torch.empty((), dtype=torch.uint64, device=query.device), query.new_empty(0)
