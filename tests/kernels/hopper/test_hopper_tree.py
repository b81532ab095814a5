"""Masks of trees and a bias of each sequence in the Hopper kernels: on a Hopper GPU, or simulated."""

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
from tests.support.trees import assert_branches, random_tree

pytestmark = [pytest.mark.simulated, pytest.mark.hopper, pytest.mark.usefixtures("on_hopper")]

# Trees that begin in a tile, at its first slot and at its last, of no context, and none.
OF_8 = ragged((8, 190), (8, 200), (5, 132), (8, 8), (1, 64), (0, 77), (8, 700)) | dict(bounds=True, qq_mask=1)
OF_32 = ragged((32, 160), (32, 159), (20, 132), (32, 32), (0, 77)) | dict(bounds=True, qq_mask=1)
OF_64 = ragged((64, 240), (64, 256), (50, 132), (64, 64)) | dict(bounds=True, qq_mask=2)
MIXED = ragged((1, 500), (40, 230), (150, 150), (64, 300), (1, 1), (17, 33), (1, 0), (2, 130), (40, 9)) | dict(
    qq_mask=2
)
BESIDE = ragged((200, 900), *[(1 + 3 * (i % 2), 64 + 37 * i) for i in range(20)]) | dict(bounds=True, qq_mask=1)
LONG = ragged((300, 500), (300, 300), (300, 430)) | dict(bounds=True, qq_mask=2)
OWN: dict[str, Any] = dict(qq_mask=0, bias_of_seqs=True, tree=True)

CASES: dict[str, dict[str, Any]] = {
    "8 nodes": OF_8,
    "8 nodes, depths, window, alibi": OF_8 | dict(positions="tree", window_size=(10, -1), alibi=True),
    "8 nodes, new": OF_8 | NEW,
    "8 nodes, x-packed e4m3": OF_8 | PACKED | E4M3_CACHE,
    "8 nodes, e4m3 cache": OF_8 | E4M3_CACHE,
    "8 nodes, head_dim 256": OF_8 | dict(head_dim=256),
    "8 nodes, a bias of each sequence": OF_8 | OWN | dict(qq_bias=8),
    "8 nodes, invariant": OF_8 | dict(batch_invariant=True, sinks=True),
    "32 nodes": OF_32,
    "32 nodes, softcap, gate": OF_32 | CAPPED | dict(gate=True),
    "32 nodes, a bias of each sequence": OF_32 | OWN | dict(qq_bias=32),
    "64 nodes": OF_64,
    "64 nodes, no lse": OF_64 | dict(lse=False),
    "64 nodes, not causal, sinks": OF_64 | dict(causal=False, sinks=True),
    "64 nodes, e4m3 cache, no lse": OF_64 | E4M3_CACHE | dict(lse=False),
    "64 nodes, all e4m3": OF_64 | ALL_E4M3,
    "64 nodes, all e4m3, no lse": OF_64 | ALL_E4M3 | dict(lse=False),
    "64 nodes, new, x-packed": OF_64 | NEW | PACKED,
    "64 nodes, head_dim 64": OF_64 | dict(head_dim=64),
    "mixed": MIXED,
    "mixed, alibi, scales of tokens": MIXED | dict(alibi=True, token_scales=True),
    "mixed, invariant": MIXED | dict(batch_invariant=True, window_size=(100, -1)),
    "decodes beside a chunk": BESIDE,
    "long": LONG,
    "long, softcap": LONG | CAPPED,
    "long, alibi, no lse": LONG | dict(alibi=True, lse=False),
    "long, a bias of each sequence": LONG | OWN | dict(qq_bias=64),
}
QUICK = {
    "8 nodes, depths, window, alibi",
    "64 nodes",
    "64 nodes, all e4m3",
    "mixed",
    "32 nodes, a bias of each sequence",
}
NAMES = [pytest.param(name, marks=[pytest.mark.quick] * (name in QUICK)) for name in CASES]


@pytest.mark.parametrize("name", NAMES)
@hopper_plans.mixed()
def test_results_are_those_of_the_reference(name: str) -> None:
    run(sized(name, **CASES[name]), DEVICE)


@pytest.mark.parametrize("name", ["mixed", "decodes beside a chunk"])
@hopper_plans.two_lists()
def test_two_lists_give_the_results_of_the_reference(name: str) -> None:
    run(sized(name, **CASES[name]), DEVICE)


@pytest.mark.parametrize("nodes", [pytest.param(8, marks=pytest.mark.quick), 64])
@hopper_plans.mixed()
def test_every_branch_is_a_plain_sequence(nodes: int) -> None:
    lengths = ragged((nodes, 30 + nodes), (nodes, nodes), (nodes - 1, 250), (1, 90)) | dict(bounds=True)
    case = sized("tree", **lengths, alibi=True, window_size=(11 if nodes < 64 else 40, -1))
    parents = list(random_tree(random.Random(nodes), nodes))
    inputs = build(case, DEVICE)
    drafts = torch.tensor([x for n in case.query_lens for x in parents[:n]], dtype=torch.int32, device=DEVICE)
    tree = paged_attn.tree(drafts, inputs["seq_lens"], inputs["cu_seqlens_q"], nodes=nodes)
    out, _ = paged_attn.paged_attention(**inputs, **tree._asdict())
    assert_branches(out, inputs, parents)


def test_masks_are_met_by_every_kind_of_kernel() -> None:
    met: set[str] = set()
    for way in (hopper_plans.mixed, hopper_plans.two_lists):
        with way():
            for name, fields in CASES.items():
                if not fields["qq_mask"]:
                    continue
                for launch in planner.plan(problem_of(build(sized(name, **fields), DEVICE))).launches:
                    for x in launch.parts:
                        met |= {f"{n}={getattr(x.pipe, n)}" for n in ("SHARES", "COARSE", "FP8_PRODUCTS", "AT_ONCE")}
                        met |= {f"{n}={getattr(x.pipe, n)}" for n in ("AHEAD", "MIXED", "PACKED")}
                        met |= {f"columns={x.pipe.COLUMNS > 0}", f"beside={launch.beside is not None}"}
                        met |= {f"piece={x.shape.PIECE is not None}", f"terms={x.pipe.TERMS > 0}"}
                        met |= {f"new={x.shape.APART}"}
    names = ["SHARES", "COARSE", "FP8_PRODUCTS", "AT_ONCE", "AHEAD", "MIXED", "PACKED", "columns", "beside", "piece"]
    assert {f"{name}={value}" for name in (*names, "terms", "new") for value in (True, False)} <= met, sorted(met)
