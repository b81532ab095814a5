"""unified_attention: each order and feature against a dense float64 attention of its documented meaning."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from paged_attn.integrations import flash_attn
from tests.integrations.by_hand import Batch, close


@pytest.fixture(scope="module")
def batch() -> Batch:
    return Batch((5, 1, 3), (9, 17, 3))


def dense_under(b: Batch, seen: Any) -> Tensor:
    """In float64, where `seen` tells by sequence, query and key who sees whom; scores are divided by 4."""
    parts = []
    for s, (n, m) in enumerate(zip(b.lens_q, b.lens_k)):
        query, key = torch.arange(m - n, m)[:, None], torch.arange(m)[None]
        bias = torch.zeros(n, m).masked_fill(~seen(s, query, key), -torch.inf)
        q, k, v = b.q[b.cu_q[s] :][:n], b.k[b.cu_k[s] :][:m], b.v[b.cu_k[s] :][:m]
        k, v = (x.double().repeat_interleave(2, 1) for x in (k, v))
        weights = (torch.einsum("nhd,mhd->hnm", q.double(), k) / 4 + bias).softmax(-1)
        parts.append(torch.einsum("hnm,mhd->nhd", weights, v))
    return torch.cat(parts)


@pytest.mark.parametrize("clip", [False, True])
def test_unified_attention_shows_ranges_and_causality_by_sequence(batch: Batch, clip: bool) -> None:
    """Against dense attention under masks written out: ranges include their last number, one token is no range."""
    b, out = batch, torch.empty_like(batch.q)
    ranges = torch.tensor([[[2, 6], [7, 7]], [[3, 16], [0, 0]], [[0, 0], [-1, -1]]])
    window, causal = 3, torch.tensor([True, True, False])

    def within(s: int, query: Tensor, key: Tensor) -> Tensor:
        past = query - key < window
        seen = (key <= query) & past
        for first, last in ranges[s].tolist():
            if first < last:
                both = (query >= first) & (query <= last) & (key >= first) & (key <= last)
                seen = seen | (both & past if clip else both)
        return seen

    call = dict(
        q=b.q, k=b.k_cache, v=b.v_cache, out=out, cu_seqlens_q=b.cu_q, max_seqlen_q=b.max_q, seqused_k=b.used,
        max_seqlen_k=b.max_k, softmax_scale=0.25, causal=True, window_size=(window - 1, 0), block_table=b.table,
    )  # fmt: skip
    asked = dict(mm_prefix_range=ranges, mm_prefix_clamp_sliding_window=clip)
    close(flash_attn.unified_attention(**call, **asked), dense_under(b, within))
    some = dense_under(b, lambda s, query, key: (query - key < window) & (key - query < (1 if causal[s] else window)))
    close(flash_attn.unified_attention(**call | {"causal": causal}), some)


@pytest.mark.parametrize("prefix", [(1, 4, 0), (4, 5, 3), (9, 14, 1), (20, 20, 20)])
def test_unified_attention_shows_the_prompt_behind_the_window_and_never_what_is_ahead(
    batch: Batch, prefix: tuple[int, ...]
) -> None:
    """Against dense attention under vLLM's mask; queries before the prefix's end, behind it, on both sides."""
    b, out = batch, torch.empty_like(batch.q)
    call = dict(
        q=b.q, k=b.k_cache, v=b.v_cache, out=out, cu_seqlens_q=b.cu_q, max_seqlen_q=b.max_q, seqused_k=b.used,
        max_seqlen_k=b.max_k, softmax_scale=0.25, causal=True, window_size=(-1, -1), block_table=b.table,
        rswa_prefix_lens=torch.tensor(prefix), rswa_window=2,
    )  # fmt: skip
    behind = dense_under(b, lambda s, query, key: (key <= query) & ((key < prefix[s]) | (query - key < 2)))
    close(flash_attn.unified_attention(**call), behind)
    with pytest.raises(ValueError, match="alibi_slopes beside rswa_window"):
        flash_attn.unified_attention(**call, alibi_slopes=torch.ones(4))
    with pytest.raises(ValueError, match="causal = True beside rswa_window"):
        flash_attn.unified_attention(**call | {"causal": False})


def test_the_prompts_of_no_sequence_hide_nothing() -> None:
    """A step of padding alone."""
    b, none = Batch((3,), (5,)), torch.zeros(0, dtype=torch.int32)
    out = torch.full_like(b.q, 7.0)
    flash_attn.unified_attention(
        q=b.q, k=b.k_cache, v=b.v_cache, out=out, cu_seqlens_q=torch.zeros(1, dtype=torch.int32), max_seqlen_q=3,
        seqused_k=none, max_seqlen_k=3, softmax_scale=0.25, causal=True, window_size=(-1, -1),
        block_table=b.table[:0], rswa_prefix_lens=none, rswa_window=2,
    )  # fmt: skip
    assert not out.any()


# What the Triton backend of vLLM 0.26 to 0.33 gives beside, of a model that asks for none of it.
OF_THE_BACKEND: dict[str, Any] = dict(
    use_alibi_sqrt=False, seq_threshold_3D=8, num_par_softmax_segments=16, softmax_segm_output=None,
    softmax_segm_max=None, softmax_segm_expsum=None, output_scale=None, mm_prefix_range=None, rswa_prefix_lens=None,
    rswa_window=None, kv_quant_mode=0, k_scale_cache=None, v_scale_cache=None, chunk_lookback=-1, use_td=False,
    mm_prefix_clamp_sliding_window=False,
)  # fmt: skip


@pytest.mark.parametrize("order", ["vLLM", "AITER", "keywords", "vLLM's backend"])
def test_every_order_of_unified_attention_means_the_same(batch: Batch, order: str) -> None:
    b, out, sinks = batch, torch.empty_like(batch.q), torch.randn(4)
    slopes = torch.tensor([0.5, 0.25, 0.1, 1.0])
    first = (b.q, b.k_cache, b.v_cache, out, b.cu_q, b.max_q, b.used, b.max_k, 0.3, True, (6, 0), b.table, 0.0, None)
    if order == "vLLM":
        got = flash_attn.unified_attention(*first, None, None, 8, 16, None, None, None, slopes, None, None, sinks)
    elif order == "AITER":
        got = flash_attn.unified_attention(*first, None, None, None, slopes, None, None, sinks, False, False, "triton")
    else:
        got = flash_attn.unified_attention(
            q=b.q, k=b.k_cache, v=b.v_cache, out=out, cu_seqlens_q=b.cu_q, max_seqlen_q=b.max_q, seqused_k=b.used,
            max_seqlen_k=b.max_k, softmax_scale=0.3, causal=True, alibi_slopes=slopes, window_size=(6, 0), softcap=0,
            block_table=b.table, q_descale=None, k_descale=torch.ones(3, 2), v_descale=None, sinks=sinks,
            **(OF_THE_BACKEND if order == "vLLM's backend" else {}),
        )  # fmt: skip
    assert got is out
    close(out, b.wanted(causal=True, window=(6, -1), slopes=slopes, sinks=sinks, scale=0.3)[0])


@pytest.mark.parametrize("causal", [True, False, "by sequence"])
@pytest.mark.parametrize(("window", "lookback"), [(6, 0), (6, 1), (9, 2), (11, 2), (6, 5), (0, 2), (40, 1)])
def test_unified_attention_looks_back_by_chunks(batch: Batch, window: int, lookback: int, causal: Any) -> None:
    """Against dense attention under vLLM's mask; without a window there are no chunks."""
    b, size = batch, max(window // (lookback + 1), 1)
    flags = [True, False, True] if causal == "by sequence" else [causal] * 3

    def seen(s: int, query: Tensor, key: Tensor) -> Tensor:
        near = query // size - key // size <= lookback if window else key >= 0
        return near & (key <= query) if flags[s] else near

    out = flash_attn.unified_attention(
        q=b.q, k=b.k_cache, v=b.v_cache, out=torch.empty_like(b.q), cu_seqlens_q=b.cu_q, max_seqlen_q=b.max_q,
        seqused_k=b.used, max_seqlen_k=b.max_k, softmax_scale=0.25, block_table=b.table,
        causal=torch.tensor(flags) if causal == "by sequence" else causal, window_size=(window - 1, 0),
        chunk_lookback=lookback,
    )  # fmt: skip
    close(out, dense_under(b, seen))


@pytest.mark.parametrize(("more", "says"), [
    (dict(mm_prefix_range=torch.zeros(3, 1, 2).int()), "does not take mm_prefix_range beside chunk_lookback"),
    (dict(chunk_lookback=4), "chunk_lookback must be less than .* = 4, got 4"),
])  # fmt: skip
def test_chunks_that_cannot_be_are_refused(batch: Batch, no_launch: None, more: dict[str, Any], says: str) -> None:
    b = batch
    call: dict[str, Any] = dict(
        q=b.q, k=b.k_cache, v=b.v_cache, out=torch.empty_like(b.q), cu_seqlens_q=b.cu_q, max_seqlen_q=b.max_q,
        seqused_k=b.used, max_seqlen_k=b.max_k, softmax_scale=0.25, block_table=b.table, causal=True,
        window_size=(3, 0), chunk_lookback=1,
    )  # fmt: skip
    with pytest.raises(ValueError, match=says):
        flash_attn.unified_attention(**call | more)


def test_unified_attention_raises_later_keys_by_slopes_as_vllms_kernel_does(batch: Batch) -> None:
    """Where FlashAttention lowers them."""
    b, slopes = batch, torch.rand(4)
    out = flash_attn.unified_attention(
        q=b.q, k=b.k_cache, v=b.v_cache, out=torch.empty_like(b.q), cu_seqlens_q=b.cu_q, max_seqlen_q=b.max_q,
        seqused_k=b.used, max_seqlen_k=b.max_k, softmax_scale=0.25, block_table=b.table, causal=False,
        window_size=(-1, -1), alibi_slopes=slopes,
    )  # fmt: skip
    parts = []
    for s, (n, m) in enumerate(zip(b.lens_q, b.lens_k)):
        apart = torch.arange(m)[None] - torch.arange(m - n, m)[:, None]
        q, k, v = b.q[b.cu_q[s] :][:n], b.k[b.cu_k[s] :][:m], b.v[b.cu_k[s] :][:m]
        k, v = (x.double().repeat_interleave(2, 1) for x in (k, v))
        scores = torch.einsum("nhd,mhd->hnm", q.double(), k) / 4 + slopes.double()[:, None, None] * apart
        parts.append(torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v))
    close(out, torch.cat(parts))
