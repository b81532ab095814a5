"""What `benchmarks.pages` times beside the library gives the same rows."""

from __future__ import annotations

import pytest
import torch

import paged_attn
from benchmarks import pages
from tests.support.formats import E4M3, INT4, INT8, with_zero


@pytest.mark.parametrize("dtype", [E4M3, INT8, INT4], ids=str)
def test_operators_of_torch_read_the_same_numbers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    cache = torch.randint(0, 100, (3, 4, 2, 8), dtype=torch.uint8).view(dtype)
    scale = torch.rand(3, 4, 2)
    if dtype == INT4:
        scale = with_zero(scale, torch.randint(0, 16, scale.shape))
    table, lengths = torch.tensor([[2, 0, 1]]), torch.tensor([12])
    got = paged_attn.gather_pages(cache, table, lengths, scale=scale, dtype=torch.bfloat16)
    want = pages.numbers_of(cache[table.flatten()], scale[table.flatten()])
    assert got.any()
    assert torch.equal(got, want.flatten(0, 1))
