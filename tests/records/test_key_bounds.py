"""Bounds of keys as the host tells them, beside what the reference lets each query see."""

from __future__ import annotations

import itertools

import pytest
import torch

from paged_attn import reference
from paged_attn.records.key_bounds import KeyBounds, key_bounds_of
from tests.support.cases import Case

WINDOWS = list(itertools.product((-1, 0, 3, 40), (-1, 0, 2, 40)))


@pytest.mark.parametrize("chunk", [None, 1, 4, 7, 50])
@pytest.mark.parametrize("causal", [True, False])
def test_bounds_are_those_of_what_queries_see(causal: bool, chunk: int | None) -> None:
    """7 queries behind 10 keys: how many each sees, and the mean of their places, which both bounds follow from."""
    queries, keys = 7, 17
    place = torch.arange(float(keys)).view(1, keys, 1, 1)
    call = dict(q=torch.zeros(queries, 1, 1), k_cache=torch.zeros_like(place), v_cache=place, return_lse=True)
    call |= dict(page_table=torch.zeros(1, 1, dtype=torch.int32), seq_lens=torch.tensor([keys], dtype=torch.int32))
    call |= dict(cu_seqlens_q=torch.tensor([0, queries], dtype=torch.int32))
    pos = torch.arange(keys - queries, keys)
    for window in WINDOWS:
        options = dict(causal=causal, window_size=window, chunk=chunk)
        mean, lse = reference.paged_attention(**call, **options)
        count = lse.exp().round().flatten().long()
        first = (mean.flatten() - (count - 1) / 2).round().long()
        bounds = key_bounds_of(Case("", (queries,), (keys,), **options))
        assert torch.equal(bounds.first_key(pos), first), window
        assert torch.equal(bounds.end_of_keys(pos, keys), first + count), window
        assert [bounds.first_key(x) for x in pos.tolist()] == first.tolist()
        assert [bounds.end_of_keys(x, keys) for x in pos.tolist()] == (first + count).tolist()
        assert bounds.reach < 0 or torch.all(pos - first <= bounds.reach)


def test_slots_do_not_end_by_chunks_where_queries_have_positions() -> None:
    """Nor by a window to the right: both are of positions, which no slot tells; what is causal is causal by slots."""
    of = Case("", (1,), (9,), causal=False, window_size=(-1, 1), chunk=4)
    assert [key_bounds_of(of, positions).end_of_keys(2, 9) for positions in (False, True)] == [4, 9]
    assert KeyBounds(right=0, chunk=4, positions=True).end_of_keys(5, 9) == 6
    assert KeyBounds(left=6, chunk=4).reach == KeyBounds(chunk=4).reach == 3
