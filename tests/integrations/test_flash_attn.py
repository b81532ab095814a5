"""FlashAttention's functions: each order and form against a dense float64 attention of their documented meaning."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from paged_attn.integrations import flash_attn
from paged_attn.integrations.flash_attn import kvcache, orders, shim, varlen

# float32 here differs from float64 by the order of sums only
CLOSE = {"atol": 2e-5, "rtol": 2e-5}
# what stands behind, or was never written: it must not matter
BAD = float("nan")


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, window: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    chunk: int = 0, slopes: Tensor | None = None, sinks: Tensor | None = None, scale: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One sequence [n, heads, d] over [m, kv_heads, d]: (out, lse [heads, n]), the last query beside the last key."""
    n, m, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q.double(), k) * (q.shape[2] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    apart = torch.arange(m)[None] - (torch.arange(n)[:, None] + m - n)
    if slopes is not None:
        scores = scores - slopes.double()[:, None, None] * apart.abs()
    right = 0 if causal else window[1]
    hidden = (apart > right) if right >= 0 else torch.zeros(n, m, dtype=torch.bool)
    if window[0] >= 0:
        hidden = hidden | (apart < -window[0])
    if chunk:
        hidden = hidden | (torch.arange(m)[None] // chunk != (torch.arange(n)[:, None] + m - n) // chunk)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, n, 1)], 2)
        v = torch.cat([v, torch.zeros_like(v[:1])]) if m else v.new_zeros(1, *v.shape[1:])
    lse = torch.logsumexp(scores, 2) if scores.shape[2] else torch.full(scores.shape[:2], -torch.inf).double()
    weights = torch.exp(scores - lse[..., None]).nan_to_num(0.0)
    return torch.einsum("hnm,mhd->nhd", weights, v), lse


class Batch:
    """Ragged queries over ragged keys, and the same keys in pages whose dead slots are NaN and table tails -1."""

    def __init__(self, lens_q: tuple[int, ...], lens_k: tuple[int, ...], page: int = 8, heads: int = 4, kv: int = 2):
        torch.manual_seed(len(lens_q) + sum(lens_k))
        self.lens_q, self.lens_k = lens_q, lens_k
        self.q = torch.randn(sum(lens_q), heads, 16)
        self.k, self.v = torch.randn(2, sum(lens_k), kv, 16)
        self.cu_q, self.cu_k = cumulative(lens_q), cumulative(lens_k)
        self.used = torch.tensor(lens_k, dtype=torch.int32)
        self.max_q, self.max_k = max(lens_q), max(lens_k)
        pages = [-(-n // page) for n in lens_k]
        self.table = torch.full((len(lens_k), max(pages) + 1), -1, dtype=torch.int32)
        self.k_cache, self.v_cache = torch.full((2, sum(pages) + 2, page, kv, 16), BAD)
        free = iter(torch.randperm(sum(pages) + 2).tolist())
        for s, count in enumerate(pages):
            for p in range(count):
                self.table[s, p] = at = next(free)
                for cache, x in ((self.k_cache, self.k), (self.v_cache, self.v)):
                    rows = x[self.cu_k[s] : self.cu_k[s + 1]][p * page : (p + 1) * page]
                    cache[at, : len(rows)] = rows

    def wanted(self, **options: Any) -> tuple[Tensor, Tensor]:
        """(out [tokens, heads, d], lse [heads, tokens])."""
        parts = [
            attention(self.q[a:b], self.k[c:d], self.v[c:d], **options)
            for a, b, c, d in zip(self.cu_q, self.cu_q[1:], self.cu_k, self.cu_k[1:])
        ]
        return torch.cat([x for x, _ in parts]), torch.cat([x for _, x in parts], 1)


def cumulative(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got.double(), wanted, **CLOSE)


@pytest.fixture(scope="module")
def batch() -> Batch:
    return Batch((5, 1, 3), (9, 17, 3))


FORMS = {
    "FA2 by position": lambda b, f: f(
        b.q, b.k_cache, b.v_cache, b.cu_q, b.cu_k, b.max_q, b.max_k, 0.0, None, True, (4, 0), 0.0, None, False, False,
        b.table,
    ),
    "FA2 by keyword": lambda b, f: f(
        q=b.q, k=b.k_cache, v=b.v_cache, max_seqlen_q=b.max_q, cu_seqlens_q=b.cu_q, max_seqlen_k=b.max_k,
        cu_seqlens_k=b.cu_k, causal=True, window_size=(4, -1), block_table=b.table,
    ),
    "vLLM by position": lambda b, f: f(
        b.q, b.k_cache, b.v_cache, b.max_q, b.cu_q, b.max_k, None, b.used, None, 0.0, None, True, [4, 0], 0.0, None,
        False, False, b.table, False, torch.empty_like(b.q),
    ),
    "vLLM by keyword": lambda b, f: f(
        q=b.q, k=b.k_cache, v=b.v_cache, out=torch.empty_like(b.q), cu_seqlens_q=b.cu_q, max_seqlen_q=b.max_q,
        seqused_k=b.used, max_seqlen_k=b.max_k, causal=True, window_size=[4, -1], block_table=b.table, softcap=0.0,
        scheduler_metadata=None, fa_version=3, num_splits=1, s_aux=None, cp_world_size=1,
        k_descale=torch.ones(()).expand(3, 2),
    ),
    "FA3 by position": lambda b, f: f(
        b.q, b.k, b.v, b.cu_q, b.cu_k, b.max_q, b.max_k, None, None, None, True, None, None, None, None, (4, -1),
    ),
    "FA4 by keyword": lambda b, f: f(
        b.q, b.k_cache, b.v_cache, cu_seqlens_q=b.cu_q, max_seqlen_q=b.max_q, seqused_k=b.used, page_table=b.table,
        causal=True, window_size=(4, None), pack_gqa=True,
    )[0],
    "FA4 by position": lambda b, f: f(
        b.q, b.k_cache, b.v_cache, None, b.cu_q, b.cu_k, b.max_q, b.max_k, None, None, None, None, b.table, None, True,
        (4, None),
    )[0],
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_order_of_varlen_means_the_same(batch: Batch, form: str) -> None:
    close(FORMS[form](batch, flash_attn.flash_attn_varlen_func), batch.wanted(causal=True, window=(4, -1))[0])


@pytest.mark.parametrize("ragged", ["one tensor", "few rows", "many rows", "lengths apart"])
def test_ragged_keys_need_no_table(monkeypatch: pytest.MonkeyPatch, ragged: str) -> None:
    if ragged == "one tensor":
        b = Batch((5, 1, 3), (5, 1, 3))
        b.cu_k = b.cu_q
    else:  # of equal sums and bounds, which are not equal lengths
        b = Batch((2, 5, 3), (3, 5, 2))
    if ragged == "many rows":
        monkeypatch.setattr(varlen, "ROWS", 1)
    more = {"seqused_k": b.used} if ragged == "lengths apart" else {}
    # FlashAttention takes any strides of tokens: here those of a projection's output, which ends with the last value
    whole = torch.cat([b.k, b.v], 1)
    k, v = whole.split(2, 1)
    out, lse = flash_attn.flash_attn_varlen_func(
        b.q, k, v, b.max_q, b.cu_q, b.max_k, b.cu_k, causal=True, return_softmax_lse=True, **more
    )
    wanted, wanted_lse = b.wanted(causal=True)
    close(out, wanted)
    close(lse, wanted_lse)
    assert lse.shape == (4, b.q.shape[0])
    assert lse.is_contiguous()


def test_empty_batches_and_empty_keys_give_zeros() -> None:
    b = Batch((2, 1), (0, 3))
    out, lse = flash_attn.flash_attn_varlen_func(
        b.q, b.k, b.v, b.max_q, b.cu_q, b.max_k, b.cu_k, return_softmax_lse=True
    )
    close(out, b.wanted()[0])
    assert not out[:2].any()
    assert (lse[:, :2] == -torch.inf).all()
    none = torch.zeros(0, 2, 16)
    starts = torch.zeros(3, dtype=torch.int32)
    assert flash_attn.flash_attn_varlen_func(b.q[:0], none, none, starts, starts.clone(), 0, 0).shape == (0, 4, 16)


def test_features_of_all_versions_together(batch: Batch) -> None:
    sinks, slopes = torch.randn(4), torch.tensor([0.5, 0.25, 0.1, 1.0])
    options = dict(causal=True, softcap=3.0, slopes=slopes, sinks=sinks, scale=0.4)
    out, lse = flash_attn.flash_attn_varlen_func(
        batch.q, batch.k_cache, batch.v_cache, batch.max_q, batch.cu_q, batch.max_k, seqused_k=batch.used,
        block_table=batch.table, softmax_scale=0.4, causal=True, softcap=3.0, alibi_slopes=slopes, s_aux=sinks,
        return_softmax_lse=True,
    )  # fmt: skip
    wanted, wanted_lse = batch.wanted(**options)
    close(out, wanted)
    close(lse, wanted_lse)


@pytest.mark.parametrize("causal", [True, False])
def test_a_chunk_hides_the_keys_of_others(batch: Batch, causal: bool) -> None:
    """Queries of 9, 17 and 3 keys meet chunks of 5 in their midst and at their edges."""
    b, options = batch, dict(causal=causal, attention_chunk=5)
    wanted = b.wanted(causal=causal, chunk=5)[0]
    close(flash_attn.flash_attn_varlen_func(b.q, b.k, b.v, b.cu_q, b.cu_k, b.max_q, b.max_k, **options), wanted)
    single = Batch((1, 1), (9, 17))
    out = flash_attn.flash_attn_with_kvcache(
        single.q[:, None], single.k_cache, single.v_cache, cache_seqlens=single.used, page_table=single.table, **options
    )
    close(out[:, 0], single.wanted(causal=causal, chunk=5)[0])


def test_values_may_be_of_another_width() -> None:
    b = Batch((5, 2), (9, 17))
    wide = torch.randn(b.k.shape[0], 2, 24)
    one = attention(b.q[5:], b.k[9:], wide[9:], causal=True)[0]
    out = flash_attn.flash_attn_varlen_func(b.q, b.k, wide, b.cu_q, b.cu_k, b.max_q, b.max_k, causal=True)
    close(out[5:], one)
    q, k, v = b.q[5:][None], b.k[9:][None], wide[9:][None]
    close(flash_attn.flash_attn_with_kvcache(q, k, v, causal=True)[0], one)
    close(flash_attn.flash_attn_func(q, k, v, causal=True)[0], one)


def test_lse_comes_as_each_version_returns_it(batch: Batch) -> None:
    b, f = batch, flash_attn.flash_attn_varlen_func
    lengths = (b.cu_q, b.cu_k, b.max_q, b.max_k)
    assert len(f(b.q, b.k, b.v, *lengths, return_attn_probs=True)) == 3
    assert len(f(b.q, b.k, b.v, *lengths, None, None, return_attn_probs=True)) == 2
    assert len(f(b.q, b.k, b.v, b.max_q, b.cu_q, b.max_k, b.cu_k, return_softmax_lse=True)) == 2
    assert f(b.q, b.k, b.v, None, *lengths)[1] is None
    assert f(b.q, b.k, b.v, None, *lengths, return_lse=True)[1].shape == (4, 9)


@pytest.mark.parametrize("clip", [False, True])
def test_unified_attention_shows_ranges_prefixes_and_causality_by_sequence(batch: Batch, clip: bool) -> None:
    """Against dense attention under masks written out: ranges include their last number, one token is no range."""
    b, out = batch, torch.empty_like(batch.q)
    ranges = torch.tensor([[[2, 6], [7, 7]], [[3, 16], [0, 0]], [[0, 0], [-1, -1]]])
    prefix, window, causal = (1, 4, 0), 3, torch.tensor([True, True, False])

    def dense(seen: Any) -> Tensor:
        parts = []
        for s, (n, m) in enumerate(zip(b.lens_q, b.lens_k)):
            query, key = torch.arange(m - n, m)[:, None], torch.arange(m)[None]
            bias = torch.zeros(n, m).masked_fill(~seen(s, query, key), -torch.inf)
            q, k, v = b.q[b.cu_q[s] :][:n], b.k[b.cu_k[s] :][:m], b.v[b.cu_k[s] :][:m]
            k, v = (x.double().repeat_interleave(2, 1) for x in (k, v))
            weights = (torch.einsum("nhd,mhd->hnm", q.double(), k) / 4 + bias).softmax(-1)
            parts.append(torch.einsum("hnm,mhd->nhd", weights, v))
        return torch.cat(parts)

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
    close(flash_attn.unified_attention(**call, **asked), dense(within))
    asked = dict(rswa_prefix_lens=torch.tensor(prefix), rswa_window=2)
    behind = dense(lambda s, query, key: (key <= query) & ((key < prefix[s]) | (query - key < 2)))
    close(flash_attn.unified_attention(**call | {"window_size": (-1, -1)}, **asked), behind)
    some = dense(lambda s, query, key: (query - key < window) & (key - query < (1 if causal[s] else window)))
    close(flash_attn.unified_attention(**call | {"causal": causal}), some)


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


@pytest.mark.parametrize(("len_q", "len_k"), [(3, 16), (5, 5), (4, 2)])
def test_dense_batches(len_q: int, len_k: int) -> None:
    """Pages of whole sequences; the call's own keys; queries that stand before the first key."""
    q, (k, v) = torch.randn(2, len_q, 4, 16), torch.randn(2, 2, len_k, 2, 16)
    out, lse, _ = flash_attn.flash_attn_func(q, k, v, 0.0, None, True, return_attn_probs=True)
    for s in range(2):
        wanted, wanted_lse = attention(q[s], k[s], v[s], causal=True)
        close(out[s], wanted)
        close(lse[s], wanted_lse)
    assert len(flash_attn.flash_attn_func(q, k, v, None, True, None, return_attn_probs=True)) == 2  # FA3
    assert flash_attn.flash_attn_func(q, k, v, None, None, 0.3, False)[1] is None  # FA4


def rotated(x: Tensor, first: int, cos: Tensor, sin: Tensor, interleaved: bool, step: int = 1) -> Tensor:
    """[n, heads, d] by complex numbers, in float64."""
    half, at = cos.shape[1], [first + i * step for i in range(len(x))]
    turn = torch.complex(cos.double(), sin.double())[at][:, None]
    y = x.double().clone()
    a, b = (
        (y[..., 0 : 2 * half : 2], y[..., 1 : 2 * half : 2])
        if interleaved
        else (y[..., :half], y[..., half : 2 * half])
    )
    both = torch.complex(a, b) * turn
    a.copy_(both.real)
    b.copy_(both.imag)
    return y


CACHES = ["pages", "rows", "chosen rows"]


@pytest.mark.parametrize("rotary", [None, "interleaved", "halves", "not causal"])
@pytest.mark.parametrize("cache", CACHES)
def test_appended_keys_are_written_turned_and_seen(cache: str, rotary: str | None) -> None:
    lens, new, room = (5, 0, 11), 2, 16
    seqs = len(lens)
    q = torch.randn(seqs, new, 4, 16)
    k, v = torch.randn(2, seqs, new, 2, 16)
    held = [torch.randn(2, n, 2, 16) for n in lens]
    k_cache, v_cache = torch.full((2, 5, room, 2, 16), BAD) if cache != "pages" else torch.full((2, 12, 4, 2, 16), BAD)
    rows = torch.tensor([3, 0, 4], dtype=torch.int32) if cache == "chosen rows" else torch.arange(3, dtype=torch.int32)
    table = torch.randperm(12).view(3, 4).int()

    def places(s: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        at = torch.arange(first, last)
        return (table[s, at // 4].long(), at % 4) if cache == "pages" else (rows[s].long().expand(len(at)), at)

    for s, (a, b) in enumerate(held):
        k_cache[places(s, 0, lens[s])], v_cache[places(s, 0, lens[s])] = a, b
    angles = torch.rand(room, 4) * 6
    cos, sin = (angles.cos(), angles.sin()) if rotary else (None, None)
    inter, causal = rotary in ("interleaved", "not causal"), rotary != "not causal"
    more = {"block_table": table} if cache == "pages" else {"cache_batch_idx": rows} if cache != "rows" else {}
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cos, sin, torch.tensor(lens, dtype=torch.int32), causal=causal,
        rotary_interleaved=inter, return_softmax_lse=True, **more,
    )  # fmt: skip
    assert lse.shape == (3, 4, new)
    for s, n in enumerate(lens):
        turned, turned_q = k[s].double(), q[s].double()
        if cos is not None and sin is not None:
            turned = rotated(k[s], n, cos, sin, inter)
            turned_q = rotated(q[s], n, cos, sin, inter, step=1 if causal else 0)
        close(k_cache[places(s, n, n + new)], turned)
        assert torch.equal(v_cache[places(s, n, n + new)], v[s])
        wanted, wanted_lse = attention(
            turned_q, torch.cat([held[s][0], turned]), torch.cat([held[s][1], v[s]]), causal=causal
        )
        close(out[s], wanted)
        close(lse[s], wanted_lse)


def test_nothing_but_the_appended_slots_changes() -> None:
    """Padding (length -1) and a row that is full: neither writes, and the full one sees what it holds."""
    k_cache, v_cache = torch.zeros(2, 6, 4, 2, 16)
    table = torch.tensor([[0, 1], [2, 3], [4, 5]], dtype=torch.int32)
    lens = torch.tensor([3, -1, 8], dtype=torch.int32)
    k = torch.ones(3, 1, 2, 16)
    q = torch.randn(3, 1, 4, 16)
    out = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, k, cache_seqlens=lens, block_table=table)
    assert k_cache.nonzero()[:, :2].unique(dim=0).tolist() == [[0, 3]]
    assert not out[1].any()


@pytest.mark.parametrize("tail", [-1, 2**31 - 1])
def test_lengths_end_with_the_table_where_a_row_is_full(tail: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A length beyond the table would send the kernel to pages that are nobody's."""
    import paged_attn

    seen: list[list[int]] = []
    attend = paged_attn.paged_attention
    monkeypatch.setattr(paged_attn, "paged_attention", lambda *x, **y: seen.append(x[4].tolist()) or attend(*x, **y))
    k_cache, v_cache = torch.zeros(2, 6, 4, 2, 16)
    wide = torch.tensor([[0, 1, tail], [4, 5, tail]], dtype=torch.int32)
    lens, k, q = torch.tensor([3, 8], dtype=torch.int32), torch.ones(2, 1, 2, 16), torch.randn(2, 1, 4, 16)
    flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, k, cache_seqlens=lens, block_table=wide[:, :2])
    assert seen == [[4, 8]]


def test_a_page_that_is_not_there_is_not_written() -> None:
    new = kvcache.Tokens(torch.tensor([0, 1]), torch.tensor([0, 0]), None)
    table = torch.tensor([[1, -1], [1, 0]], dtype=torch.int32)
    assert kvcache._slots(new, torch.tensor([4, 4], dtype=torch.int32), table, 4).tolist() == [-1, 0]


def test_ragged_appends_follow_their_own_starts() -> None:
    """FlashAttention-3's cu_seqlens_q and cu_seqlens_k_new, lengths of which differ, and rotary_seqlens."""
    k_cache, v_cache = torch.randn(2, 2, 16, 2, 16)
    before = k_cache.clone(), v_cache.clone()
    q, (k, v) = torch.randn(4, 4, 16), torch.randn(2, 4, 2, 16)
    cos, sin = torch.rand(2, 32, 8)
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, None, cos, sin, torch.tensor([6, 2], dtype=torch.int32), None, None, None,
        cumulative((3, 1)), cumulative((1, 2)), 3, torch.tensor([9, 1], dtype=torch.int32), causal=True,
        rotary_interleaved=False, return_softmax_lse=True,
    )  # fmt: skip
    assert lse.shape == (4, 4)
    for s, (n, start, a, b, c, d) in enumerate([(6, 9, 0, 3, 0, 1), (2, 1, 3, 4, 1, 3)]):
        keys = torch.cat([before[0][s, :n], rotated(k[c:d], start, cos, sin, False)])
        values = torch.cat([before[1][s, :n], v[c:d]])
        wanted, wanted_lse = attention(rotated(q[a:b], start, cos, sin, False), keys, values, causal=True)
        close(out[a:b], wanted)
        close(lse[:, a:b], wanted_lse)
    assert torch.equal(v_cache[1, 2:4], v[1:3])  # the fourth token is padding
    assert torch.equal(v_cache[1, 4:], before[1][1, 4:])


@pytest.mark.parametrize("order", ["FA2", "FA3", "int", "full", "page_table and cache_batch_idx"])
def test_every_order_of_kvcache_means_the_same(order: str) -> None:
    b, f = Batch((1, 1), (9, 9)), flash_attn.flash_attn_with_kvcache
    q, caches = b.q[:, None], (b.k_cache, b.v_cache)
    dense = tuple(x.view(2, 9, 2, 16) for x in (b.k, b.v))
    calls = {
        "FA2": lambda: f(q, *caches, None, None, None, None, b.used, None, None, b.table, None, True, (5, 0), 0.0),
        "FA3": lambda: f(q, *caches, None, None, None, None, None, b.used, None, None, b.table, None, None, None, None,
                         None, None, None, None, True, (5, 0)),
        "int": lambda: f(q, *caches, cache_seqlens=9, page_table=b.table, causal=True, window_size=(5, -1)),
        "full": lambda: f(q, *dense, causal=True, window_size=(5, 0)),
        "page_table and cache_batch_idx": lambda: f(
            q, *caches, cache_seqlens=b.used, page_table=b.table.flip(0), causal=True, window_size=(5, 0),
            cache_batch_idx=torch.tensor([1, 0], dtype=torch.int32)),
    }  # fmt: skip
    close(calls[order]()[:, 0], b.wanted(causal=True, window=(5, -1))[0])


def test_left_padding_is_not_seen() -> None:
    q, (k, v) = torch.randn(2, 2, 4, 16), torch.randn(2, 2, 12, 2, 16)
    left, lens = torch.tensor([3, 0], dtype=torch.int32), torch.tensor([9, 12], dtype=torch.int32)
    k[0, :3], v[0, :3], k[0, 9:], v[0, 9:] = BAD, BAD, BAD, BAD
    out = flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=lens, cache_leftpad=left, causal=True)
    close(out[0], attention(q[0], k[0, 3:9], v[0, 3:9], causal=True)[0])
    close(out[1], attention(q[1], k[1], v[1], causal=True)[0])


def test_fp8_takes_descales_of_every_shape() -> None:
    b = Batch((2, 3), (9, 4))
    k, v = (x.nan_to_num(1.0).to(torch.float8_e4m3fn) for x in (b.k_cache, b.v_cache))
    b.k, b.v = (x.to(torch.float8_e4m3fn).double() * n for x, n in ((b.k, 0.5), (b.v, 2.0)))
    half, two = torch.tensor(0.5), torch.tensor([2.0, 2.0])
    for k_scale, v_scale in ((half, two), (half.expand(2, 2), two.expand(2, 2)), (0.5, two[None, :1].expand(2, 2))):
        out = flash_attn.flash_attn_varlen_func(
            b.q, k, v, b.max_q, b.cu_q, b.max_k, seqused_k=b.used, block_table=b.table, causal=True,
            k_descale=k_scale, v_descale=v_scale,
        )  # fmt: skip
        close(out, b.wanted(causal=True)[0])
    with pytest.raises(ValueError, match="k_descale must be the same for all sequences"):
        flash_attn.flash_attn_varlen_func(
            b.q, k, v, b.max_q, b.cu_q, b.max_k, seqused_k=b.used, block_table=b.table, k_descale=torch.ones(2, 2)
        )


REFUSED = [
    ({"dropout_p": 0.1}, ValueError, "has no dropout_p: it must be 0 or left out, got 0.1"),
    ({"cp_world_size": 2}, ValueError, "has no cp_world_size: it must be 1 or left out, got 2"),
    ({"attention_chunk": -64}, ValueError, "chunk must be None or an int >= 1"),
    ({"qv": torch.ones(9, 4, 16)}, ValueError, "takes qv with a page table only"),
    ({"q_v": torch.ones(9, 4, 16)}, ValueError, "takes qv with a page table only"),
    ({"rel_bias": torch.ones(9, 4, 8)}, ValueError, "has no rel_bias: it must be None or left out, got a Tensor"),
    ({"only_qv": True}, ValueError, "needs qv where only_qv is True"),
    ({"seqused_q": torch.ones(3)}, ValueError, "has no seqused_q"),
    ({"score_mod": max}, ValueError, "has no score_mod"),
    ({"alibi_slopes": torch.ones(3, 4), "causal": True}, ValueError, r"alibi_slopes must be \[heads\]"),
    ({"alibi_slopes": torch.ones(4)}, ValueError, "alibi_slopes need causal = True"),
    ({"window_size": (-3, 0)}, ValueError, r"window_size\[0\] must be"),
    ({"blocktable": None}, TypeError, "unknown keyword 'blocktable'; known: alibi_slopes, attention_chunk"),
    ({"block_table": torch.ones(3, 1).int(), "page_table": torch.ones(3, 1).int()}, TypeError, "got page_table twice"),
    ({"cu_seqlens_q": torch.ones(4).int()}, TypeError, "fit no order"),
]


@pytest.mark.parametrize(("more", "error", "text"), REFUSED, ids=[" ".join(more) for more, _, _ in REFUSED])
def test_what_is_not_known_is_refused_by_name(
    batch: Batch, no_launch: None, more: dict[str, Any], error: type[Exception], text: str
) -> None:
    b = batch
    with pytest.raises(error, match=text):
        flash_attn.flash_attn_varlen_func(b.q, b.k, b.v, b.cu_q, b.cu_k, b.max_q, b.max_k, **more)


def test_orders_that_cannot_be_told_apart_are_refused(no_launch: None) -> None:
    q = torch.ones(2, 3, 4, 16)
    with pytest.raises(TypeError, match="fit the orders of FA2 and FA3, which mean different things"):
        flash_attn.flash_attn_func(q, q, q, 0.125)  # a dropout, or a scale
    with pytest.raises(TypeError, match="fit the orders of FA2 and FA3"):
        flash_attn.flash_attn_with_kvcache(q, q, q, *[None] * 5, torch.ones(2).int())
    with pytest.raises(TypeError, match=r"fit no order of FA2, FA3, SGLang: \[-, -, str\]"):
        flash_attn.flash_attn_with_kvcache(q, q, q, None, None, "text")


def test_incomplete_calls_say_what_is_missing(batch: Batch, no_launch: None) -> None:
    b, q, cos = batch, batch.q[:3, None], torch.ones(9, 4)
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: flash_attn.flash_attn_varlen_func(b.q, b.k, b.v), TypeError, "needs cu_seqlens_q"),
        (lambda: flash_attn.flash_attn_varlen_func(b.q, b.k, b.v, b.max_q, b.cu_q), TypeError,
         "cu_seqlens_k or seqused_k"),
        (lambda: flash_attn.flash_attn_varlen_func(b.q, b.k, b.v, b.max_q, b.cu_q, b.max_k, None, b.used), TypeError,
         "cu_seqlens_k where k has neither"),
        (lambda: flash_attn.flash_attn_with_kvcache(q, b.k_cache, b.v_cache, k=q), ValueError, "k needs cache_seqlens"),
        (lambda: flash_attn.flash_attn_with_kvcache(q, b.k_cache, b.v_cache, k=q, cache_seqlens=b.used), ValueError,
         "k and v must be given together"),
        (lambda: flash_attn.flash_attn_with_kvcache(q, b.k_cache, b.v_cache, rotary_cos=cos, rotary_sin=cos),
         ValueError, "rotary_cos needs k and v"),
        (lambda: flash_attn.flash_attn_with_kvcache(q, b.k_cache, b.v_cache, rotary_cos=cos), ValueError,
         "must be given together"),
        (lambda: flash_attn.unified_attention(b.q, b.k, b.v, out=b.q), TypeError, "needs cu_seqlens_q"),
    ]  # fmt: skip
    for call, error, text in cases:
        with pytest.raises(error, match=text):
            call()


def test_hosts_that_ask_for_the_signature_see_every_name() -> None:
    for function in orders.ORDERS:
        known = inspect.signature(getattr(flash_attn, function)).parameters
        assert {name for order in orders.ORDERS[function].values() for name in order} <= set(known)
    assert list(inspect.signature(flash_attn.flash_attn_varlen_func).parameters)[:7] == [
        "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k",
    ]  # fmt: skip


def test_nothing_is_put_in_place_until_install() -> None:
    code = """
import sys, importlib.util, types
import paged_attn.integrations.flash_attn as ours
assert "flash_attn" not in sys.modules and "transformers" not in sys.modules and "vllm" not in sys.modules
module = ours.install()
import flash_attn
from flash_attn.flash_attn_interface import flash_attn_varlen_func
assert flash_attn is module is ours.install() and flash_attn_varlen_func is ours.flash_attn_varlen_func
assert importlib.util.find_spec("flash_attn") is not None and flash_attn.__version__.startswith("2.")
assert not hasattr(flash_attn, "flash_attn_qkvpacked_func")
ours.uninstall(); ours.uninstall()
assert "flash_attn" not in sys.modules and "flash_attn.flash_attn_interface" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_imported_flash_attn_is_not_replaced_unless_forced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import types

    real, inner = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.layers")
    real.__version__ = "2.7.4"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", real)
    monkeypatch.setitem(sys.modules, "flash_attn.layers", inner)
    with pytest.raises(RuntimeError, match=r"flash_attn 2\.7\.4 of None has been imported already"):
        shim.install()
    shim.install(force=True)
    assert "replaces flash_attn 2.7.4" in caplog.text
    assert sys.modules["flash_attn"] is not real
    assert "flash_attn.layers" not in sys.modules
    shim.uninstall()
    assert sys.modules["flash_attn"] is real
    assert sys.modules["flash_attn.layers"] is inner
    assert "flash_attn.flash_attn_interface" not in sys.modules
