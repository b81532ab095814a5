"""Numbers and scales whose quotients are so near to ties of fp8 that an inexact division crosses the tie."""

from __future__ import annotations

import torch
from torch import Tensor

import paged_attn


def beside_ties(fp8: torch.dtype, source: torch.dtype, heads: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return (values [16, heads, 32] of the source's dtype, scales [heads] float32), with all quotients beside ties.

    A head has one value and one tie.  Its scale is the float32 above or below value / tie.  Tokens hold the value times
    powers of two, with both signs.
    """
    rng = torch.Generator().manual_seed(seed)
    codes = torch.arange(128, dtype=torch.uint8).view(fp8).double()
    codes = codes[codes.isfinite() & (codes >= 0.25) & (codes <= 64)]
    middles = (codes[1:] + codes[:-1]) / 2
    ties = middles[torch.randint(len(middles), (heads,), generator=rng)]
    values = (1 + torch.rand(heads, generator=rng)).to(source)
    scales = (values.double() / ties).float()
    away = torch.where(torch.arange(heads) % 2 == 0, torch.inf, 0.0)
    scales = scales.nextafter(away)
    powers = 2.0 ** (torch.arange(16) % 4 - 2)
    signs = 1.0 - 2 * (torch.arange(32) % 2)
    all_values = powers[:, None, None] * values.double()[None, :, None] * signs
    return all_values.to(source), scales


def divided(values: Tensor, scales: Tensor, fp8: torch.dtype) -> Tensor:
    """Return the fp8 numbers nearest to values / scales, rounded by float32, in which the quotient is not a tie."""
    quotients = values.double() / scales.double()
    return quotients.to(torch.float32).to(fp8)


def check_results_beside_ties(source: torch.dtype, fp8: torch.dtype, device: str, heads: int, dim: int = 32) -> None:
    """Assert that fp8 results are rounded like `divided`: attention over one key each, in a call for each scale."""
    values, scales = beside_ties(fp8, source, heads)
    for head, scale in enumerate(scales.tolist()):
        v = values[:, head, None, None].to(device).repeat(1, 16, 1, dim // 32)  # [pages, slots, 1, dim]
        k, q = torch.zeros_like(v), torch.zeros_like(v[:, 0])
        table = torch.arange(16, dtype=torch.int32, device=device)[:, None]
        lens = torch.ones(16, dtype=torch.int32, device=device)
        out = torch.empty_like(q, dtype=fp8)
        paged_attn.paged_attention(q, k, v, table, lens, out=out, out_scale=scale)
        want = divided(v[:, 0], torch.tensor(scale, device=device), fp8)
        assert torch.equal(out.view(torch.uint8), want.view(torch.uint8)), f"of {values[0, head, 0]} / {scale}"
