"""A layer that torch is to compile, with the caches that it may have, and marks for tests that compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import paged_attn

FP16 = torch.float16
HEADS, KV_HEADS, HEAD_DIM, PAGES, PAGE = 4, 2, 16, 8, 16
CACHES = ["apart", "halves", "pages in turn", "dims side by side"]

# Marks of tests that compile.  The warnings are torch's own, of modules of its compiler and of copies of its records.
COMPILES = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.:FutureWarning"),
    pytest.mark.usefixtures("nothing_compiled"),
]


def caches(how: str, device: str) -> tuple[Tensor, Tensor]:
    shape = (PAGES, PAGE, KV_HEADS, HEAD_DIM)
    make = dict(dtype=FP16, device=device)
    if how == "apart":
        return torch.zeros(shape, **make), torch.zeros(shape, **make)
    if how == "halves":
        k_cache, v_cache = torch.zeros(2, *shape, **make)
        return k_cache, v_cache
    if how == "pages in turn":
        k_cache, v_cache = torch.zeros(PAGES, 2, *shape[1:], **make).unbind(1)
        return k_cache, v_cache
    both = torch.zeros(*shape[:-1], 2 * HEAD_DIM, **make)
    return both[..., :HEAD_DIM], both[..., HEAD_DIM:]


def step(how: str, device: str, seqs: int = 2) -> tuple[Tensor, ...]:
    """Return the arguments of `layer`: one decode for each sequence."""
    generator = torch.Generator(device).manual_seed(seqs)
    q = torch.randn(seqs, HEADS, HEAD_DIM, generator=generator, device=device).to(FP16)
    k, v = torch.randn(2, seqs, KV_HEADS, HEAD_DIM, generator=generator, device=device).to(FP16)
    lens = torch.arange(1, seqs + 1, dtype=torch.int32, device=device)
    table = torch.arange(seqs, dtype=torch.int32, device=device)[:, None]
    return q, k, v, *caches(how, device), table.long()[:, 0] * PAGE + lens.long() - 1, table, lens


def layer(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, table: Tensor, lens: Tensor
) -> Tensor:
    """Call write_kv, paged_attention and merge_states, and nothing that a compiler's backend would have to compile."""
    paged_attn.write_kv(k, v, k_cache, v_cache, slots)
    out = paged_attn.paged_attention(q, k_cache, v_cache, table, lens)
    _, lse = paged_attn.paged_attention(q, k_cache, v_cache, table, lens, causal=False, return_lse=True)
    return paged_attn.merge_states(out[None], lse[None])[0]


def same(compiled: Any, how: str, device: str, seqs: int = 2) -> tuple[Tensor, ...]:
    """Assert that a compiled layer has the layer's result and changes its caches alike; return its arguments."""
    got, want = step(how, device, seqs), step(how, device, seqs)
    assert torch.equal(compiled(*got), layer(*want))
    assert got[3].any()
    assert all(torch.equal(x, y) for x, y in zip(got, want))
    return got
