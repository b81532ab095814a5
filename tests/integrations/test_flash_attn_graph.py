"""FlashAttention's functions in CUDA graphs, and beside FlashAttention's own kernels where they are installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from paged_attn.integrations import flash_attn

pytestmark = pytest.mark.gpu
# two roundings of bfloat16 apart, results of about 1
CLOSE = {"atol": 2e-2, "rtol": 2e-2}


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def replayed(function: Any) -> Any:
    """What function() returns, captured after a first run."""
    function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = function()
    return graph, held


def test_appends_with_rotary_are_captured_and_replayed_at_other_lengths() -> None:
    q, k, v = random(8, 1, 16, 128), random(8, 1, 4, 128), random(8, 1, 4, 128)
    k_cache, v_cache = random(64, 16, 4, 128), random(64, 16, 4, 128)
    table = torch.randperm(64, device="cuda", dtype=torch.int32).view(8, 8)
    lens = torch.full((8,), 5, dtype=torch.int32, device="cuda")
    cos, sin = random(128, 64), random(128, 64)

    def call() -> Tensor:
        return flash_attn.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cos, sin, lens, block_table=table, causal=True, rotary_interleaved=False
        )

    graph, held = replayed(call)
    for length in (5, 77, 126):
        lens.fill_(length)
        graph.replay()
        got = held.clone()
        torch.testing.assert_close(got, call(), atol=0, rtol=0)
    lens.fill_(-1)
    graph.replay()
    assert not held.any()


@pytest.mark.parametrize("tokens", [32, 512])
def test_ragged_keys_are_captured_and_replayed_at_other_lengths(tokens: int) -> None:
    """Few rows, in pages of one token; many, in a copy: both beside the keys as the call's own."""
    q, k, v = random(tokens, 16, 128), random(tokens, 4, 128), random(tokens, 4, 128)
    starts = torch.tensor([0, 7, tokens], dtype=torch.int32, device="cuda")
    other = starts.clone()

    def call(starts_k: Tensor) -> Tensor:
        return flash_attn.flash_attn_varlen_func(q, k, v, starts, starts_k, tokens, tokens, causal=True)

    graph, held = replayed(lambda: call(other))
    for cut in (7, tokens - 1, 0):
        starts[1], other[1] = cut, cut
        graph.replay()
        torch.testing.assert_close(held, call(starts), **CLOSE)


def test_flash_attention_itself_gives_the_same() -> None:
    real = pytest.importorskip("flash_attn")
    q, k, v = random(600, 16, 128), random(900, 4, 128), random(900, 4, 128)
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, 100, 101, 600], [0, 100, 301, 900]))
    lengths = (cu_q, cu_k, 499, 599)
    for options in ({}, {"causal": True}, {"causal": True, "window_size": (64, 0), "softcap": 20.0}):
        wanted, wanted_lse, _ = real.flash_attn_varlen_func(q, k, v, *lengths, return_attn_probs=True, **options)
        out, lse, _ = flash_attn.flash_attn_varlen_func(q, k, v, *lengths, return_attn_probs=True, **options)
        torch.testing.assert_close(out, wanted, **CLOSE)
        torch.testing.assert_close(lse, wanted_lse, **CLOSE)
    caches = random(8, 256, 4, 128), random(8, 256, 4, 128)
    table = torch.randperm(8, device="cuda", dtype=torch.int32).view(4, 2)
    lens = torch.tensor([1, 200, 257, 400], dtype=torch.int32, device="cuda")
    new, cos, sin = random(2, 4, 3, 4, 128), random(512, 64), random(512, 64)
    results = []
    for module in (real, flash_attn):
        copies = [x.clone() for x in caches]
        out = module.flash_attn_with_kvcache(
            q[:12].view(4, 3, 16, 128), *copies, *new, cos, sin, lens, block_table=table, causal=True
        )
        results.append((out, *copies))
    for got, wanted in zip(results[1], results[0]):
        torch.testing.assert_close(got, wanted, **CLOSE)
