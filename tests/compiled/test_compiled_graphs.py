"""CUDA graphs that torch.compile captures: lengths change in place, and scratch is the graph's."""

from __future__ import annotations

import pytest
import torch

import paged_attn
from tests.support.compiled_layer import CACHES, COMPILES, FP16, HEADS, KV_HEADS, PAGE, layer, step

pytestmark = COMPILES


@pytest.mark.gpu
@pytest.mark.parametrize("how", CACHES)
def test_a_captured_layer_follows_lengths_that_change_in_place(how: str, device: str) -> None:
    """mode="reduce-overhead" captures CUDA graphs and minds memory of its pool that others keep."""
    compiled = torch.compile(layer, mode="reduce-overhead", fullgraph=True)
    given = step(how, device, 4)
    for shorter in range(6):
        lens = given[-1]
        lens.fill_(1 + shorter)
        want = layer(*[x.clone() if i not in (3, 4) else x for i, x in enumerate(given)])
        torch.compiler.cudagraph_mark_step_begin()
        assert torch.equal(compiled(*given), want)


@pytest.mark.gpu
@pytest.mark.parametrize("keys", [40, 4000])
def test_captured_calls_whose_keys_are_cut_are_right_beside_eager_ones(keys: int, device: str) -> None:
    """Scratch of a call that torch captures is the graph's, and what eager calls share is not."""
    shape = (300, PAGE, KV_HEADS, 64)
    q = torch.randn(1, HEADS, 64, dtype=FP16, device=device)
    k_cache, v_cache = torch.randn(2, *shape, dtype=FP16, device=device)
    table = torch.arange(300, dtype=torch.int32, device=device)[None]
    lens = torch.tensor([keys], dtype=torch.int32, device=device)
    compiled = torch.compile(paged_attn.paged_attention, mode="reduce-overhead", fullgraph=True)
    for length in (keys, keys // 2, keys - 1, 3, keys):
        lens.fill_(length)
        want = paged_attn.paged_attention(q, k_cache, v_cache, table, lens)
        torch.compiler.cudagraph_mark_step_begin()
        assert torch.equal(compiled(q, k_cache, v_cache, table, lens), want)
