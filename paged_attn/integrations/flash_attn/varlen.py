"""flash_attn_varlen_func: ragged queries over pages, over rows of a dense cache, or over ragged keys.

Also flash_attn_func: batches in which all sequences have len_q queries and len_k keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...checks.cures import of_shape
from ...strides import same_steps
from .common_call import FP8, attend, bound, dense, even_starts, int32, latent, pairs, rows_as_pages, twice
from .orders import bind

PAGE = 64  # page size of ragged keys that are copied
# Ragged keys and values that are read as pages are copied if the longest sequence has at least this number of rows
# (query tokens x query heads of a KV head).  Without the copy, pages have one token, and a prefill takes twice as long.
# At 800 TFLOP/s and 4 TB/s, a copy takes less than the added time from about 400 rows on.
ROWS = 512
# Arguments with an optional axis of sequences -> number of axes of a tensor that has this axis.
OF_SEQS = {"alibi_slopes": 2, "q_descale": 2, "k_descale": 2, "v_descale": 2, "dynamic_causal": 1}


class Keys(NamedTuple):
    """Keys and values as paged_attention reads them.  new: k and v are new keys and values, without a cache."""

    k: Tensor
    v: Tensor
    page_table: Tensor
    new: bool = False


def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, *args: Any, **keywords: Any) -> Any:
    """FlashAttention of ragged queries, with the argument order of FlashAttention-2, -3, -4, vLLM or SGLang.

    Types of positional arguments, and keywords, tell which order a call has.

    Causal masks and windows are aligned to the last key: query i of n sees positions up to lens - n + i, inclusive.

    Args:
        q: [tokens, heads, head_dim] float16 | bfloat16 | float32, or fp8 with bfloat16 results unless out is given.
        k, v: [pages, page_size, kv_heads, head_dim] with a table, dtype of q or fp8.  Without a table, [total_k,
            kv_heads, head_dim], sequence s in rows cu_seqlens_k[s] ... cu_seqlens_k[s + 1] - 1, or [seqs, max_len,
            kv_heads, head_dim] with seqused_k.  The last axis of v, and of results, may have another size.
        cu_seqlens_q, cu_seqlens_k: [seqs + 1] int32 | int64.
        max_seqlen_q, max_seqlen_k: upper bounds, ints.
        seqused_q: [seqs] int32 | int64; number of first queries of each sequence that count.  Result rows of all other
            queries are zeros.
        seqused_k: [seqs] int32 | int64; keys of each sequence, instead of the differences of cu_seqlens_k.
        block_table: [seqs, max_pages] int32 | int64, also named page_table.  Entries past the last key may hold
            anything.
        qv: [tokens, heads, rank], also named q_v, for latent attention, as in flash_attn_with_kvcache.  Without a
            table, k and v may be separate tensors, which are copied into one.
        dynamic_causal: [seqs] bool or int; which sequences are causal, in place of causal.
        causal: False by default.
        window_size: (left, right) as in paged_attention; None is no limit, as -1 is.
        attention_chunk: positions in a chunk; a query sees only keys of its own chunk.  No chunks if 0.
        sinks: [heads], also named s_aux or learnable_sink, as in paged_attention.
        alibi_slopes: [heads] or [seqs, heads]; adds -slope * |position of the query - position of the key|.
        q_descale: float, [1], [kv_heads] or [seqs, kv_heads], for fp8 queries.
        k_descale, v_descale: as q_descale, for fp8 keys and values.
        return_lse: also return the log-sum-exp [heads, tokens] float32.  FlashAttention's versions name this argument
            return_attn_probs or return_softmax_lse.

    The arguments softmax_scale, softcap and out are as in paged_attention.  Arguments that steer only how results are
    computed (num_splits, pack_gqa, scheduler_metadata, ...) are ignored.  Without a table, a call is fastest if both
    cu_seqlens are one tensor.  Otherwise few queries read pages of one token, and many queries read a copy of keys and
    values.  There is no host sync, and calls can be captured in a CUDA graph.

    Returns: [tokens, heads, head_dim], or (out, lse).  FlashAttention-2's return_attn_probs gives (out, lse, None).
        FlashAttention-4's order always gives (out, lse or None).  Rows that see no key are zeros with an LSE of minus
        infinity, as in FlashAttention-3 (FlashAttention-2 gives plus infinity).
    Raises: TypeError naming an unknown keyword or a missing argument.  ValueError naming a refused argument, such as
        dropout_p > 0, cp_world_size > 1, score_mod, mask_mod or block_sparse_tensors.
    Source: Dao 2023, Shah et al. 2024.
    """
    given, version = bind("flash_attn_varlen_func", args, keywords)
    starts = given.get("cu_seqlens_q")
    if starts is None:
        raise TypeError("flash_attn_varlen_func() needs cu_seqlens_q; flash_attn_func takes batches without it")
    starts_k, used = given.get("cu_seqlens_k"), given.get("seqused_k")
    if used is None and starts_k is None:
        raise TypeError("flash_attn_varlen_func() needs cu_seqlens_k or seqused_k")
    max_q, max_k = bound(given.get("max_seqlen_q")), bound(given.get("max_seqlen_k"))
    table = given.get("page_table")
    two_parts, used_q = given.get("qv") is not None, given.get("seqused_q")
    if two_parts:
        q, k, v = latent("flash_attn_varlen_func", q, k, v, given, own=table is None)
    elif given.get("only_qv"):
        raise ValueError("flash_attn_varlen_func() needs qv where only_qv is True")
    q, k, v = dense(q), dense(k), dense(v)
    lens = int32(starts_k[1:] - starts_k[:-1]) if used is None else int32(used)  # type: ignore[index]
    if table is not None:
        keys = Keys(k, v, table)
    elif k.ndim == 4:
        keys = Keys(k, v, rows_as_pages(None, k.shape[0], k.device))
    elif starts_k is None:
        raise TypeError(
            "flash_attn_varlen_func() needs cu_seqlens_k where k has neither pages nor an axis of sequences"
        )
    elif (
        used is used_q is None
        and not two_parts
        and same(starts, starts_k)
        and q.shape[0] == k.shape[0]
        and k.dtype not in FP8
    ):
        keys = Keys(k, v, lens[:, None], new=True)  # without cached keys the table is never read
    else:
        rows = (q.shape[0] if max_q is None else max_q) * (q.shape[1] // max(k.shape[1], 1))
        most = k.shape[0] if max_k is None else min(max_k, k.shape[0])
        keys = ragged(k, v, int32(starts_k), most, rows, two_parts)
    starts = int32(starts)
    if used_q is not None:
        keys, lens, starts, given = without_unused(int32(used_q), keys, lens, starts, given)
    probs = bool(given.get("return_attn_probs", False))
    wanted = probs or bool(given.get("return_lse", False))
    out, lse = attend(
        q, keys.k, keys.v, keys.page_table, lens, starts, given, max_seqlen_q=max_q, max_seqlen_k=max_k,
        new=keys.new, lse=wanted,
    )  # fmt: skip
    if lse is not None:
        lse = lse.t().contiguous()
    if version == "FA4":
        return out, lse
    if probs and version == "FA2":
        return out, lse, None
    return (out, lse) if wanted else out


def same(a: Tensor, b: Tensor) -> bool:
    """Whether both tensors are views of the same elements; contents are not read.

    While torch.compile traces, this is True only if a and b are one object.
    """
    if a is b:
        return True
    if torch.compiler.is_compiling():
        return False
    return (a.data_ptr(), a.dtype) == (b.data_ptr(), b.dtype) and same_steps(a, b)


def without_unused(
    used: Tensor, keys: Keys, lens: Tensor, starts: Tensor, given: dict[str, Any]
) -> tuple[Keys, Tensor, Tensor, dict[str, Any]]:
    """Cut each sequence in two: the first `used` queries with all keys, and the other queries without keys."""
    begin, end = starts[:-1], starts[1:]
    by_seq = {name: twice(given[name]) for name, axes in OF_SEQS.items() if getattr(given.get(name), "ndim", 0) == axes}
    starts = torch.cat([pairs(begin, torch.minimum(begin + used, end)), end[-1:]])
    return keys._replace(page_table=twice(keys.page_table)), pairs(lens, lens * 0), starts, given | by_seq


def ragged(k: Tensor, v: Tensor, starts: Tensor, longest: int, rows: int, latent: bool = False) -> Keys:
    """Pages of ragged keys: pages of one token without a copy, or, for many rows, pages of PAGE tokens in a copy.

    A page of the copy starts at each token, so pages overlap.  The copy ends with PAGE - 1 rows of zeros, for the page
    at the last token.

    `starts` is cu_seqlens_k.  `longest` is an upper bound on the keys of a sequence.  Keys are copied if `rows` is at
    least ROWS.  If `latent` is true, values are the first dims of keys.
    """
    page = 1 if rows < ROWS else PAGE
    if page > 1:
        k = with_room(k, page - 1)
        v = k[..., : v.shape[-1]] if latent else with_room(v, page - 1)
    columns = torch.arange(0, max(longest, 1), page, device=starts.device, dtype=torch.int32)
    return Keys(pages(k, page), pages(v, page), starts[:-1, None] + columns)


def with_room(x: Tensor, room: int) -> Tensor:
    """Return a copy [tokens + room, ...] whose last `room` rows are zeros.

    Kernels multiply queries by keys of dead slots, too, and mask the scores later.  On a CPU, infinities in dead slots
    would cause warnings.
    """
    copy = torch.empty((x.shape[0] + room, *x.shape[1:]), dtype=x.dtype, device=x.device)
    copy[: x.shape[0]].copy_(x)
    copy[x.shape[0] :].zero_()
    return copy


def pages(x: Tensor, page: int) -> Tensor:
    """View [tokens + page - 1, ...] as [tokens, page, ...]; page p starts at token p."""
    if page == 1:
        return x.unsqueeze(1)
    tokens, (token, head, _) = x.shape[0] - page + 1, x.stride()
    return x.as_strided((tokens, page, *x.shape[1:]), (token, token, head, 1))


# ---- batches whose sequences have equal lengths --------------------------------------------------

DENSE_KEYS = ("batch", "len_k", "kv_heads")


def batches(name: str, x: Any, axes: tuple[str, ...]) -> None:
    """Check that x is a tensor with these axes."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor [{', '.join(axes)}], got {type(x).__name__}")
    if x.ndim != len(axes):
        given = f"{list(x.shape)}{of_shape(name, x.shape, axes, {})}"
        raise ValueError(f"{name} must be [{', '.join(axes)}], got {given}")


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *args: Any, **keywords: Any) -> Any:
    """FlashAttention of a dense batch, with the argument order of FlashAttention-2, -3 or -4.

    Types of positional arguments, and keywords, tell which order a call has.

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
    for name, x, axes in (("q", q, ("batch", "len_q", "heads")), ("k", k, DENSE_KEYS), ("v", v, DENSE_KEYS)):
        batches(name, x, (*axes, "head_dim"))
    batch, len_q, heads, _ = q.shape
    q, two_parts = q.flatten(0, 1), given.get("qv") is not None
    if two_parts:
        q, k, v = latent("flash_attn_func", q, k, v, given, own=True)
    q, k, v = dense(q), dense(k), dense(v)
    len_k = k.shape[1]
    lens = torch.full((batch,), len_k, dtype=torch.int32, device=q.device)
    starts = even_starts(batch, len_q, q.device)
    # A page is a whole sequence, unless keys are passed as new keys, which are faster if len_k is no multiple of 8.
    new = len_q == len_k and len_k % 8 != 0 and k.dtype not in FP8 and not two_parts
    keys = (k.flatten(0, 1), v.flatten(0, 1)) if new else (k, v)
    table = lens[:, None] if new else rows_as_pages(None, batch, q.device)
    if len_k == 0:  # a cache needs at least one page of one slot; no query sees this slot
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
