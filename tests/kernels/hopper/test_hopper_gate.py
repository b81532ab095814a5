"""Gates of results in the Hopper kernels, wherever rows leave: on a Hopper GPU, or simulated."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paged_attn.planning import planner
from tests.support import hopper_plans
from tests.support.cases import E4M3, build, problem_of, run
from tests.support.hopper_cases import ALL_E4M3, CAPPED, DEVICE, E4M3_CACHE, FEATURES, NEW, PACKED, ragged, sized
from tests.support.hopper_cases.short import BESIDE, LONG, MIXED_WITH_CHUNK

pytestmark = [pytest.mark.simulated, pytest.mark.hopper, pytest.mark.usefixtures("on_hopper")]

DECODES = ragged((1, 500), (1, 1500), (1, 1), (1, 0), (1, 900)) | dict(decode_form=True)
LONE = ragged((1, 6000)) | dict(decode_form=True)
OF_8 = ragged((8, 190), (8, 1900), (5, 132), (8, 8), (0, 77)) | dict(bounds=True)
OF_32 = ragged((32, 240), (32, 1256), (20, 132), (32, 32)) | dict(bounds=True)
CUT = ragged((64, 3000)) | dict(bounds=True)

CASES: dict[str, dict[str, Any]] = {
    "decodes": DECODES,
    "decodes, features, strided": DECODES | FEATURES | dict(strided=True),
    "decodes, e4m3 cache": DECODES | E4M3_CACHE,
    "decodes, all e4m3, fp8 out": DECODES | ALL_E4M3 | dict(out_dtype=E4M3),
    "decodes, x-packed": DECODES | PACKED,
    "decodes, head_dim 64": DECODES | dict(head_dim=64),
    "decodes, head_dim 80": DECODES | dict(head_dim=80),
    "decodes, head_dim 256": DECODES | dict(head_dim=256),
    "decodes, invariant": DECODES | dict(batch_invariant=True, sinks=True),
    "a decode of many keys": LONE,
    "a decode of many keys, group 48": LONE | dict(heads=48, kv_heads=1),
    "a decode of many keys, invariant": LONE | dict(batch_invariant=True),
    "drafts of 8": OF_8,
    "drafts of 8, trees": OF_8 | dict(qq_bias=8, tree=True),
    "drafts of 8, new, fp8 out": OF_8 | NEW | dict(out_dtype=E4M3),
    "drafts of 8, x-packed e4m3": OF_8 | PACKED | E4M3_CACHE,
    "drafts of 32": OF_32,
    "drafts of 32, e4m3 cache, no lse": OF_32 | E4M3_CACHE | dict(lse=False),
    "drafts of 32, float16": OF_32 | dict(dtype=torch.float16),
    "mixed": MIXED_WITH_CHUNK | dict(padding=5),
    "mixed, e4m3 cache": MIXED_WITH_CHUNK | E4M3_CACHE,
    "mixed, decodes only": MIXED_WITH_CHUNK | dict(only="decode"),
    "mixed, prefills only": MIXED_WITH_CHUNK | dict(only="prefill", padding=5),
    "mixed, invariant": MIXED_WITH_CHUNK | dict(batch_invariant=True, window_size=(100, -1), sinks=True),
    "decodes beside a chunk": BESIDE,
    "decodes beside a chunk, features": BESIDE | FEATURES,
    "long": LONG,
    "long, softcap": LONG | CAPPED,
    "long, all e4m3": LONG | ALL_E4M3,
    "long, all e4m3, fp8 out, no lse": LONG | ALL_E4M3 | dict(out_dtype=E4M3, lse=False),
    "long, head_dim 64": LONG | dict(head_dim=64),
    "long, head_dim 256": LONG | dict(head_dim=256),
    "long, group 3": LONG | dict(heads=24),
    "long, x-packed": LONG | PACKED,
    "a chunk whose keys are cut": CUT,
    "a chunk whose keys are cut, window, sinks": CUT | dict(window_size=(2500, -1), sinks=True),
    "a chunk whose keys are cut, head_dim 256": CUT | dict(head_dim=256),
    "a chunk whose keys are cut, invariant": CUT | dict(batch_invariant=True),
}
QUICK = {
    "decodes, all e4m3, fp8 out",
    "a decode of many keys",
    "drafts of 32",
    "mixed",
    "long",
    "a chunk whose keys are cut",
}
NAMES = [pytest.param(name, marks=[pytest.mark.quick] * (name in QUICK)) for name in CASES]


@pytest.mark.parametrize("name", NAMES)
@hopper_plans.mixed()
def test_results_are_those_of_the_reference(name: str) -> None:
    run(sized(name, **CASES[name], gate=True), DEVICE)


WAYS = {"as long ones": hopper_plans.long, "two lists": hopper_plans.two_lists, "two launches": hopper_plans.apart}


@pytest.mark.parametrize("name", ["mixed", "decodes beside a chunk, features"])
@pytest.mark.parametrize("way", WAYS)
def test_uneven_queries_served_in_other_ways_give_the_results_of_the_reference(way: str, name: str) -> None:
    with WAYS[way]():
        run(sized(name, **CASES[name], gate=True), DEVICE)


def test_these_cases_meet_every_way_in_which_rows_leave() -> None:
    """Whole and cut blocks, joined by the last or by a launch, in groups, folded, and by columns."""
    met: set[str] = set()
    for way in (hopper_plans.mixed, *WAYS.values()):
        with way():
            for name, fields in CASES.items():
                for launch in planner.plan(problem_of(build(sized(name, **fields, gate=True), DEVICE))).launches:
                    for x in launch.parts:
                        met |= {f"{n}={getattr(x.pipe, n)}" for n in ("SHARES", "FP8_PRODUCTS", "MIXED", "BRIEF")}
                        met |= {f"split={x.shape.SPLIT}", f"merge={x.merge is not None}", f"joins={x.shape.MERGE > 0}"}
                        met |= {f"columns={x.pipe.COLUMNS > 0}", f"grouped={x.pipe.GROUPED > 0}"}
                        met |= {f"piece={x.shape.PIECE is not None}", f"beside={launch.beside is not None}"}
    names = ["SHARES", "FP8_PRODUCTS", "MIXED", "split", "merge", "joins", "columns", "grouped", "piece", "beside"]
    assert {f"{name}={value}" for name in names for value in (True, False)} <= met, sorted(met)
