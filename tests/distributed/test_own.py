"""Helpers of a rank's own keys: lengths, positions, slots, page tables, chunks of prompts."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import triton

import paged_attn
from paged_attn import distributed
from paged_attn.distributed import attention, groups
from tests.support import score_mods

SHARDS = [(0, 1, 1), (0, 2, 1), (1, 2, 1), (2, 3, 5), (0, 4, 16), (3, 4, 16), (1, 2, 1000)]


@pytest.mark.parametrize("shard", SHARDS, ids=str)
def test_own_keys_are_counted_one_by_one(shard: tuple[int, int, int]) -> None:
    rank, world, stripe = shard
    owner = [p // stripe % world for p in range(200)]
    count = list(itertools.accumulate([x == rank for x in owner], initial=0))
    assert [distributed.own_lens(n, shard) for n in range(201)] == count
    assert distributed.own_lens(torch.arange(-3, 201), shard).tolist() == [0, 0, 0, *count]
    numbers = distributed.own_positions(torch.arange(-2, 200), shard).tolist()
    assert numbers == [-1, -1] + [count[p] if owner[p] == rank else -1 for p in range(200)]


@pytest.mark.parametrize("stripe", [2, 4, 8, 3])
def test_every_key_has_a_slot_on_one_rank(stripe: int) -> None:
    page, world, seq_lens = 4, 2, (23, 9)
    positions = torch.cat([torch.arange(n) for n in seq_lens])
    starts = torch.tensor([0, 23, 32])
    found = []
    for rank in range(world):
        shard = (rank, world, stripe)
        table = torch.arange(8).view(2, 4) if rank == 0 else torch.arange(8).flip(0).view(2, 4)
        found.append(distributed.slots(table, positions, page, shard, starts))
        own = found[-1][found[-1] >= 0]
        assert len(set(own.tolist())) == len(own) == sum(distributed.own_lens(n, shard) for n in seq_lens)
        first = found[-1][:23]
        want = [table[0, j // page] * page + j % page for j in range(distributed.own_lens(23, shard))]
        assert first[first >= 0].tolist() == want
    assert ((found[0] >= 0) ^ (found[1] >= 0)).all()


def test_a_page_table_of_whole_sequences_is_cut_by_stripes() -> None:
    whole = torch.arange(20).view(2, 10)
    assert distributed.page_table(whole, 4, (0, 2, 4)).tolist() == whole[:, ::2].tolist()
    assert distributed.page_table(whole, 4, (1, 2, 8)).tolist() == whole[:, [2, 3, 6, 7]].tolist()
    assert distributed.page_table(whole, 4, (1, 3, 12)).tolist() == whole[:, [3, 4, 5]].tolist()
    with pytest.raises(ValueError, match=r"^shard\[2\] must be a multiple of page_size = 4, got 6$"):
        distributed.page_table(whole, 4, (0, 2, 6))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_chunks_of_a_prompt_cover_it_and_see_as_much_on_every_rank(world: int) -> None:
    tokens = 2 * world * 6
    chunks = [distributed.zigzag(tokens, rank, world) for rank in range(world)]
    assert sorted(torch.cat([x.tokens for x in chunks]).tolist()) == list(range(tokens))
    seen = [sum(int(t) + 1 for t in x.tokens) for x in chunks]
    assert len(set(seen)) == 1
    for x in chunks:
        ends = [int(x.tokens[5]) + 1, int(x.tokens[11]) + 1]
        assert (x.seq_lens.tolist(), x.cu_seqlens_q.tolist()) == (ends, [0, 6, 12])
    gathered = torch.cat([x.tokens for x in chunks]).view(-1, 3)  # pages as they lie
    table = distributed.gathered_table(tokens, 3, world)
    assert gathered[table[0].long()].flatten().tolist() == gathered[table[1].long()].flatten().tolist()
    assert gathered[table[0].long()].flatten().tolist() == list(range(tokens))


def test_lengths_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^tokens must be a multiple of 2 \* world = 4, got 6$"):
        distributed.zigzag(6, 0, 2)
    with pytest.raises(ValueError, match=r"^tokens must be a multiple of 2 \* world \* page_size = 16, got 8$"):
        distributed.gathered_table(8, 4, 2)
    with pytest.raises(
        ValueError, match=r"^shard must be None or \(rank, world, stripe\), three ints, with rank < world"
    ):
        distributed.own_lens(5, (2, 2, 1))
    assert paged_attn.pages_needed(distributed.own_lens(33, (0, 2, 16)), 16) == 2


def compared(monkeypatch: pytest.MonkeyPatch, **options: Any) -> dict[str, int]:
    """Hashes of what a checked call of these options compares."""
    found: dict[str, int] = {}
    hashes = lambda group, **numbers: found.update({name: groups._hash(x) for name, x in numbers.items()})  # noqa: E731
    monkeypatch.setattr(groups, "agree", hashes)
    q, lens = torch.zeros(2, 4, 8), torch.tensor([5, 9], dtype=torch.int32)
    attention._agree(None, q, lens, options.pop("cu_seqlens_q", None), options.pop("stripe", 16), "heads", options)
    return found


def test_ranks_that_mean_the_same_compare_equal_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Floats, and what a user's function is given, are each rank's own tensors; functions have other addresses."""

    def options(number: float) -> dict[str, Any]:
        function = triton.jit(score_mods.alibi.fn)
        tensors = dict(alibi_slopes=torch.full((4,), number), k_scale=torch.tensor(number))
        return dict(score_mod=function, score_mod_args=(torch.full((4,), number), 3), causal=False, **tensors)

    assert compared(monkeypatch, **options(1.0)) == compared(monkeypatch, **options(2.0))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (dict(stripe=8), "options"),
        (dict(max_seqlen_k=10), "options"),
        (dict(causal=False), "causal"),
        (dict(cu_seqlens_q=torch.tensor([0, 1, 2])), "cu_seqlens_q"),
        (dict(prefix_lens=torch.tensor([1, 0])), "prefix_lens"),
        (dict(qq_mask=torch.tensor([[1], [2]], dtype=torch.int32)), "qq_mask"),
    ],
    ids=str,
)
def test_what_differs_is_named_and_ranks_compare_as_many_numbers(
    change: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = compared(monkeypatch, sinks=None), compared(monkeypatch, sinks=None, **change)
    assert before.keys() == after.keys()
    assert [x for x in before if before[x] != after[x]] == [name]
