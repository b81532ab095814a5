"""FlashAttention's functions: each order and form against a dense float64 attention of their documented meaning."""

from __future__ import annotations

import pytest
import torch

from paged_attn.integrations import flash_attn
from paged_attn.integrations.flash_attn import varlen
from tests.integrations.by_hand import Batch, attention, close, cumulative


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


@pytest.mark.parametrize(("batch", "len_q", "len_k"), [(2, 0, 5), (2, 3, 0), (2, 0, 0), (0, 3, 5)])
def test_dense_batches_of_no_queries_or_no_keys(batch: int, len_q: int, len_k: int) -> None:
    q, (k, v) = torch.randn(batch, len_q, 4, 16), torch.randn(2, batch, len_k, 2, 16)
    out, lse, _ = flash_attn.flash_attn_func(q, k, v, 0.0, None, True, return_attn_probs=True)
    assert (out.shape, lse.shape) == (q.shape, (batch, 4, len_q))
    assert not out.any()
    assert (lse == -torch.inf).all()


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


E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize("lens_q", [(2, 3), (1, 1)])
def test_fp8_takes_descales_of_each_sequence(lens_q: tuple[int, ...]) -> None:
    """Descales of queries belong to sequences even if there are as many tokens as sequences."""
    for b in (Batch(lens_q, (9, 4)), Batch((2, 0), (9, 4))):
        k, v = (x.nan_to_num(1.0).to(E4M3) for x in (b.k_cache, b.v_cache))
        q = b.q.to(E4M3)
        scales = {name: 0.5 + torch.rand(2, 2) for name in ("q_descale", "k_descale", "v_descale")}
        token_q, token_k = (torch.arange(2).repeat_interleave(torch.tensor(x)) for x in (b.lens_q, b.lens_k))
        b.k, b.v = (
            x.to(E4M3).double() * scales[name][token_k][..., None]
            for x, name in ((b.k, "k_descale"), (b.v, "v_descale"))
        )
        b.q = q.double() * scales["q_descale"][token_q].repeat_interleave(2, 1)[..., None]
        out = flash_attn.flash_attn_varlen_func(
            q, k, v, b.max_q, b.cu_q, b.max_k, seqused_k=b.used, block_table=b.table, causal=True,
            out=torch.empty(q.shape), **scales,
        )  # fmt: skip
        torch.testing.assert_close(out.double(), b.wanted(causal=True)[0], atol=0.02, rtol=0.02)
    with pytest.raises(
        ValueError, match=r"q_descale must be the same for all sequences beside keys of torch\.bfloat16"
    ):
        flash_attn.flash_attn_varlen_func(
            q, b.k_cache.bfloat16(), b.v_cache.bfloat16(), b.max_q, b.cu_q, b.max_k, seqused_k=b.used,
            block_table=b.table, q_descale=scales["q_descale"],
        )  # fmt: skip


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("keys", ["pages", "ragged", "many rows"])
def test_queries_that_are_not_used_give_zeros_and_move_nobody(
    keys: str, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Causal masks end with the last query that counts; slopes and descales stay those of their sequences."""
    b, used = Batch((5, 1, 3, 2), (9, 17, 3, 4)), (3, 0, 3, 1)
    if keys == "many rows":
        monkeypatch.setattr(varlen, "ROWS", 1)
    slopes = torch.rand(4, 4)
    count = [n for n, most in zip(used, b.lens_q) for n in [True] * n + [False] * (most - n)]
    live = torch.tensor(count)
    at = (b.k_cache, b.v_cache) if keys == "pages" else (b.k, b.v)
    lens = {"seqused_k": b.used, "block_table": b.table} if keys == "pages" else {"cu_seqlens_k": b.cu_k}
    q = b.q.clone()
    q[~live] = float("nan")
    out, lse = flash_attn.flash_attn_varlen_func(
        q, *at, cu_seqlens_q=b.cu_q, max_seqlen_q=b.max_q, max_seqlen_k=b.max_k, causal=causal, alibi_slopes=slopes,
        seqused_q=torch.tensor(used), return_softmax_lse=True, **lens,
    )  # fmt: skip
    b.q, b.cu_q = b.q[live], cumulative(used)
    wanted, wanted_lse = b.wanted(causal=causal, by_seq={"slopes": slopes})
    close(out[live], wanted)
    close(lse[:, live], wanted_lse)
    assert not out[~live].any()
    assert (lse[:, ~live] == -torch.inf).all()


def test_used_queries_equal_to_all_are_the_call_without_them(batch: Batch) -> None:
    """Calls as FlashAttention-3's callers make them: one tensor as both starts, and descales of fp8."""
    b = Batch((5, 1, 3), (5, 1, 3))
    used = b.cu_q.diff()
    out = flash_attn.flash_attn_varlen_func(b.q, b.k, b.v, b.cu_q, b.cu_q, b.max_q, b.max_k, used, used, causal=True)
    close(out, b.wanted(causal=True)[0])
    q, k, v = (x.to(E4M3) for x in (b.q, b.k, b.v))
    b.q, b.k, b.v = q.double(), k.double() * 0.5, v.double() * 2.0
    scales = dict(q_descale=torch.ones(3, 2), k_descale=torch.full((3, 2), 0.5), v_descale=torch.full((3, 2), 2.0))
    out = flash_attn.flash_attn_varlen_func(
        q, k, v, b.cu_q, b.cu_q, b.max_q, b.max_k, used, None, causal=True, out=torch.empty(q.shape), **scales
    )
    torch.testing.assert_close(out.double(), b.wanted(causal=True)[0], atol=0.02, rtol=0.02)


@pytest.mark.parametrize("window", [(-1, -1), (5, 2)])
def test_slopes_lower_keys_on_both_sides_and_may_be_of_each_sequence(batch: Batch, window: tuple[int, int]) -> None:
    b, slopes = batch, torch.rand(3, 4)
    call = dict(max_seqlen_q=b.max_q, cu_seqlens_q=b.cu_q, max_seqlen_k=b.max_k, cu_seqlens_k=b.cu_k)
    out = flash_attn.flash_attn_varlen_func(b.q, b.k, b.v, **call, window_size=window, alibi_slopes=slopes)
    close(out, b.wanted(window=window, by_seq={"slopes": slopes})[0])
    one = flash_attn.flash_attn_varlen_func(b.q, b.k, b.v, **call, window_size=window, alibi_slopes=slopes[0])
    close(one, b.wanted(window=window, slopes=slopes[0])[0])
    q, (k, v) = torch.randn(2, 3, 4, 16), torch.randn(2, 2, 7, 2, 16)
    dense = flash_attn.flash_attn_func(q, k, v, 0.0, None, False, window, 0.0, slopes[:2])
    cached = flash_attn.flash_attn_with_kvcache(q, k, v, window_size=window, alibi_slopes=slopes[:2])
    for s in range(2):
        wanted = attention(q[s], k[s], v[s], window=window, slopes=slopes[s])[0]
        close(dense[s], wanted)
        close(cached[s], wanted)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32])
def test_causality_of_each_sequence_may_be_told(batch: Batch, dtype: torch.dtype) -> None:
    b, causal = batch, [True, False, False]
    call = dict(
        max_seqlen_q=b.max_q, cu_seqlens_q=b.cu_q, max_seqlen_k=b.max_k, seqused_k=b.used, block_table=b.table,
        window_size=[6, 6], dynamic_causal=torch.tensor(causal, dtype=dtype),
    )  # fmt: skip
    wanted = b.wanted(window=(6, 6), by_seq={"causal": causal})[0]
    close(flash_attn.flash_attn_varlen_func(b.q, b.k_cache, b.v_cache, **call, causal=False), wanted)
    close(flash_attn.flash_attn_varlen_func(b.q, b.k_cache, b.v_cache, **call, causal=True), wanted)


def test_a_window_may_be_a_tensor_on_the_host(batch: Batch) -> None:
    b = batch
    out = flash_attn.flash_attn_varlen_func(
        b.q, b.k, b.v, b.cu_q, b.cu_k, b.max_q, b.max_k, window_size=torch.tensor([4, 2])
    )
    close(out, b.wanted(window=(4, 2))[0])
