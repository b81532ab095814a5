"""Queries at positions of their own in the Hopper kernels: on a Hopper GPU, or simulated."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import paged_attn
from paged_attn.planning import planner
from tests.support import hopper_plans
from tests.support.cases import build, problem_of, run
from tests.support.hopper_cases import ALL_E4M3, CAPPED, DEVICE, E4M3_CACHE, NEW, PACKED, ragged, sized
from tests.support.hopper_cases.short import BESIDE, LONG, MIXED_WITH_CHUNK
from tests.support.trees import assert_branches, random_tree, with_tree

pytestmark = [pytest.mark.simulated, pytest.mark.hopper, pytest.mark.usefixtures("on_hopper")]

WINDOW: dict[str, Any] = dict(window_size=(10, -1))  # shorter than trees are deep
WIDE: dict[str, Any] = dict(window_size=(150, -1))
BOTH: dict[str, Any] = dict(window_size=(9, 4), causal=False)
ALIBI: dict[str, Any] = dict(alibi=True)
# Trees of so many nodes that begin in a tile, at its first slot and at its last, of no context; plain ones, and none.
OF_4 = ragged((4, 191), (4, 196), (4, 132), (3, 3), (1, 1), (0, 77), (4, 700)) | dict(bounds=True)
OF_8 = ragged((8, 190), (8, 200), (5, 132), (8, 8), (1, 64), (0, 77), (8, 700)) | dict(bounds=True)
OF_16 = ragged((16, 190), (16, 208), (9, 132), (16, 16), (1, 64), (0, 77)) | dict(bounds=True)
OF_64 = ragged((64, 240), (64, 256), (50, 132), (64, 64)) | dict(bounds=True)

CASES: dict[str, dict[str, Any]] = {
    "drafts of 4, window": OF_4 | WINDOW,
    "drafts of 4, both ways, alibi": OF_4 | BOTH | ALIBI,
    "drafts of 4, tree, alibi, softcap, sinks": OF_4 | ALIBI | dict(qq_bias=4, tree=True, softcap=20.0, sinks=True),
    "drafts of 8, wide window": OF_8 | WIDE,
    "drafts of 8, e4m3 cache": OF_8 | WINDOW | ALIBI | E4M3_CACHE,
    "drafts of 8, all e4m3": OF_8 | WINDOW | ALIBI | ALL_E4M3,
    "drafts of 8, x-packed": OF_8 | WINDOW | ALIBI | PACKED,
    "drafts of 8, x-packed e4m3": OF_8 | WINDOW | PACKED | E4M3_CACHE,
    "drafts of 8, hnd, head_dim 64": OF_8 | WINDOW | dict(layout="HND", head_dim=64),
    "drafts of 8, new": OF_8 | WINDOW | ALIBI | NEW,
    "drafts of 8, new, both ways": OF_8 | BOTH | NEW,
    "drafts of 8, invariant": OF_8 | WINDOW | ALIBI | dict(batch_invariant=True, sinks=True),
    "drafts of 16, tree, window": OF_16 | WINDOW | dict(qq_bias=16, tree=True, padding=5),
    "drafts of 16, head_dim 256": OF_16 | WINDOW | ALIBI | dict(head_dim=256),
    "drafts of 64, window": OF_64 | WINDOW,
    "drafts of 64, alibi, no window": OF_64 | ALIBI,
    "drafts of 64, tree, window, alibi": OF_64 | WINDOW | ALIBI | dict(qq_bias=64, tree=True),
    "drafts of 64, new, both ways": OF_64 | BOTH | NEW,
    "drafts of 64, e4m3 cache, no lse": OF_64 | WIDE | ALIBI | E4M3_CACHE | dict(lse=False),
    "drafts of 64, all e4m3": OF_64 | WINDOW | ALL_E4M3,
    "drafts of 64, all e4m3, no lse": OF_64 | WINDOW | ALIBI | ALL_E4M3 | dict(lse=False),
    "drafts of 64, x-packed": OF_64 | WINDOW | ALIBI | PACKED,
    "drafts of 64, x-packed, new": OF_64 | WINDOW | PACKED | NEW,
    "mixed, window": MIXED_WITH_CHUNK | WINDOW,
    "mixed, wide window, alibi": MIXED_WITH_CHUNK | WIDE | ALIBI,
    "mixed, e4m3 cache": MIXED_WITH_CHUNK | WINDOW | ALIBI | E4M3_CACHE,
    "mixed, prefills only": MIXED_WITH_CHUNK | WINDOW | dict(only="prefill", padding=5),
    "mixed, invariant": MIXED_WITH_CHUNK | WINDOW | ALIBI | dict(batch_invariant=True),
    "decodes beside a chunk": BESIDE | WIDE | ALIBI,
    "decodes beside a chunk, new": BESIDE | WINDOW | NEW,
    "long, window": LONG | WINDOW,
    "long, wide window, softcap": LONG | WIDE | CAPPED,
    "long, alibi": LONG | ALIBI | dict(lse=False),
    "long, softcap, both ways": LONG | BOTH | CAPPED,
    "long, head_dim 64": LONG | WINDOW | ALIBI | dict(head_dim=64),
    "long, head_dim 256": LONG | WINDOW | dict(head_dim=256),
    "long, group 3": LONG | WINDOW | ALIBI | dict(heads=24),
    "long, tree": LONG | WINDOW | ALIBI | dict(qq_bias=64, tree=True),
}
QUICK = {
    "drafts of 4, window", "drafts of 8, new", "drafts of 64, tree, window, alibi", "drafts of 64, all e4m3",
    "drafts of 8, x-packed e4m3", "mixed, window", "long, softcap, both ways",
}  # fmt: skip
NAMES = [pytest.param(name, marks=[pytest.mark.quick] * (name in QUICK)) for name in CASES]


@pytest.mark.parametrize("name", NAMES)
@hopper_plans.mixed()
def test_results_are_those_of_the_reference(name: str) -> None:
    case = sized(name, **CASES[name], positions="tree")
    run(case, DEVICE)
    run(case, DEVICE)


WAYS = {"as long ones": hopper_plans.long, "two lists": hopper_plans.two_lists, "two launches": hopper_plans.apart}


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(("mixed", "decodes beside"))])
@pytest.mark.parametrize("way", WAYS)
def test_uneven_queries_served_in_other_ways_give_the_results_of_the_reference(way: str, name: str) -> None:
    with WAYS[way]():
        run(sized(name, **CASES[name], positions="tree"), DEVICE)


@pytest.mark.parametrize("nodes", [pytest.param(8, marks=pytest.mark.quick), 4, 16, 64])
@pytest.mark.parametrize("alibi", [pytest.param(True, marks=pytest.mark.quick), False])
@hopper_plans.mixed()
def test_every_branch_is_a_plain_sequence(nodes: int, alibi: bool) -> None:
    """Under a window shorter than some branches; of 64 nodes behind 30 keys, in one tile and more."""
    lengths = ragged((nodes, 30 + nodes), (nodes, nodes), (nodes - 1, 250), (1, 90)) | dict(bounds=True)
    case = sized("tree", **lengths, alibi=alibi, window_size=(11 if nodes < 64 else 40, -1))
    parents = random_tree(random.Random(nodes), nodes)
    inputs = with_tree(build(case, DEVICE), parents)
    out, _ = paged_attn.paged_attention(**inputs)
    assert_branches(out, inputs, parents)


SLOTS = [
    "drafts of 4, window",
    "drafts of 64, window",
    "mixed, wide window, alibi",
    "mixed, invariant",
    "long, group 3",
]


@pytest.mark.parametrize("name", SLOTS)
@hopper_plans.mixed()
def test_places_as_positions_give_the_results_of_the_reference_too(name: str) -> None:
    case = sized(name, **CASES[name], positions="slots")
    run(case, DEVICE)
    if case.batch_invariant:
        inputs = build(case, DEVICE)
        with_positions = [x.clone() for x in paged_attn.paged_attention(**inputs)]
        assert all(map(torch.equal, with_positions, paged_attn.paged_attention(**inputs | {"query_positions": None})))


def test_these_cases_meet_every_kind_of_kernel() -> None:
    """Few rows as columns or rows, blocks of two to four warpgroups, both lists, both launches, each way to weigh."""
    met: set[str] = set()
    for way in (hopper_plans.mixed, *WAYS.values()):
        with way():
            for name, fields in CASES.items():
                problem = problem_of(build(sized(name, **fields, positions="tree"), DEVICE))
                for launch in planner.plan(problem).launches:
                    for x in launch.parts:
                        pipe = x.pipe
                        met |= {f"{n}={getattr(pipe, n)}" for n in ("SHARES", "COARSE", "FP8_PRODUCTS", "AT_ONCE")}
                        met |= {f"{n}={getattr(pipe, n)}" for n in ("AHEAD", "MIXED", "ROWS", "CONVERT", "PACKED")}
                        met |= {f"columns={pipe.COLUMNS > 0}", f"terms={pipe.TERMS > 0}", f"new={x.shape.APART}"}
                        met |= {f"beside={launch.beside is not None}", f"piece={x.shape.PIECE is not None}"}
    both = ["SHARES", "COARSE", "FP8_PRODUCTS", "AT_ONCE", "AHEAD", "MIXED", "PACKED"]
    both += ["columns", "terms", "new", "beside", "piece"]
    assert {f"{name}={value}" for name in both for value in (True, False)} <= met
    assert {"ROWS=64", "ROWS=128", "ROWS=256", "CONVERT=0", "CONVERT=1", "CONVERT=2"} <= met, sorted(met)
