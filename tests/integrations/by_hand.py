"""Attention of FlashAttention's documented meaning, dense and in float64, and a batch that all its functions take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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

    def wanted(self, by_seq: dict[str, Any] | None = None, **options: Any) -> tuple[Tensor, Tensor]:
        """(out [tokens, heads, d], lse [heads, tokens]); by_seq: options of each sequence."""
        parts = [
            attention(self.q[a:b], self.k[c:d], self.v[c:d], **options, **{n: x[s] for n, x in (by_seq or {}).items()})
            for s, (a, b, c, d) in enumerate(zip(self.cu_q, self.cu_q[1:], self.cu_k, self.cu_k[1:]))
        ]
        return torch.cat([x for x, _ in parts]), torch.cat([x for _, x in parts], 1)


def cumulative(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got.double(), wanted, **CLOSE)
