"""Scales of tokens in the Hopper kernels: on a Hopper GPU, or simulated."""

from __future__ import annotations

from typing import Any

import pytest

from paged_attn.planning import planner
from tests.support import hopper_plans
from tests.support.cases import build, problem_of, run
from tests.support.hopper_cases import ALL_E4M3, CAPPED, DEVICE, E4M3_CACHE, FEATURES, NEW, PACKED, sized
from tests.support.hopper_cases.short import BESIDE, DECODES, LONG, MIXED, OF_8, OF_32

pytestmark = [pytest.mark.simulated, pytest.mark.hopper, pytest.mark.usefixtures("on_hopper")]

CASES: dict[str, dict[str, Any]] = {
    "decodes": DECODES,
    "decodes, features": DECODES | FEATURES,
    "decodes, e4m3 cache": DECODES | E4M3_CACHE,
    "decodes, all e4m3": DECODES | ALL_E4M3,
    "decodes, x-packed": DECODES | PACKED,
    "decodes, head_dim 256": DECODES | dict(head_dim=256),
    "drafts of 8": OF_8,
    "drafts of 8, trees, new": OF_8 | NEW | dict(qq_bias=8, tree=True),
    "drafts of 8, x-packed e4m3": OF_8 | PACKED | E4M3_CACHE,
    "drafts of 32": OF_32,
    "drafts of 32, softcap": OF_32 | CAPPED,
    "drafts of 32, e4m3 cache, no lse": OF_32 | E4M3_CACHE | dict(lse=False),
    "mixed": MIXED | dict(padding=5),
    "mixed, features": MIXED | FEATURES,
    "mixed, invariant": MIXED | dict(batch_invariant=True, sinks=True),
    "decodes beside a chunk": BESIDE,
    "long": LONG,
    "long, softcap": LONG | CAPPED,
    "long, softcap far above, lse": LONG | dict(softcap=100.0),
    "long, alibi, no lse": LONG | dict(alibi=True, lse=False),
    "long, e4m3 cache": LONG | E4M3_CACHE,
    "long, all e4m3": LONG | ALL_E4M3,
    "long, all e4m3, no lse": LONG | ALL_E4M3 | dict(lse=False),
    "long, head_dim 64": LONG | dict(head_dim=64),
    "long, group 3": LONG | dict(heads=24),
    "long, parts of a group": LONG | dict(heads=48, kv_heads=1),
    "long, x-packed": LONG | PACKED,
}
QUICK = {"decodes", "drafts of 32", "mixed", "long, softcap", "long, all e4m3, no lse"}
NAMES = [pytest.param(name, marks=[pytest.mark.quick] * (name in QUICK)) for name in CASES]


@pytest.mark.parametrize("name", NAMES)
@hopper_plans.mixed()
def test_results_are_those_of_the_reference(name: str) -> None:
    run(sized(name, **CASES[name], token_scales=True), DEVICE)


@pytest.mark.parametrize("name", ["mixed", "decodes beside a chunk"])
@hopper_plans.two_lists()
def test_two_lists_give_the_results_of_the_reference(name: str) -> None:
    run(sized(name, **CASES[name], token_scales=True), DEVICE)


def test_these_cases_meet_every_kind_of_kernel() -> None:
    met: set[str] = set()
    for way in (hopper_plans.mixed, hopper_plans.two_lists):
        with way():
            for name, fields in CASES.items():
                for launch in planner.plan(
                    problem_of(build(sized(name, **fields, token_scales=True), DEVICE))
                ).launches:
                    for x in launch.parts:
                        met |= {f"{n}={getattr(x.pipe, n)}" for n in ("SHARES", "COARSE", "FP8_PRODUCTS", "AT_ONCE")}
                        met |= {f"{n}={getattr(x.pipe, n)}" for n in ("AHEAD", "MIXED", "PACKED")}
                        met |= {f"columns={x.pipe.COLUMNS > 0}", f"beside={launch.beside is not None}"}
                        met |= {f"piece={x.shape.PIECE is not None}", f"normalized={x.shape.NORMALIZED}"}
                        met |= {f"tanh={x.pipe.TANH}", f"terms={x.pipe.TERMS > 0}"}
    names = ["SHARES", "COARSE", "FP8_PRODUCTS", "AT_ONCE", "AHEAD", "MIXED", "PACKED", "columns", "beside", "piece"]
    assert {f"{name}={value}" for name in (*names, "normalized", "tanh") for value in (True, False)} <= met, sorted(met)
    assert "terms=True" not in met  # of whose polynomial one scale has to do
