"""Plain `generate`: the host's [B, kv_heads, T, D] keys and values as pages, where they lie."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...api import paged_attention

# Of what is not padded; a page size is compiled into a kernel, so it may not be T, which grows with each token.
PAGE = 16


class Batch(NamedTuple):
    """Arguments of paged_attention that all layers share."""

    page_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor


def attend(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor | None, window: int | None, scores: Any) -> Tensor:
    """query [B, heads, n, D], key and value [B, kv_heads, T, D], bounds as masks.mask gives -> [B, n, heads, D]."""
    seqs, heads, tokens, dim = query.shape
    if bounds is not None and (bounds.dtype != torch.int32 or bounds.shape != (seqs, 1, 1, 2)):
        raise ValueError(f"paged_attn takes no mask of its own kind, got {bounds.dtype} {list(bounds.shape)}")
    keys = key.shape[2]
    if any(x.stride(3) != 1 or x.stride(0) % x.stride(2) for x in (key, value)) or key.stride() != value.stride():
        key, value = key.contiguous(), value.contiguous()
    page = PAGE if bounds is None and keys % PAGE == 0 and key.stride(0) % (PAGE * key.stride(2)) == 0 else 1
    per_seq = key.stride(0) // (page * key.stride(2)) if seqs > 1 else 0
    batch = _batch(seqs, tokens, keys, page, per_seq, bounds, query.device)
    out = paged_attention(
        query.transpose(1, 2).reshape(seqs * tokens, heads, dim),
        _pages(key, page, per_seq),
        _pages(value, page, per_seq),
        *batch,
        kv_layout="HND",
        max_seqlen_q=tokens,
        max_seqlen_k=batch.page_table.shape[1] * page,
        window_size=(-1, -1) if window is None else (window - 1, 0),
        **scores._asdict(),
    )
    return out.view(seqs, tokens, heads, dim)  # type: ignore[union-attr]


def _pages(x: Tensor, page: int, per_seq: int) -> Tensor:
    """[B, kv_heads, T, D] as pages [N, kv_heads, page, D], of which those of one sequence begin every per_seq.

    Between them lie ids of pages that nobody asks for: they reach into the next head.
    """
    seqs, heads, keys, dim = x.shape
    count = (seqs - 1) * per_seq + keys // page
    return x.as_strided((count, heads, page, dim), (page * x.stride(2), x.stride(1), x.stride(2), 1))


def _batch(seqs: int, tokens: int, keys: int, page: int, per_seq: int, bounds: Tensor | None, device: Any) -> Batch:
    """What all layers share: kept with bounds, or, of batches without, by their sizes."""
    sizes = (seqs, tokens, keys, page, per_seq)
    if bounds is None:
        # What is made while a graph is captured holds nothing before its replay.
        captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        return (_whole.__wrapped__ if captured else _whole)(*sizes, device)
    kept = getattr(bounds, "_paged_attn_batch", None)
    if kept is None or kept[0] != sizes:
        first, end = bounds[:, 0, 0].unbind(1)
        whole = _whole.__wrapped__(*sizes, device)
        # Entries behind the last key may hold anything.
        kept = (sizes, Batch(whole.page_table + first[:, None], end - first, whole.cu_seqlens_q))
        bounds._paged_attn_batch = kept  # type: ignore[attr-defined]
    return kept[1]


@functools.lru_cache(maxsize=8)
def _whole(seqs: int, tokens: int, keys: int, page: int, per_seq: int, device: Any) -> Batch:
    """Every sequence sees all keys."""
    integers = {"dtype": torch.int32, "device": device}
    starts = torch.arange(seqs, **integers)[:, None] * per_seq
    return Batch(
        starts + torch.arange(keys // page, **integers),
        torch.full((seqs,), keys, **integers),
        torch.arange(seqs + 1, **integers) * tokens,
    )
