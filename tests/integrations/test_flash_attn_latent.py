"""qv, queries of latent attention in two parts: what they mean, where keys and values may lie, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from paged_attn.integrations import flash_attn
from paged_attn.integrations.flash_attn import varlen
from tests.integrations.by_hand import BAD, attention, close, cumulative

RANK, ROPE, HEADS, PAGE = 32, 16, 4, 4
LENS_Q, LENS_K = (1, 3, 2), (9, 5, 2)


class Batch:
    """Queries of two parts, and latents with rotated keys in the pages of one cache, whose dead slots are NaN."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        tokens, pages = sum(LENS_Q), [-(-n // PAGE) for n in LENS_K]
        self.qv, self.q = torch.randn(tokens, HEADS, RANK), torch.randn(tokens, HEADS, ROPE)
        self.latents = [torch.randn(n, 1, RANK + ROPE) for n in LENS_K]
        self.cache = torch.full((sum(pages) + 1, PAGE, 1, RANK + ROPE), BAD)
        self.table = torch.full((len(LENS_K), max(pages) + 1), -1, dtype=torch.int32)
        free = iter(torch.randperm(sum(pages)).tolist())
        for s, latent in enumerate(self.latents):
            for p in range(pages[s]):
                self.table[s, p] = at = next(free)
                rows = latent[p * PAGE : (p + 1) * PAGE]
                self.cache[at, : len(rows)] = rows
        self.v, self.k = self.cache[..., :RANK], self.cache[..., RANK:]
        self.starts, self.lens = cumulative(LENS_Q), torch.tensor(LENS_K, dtype=torch.int32)
        self.call: dict[str, Any] = dict(
            cu_seqlens_q=self.starts, max_seqlen_q=max(LENS_Q), page_table=self.table, cache_seqlens=self.lens,
            causal=True,
        )  # fmt: skip

    def wanted(self, keys: int = RANK + ROPE, scale: float | None = None, **options: Any) -> tuple[Tensor, Tensor]:
        """(out, lse) of the first so many dims of queries and keys."""
        q = torch.cat([self.qv, self.q], -1)[..., :keys]
        parts = [
            attention(q[a:b], x[..., :keys], x[..., :RANK], causal=True, scale=scale, **options)
            for a, b, x in zip(self.starts, self.starts[1:], self.latents)
        ]
        return torch.cat([x for x, _ in parts]), torch.cat([x for _, x in parts], 1)


def test_scores_are_of_both_parts_and_values_are_latents() -> None:
    b = Batch()
    out, lse = flash_attn.flash_attn_with_kvcache(b.q, b.k, b.v, qv=b.qv, **b.call, return_softmax_lse=True)
    wanted, wanted_lse = b.wanted()  # the scale is that of both parts, unless it is given
    close(out, wanted)
    close(lse, wanted_lse)
    out = flash_attn.flash_attn_with_kvcache(
        b.q, b.k, b.v, qv=b.qv, **b.call, softmax_scale=0.3, softcap=2.0, window_size=(3, 0), max_seqlen_k=9
    )
    close(out, b.wanted(scale=0.3, softcap=2.0, window=(3, 0))[0])


def test_batches_of_one_length_and_decodes_have_two_parts_too() -> None:
    b = Batch()
    q, qv = b.q[:3, None], b.qv[:3, None]
    out = flash_attn.flash_attn_with_kvcache(q, b.k, b.v, qv=qv, cache_seqlens=b.lens, page_table=b.table)
    both = torch.cat([b.qv, b.q], -1)
    wanted = [attention(both[s : s + 1], x, x[..., :RANK])[0] for s, x in enumerate(b.latents)]
    assert out.shape == (3, 1, HEADS, RANK)
    close(out[:, 0], torch.cat(wanted))


def test_appended_latents_are_written_to_the_one_cache_and_seen() -> None:
    b = Batch()
    new = torch.randn(3, 1, 1, RANK + ROPE)
    room = torch.arange(12, dtype=torch.int32).view(3, 4)
    cache = torch.full((12, PAGE, 1, RANK + ROPE), BAD)
    for s, x in enumerate(b.latents):
        cache.view(3, 4 * PAGE, 1, -1)[s, : len(x)] = x
    out = flash_attn.flash_attn_with_kvcache(
        b.q[:3, None], cache[..., RANK:], cache[..., :RANK], new[..., RANK:], new[..., :RANK], qv=b.qv[:3, None],
        cache_seqlens=b.lens, page_table=room, max_seqlen_k=1,
    )  # fmt: skip
    both = torch.cat([b.qv, b.q], -1)
    for s, x in enumerate(b.latents):
        keys = torch.cat([x, new[s]])
        close(out[s], attention(both[s : s + 1], keys, keys[..., :RANK])[0])
        assert torch.equal(cache.view(3, 4 * PAGE, 1, -1)[s, LENS_K[s]], new[s, 0])


@pytest.mark.parametrize("given", ["nothing", "a part of no dims", "only_qv"])
def test_latents_alone_are_keys_and_values(given: str) -> None:
    b = Batch()
    q = {"nothing": None, "a part of no dims": b.q[..., :0], "only_qv": b.q}[given]
    k = {"nothing": None, "a part of no dims": b.cache[..., RANK + ROPE :], "only_qv": b.k}[given]
    more = {"only_qv": True} if given == "only_qv" else {}
    out = flash_attn.flash_attn_with_kvcache(q, k, b.v, qv=b.qv, softmax_scale=0.2, **b.call, **more)
    close(out, b.wanted(keys=RANK, scale=0.2)[0])


def test_varlen_takes_two_parts_over_pages() -> None:
    b = Batch()
    args = dict(
        cu_seqlens_q=b.starts, max_seqlen_q=max(LENS_Q), max_seqlen_k=max(LENS_K), seqused_k=b.lens, causal=True
    )
    close(flash_attn.flash_attn_varlen_func(b.q, b.k, b.v, q_v=b.qv, block_table=b.table, **args), b.wanted()[0])


@pytest.mark.parametrize("keys", ["one cache", "parts apart", "many rows", "latents alone"])
def test_varlen_takes_two_parts_without_pages(keys: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if keys == "many rows":
        monkeypatch.setattr(varlen, "ROWS", 1)
    b, ragged = Batch(), torch.cat(Batch().latents)
    k, v = ragged[..., RANK:], ragged[..., :RANK]
    if keys != "one cache":
        k, v = k.clone(), v.clone()
    more: dict[str, Any] = {"only_qv": True, "softmax_scale": 0.2} if keys == "latents alone" else {}
    out, lse = flash_attn.flash_attn_varlen_func(
        b.q, k, v, cu_seqlens_q=b.starts, cu_seqlens_k=cumulative(LENS_K), max_seqlen_q=max(LENS_Q),
        max_seqlen_k=max(LENS_K), seqused_q=torch.tensor(LENS_Q), causal=True, qv=b.qv, return_softmax_lse=True, **more,
    )  # fmt: skip
    wanted, wanted_lse = b.wanted(*((RANK, 0.2) if more else ()))
    close(out, wanted)
    close(lse, wanted_lse)


@pytest.mark.parametrize("len_k", [0, 3, 8])
def test_dense_batches_take_two_parts(len_k: int) -> None:
    q, qv = torch.randn(2, 3, HEADS, ROPE), torch.randn(2, 3, HEADS, RANK)
    k, v = torch.randn(2, len_k, 1, ROPE), torch.randn(2, len_k, 1, RANK)
    out = flash_attn.flash_attn_func(q, k, v, causal=True, qv=qv)
    for s in range(2):
        keys = torch.cat([v[s], k[s]], -1)
        close(out[s], attention(torch.cat([qv[s], q[s]], -1), keys, v[s], causal=True)[0])


def test_what_is_not_one_cache_or_not_known_is_refused_by_name() -> None:
    b = Batch()
    call = flash_attn.flash_attn_with_kvcache
    apart = r"cache\[..., :32\] and cache\[..., 32:\] of one cache of 48 dims; these lie apart"
    for k, v in ((b.k.clone(), b.v), (b.cache[..., :ROPE], b.v), (b.k.double(), b.v)):
        with pytest.raises(ValueError, match=apart):
            call(b.q, k, v, qv=b.qv, **b.call)
    with pytest.raises(ValueError, match="needs qv where only_qv is True"):
        call(b.q, b.k, b.v, only_qv=True, **b.call)
    with pytest.raises(ValueError, match="needs softmax_scale where qv is all of the queries"):
        call(None, None, b.v, qv=b.qv, **b.call)
    with pytest.raises(ValueError, match=r"beside 16 bits, not beside a cache of torch\.float8_e4m3fn"):
        call(b.q, b.k, b.v.nan_to_num().to(torch.float8_e4m3fn), qv=b.qv, **b.call)
    for name in ("rel_bias", "sfq", "sfk", "sfv"):
        with pytest.raises(ValueError, match=f"has no {name}: it must be None or left out, got a Tensor"):
            call(b.q, b.k, b.v, **b.call, **{name: torch.ones(1)})
