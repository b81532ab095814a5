"""Prefills over pages of any size: their keys are copied into whole pages, which the Hopper kernels read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import paged_attn
from paged_attn.planning import planner
from tests.support import hopper_plans
from tests.support.cases import INT4, INT8, Case, build, problem_of, run
from tests.support.hopper_cases import ALL_E4M3, DEVICE, E4M3_CACHE, FEATURES, NEW, ragged, sized

pytestmark = [pytest.mark.simulated, pytest.mark.hopper, pytest.mark.usefixtures("on_hopper", "copied")]


@pytest.fixture
def copied() -> Iterator[None]:
    """Plans in which even the few scores that a test can afford are worth a copy."""
    with hopper_plans.planned(MIN_SCORES_WORTH_A_COPY=0, MIN_SCORES_PER_COPIED_KEY=0):
        yield


def assert_copied(case: Case) -> None:
    made = planner.plan(problem_of(build(case, DEVICE)))
    assert made.copies is not None
    assert made.copies.from_page == case.page_size
    assert all(part.shape.PAGE == 128 for launch in made.launches for part in launch.parts)


UNEVEN = ragged((1, 500), (70, 300), (1, 0), (9, 9), (0, 40))
PREFILLS = ragged((200, 200), (200, 333)) | dict(bounds=True)
CASES: dict[str, dict[str, Any]] = {
    "prefills, page 4": PREFILLS | dict(page_size=4),
    "prefills, page 1, float16, ragged table": PREFILLS | dict(page_size=1, dtype=torch.float16, table="ragged"),
    "prefills, page 12, hnd, views": PREFILLS | dict(page_size=12, layout="HND", table="views"),
    "prefills, page 2, new": PREFILLS | NEW | dict(page_size=2),
    "prefills, page 4, e4m3 cache": PREFILLS | E4M3_CACHE | dict(page_size=4),
    "prefills, page 4, all e4m3": PREFILLS | ALL_E4M3 | dict(page_size=4),
    "chunk, page 7, head_dim 64, window": ragged((100, 700)) | dict(page_size=7, head_dim=64, window_size=(150, -1)),
    "chunk, page 1, head_dim 96, gaps": ragged((100, 700)) | dict(page_size=1, head_dim=96, table="gaps"),
    "chunk, page 4, chunked": ragged((100, 700)) | dict(page_size=4, chunk=130),
    "chunk, page 4, spans beyond a window": ragged((100, 700)) | dict(page_size=4, spans=3, window_size=(150, -1)),
    "prefills, page 4, 192 and 128": PREFILLS | dict(page_size=4, head_dim=192, value_dim=128),
    "mixed, features, page 1": UNEVEN | FEATURES | dict(padding=3, page_size=1),
    "mixed, prefills only, page 3": UNEVEN | dict(only="prefill", page_size=3),
    "drafts, page 2, trees": ragged((32, 600), (20, 70), (0, 9))
    | dict(page_size=2, bounds=True, qq_bias=32, tree=True),
}
QUICK = ("prefills, page 4", "chunk, page 7, head_dim 64, window")


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.quick] * (x in QUICK)) for x in CASES])
def test_copied_keys_give_the_results_of_the_reference(name: str) -> None:
    case = sized(name, **CASES[name])
    assert_copied(case)
    run(case, DEVICE)


# The cache itself cannot be read, so decodes have copies, too.
OF_BYTES: dict[str, dict[str, Any]] = {
    "mixed, page 4, e4m3, one scale": UNEVEN | E4M3_CACHE | dict(page_size=4, scales="float"),
    "mixed, page 4, int8 by token": UNEVEN | dict(page_size=4, cache_dtype=INT8, scales="per_token"),
    "mixed, page 12, int4": UNEVEN | dict(page_size=12, cache_dtype=INT4, scales="per_token", lse=False),
    "mixed, prefills only, page 3, e4m3 by token": UNEVEN
    | E4M3_CACHE
    | dict(page_size=3, scales="per_token", only="prefill"),
}


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.quick] * ("int8" in x)) for x in OF_BYTES])
def test_uneven_prefills_over_small_pages_of_bytes_give_the_results_of_the_reference(name: str) -> None:
    case = sized(name, **OF_BYTES[name])
    with hopper_plans.copied(MIN_SCORES_PER_COPIED_KEY=0):
        assert_copied(case)
        made = planner.plan(problem_of(build(case, DEVICE)))
        assert made.copies is not None
        assert made.copies.dtype == case.dtype
        assert all(x.copied for x in made.launches)
        run(case, DEVICE)


@pytest.mark.gpu
def test_a_graph_copies_what_lies_there_when_it_is_replayed() -> None:
    """Other lengths, pages and keys than those that were captured, and whatever the last replay has left."""
    case = sized("graph", **ragged((300, 3000), (20, 300)), page_size=4, bounds=True, lse=False)
    assert_copied(case)
    inputs = build(case, DEVICE)
    paged_attn.paged_attention(**inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_attn.paged_attention(**inputs)
    for seed in (1, 2, 3):
        given = build(replace(case, seed=seed), DEVICE)
        for name in ("q", "k_cache", "v_cache", "page_table", "seq_lens"):
            inputs[name].copy_(given[name])
        inputs["seq_lens"] -= 7 * seed
        given["seq_lens"] -= 7 * seed
        expected = paged_attn.paged_attention(**given)
        graph.replay()
        assert torch.equal(inputs["out"], expected)


@hopper_plans.apart()
def test_two_launches_that_overlap_read_the_same_copies() -> None:
    case = sized("apart", **ragged((100, 300), (1, 400), (1, 70), (2, 9)), page_size=2, bounds=True)
    assert_copied(case)
    assert len(planner.plan(problem_of(build(case, DEVICE))).launches) == 2
    run(case, DEVICE)
