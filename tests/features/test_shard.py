"""Keys over ranks: a rank's call over its own keys, and all ranks' results joined."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import paged_attn
from paged_attn import distributed, reference
from tests.support.cases import Case, build, run
from tests.support.masks import MASKS

LENGTHS = dict(query_lens=(1, 3, 20, 0, 5, 1, 40), seq_lens=(50, 3, 87, 12, 70, 1, 40))
# Of one position, of parts of pages, of whole ones, of no power of two, longer than most sequences.
SHARDS = [(1, 2, 1), (2, 3, 5), (0, 4, 8), (3, 4, 16), (1, 2, 64)]

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "not causal": dict(causal=False),
    "alibi": dict(alibi=True),
    "alibi both ways": dict(alibi=True, alibi_symmetric=True, causal=False, qq_mask=1, positions="tree"),
    "softcap, window": dict(softcap=5.0, window_size=(20, -1)),
    "window both ways": dict(window_size=(20, 6), causal=False),
    "qq_bias": dict(qq_bias=8, tree=True),
    "qq_mask at depths": dict(qq_mask=1, positions="tree", window_size=(12, -1), alibi=True),
    "score_mod": dict(score_mod="relative"),
    "latents": dict(latent=True, value_dim=16, heads=4),
    "x-packed": dict(layout="x", alibi=True),
    "ragged table": dict(table="gaps"),
    "scales of tokens": dict(token_scales=True),
    "strided": dict(strided=True, padding=3),
    "groups": dict(heads=6, kv_heads=2, window_size=(9, -1)),
}


@pytest.mark.parametrize("shard", SHARDS, ids=str)
@pytest.mark.parametrize("name", FEATURES)
def test_results_are_those_of_the_reference(name: str, shard: tuple[int, int, int], device: str) -> None:
    case = Case(name, **LENGTHS, page_size=8, shard=shard, **FEATURES[name])
    run(case, device)
    run(case, device)  # a kept call


@pytest.mark.parametrize("shard", [(1, 2, 5), (0, 3, 16)], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_masks_are_those_of_the_reference(mask: str, shard: tuple[int, int, int], device: str) -> None:
    run(Case(mask, **LENGTHS, page_size=4, shard=shard, **MASKS[mask]), device)


@pytest.mark.parametrize("segments", [1, 3])
def test_shares_of_tiles_are_of_own_keys(segments: int, cut: Any, device: str) -> None:
    cut(segments)
    for options in ({}, {"window_size": (20, -1)}, {"prefix": 11, "window_size": (9, -1)}):
        run(Case("shares", (1, 3, 1, 5), (90, 3, 33, 70), shard=(1, 2, 4), bounds=True, check=True, **options), device)


def test_a_rank_without_keys_gives_zero_and_minus_infinity(device: str) -> None:
    case = Case("none", (1, 4, 2), (5, 14, 2), shard=(3, 4, 16))
    out, lse = paged_attn.paged_attention(**build(case, device))
    assert not out.any()
    assert (lse == -torch.inf).all()


def whole_and_own(world: int, stripe: int, seed: int = 0) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A call over whole sequences by the reference, and each rank's over its own keys."""
    rng = torch.Generator().manual_seed(seed)
    page, seq_lens, query_lens = 4, (37, 6, 90), (3, 6, 1)
    pages = 23
    k, v = torch.randn(2, 3, pages * page, 2, 16, generator=rng)
    q = torch.randn(sum(query_lens), 4, 16, generator=rng)
    batch = dict(q=q, seq_lens=torch.tensor(seq_lens).int(), cu_seqlens_q=torch.tensor([0, 3, 9, 10]).int())

    def cached(pos: Tensor) -> dict[str, Any]:
        """Keys at these positions of every sequence, one after another."""
        room = torch.full((2, 3, pages * page, 2, 16), torch.nan)
        room[0, :, : len(pos)], room[1, :, : len(pos)] = k[:, pos], v[:, pos]
        caches = room.view(2, 3 * pages, page, 2, 16)
        table = torch.arange(3 * pages, dtype=torch.int32).view(3, pages)
        return dict(k_cache=caches[0], v_cache=caches[1], page_table=table)

    pos = torch.arange(pages * page)
    own = [cached(pos[pos // stripe % world == r]) | batch | dict(shard=(r, world, stripe)) for r in range(world)]
    return cached(pos) | batch, own


@pytest.mark.parametrize(("world", "stripe"), [(2, 1), (3, 4), (4, 6), (2, 64)])
def test_references_of_all_ranks_join_to_that_of_whole_sequences(world: int, stripe: int) -> None:
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    whole, own = whole_and_own(world, stripe)
    for options in ({}, dict(window_size=(9, 2), causal=False), dict(alibi_slopes=torch.tensor([1.0, 0.1, 0.5, 2.0]))):
        want = reference.paged_attention(**whole, **options, sinks=sinks, return_lse=True)
        states = [reference.paged_attention(**x, **options, return_lse=True) for x in own]
        outs, lses = (torch.stack(x) for x in zip(*states))
        for got, expected in zip(reference.merge_states(outs, lses, sinks), want):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("world", "stripe"), [(2, 1), (4, 6)])
def test_states_of_all_ranks_join_to_the_results_of_whole_sequences(world: int, stripe: int, device: str) -> None:
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    whole, own = whole_and_own(world, stripe)
    want = reference.paged_attention(**whole, sinks=sinks)
    moved = [{name: x.to(device) if isinstance(x, Tensor) else x for name, x in call.items()} for call in own]
    outs, lses = (torch.stack(x) for x in zip(*[paged_attn.paged_attention(**x, return_lse=True) for x in moved]))
    got = paged_attn.merge_states(outs, lses, sinks.to(device))[0]
    torch.testing.assert_close(got.double().cpu(), want, rtol=1e-5, atol=1e-5)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "sinks": (dict(sinks=torch.zeros(2)), "sinks must be None with shard: give them to distributed.merge"),
    "gate": (dict(gate=torch.zeros(3, 2, 32)), "gate must be None with shard: multiply what distributed.merge returns"),
    "k_new": (
        dict(k_new=torch.zeros(3, 1, 32), v_new=torch.zeros(3, 1, 32)),
        "k_new must be None with shard: write the call's own keys into the caches of their ranks first",
    ),
    "batch_invariant": (dict(batch_invariant=True), "batch_invariant must be False with shard"),
    "three": (dict(shard=(0, 2)), "shard must be None or (rank, world, stripe), three ints, got (0, 2)"),
    "a rank": (dict(shard=(2, 2, 16)), "three ints, with rank < world and world * stripe < 2^27, got (2, 2, 16)"),
    "a stripe": (dict(shard=(0, 2, 0)), "shard[2] must be an int >= 1 and < 2^31, got 0"),
    "too long": (dict(shard=(0, 2, 2**27)), "world * stripe < 2^27"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_belongs_to_all_ranks_is_refused(name: str, no_launch: None, device: str) -> None:
    changes, message = REFUSED[name]
    inputs = build(Case("refused", (1, 2), (20, 30), shard=(0, 2, 16)), device)
    changes = {key: x.to(device) if isinstance(x, Tensor) else x for key, x in changes.items()}
    with pytest.raises(ValueError) as error:
        paged_attn.paged_attention(**inputs | changes)
    assert message in str(error.value)


def test_pages_of_own_keys_are_checked(device: str) -> None:
    inputs = build(Case("checked", (1, 2), (40, 90), page_size=8, shard=(1, 2, 8), check=True), device)
    inputs["page_table"][1, 5] = 99  # of own keys 40 ... 47, of which there are 42
    with pytest.raises(ValueError, match=r"^page_table\[1, 5\] = 99, but the cache has"):
        paged_attn.paged_attention(**inputs)
    inputs["page_table"] = inputs["page_table"][:, :5]
    with pytest.raises(ValueError, match=r"^seq_lens\[1\] = 90 needs 42 keys in the cache"):
        paged_attn.paged_attention(**inputs)


def test_own_lens_are_what_the_cases_hold() -> None:
    assert [distributed.own_lens(n, (1, 2, 8)) for n in (90, 40, 8, 9)] == [42, 16, 0, 1]
