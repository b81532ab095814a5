"""FlashAttention's function over a cache: keys that it appends, turns and sees, in each order of its arguments."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from paged_attn.integrations import flash_attn
from paged_attn.integrations.flash_attn import kvcache
from tests.integrations.by_hand import BAD, Batch, attention, close, cumulative


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


@pytest.mark.parametrize("len_q", [0, 1, 3])
def test_results_go_where_out_says(len_q: int) -> None:
    """In the shape of q, or of its tokens; also where sequences lie apart, if each has one token."""
    k_cache, v_cache = torch.randn(2, 2, 9, 2, 16)
    q, room = torch.randn(2, len_q, 4, 16), torch.full((2, max(len_q, 1) + (len_q == 1), 4, 16), BAD)
    call = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "cache_seqlens": 9, "causal": True}
    wanted = flash_attn.flash_attn_with_kvcache(**call)
    out = room[:, :len_q]
    assert flash_attn.flash_attn_with_kvcache(**call, out=out) is out
    assert torch.equal(out, wanted)
    flat = torch.empty(2 * len_q, 4, 16)
    assert torch.equal(flash_attn.flash_attn_with_kvcache(**call, out=flat), wanted)
    assert torch.equal(flat, wanted.flatten(0, 1))


@pytest.mark.parametrize(("shape", "says"), [
    ((2, 4, 4, 16), "must have its sequences one behind the other, got strides"),  # of which the first three tokens
    ((3, 2, 4, 16), "must be [2, 3, 4] of [seqs, len_q, heads] like q, got [3, 2, 4, 16]"),
])  # fmt: skip
def test_out_of_another_form_is_refused_by_name(shape: tuple[int, ...], says: str) -> None:
    q, (k_cache, v_cache) = torch.randn(2, 3, 4, 16), torch.randn(2, 2, 9, 2, 16)
    with pytest.raises(ValueError, match=re.escape(f"out {says}")):
        flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=9, out=torch.empty(shape)[:, :3])


def test_keys_are_not_appended_beside_queries_of_values_alone() -> None:
    qv, cache, new = torch.randn(2, 1, 4, 16), torch.randn(2, 9, 1, 16), torch.randn(2, 1, 1, 16)
    with pytest.raises(ValueError, match="writes no k and v where only_qv is True"):
        flash_attn.flash_attn_with_kvcache(
            None, None, cache, k=new, v=new, qv=qv, only_qv=True, cache_seqlens=8, softmax_scale=0.25
        )


def test_left_padding_is_not_seen() -> None:
    q, (k, v) = torch.randn(2, 2, 4, 16), torch.randn(2, 2, 12, 2, 16)
    left, lens = torch.tensor([3, 0], dtype=torch.int32), torch.tensor([9, 12], dtype=torch.int32)
    k[0, :3], v[0, :3], k[0, 9:], v[0, 9:] = BAD, BAD, BAD, BAD
    out = flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=lens, cache_leftpad=left, causal=True)
    close(out[0], attention(q[0], k[0, 3:9], v[0, 3:9], causal=True)[0])
    close(out[1], attention(q[1], k[1], v[1], causal=True)[0])


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("chunk", [0, 4])
@pytest.mark.parametrize("cache", ["pages", "pages of heads", "pages of one", "apart", "chosen rows"])
def test_left_padding_beside_tables_chunks_and_rotary_tables(cache: str, chunk: int, rotary: bool) -> None:
    """Chunks count from the first key, rotary tables and lengths from the first slot; what lies left of it is NaN."""
    room, new, left, lens = 16, 2, (3, 0, 7), (9, 5, 8)
    q, (k, v) = torch.randn(3, new, 4, 16), torch.randn(2, 3, new, 2, 16)
    held = torch.full((2, 3, room, 2, 16), BAD)
    for s, (a, b) in enumerate(zip(left, lens)):
        held[:, s, a:b] = torch.randn(2, b - a, 2, 16)
    page = {"pages of one": 1, "chosen rows": room}.get(cache, 4)
    count = room // page
    table = torch.randperm(3 * count + 2)[: 3 * count].view(3, count).int()
    k_cache, v_cache = torch.full((2, 3 * count + 2, page, 2, 16), BAD)
    k_cache[table.long()], v_cache[table.long()] = held.unflatten(2, (count, page))
    if cache == "pages of heads":  # whose heads lie apart, between pages
        k_cache, v_cache = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k_cache, v_cache))
    if cache == "apart":  # in two ways
        v_cache = v_cache.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.cat([table, torch.full((3, 1), 2**31 - 1)], 1).int()
    more = {"cache_batch_idx": table[:, 0]} if cache == "chosen rows" else {"block_table": wide}
    cos, sin = torch.rand(2, room, 8) if rotary else (None, None)
    out = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=torch.tensor(lens).int(),
        cache_leftpad=torch.tensor(left).int(), causal=True, attention_chunk=chunk, rotary_interleaved=False, **more,
    )  # fmt: skip
    for s, (a, b) in enumerate(zip(left, lens)):
        turned, turned_q = k[s].double(), q[s].double()
        if cos is not None and sin is not None:
            turned, turned_q = (rotated(x[s], b, cos, sin, False) for x in (k, q))
        keys, values = torch.cat([held[0, s, a:b], turned]), torch.cat([held[1, s, a:b], v[s]])
        close(out[s], attention(turned_q, keys, values, causal=True, chunk=chunk)[0])


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.mark.parametrize("fp8", [E4M3, E5M2])
def test_fp8_keys_are_appended_as_they_are(fp8: torch.dtype) -> None:
    """Whatever the descales: every number of the type, and what a slot held is what it holds."""
    every = torch.arange(256, dtype=torch.uint8).view(fp8)
    finite = every[every.float().isfinite()]
    k = finite[torch.randint(len(finite), (2, 3, 2, 128))]
    k[0, 0, 0] = finite[:128]
    k[0, 0, 1, : len(finite) - 128] = finite[128:]
    k_cache, v_cache = torch.zeros(2, 2, 8, 2, 128).to(fp8).unbind(0)
    lens, q = torch.tensor([5, -1]).int(), torch.randn(2, 1, 4, 128).to(fp8)
    descale = torch.tensor([[0.5, 1.0], [2.0, 3.0]])
    flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, k.flip(0), cache_seqlens=lens, q_descale=descale, k_descale=descale, v_descale=descale
    )
    assert torch.equal(k_cache[0, 5:].view(torch.uint8), k[0].view(torch.uint8))
    assert torch.equal(v_cache[0, 5:].view(torch.uint8), k[1].view(torch.uint8))
    assert not k_cache[1].float().any()
    other = k.float().to(E4M3 if fp8 == E5M2 else E5M2)
    with pytest.raises(TypeError, match=f"k must be {fp8} like the cache, or 16 bits, got {other.dtype}"):
        flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, other, k, cache_seqlens=lens)


def test_keys_of_16_bits_are_quantised_by_the_descales_of_their_sequences() -> None:
    k, v = torch.randn(2, 2, 1, 2, 16).half().unbind(0)
    k_cache, v_cache = torch.zeros(2, 2, 8, 2, 16).to(E4M3).unbind(0)
    descale = torch.tensor([[0.5, 1.0], [2.0, 3.0]])
    q = torch.randn(2, 1, 4, 16).half()
    out = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=torch.zeros(2).int(), k_descale=descale, v_descale=descale
    )
    for cache, x in ((k_cache, k), (v_cache, v)):
        assert torch.equal(cache[:, 0].float(), (x[:, 0].float() / descale[..., None]).to(E4M3).float())
    torch.testing.assert_close(out.float()[:, 0], v[:, 0].float().repeat_interleave(2, 1), atol=0.1, rtol=0.1)


def test_fp8_queries_and_keys_are_turned() -> None:
    """The rotary tables are fp8, as in FlashAttention-3's tests."""
    q, k, v = (torch.randn(1, 2, 2, 16).to(E4M3) for _ in range(3))
    cos, sin = torch.rand(2, 16, 8).to(E4M3).unbind(0)
    k_cache, v_cache = torch.zeros(2, 1, 16, 2, 16).to(E4M3).unbind(0)
    out = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=torch.tensor([4]).int(), causal=True
    )
    turned_k, turned_q = (rotated(x[0].float(), 4, cos.float(), sin.float(), True).to(E4M3) for x in (k, q))
    assert torch.equal(k_cache[0, 4:6].float(), turned_k.float())
    keys, values = k_cache[0, :6].double(), v_cache[0, :6].double()
    wanted = attention(turned_q.double(), keys, values, causal=True)[0]
    torch.testing.assert_close(out[0].double(), wanted, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("new, interleaved", [(1, True), (3, False)])
def test_rotation_and_write_are_one_call_where_queries_and_new_keys_are_alike(
    new: int, interleaved: bool, cache_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second sequence is padding; the third has no room for its last keys."""
    q, k, v = (torch.randn(3, new, heads, 16) for heads in (4, 2, 2))
    caches = torch.randn(2, 12, 4, 2, 16).to(cache_dtype)
    table, lens = torch.randperm(12).view(3, 4).int(), torch.tensor([5, -1, 14], dtype=torch.int32)
    cos, sin = torch.rand(2, 20, 4)
    more = dict(k_descale=0.02, v_descale=0.03) if cache_dtype != torch.float32 else {}

    def called() -> tuple[Tensor, Tensor, Tensor]:
        k_cache, v_cache = caches.clone()
        out = flash_attn.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cos, sin, lens, block_table=table, causal=True, rotary_interleaved=interleaved,
            **more,
        )  # fmt: skip
        return out, k_cache.float(), v_cache.float()

    with monkeypatch.context() as patch:
        patch.setattr(kvcache, "rotate", lambda *_: pytest.fail("queries and keys were rotated apart"))
        fused = called()
    with monkeypatch.context() as patch:
        patch.setattr(kvcache, "_fuses", lambda *_: False)
        apart = called()
    for one, other in zip(fused, apart):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
