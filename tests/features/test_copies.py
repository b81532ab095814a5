"""Keys copied into whole pages: launches over copies see what launches over the cache see, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import paged_attn
from paged_attn.calls import launched as called
from paged_attn.kernels import shared_steps as launched
from paged_attn.launching import scratch
from paged_attn.planning import planner
from paged_attn.records.copies import PAGE, copies_of, over
from tests.support import copied_plans
from tests.support.cases import E4M3, E5M2, Case, bits, build, problem_of, run
from tests.support.masks import MASKS

UNEVEN: dict[str, Any] = dict(query_lens=(1, 40, 0, 9, 3), seq_lens=(300, 170, 20, 9, 129), heads=4, kv_heads=2)
CASES: dict[str, dict[str, Any]] = {
    "page 1": dict(page_size=1),
    "page 12, hnd": dict(page_size=12, layout="HND"),
    "page 3, ragged table": dict(page_size=3, table="ragged"),
    "page 7, gaps": dict(page_size=7, table="gaps"),
    "page 2, views": dict(page_size=2, table="views"),
    "page 4, strided, shared buffer": dict(page_size=4, strided=True, shared_buffer=True),
    "page 4, float16": dict(page_size=4, dtype=torch.float16),
    "page 4, e4m3": dict(page_size=4, dtype=torch.bfloat16, cache_dtype=E4M3, scales="per_head"),
    "page 4, e5m2, head_dim 40": dict(page_size=4, cache_dtype=E5M2, head_dim=40),
    "page 4, new": dict(page_size=4, new=True),
    "page 4, new, window": dict(page_size=4, new=True, window_size=(50, -1)),
    "page 4, values of another width": dict(page_size=4, head_dim=40, value_dim=72),
    "page 4, three KV heads": dict(page_size=4, heads=3, kv_heads=3),
    "page 4, window": dict(page_size=4, window_size=(30, -1)),
    "page 4, window to both sides": dict(page_size=4, window_size=(30, 5), causal=False),
    "page 4, chunk": dict(page_size=4, chunk=50),
    "page 4, chunk, window": dict(page_size=4, chunk=50, window_size=(20, -1)),
    "page 4, window, positions": dict(page_size=4, window_size=(30, -1), positions="tree"),
    "page 4, prefix": dict(page_size=4, prefix=20),
    "page 4, spans beyond a window": dict(page_size=4, window_size=(30, -1), spans=3),
    "page 4, spans clipped by a window": dict(page_size=4, window_size=(30, -1), spans=3, clip_spans=True),
    "page 4, causal by sequence": dict(page_size=4, causal_by_seq=True),
    "page 4, tree": dict(page_size=4, qq_bias=40, tree=True, alibi=True, softcap=20.0, sinks=True),
    "page 4, mask": dict(page_size=4, qq_mask=2),
    "page 4, function": dict(page_size=4, score_mod="alibi"),
    "page 4, gate, scales of tokens": dict(page_size=4, gate=True, token_scales=True),
    "page 4, prefills only": dict(page_size=4, only="prefill", padding=3),
    "page 4, int64": dict(page_size=4, integers=torch.int64),
    "page 4, bounds": dict(page_size=4, bounds=True),
    "page 4, checked": dict(page_size=4, check=True),
    "page 4, invariant": dict(page_size=4, batch_invariant=True),
}


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All calls over copies, whose memory holds NaN in every type, and table entries of -1."""

    def poisoned(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.full((count * dtype.itemsize,), 255, dtype=torch.uint8, device=device).view(dtype)

    monkeypatch.setattr(scratch, "_empty", poisoned)
    with copied_plans.copied():
        yield


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[list[torch.Tensor]]:
    """Keys, values and table of each call that is made from now on."""
    kept: list[list[torch.Tensor]] = []
    memory_of = scratch.memory_of  # also of calls whose launches are kept

    def remember(own: scratch.Own, device: torch.device) -> torch.Tensor:
        memory = memory_of(own, device)
        parts = zip(own.likes, own.begins)
        kept.append([memory[begin : begin + x.nbytes].view(x.dtype).view(x.shape) for x, begin in parts])
        return memory

    monkeypatch.setattr(scratch, "memory_of", remember)
    return kept


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("copied")
def test_calls_over_copies_give_the_results_of_the_reference(name: str, device: str) -> None:
    case = Case(name, **UNEVEN | CASES[name])
    assert planner.plan(problem_of(build(case, device))).copies is not None
    run(case, device)


@pytest.mark.thorough
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.usefixtures("copied")
def test_every_mask_sees_over_copies_what_the_reference_does(name: str, device: str) -> None:
    run(Case(name, **UNEVEN | MASKS[name], page_size=4), device)


@pytest.mark.usefixtures("copied")
def test_a_program_copies_several_tiles_where_programs_are_few(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launched, "MAX_PROGRAMS", 7)
    monkeypatch.setattr(launched, "BYTES_AT_ONCE", 1 << 10)
    run(Case("few programs", **UNEVEN, page_size=4, window_size=(30, -1)), device)


@pytest.mark.usefixtures("copied")
def test_heads_are_parted_where_a_program_has_no_room_for_all(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launched, "BYTES_AT_ONCE", 1 << 9)
    run(Case("parts of heads", **UNEVEN | dict(heads=6, kv_heads=6), page_size=4), device)


@pytest.mark.usefixtures("copied")
def test_lengths_above_the_bounds_are_copied_as_far_as_these(
    copies: list[list[torch.Tensor]], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results are undefined then, but the pages of the next sequence, or other memory, are not written."""
    steps = called.steps_of
    monkeypatch.setattr(called, "steps_of", lambda made, call: steps(made, call)[:1])
    inputs = build(Case("bounds", (40, 40), (100, 100), page_size=4, bounds=True, lse=False), device)
    inputs["page_table"][0] = inputs["page_table"][1, 0]
    for length in (100, 1000):
        inputs["seq_lens"][0] = length
        paged_attn.paged_attention(**inputs)
    (keys, _, _), (others, _, _) = copies
    assert torch.equal(bits(keys[1]), bits(others[1]))


@pytest.mark.usefixtures("copied")
def test_lengths_may_change_in_place(device: str) -> None:
    """As in a graph: the same plan, and the same kept launches, for other lengths within the bounds."""
    long = build(Case("lengths", (40, 40), (170, 90), page_size=4, lse=False), device)
    short = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in long.items()}
    short["seq_lens"].copy_(torch.tensor([60, 41]))
    expected = paged_attn.reference.paged_attention(**short | dict(out=None)).float()
    for lengths in ([170, 90], [60, 41]):
        long["seq_lens"].copy_(torch.tensor(lengths))
        got = paged_attn.paged_attention(**long)
    torch.testing.assert_close(got.float(), expected, atol=2e-5, rtol=2e-5)  # float32, sums in another order


@pytest.mark.usefixtures("copied")
@pytest.mark.parametrize("page_size", [1, 4, 12])
def test_copies_hold_what_the_cache_holds(page_size: int, copies: list[list[torch.Tensor]], device: str) -> None:
    """Bit by bit, where somebody may see it; zeros before that in the first page."""
    case = Case("bits", (40, 7), (300, 90), heads=4, kv_heads=2, page_size=page_size, window_size=(20, -1))
    case = replace(case, dtype=torch.float16, cache_dtype=E4M3, bounds=True)
    inputs = build(case, device)
    paged_attn.paged_attention(**inputs)
    keys, values, table = copies[0]
    assert keys.shape == (2 * 3, PAGE, 2, 32)
    for seq, (first, end) in enumerate(((240, 300), (63, 90))):
        pos = torch.arange(first, end, device=device)
        page = inputs["page_table"][seq, pos // page_size].long()
        whole = table[seq, pos // PAGE].long()
        assert torch.equal(whole, 3 * seq + pos // PAGE)
        for cache, copy in ((inputs["k_cache"], keys), (inputs["v_cache"], values)):
            assert torch.equal(bits(copy)[whole, pos % PAGE], bits(cache)[page, pos % page_size])
            assert not bits(copy)[whole[0], : first % PAGE].any()


def test_the_plan_over_copies_is_that_of_a_cache_of_whole_pages(device: str) -> None:
    small = Case("small", (40,), (300,), heads=4, kv_heads=2, head_dim=128, page_size=4, dtype=torch.bfloat16)
    problem, whole = (problem_of(build(replace(small, page_size=size), device, filled=False)) for size in (4, PAGE))
    problem = problem._replace(max_seqlen_k=whole.max_seqlen_k)
    assert over(problem, copies_of(problem)) == whole._replace(copied=True)
