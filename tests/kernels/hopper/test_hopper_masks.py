"""Who sees what in the Hopper kernels: each mask in every kind of kernel, on a Hopper GPU or simulated."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import hopper_plans
from tests.support.cases import run
from tests.support.hopper_cases import ALL_E4M3, DEVICE, E4M3_CACHE, NEW, PACKED, ragged, sized
from tests.support.hopper_cases.short import LONG, MIXED_WITH_CHUNK
from tests.support.masks import LONG_MASKS as MASKS
from tests.support.masks import QUICK

pytestmark = [pytest.mark.simulated, pytest.mark.hopper, pytest.mark.usefixtures("on_hopper")]

# Lengths that end on borders of tiles and of chunks, and beside them; decodes, drafts, chunks of prefill, prefills,
# those of no context, of no keys and of no queries.
DECODES = ragged((1, 512), (1, 0), (1, 1), (1, 1500), (1, 130), (1, 257)) | dict(decode_form=True)
DRAFTS = ragged((8, 190), (8, 200), (5, 132), (8, 8), (1, 64), (0, 77), (8, 700)) | dict(bounds=True)
ALL: dict[str, Any] = dict(softcap=20.0, alibi=True, sinks=True)

CASES: dict[str, dict[str, Any]] = {
    "decodes": DECODES,
    "decodes, all": DECODES | ALL,
    "decodes, e4m3 cache": DECODES | E4M3_CACHE,
    "decodes, new": DECODES | NEW,
    "decodes, invariant": DECODES | dict(batch_invariant=True, sinks=True),
    "drafts, all": DRAFTS | ALL,
    "drafts, tree at depths": DRAFTS | dict(positions="tree", qq_bias=8, tree=True, alibi=True),
    "drafts, x-packed": DRAFTS | PACKED,
    "drafts, all e4m3": DRAFTS | ALL_E4M3,
    "mixed": MIXED_WITH_CHUNK,
    "mixed, all": MIXED_WITH_CHUNK | ALL,
    "mixed, e4m3 cache": MIXED_WITH_CHUNK | E4M3_CACHE,
    "mixed, invariant": MIXED_WITH_CHUNK | dict(batch_invariant=True, sinks=True),
    "long": LONG,
    "long, softcap": LONG | dict(softcap=20.0, lse=False),
    "long, new": LONG | NEW,
    "long, all e4m3": LONG | ALL_E4M3 | dict(lse=False),
    "long, head_dim 64, sinks": LONG | dict(head_dim=64, sinks=True),
    "long, group 3, alibi": LONG | dict(heads=24, alibi=True),
}
NAMES = [
    pytest.param(mask, name, marks=[pytest.mark.quick] * ((mask, name) in QUICK)) for mask in MASKS for name in CASES
]


@pytest.mark.parametrize("mask, name", NAMES)
@hopper_plans.mixed()
def test_results_are_those_of_the_reference(mask: str, name: str) -> None:
    case = sized(f"{mask}, {name}", **CASES[name] | MASKS[mask])
    run(case, DEVICE)
    run(case, DEVICE)


@pytest.mark.quick
def test_windows_by_head_may_be_slices_of_a_wider_tensor() -> None:
    """The slices are windows of decodes whose KV heads have programs by what they see."""
    run(sized("strided", **DECODES | MASKS["windows by KV head"] | dict(strided=True)), DEVICE)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("way", ["long", "two_lists", "apart"])
def test_uneven_queries_served_in_other_ways_give_the_results_of_the_reference(way: str, mask: str) -> None:
    with getattr(hopper_plans, way)():
        run(sized(mask, **MIXED_WITH_CHUNK | ALL | MASKS[mask]), DEVICE)
