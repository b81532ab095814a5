"""flash_attn_with_kvcache: write new keys and values to a cache, rotate queries and keys if asked, and attend."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

import paged_attn

from .common_call import (
    FP8,
    OF_CACHES,
    attend,
    bound,
    dense,
    even_starts,
    int32,
    latent,
    rows_as_pages,
    scale,
    window_of,
)
from .orders import bind


class Tokens(NamedTuple):
    """Tokens of a batch; each field is [tokens]."""

    seq: Tensor  # sequence of a token
    place: Tensor  # index of a token among the tokens of its sequence
    live: Tensor | None  # bool, False for padding; None: there is no padding


def flash_attn_with_kvcache(
    q: Tensor | None, k_cache: Tensor | None, v_cache: Tensor, *args: Any, **keywords: Any
) -> Any:
    """FlashAttention over a cache, with the argument order of FlashAttention-2, FlashAttention-3, vLLM or SGLang.

    Types of positional arguments, and keywords, tell which order a call has.

    Args:
        q: [seqs, len_q, heads, head_dim], or [tokens, heads, head_dim] with cu_seqlens_q.
        k_cache, v_cache: [pages, page_size, kv_heads, head_dim] with a table, for any page size.  Without a table,
            [rows, max_len, kv_heads, head_dim]; sequence s is in row s or cache_batch_idx[s].
        k, v: [seqs, len_new, kv_heads, head_dim], or [total_new, kv_heads, head_dim] with cu_seqlens_k_new.  They are
            written to the cache at positions cache_seqlens[s] and on, before attention.  In an fp8 cache,
            16-bit values are quantised by the descales, and fp8 values are stored unchanged.
        rotary_cos, rotary_sin: [max_len, rotary_dim / 2].  Token i of a sequence's k, and of its q, is rotated by
            position start + i; start is rotary_seqlens if given, else cache_seqlens.  Without causal, window_size and
            attention_chunk, all queries of a sequence are rotated by position start.  rotary_interleaved: True by
            default.
        cache_seqlens: int, or [seqs] int32 | int64; keys in the cache before this call.  -1: padding.  None: every slot
            has a key; k and v are then refused.
        cache_batch_idx: [seqs] int32 | int64; rows of the table, or of the cache if there is no table.
        cache_leftpad: [seqs] int32 | int64; index of each sequence's first key.  Chunks count from this key;
            cache_seqlens and positions in rotary tables count from the first slot.
        block_table | page_table: [seqs, max_pages] int32 | int64.
        qv: [seqs, len_q, heads, rank], or [tokens, heads, rank], for latent attention, whose scores are q k + qv v.
            Then v_cache is cache[..., :rank] and k_cache is cache[..., rank:] of one cache.  With only_qv scores are
            qv v, q and k_cache may be None, and softmax_scale is required.

    Dtypes and all other arguments are as in flash_attn_varlen_func.

    Returns: shape of q, with the width of values.  With return_softmax_lse also the log-sum-exp [seqs, heads, len_q],
        or [heads, tokens] with cu_seqlens_q, float32.  A token that has no room in the cache is not written.
    Raises: as flash_attn_varlen_func.
    Source: Dao 2023, Shah et al. 2024, Su et al. 2021 (rotary).
    """
    given, _ = bind("flash_attn_with_kvcache", args, keywords)
    two_parts = given.get("qv") is not None
    if given.get("only_qv") or q is None or k_cache is None:
        if not two_parts:
            raise ValueError("flash_attn_with_kvcache() needs qv where only_qv is True, or q or k_cache None")
        if given.get("k") is not None or given.get("v") is not None:
            raise ValueError(
                "flash_attn_with_kvcache() of paged_attn writes no k and v where only_qv is True: write_kv does"
            )
        given["only_qv"], q, k_cache = True, given["qv"], v_cache
    q = dense(q)
    starts = given.get("cu_seqlens_q")
    starts = None if starts is None else int32(starts)
    seqs = q.shape[0] if starts is None else starts.shape[0] - 1
    tokens = q if starts is not None else q[:, 0] if q.shape[1] == 1 else q.flatten(0, 1)
    whole = given.get("out")
    if starts is None and whole is not None and whole.ndim == 4:
        given["out"] = _rows(whole, q)
    len_q = bound(given.get("max_seqlen_q")) if starts is not None else q.shape[1]
    table, capacity = _table(given, k_cache, seqs)
    cached = _lengths(given, seqs, capacity, q.device)
    lens = cached
    check_tables(given.get("rotary_cos"), given.get("rotary_sin"), q.shape[-1])
    if given.get("k") is not None or given.get("v") is not None:
        tokens, lens = _append(given, tokens, starts, len_q, k_cache, v_cache, table, cached)
    elif given.get("rotary_cos") is not None:
        raise ValueError("rotary_cos needs k and v: without them nothing is turned")
    k, v = k_cache, v_cache
    if given.get("cache_leftpad") is not None:
        k, v, table, lens = _without_left(int32(given["cache_leftpad"]), k_cache, v_cache, table, lens)
    if starts is None and q.shape[1] != 1:
        starts = even_starts(seqs, q.shape[1], q.device)
    if two_parts:
        tokens, k, v = latent("flash_attn_with_kvcache", tokens, k, v, given)
    wanted = bool(given.get("return_lse", False))
    max_k = bound(given.get("max_seqlen_k")) if lens is cached else None  # the bound does not count new keys
    out, lse = attend(
        tokens, k, v, table, lens, starts, given, max_seqlen_q=len_q, max_seqlen_k=max_k, lse=wanted, names=OF_CACHES
    )  # fmt: skip
    if q.ndim == 4:
        out = out.view(*q.shape[:3], v_cache.shape[-1]) if whole is None or whole.ndim == 3 else whole
    if lse is None:
        return out
    if q.ndim == 4:
        return out, lse.view(*q.shape[:3]).transpose(1, 2).contiguous()
    return out, lse.t().contiguous()


def _rows(out: Tensor, q: Tensor) -> Tensor:
    """View [seqs, len_q, ...] as [seqs * len_q, ...]."""
    if out.shape[:3] != q.shape[:3]:
        raise ValueError(f"out must be {list(q.shape[:3])} of [seqs, len_q, heads] like q, got {list(out.shape)}")
    if out.shape[1] == 1:
        return out[:, 0]
    if out.numel() and out.shape[0] > 1 and out.stride(0) != out.shape[1] * out.stride(1):
        raise ValueError(f"out must have its sequences one behind the other, got strides {list(out.stride())}")
    return out.view(out.shape[0] * out.shape[1], *out.shape[2:])


def _table(given: dict[str, Any], k_cache: Tensor, seqs: int) -> tuple[Tensor, int]:
    """(page table [seqs, pages], number of slots of each sequence in it)."""
    table, rows = given.get("page_table"), given.get("cache_batch_idx")
    if table is None:
        return rows_as_pages(rows, seqs, k_cache.device), k_cache.shape[1]
    table = table if rows is None else table.index_select(0, rows)
    return table, table.shape[1] * k_cache.shape[1]


def _lengths(given: dict[str, Any], seqs: int, capacity: int, device: torch.device) -> Tensor:
    """Keys in the cache before this call, [seqs] int32."""
    lengths = given.get("cache_seqlens")
    if lengths is None and given.get("k") is not None:
        raise ValueError("k needs cache_seqlens: the keys of the cache behind which it goes")
    if isinstance(lengths, Tensor):
        return int32(lengths) if lengths.ndim else int32(lengths).expand(seqs).contiguous()
    return torch.full((seqs,), capacity if lengths is None else lengths, dtype=torch.int32, device=device)


def _append(
    given: dict[str, Any], q: Tensor, starts: Tensor | None, len_q: int | None, k_cache: Tensor, v_cache: Tensor,
    table: Tensor, cached: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Write k and v after the cached keys; return (queries, lengths [seqs] after the write).

    Queries and new keys are rotated if rotary tables are given.
    """
    k, v, starts_new = given.get("k"), given.get("v"), given.get("cu_seqlens_k_new")
    if k is None or v is None:
        raise ValueError("k and v must be given together")
    k, v, seqs = dense(k), dense(v), cached.shape[0]
    new = _tokens(starts_new, seqs, k)
    added = k.shape[1] if starts_new is None else int32(starts_new[1:] - starts_new[:-1])
    if starts_new is None:
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    # a token beyond the cache's end is not written, so no query may see it
    room = table.shape[1] * k_cache.shape[1]
    lens = torch.where(cached < 0, 0, (cached + added).clamp(max=room))
    slots = _slots(new, cached, table, k_cache.shape[1])
    cos, sin = given.get("rotary_cos"), given.get("rotary_sin")
    scales = {f"{x}_scale": scale(given.get(f"{x}_descale"), cache) for x, cache in (("k", k_cache), ("v", v_cache))}
    if cos is not None and sin is not None:
        start = cached if given.get("rotary_seqlens") is None else given["rotary_seqlens"]
        interleaved = bool(given.get("rotary_interleaved", True))
        local = bool(given.get("causal", False) or given.get("attention_chunk")) or window_of(given) != (-1, -1)
        position = start[new.seq] + new.place
        alike = starts is None and starts_new is None and len_q == added and (local or len_q == 1)
        if alike and _fuses(q, k, v, cos, scales):
            table_rows = rows_of(position, cos, sin)
            options = dict(cos_sin=table_rows, interleaved=interleaved, **scales)
            return paged_attn.write_qkv((q, k, v), k_cache, v_cache, slots, **options), lens
        k = rotate(k, position, cos, sin, interleaved)
        at = _tokens(starts, seqs, q if starts is not None else q.view(seqs, len_q or 0, *q.shape[1:]))
        q = rotate(q, start[at.seq] + at.place if local else start[at.seq], cos, sin, interleaved)
    k, k_scale = _stored("k", k, scales["k_scale"], k_cache, new.seq)
    v, v_scale = _stored("v", v, scales["v_scale"], v_cache, new.seq)
    paged_attn.write_kv(k, v, k_cache, v_cache, slots, k_scale=k_scale, v_scale=v_scale)
    return q, lens


def _fuses(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, scales: dict[str, Any]) -> bool:
    """Whether write_qkv takes these queries, new keys and values, tables and scales."""
    by_seq = any(isinstance(x, Tensor) and x.ndim == 2 for x in scales.values())
    return q.dtype == k.dtype == v.dtype not in FP8 and cos.dtype not in FP8 and cos.shape[1] > 0 and not by_seq


def _stored(name: str, x: Tensor, by: Any, cache: Tensor, seq: Tensor) -> tuple[Tensor, Any]:
    """(new keys or values, scale), as write_kv takes them.

    `by` is the scale of x, as write_kv takes it or [seqs, kv_heads].  `seq` is the sequence of each token.
    """
    if x.dtype in FP8:
        if x.dtype != cache.dtype:
            raise TypeError(f"{name} must be {cache.dtype} like the cache, or 16 bits, got {x.dtype}")
        return x.half(), 1.0  # float16 holds every fp8 number, so the cache gets equal numbers
    if isinstance(by, Tensor) and by.ndim == 2:  # a row for each sequence, which write_kv does not take
        return x.float() / by[seq][:, :, None], 1.0
    return x, by


def _tokens(starts: Tensor | None, seqs: int, x: Tensor) -> Tokens:
    """Tokens of x, which is [seqs, length, ...], or [tokens, ...] with sequences beginning at `starts`."""
    if starts is None:
        length = x.shape[1]
        place = torch.arange(seqs * length, device=x.device)
        return Tokens(place // max(length, 1), place % max(length, 1), None)
    place = torch.arange(x.shape[0], device=x.device, dtype=starts.dtype)
    seq = torch.searchsorted(starts[1:], place, right=True)
    live = seq < seqs
    seq = seq.clamp(max=max(seqs - 1, 0))
    return Tokens(seq, place - starts[seq], live)


def _slots(new: Tokens, cached: Tensor, table: Tensor, page_size: int) -> Tensor:
    """Slot number of each new token, page * page_size + slot; -1 for padding, and for tokens without a page."""
    before = cached[new.seq].long()
    at = before + new.place
    page = at // page_size
    room = (before >= 0) & (page < table.shape[1])
    if new.live is not None:
        room &= new.live
    held = table[new.seq, torch.where(room, page, 0)].long()
    return torch.where(room & (held >= 0), held * page_size + at % page_size, -1)


def _without_left(
    left: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Drop the first left[s] slots of each sequence s; return (K, V, table, lens), with pages of one token."""
    k, v, of_page, of_slot = _by_token(k_cache, v_cache)
    size, columns = k_cache.shape[1], table.shape[1]
    at = left[:, None] + torch.arange(columns * size, dtype=torch.int32, device=table.device)
    pages = table.gather(1, (at // size).clamp(max=columns - 1).long())
    return k, v, pages * of_page + at % size * of_slot, lens - left


def _by_token(k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """View caches as pages of one token: (K, V, id step of cache pages, id step of slots).

    Slot j of cache page i becomes the one-token page with id i * (id step of cache pages) + j * (id step of slots).
    From one id to the next, the address grows by the greatest common divisor of the strides of cache pages and slots.
    If slots of one head lie side by side (HND), one-token pages overlap, which is fine for reading.
    """
    (k, *steps), (v, *others) = _steps(k_cache), _steps(v_cache)
    if steps != others:  # a token would have one page id in K and another one in V
        return _by_token(k_cache.contiguous(), v_cache.contiguous())
    return k, v, steps[0], steps[1]


def _steps(cache: Tensor) -> tuple[Tensor, int, int]:
    """View one cache as in `_by_token`: (one-token pages, id step of cache pages, id step of slots)."""
    page, slot = (n if size > 1 else 0 for n, size in zip(cache.stride()[:2], cache.shape[:2]))
    step = math.gcd(page, slot) or 1
    count = (max(cache.shape[0], 1) - 1) * page // step + (cache.shape[1] - 1) * slot // step + 1
    shape = (count if cache.shape[0] else 0, 1, *cache.shape[2:])
    return cache.as_strided(shape, (step, step, *cache.stride()[2:])), page // step, slot // step


# ---- rotary embedding ------------------------------------------------------------------------------------------------


def rotate(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate x [tokens, heads, head_dim] by rows `positions` [tokens] of tables [max_len, rotary_dim / 2], in float32.

    interleaved: dims 0 and 1, 2 and 3, ... are pairs (GPT-J).  Otherwise 0 and rotary_dim / 2, ... (GPT-NeoX).
    Positions outside the tables, as padding has, take the nearest row.  Source: Su et al. 2021.
    """
    at = positions.long().clamp(0, cos.shape[0] - 1)
    c, s = cos[at].float()[:, None], sin[at].float()[:, None]
    dims = 2 * cos.shape[1]
    turned = x[..., :dims].float()
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    pair = (a * c - b * s, a * s + b * c)
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((turned.to(x.dtype), x[..., dims:]), dim=-1)


def rows_of(positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rows `positions` [tokens] of both tables as write_qkv takes them, [tokens, rotary_dim]."""
    at = positions.long().clamp(0, cos.shape[0] - 1)
    return torch.cat((cos[at], sin[at]), dim=-1)


def check_tables(cos: Tensor | None, sin: Tensor | None, head_dim: int) -> None:
    """Check rotary tables: both or neither given, equal shapes, and no more dims than a head has."""
    if cos is None and sin is None:
        return
    if cos is None or sin is None:
        raise ValueError("rotary_cos and rotary_sin must be given together")
    if cos.ndim != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > head_dim:
        wanted = f"both [max_len, rotary_dim / 2] with rotary_dim <= head_dim = {head_dim}"
        raise ValueError(f"rotary_cos and rotary_sin must be {wanted}, got {list(cos.shape)} and {list(sin.shape)}")
