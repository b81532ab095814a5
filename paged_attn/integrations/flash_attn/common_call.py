"""Code that all functions of this folder share: it turns their arguments into one call of paged_attention."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import paged_attn

from ...checks.options import INT32_MAX
from ...strides import same_steps

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# Names of arguments: in errors of paged_attention -> in FlashAttention's functions.
SCALES = {"q_scale": "q_descale", "k_scale": "k_descale", "v_scale": "v_descale"}
NAMES = SCALES | dict(seq_lens="seqused_k", k_cache="k", v_cache="v", k_new="k", v_new="v", chunk="attention_chunk")
OF_CACHES = SCALES | dict(seq_lens="cache_seqlens", chunk="attention_chunk")


def attend(
    q: Tensor, k: Tensor, v: Tensor, page_table: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor | None,
    given: dict[str, Any], *, max_seqlen_q: int | None, max_seqlen_k: int | None = None, new: bool = False,
    lse: bool = False, symmetric: bool = True, names: dict[str, str] = NAMES,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attend from q [tokens, heads, head_dim]; return (out, lse [tokens, heads] float32 or None).

    `given` has further arguments, as `bind` returns them.  If `new` is true, k and v [tokens, kv_heads, head_dim] are
    new keys and values, and there is no cache.  If `symmetric` is true, ALiBi also lowers scores of keys after a query.
    `names` translates argument names in errors.
    """
    causal, window = given.get("dynamic_causal", given.get("causal", False)), window_of(given)
    causal = causal.bool() if isinstance(causal, Tensor) else bool(causal)
    slopes, nothing_ahead = given.get("alibi_slopes"), max_seqlen_q == 1 or causal is True or window[1] == 0
    if causal is True and not given.get("clip_spans") and given.get("query_positions") is None:
        # A causal mask becomes a window, because causal=True of paged_attention needs as many keys as queries at least.
        causal, window = False, (window[0], 0)
    out = given.get("out")
    if out is None and q.dtype in FP8:  # FlashAttention-3 gives bfloat16, too
        out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=torch.bfloat16, device=q.device)
    cache = (k.unsqueeze(1), v.unsqueeze(1)) if new else (k, v)
    q_scale, k_scale = scales_of_scores(given, q, k)
    result = told(
        names, paged_attn.paged_attention, q, *cache, page_table, seq_lens, cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        k_new=k if new else None,
        v_new=v if new else None,
        softmax_scale=given.get("softmax_scale"),
        causal=causal,
        window_size=window,
        chunk=given.get("attention_chunk") or None,
        prefix_lens=given.get("prefix_lens"),
        spans=given.get("spans"),
        clip_spans=given.get("clip_spans", False),
        softcap=given.get("softcap", 0.0),
        alibi_slopes=slopes,
        alibi_symmetric=symmetric and slopes is not None and not nothing_ahead,
        sinks=given.get("sinks"),
        qq_bias=given.get("qq_bias"),
        query_positions=given.get("query_positions"),
        score_mod=given.get("score_mod"),
        score_mod_args=given.get("score_mod_args", ()),
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=scale(given.get("v_descale"), v),
        out=out,
        out_scale=given.get("out_scale"),
        return_lse=lse,
    )  # fmt: skip
    return result if lse else (result, None)


def told(names: dict[str, str], function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """Call a function; in its errors, replace names of arguments as `names` says."""
    try:
        return function(*args, **keywords)
    except (TypeError, ValueError) as error:
        text = re.sub(rf"\b({'|'.join(names)})\b", lambda word: names[word[0]], str(error))
        raise (TypeError if isinstance(error, TypeError) else ValueError)(text) from error


def window_of(given: dict[str, Any]) -> tuple[int, int]:
    """(left, right) of a call; -1: no limit, which is None in FlashAttention-4 and a missing window in vLLM."""
    left, right = given.get("window_size", (-1, -1))
    return (-1 if left is None else int(left), -1 if right is None else int(right))


def scales_of_scores(given: dict[str, Any], q: Tensor, k: Tensor) -> tuple[Any, Any]:
    """Return (q_scale, k_scale): if q_descale has a row for each sequence, 1 and the product of both descales.

    If there are as many tokens as sequences, paged_attention would take rows of q_scale for scales by token.
    """
    q_scale, k_scale = scale(given.get("q_descale"), q), scale(given.get("k_descale"), k)
    if not isinstance(q_scale, Tensor) or q_scale.ndim < 2:
        return q_scale, k_scale
    if k_scale is None:
        raise ValueError(f"q_descale must be the same for all sequences beside keys of {k.dtype}")
    return 1.0, q_scale * k_scale


def scale(value: Any, stored: Tensor) -> Any:
    """Return a FlashAttention descale as float, [1], [kv_heads] or [seqs, kv_heads]; 1.0 if there is no descale.

    Without fp8 in `stored`, return None.
    """
    if stored.dtype not in FP8:
        return None
    if value is None:
        return 1.0
    if not isinstance(value, Tensor):
        return float(value)
    if value.numel() == 1:
        return value.reshape(1)
    if value.ndim == 2:
        if value.shape[0] > 1 and value.stride(0) != 0:
            return value
        value = value[0]
    return value[:1] if value.stride(0) == 0 else value.contiguous()


def int32(lengths: Tensor) -> Tensor:
    """Return integers as int32; int64 values outside of int32 are clamped."""
    if lengths.dtype is torch.int64:
        lengths = lengths.clamp(-INT32_MAX - 1, INT32_MAX)
    return lengths if lengths.dtype is torch.int32 else lengths.to(torch.int32)


def dense(x: Tensor) -> Tensor:
    """Return x, or a copy if its last axis is not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def even_starts(seqs: int, each: int, device: torch.device) -> Tensor:
    """[seqs + 1] int32: where sequences of `each` tokens begin, and where the last one ends."""
    return torch.arange(seqs + 1, dtype=torch.int32, device=device) * each


def bound(length: Any) -> int | None:
    """A bound as an int.  None: there is no bound, or it is on a GPU, where reading it would wait."""
    if isinstance(length, Tensor):
        return int(length) if length.device.type == "cpu" else None
    return None if length is None else int(length)


def rows_as_pages(rows: Tensor | None, seqs: int, device: torch.device) -> Tensor:
    """Page table [seqs, 1] of caches whose pages are whole sequences: sequence s in page s, or in `rows`[s]."""
    return (torch.arange(seqs, device=device, dtype=torch.int32) if rows is None else int32(rows))[:, None]


def pairs(first: Tensor, second: Tensor) -> Tensor:
    """Interleave two tensors [n] -> [2 n] int32: for each sequence the first number, then the second."""
    return torch.stack([first, second], dim=1).flatten().int()


def twice(page_table: Tensor) -> Tensor:
    """Repeat each row of a page table: [seqs, pages] -> [2 seqs, pages]."""
    return page_table.repeat_interleave(2, dim=0)


# ---- latent attention (MLA): qv, and keys and values that are views of one cache -------------------------------------


class Latent(NamedTuple):
    """Whole queries (qv, then q), and keys whose first dims are the values."""

    q: Tensor
    keys: Tensor
    values: Tensor


def latent(
    function: str, q: Tensor | None, k: Tensor | None, v: Tensor, given: dict[str, Any], own: bool = False
) -> Latent:
    """Join q [tokens, heads, rope] with given["qv"] [tokens, heads, rank], and k [..., rope] with v [..., rank].

    Scores are q k + qv v, so a whole key is the value and then the rotated part, as they lie in the cache.  If only_qv
    is set, if q or k is None, or if q has no dims, the values are the whole keys.  If `own` is true, k and v are the
    call's own keys and values, which are copied into one tensor unless they already lie in one.  The keys and values of
    a cache must lie in one tensor.
    """
    qv = given["qv"]
    if qv.ndim != 3:
        qv = qv.flatten(0, qv.ndim - 3)
    if v.dtype in FP8:
        raise ValueError(f"{function}() of paged_attn takes qv beside 16 bits, not beside a cache of {v.dtype}")
    if q is None or k is None or q.shape[-1] == 0 or given.get("only_qv"):
        if given.get("softmax_scale") is None:
            raise ValueError(f"{function}() of paged_attn needs softmax_scale where qv is all of the queries")
        return Latent(qv, v, v)
    rank, rope = v.shape[-1], k.shape[-1]
    where = v.data_ptr() + rank * v.element_size()
    lined = all(x.stride(-1) == 1 or x.shape[-1] == 1 for x in (k, v))
    if (k.dtype, k.data_ptr()) != (v.dtype, where) or not (lined and same_steps(k, v, -1)):
        if own and (k.dtype, k.shape[:-1]) == (v.dtype, v.shape[:-1]):
            keys = torch.cat([v, k], -1)
            return Latent(torch.cat([qv, q], -1), keys, keys[..., :rank])
        raise ValueError(
            f"{function}() of paged_attn takes qv where v and k are cache[..., :{rank}] and cache[..., {rank}:] of one "
            f"cache of {rank + rope} dims; these lie apart"
        )
    keys = v.as_strided((*v.shape[:-1], rank + rope), (*v.stride()[:-1], 1))
    return Latent(torch.cat([qv, q], -1), keys, keys[..., :rank])
