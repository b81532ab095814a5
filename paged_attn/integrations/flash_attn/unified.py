"""unified_attention: the function of vLLM's Triton backend and of AITER."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .common_call import attend, bound, int32, pairs, twice, window_of
from .orders import bind


def unified_attention(q: Tensor, k: Tensor, v: Tensor, *args: Any, **keywords: Any) -> Tensor:
    """Attention of ragged queries over pages, with the argument order of vLLM or AITER.

    Args:
        q: [tokens, heads, head_dim].
        out: [tokens, heads, head_dim]; written and returned.
        k: [pages, page_size, kv_heads, head_dim], dtype of q, or fp8.
        v: as k.
        cu_seqlens_q: [seqs + 1] int32 | int64.
        seqused_k: [seqs] int32 | int64.
        block_table: [seqs, max_pages] int32 | int64.
        max_seqlen_q: upper bound, int.
        max_seqlen_k: upper bound, int.
        causal: True, False, or bool [seqs].
        window_size: (left, _).  A query sees `left` keys before it and, without causality, `left` keys after it.
        mm_prefix_range: [seqs, R, 2] int32 | int64; ranges (first, last), both included, whose tokens see each other.
            A range of one token or none has no effect.
        mm_prefix_clamp_sliding_window: whether the window also hides keys inside ranges.
        rswa_prefix_lens: [seqs]; number of first keys that stay visible outside a window of rswa_window keys, the
            query's own included.  This window replaces window_size.  Calls must be causal, without ranges and slopes.
        chunk_lookback: number of earlier chunks that a query sees beside its own, in place of the window.  Chunks have
            (left + 1) // (chunk_lookback + 1) positions.  Without causality, a query also sees all later keys.
            -1, or a window without limit: no chunks.
        q_descale, k_descale, v_descale: as in flash_attn_varlen_func.
        output_scale: float or [1] float32, for an fp8 out.

    The arguments softmax_scale, softcap, alibi_slopes, qq_bias and sinks are as in paged_attention.

    ALiBi follows vLLM's kernel: slope * (position of the key - position of the query), also for later keys.

    Returns: out.
    Raises: as flash_attn_varlen_func.  Also refused: use_alibi_sqrt, quantisation by token and head, shuffled_kv_cache
        and skip_reduce.
    Source: vLLM's triton_unified_attention, AITER's unified_attention (their arguments).
    """
    given, _ = bind("unified_attention", args, keywords)
    for name in ("out", "cu_seqlens_q", "seqused_k", "page_table"):
        if name not in given:
            raise TypeError(f"unified_attention() needs {'block_table' if name == 'page_table' else name}")
    table, lens, starts = given["page_table"], int32(given["seqused_k"]), int32(given["cu_seqlens_q"])
    most, changed = bound(given.get("max_seqlen_q")), _behind(given)
    if "prefix_lens" in changed and most != 1:
        table, lens, starts, *behind = split(changed["prefix_lens"], table, lens, starts, len(q))
        changed["prefix_lens"], changed["query_positions"] = behind
    out, _ = attend(
        q, k, v, table, lens, starts, changed, max_seqlen_q=most, max_seqlen_k=bound(given.get("max_seqlen_k")),
        symmetric=False,
    )  # fmt: skip
    return out


def _behind(given: dict[str, Any]) -> dict[str, Any]:
    """Convert out_scale, windows, prefixes, ranges and chunks to the form that `attend` takes."""
    changed: dict[str, Any] = {}
    scale, left = given.get("out_scale"), window_of(given)[0]
    if isinstance(scale, Tensor):
        changed["out_scale"] = scale.reshape(1)
    if given.get("rswa_window") is not None and given.get("rswa_prefix_lens") is not None:
        changed["prefix_lens"] = int32(given["rswa_prefix_lens"])
        left = int(given["rswa_window"]) - 1
    causal = given.get("causal", False)
    if "prefix_lens" in changed:
        beside = {"mm_prefix_range": given.get("mm_prefix_range"), "alibi_slopes": given.get("alibi_slopes")}
        if asked := [name for name, value in beside.items() if value is not None]:
            raise ValueError(f"unified_attention() of paged_attn does not take {', '.join(asked)} beside rswa_window")
        if causal is not True:
            raise ValueError("unified_attention() of paged_attn needs causal = True beside rswa_window")
    # If all sequences are causal, a window has no limit ahead, because it never hides later keys of a range.
    # Otherwise it reaches as far ahead as back.
    changed["window_size"] = (left, -1 if causal is True else left)
    if (lookback := given.get("chunk_lookback", -1)) > -1 and left >= 0:
        if asked := [name for name in ("mm_prefix_range", "rswa_prefix_lens") if given.get(name) is not None]:
            raise ValueError(f"unified_attention() of paged_attn does not take {asked[0]} beside chunk_lookback")
        from ..score_mods import look_back

        changed |= look_back(int(lookback), left + 1, causal is True)
    if given.get("mm_prefix_range") is not None:
        changed["spans"] = spans_of(given["mm_prefix_range"])
        changed["clip_spans"] = bool(given.get("mm_prefix_clamp_sliding_window", False))
    return given | changed


def spans_of(ranges: Tensor) -> Tensor:
    """Spans from vLLM's ranges [seqs, R, 2], both ends included.  A range of one token or none becomes (-1, -1)."""
    first, last = ranges.unbind(-1)
    there = first < last
    return torch.stack([torch.where(there, first, -1), torch.where(there, last + 1, -1)], -1)


class Split(NamedTuple):
    """Arguments of paged_attention after each sequence has become two: queries in its prompt, then later queries."""

    page_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    prefix_lens: Tensor
    query_positions: Tensor


def split(prompts: Tensor, page_table: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor, tokens: int) -> Split:
    """Split sequences at their prompt lengths [seqs] int32, for R-SWA, without a host sync.

    In R-SWA, keys of the prompt stay visible outside the window of generated tokens (vLLM has this for Unlimited-OCR).
    A query sees earlier keys that lie in the prompt, or less than a window before the query.  prefix_lens of
    paged_attention shows the whole prefix to all queries.  But a query in the prompt must not see the prompt's later
    keys.

    Queries in the prompt therefore become a separate sequence.  Its prefix ends before its first query.  All its
    queries get the position of the first one, so that the window hides no query's key from another query.  Causal
    masks go by the order of keys, which does not change.

    If a sequence has no queries in its prompt, or none after its prompt, the sequence for these queries has length 0.
    """
    if not len(seq_lens):  # all tokens are padding
        nowhere = torch.zeros(tokens, dtype=torch.int32, device=seq_lens.device)
        return Split(page_table, seq_lens.int(), cu_seqlens_q.int(), prompts.int(), nowhere)
    begin, end = cu_seqlens_q[:-1], cu_seqlens_q[1:]
    contexts = seq_lens - (end - begin)
    within = torch.minimum((prompts - contexts).clamp_min(0), end - begin)  # queries in the prompt
    middle = begin + within
    token = torch.arange(tokens, dtype=torch.int32, device=begin.device)
    row = torch.searchsorted(end.contiguous(), token, right=True).clamp_max(len(end) - 1)
    stands = contexts[row] + torch.where(token < middle[row], 0, token - begin[row])
    lens = pairs(torch.where(within > 0, contexts + within, 0), torch.where(middle < end, seq_lens, 0))
    starts = torch.cat([pairs(begin, middle), end[-1:].int()])
    return Split(twice(page_table), lens, starts, pairs(contexts, prompts), stands.int())
