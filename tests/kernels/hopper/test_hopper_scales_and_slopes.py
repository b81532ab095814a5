"""Scales and slopes of each sequence, and symmetric ALiBi, in the Hopper kernels: on a Hopper GPU, or simulated."""

from __future__ import annotations

from typing import Any

import pytest

from paged_attn.planning import planner
from tests.support import hopper_plans
from tests.support.cases import build, problem_of, run
from tests.support.hopper_cases import ALL_E4M3, CAPPED, DEVICE, E4M3_CACHE, NEW, PACKED, sized
from tests.support.hopper_cases.short import BESIDE, DECODES, LONG, MIXED, OF_8, OF_32

pytestmark = [pytest.mark.simulated, pytest.mark.hopper, pytest.mark.usefixtures("on_hopper")]

SCALES: dict[str, Any] = E4M3_CACHE | dict(scales="per_seq")
ALL: dict[str, Any] = ALL_E4M3 | dict(scales="per_seq")
SLOPES: dict[str, Any] = dict(alibi=True, slopes_of_seqs=True)
BOTH_SIDES: dict[str, Any] = dict(alibi=True, alibi_symmetric=True, causal=False)

CASES: dict[str, dict[str, Any]] = {
    "decodes, scales": DECODES | SCALES,
    "decodes, scales, turned": DECODES | ALL | dict(scales="per_seq, turned"),
    "decodes, slopes": DECODES | SLOPES | SCALES,
    "decodes, both sides": DECODES | BOTH_SIDES,
    "one decode without keys, scales": DECODES | SCALES | dict(query_lens=(1,), seq_lens=(0,)),
    "drafts of 8, scales": OF_8 | ALL,
    "drafts of 8, x-packed, scales": OF_8 | PACKED | SCALES,
    "drafts of 8, slopes, new": OF_8 | SLOPES | NEW,
    "drafts of 8, both sides": OF_8 | BOTH_SIDES | dict(window_size=(100, 3)),
    "drafts of 8, both sides, trees": OF_8 | BOTH_SIDES | dict(positions="tree", qq_bias=8),
    "drafts of 32, scales": OF_32 | SCALES,
    "drafts of 32, slopes": OF_32 | SLOPES,
    "drafts of 32, both sides, softcap": OF_32 | BOTH_SIDES | CAPPED,
    "mixed, scales, slopes": MIXED | SCALES | SLOPES | dict(padding=5),
    "mixed, slopes, invariant": MIXED | SLOPES | dict(batch_invariant=True, sinks=True),
    "mixed, both sides, slopes": MIXED | BOTH_SIDES | SLOPES,
    "decodes beside a chunk, scales": BESIDE | SCALES | SLOPES,
    "long, scales": LONG | SCALES,
    "long, scales, no lse": LONG | ALL | dict(lse=False),
    "long, scales of fp8 queries": LONG | ALL,
    "long, slopes": LONG | SLOPES,
    "long, both sides": LONG | BOTH_SIDES,
    "long, both sides, no lse": LONG | BOTH_SIDES | dict(lse=False, window_size=(150, 40)),
    "long, both sides, sinks, softcap": LONG | BOTH_SIDES | CAPPED | dict(sinks=True, lse=False),
    "long, both sides, scales of tokens": LONG | BOTH_SIDES | dict(token_scales=True, slopes_of_seqs=True),
    "long, both sides, e4m3": LONG | BOTH_SIDES | ALL | dict(lse=False),
    "long, both sides, head_dim 64": LONG | BOTH_SIDES | dict(head_dim=64),
    "long, both sides, x-packed": LONG | BOTH_SIDES | PACKED,
    "long, both sides, trees": LONG | BOTH_SIDES | dict(positions="tree"),
}
QUICK = {
    "decodes, scales",
    "drafts of 8, both sides, trees",
    "mixed, scales, slopes",
    "long, both sides",
    "long, scales",
}
NAMES = [pytest.param(name, marks=[pytest.mark.quick] * (name in QUICK)) for name in CASES]


@pytest.mark.parametrize("name", NAMES)
@hopper_plans.mixed()
def test_results_are_those_of_the_reference(name: str) -> None:
    run(sized(name, **CASES[name]), DEVICE)


@pytest.mark.parametrize("name", ["mixed, scales, slopes", "decodes beside a chunk, scales"])
@hopper_plans.two_lists()
def test_two_lists_give_the_results_of_the_reference(name: str) -> None:
    run(sized(name, **CASES[name]), DEVICE)


def test_these_cases_meet_every_kind_of_kernel() -> None:
    """Scales, slopes and both sides, of columns, of whole blocks, weighed at once or not, and of fp8 products."""
    met: set[str] = set()
    for way in (hopper_plans.mixed, hopper_plans.two_lists):
        with way():
            for name, fields in CASES.items():
                what = "both sides" if "both sides" in name else "scales" if "scales" in name else "slopes"
                for launch in planner.plan(problem_of(build(sized(name, **fields), DEVICE))).launches:
                    for x in launch.parts:
                        met |= {f"{what}, columns={x.pipe.COLUMNS > 0}", f"{what}, AT_ONCE={x.pipe.AT_ONCE}"}
                        met.add(f"{what}, FP8_PRODUCTS={x.pipe.FP8_PRODUCTS}")
    kinds = ("columns", "AT_ONCE", "FP8_PRODUCTS")
    whats = ("both sides", "scales")
    wanted = {f"{what}, {kind}={on}" for what in whats for kind in kinds for on in (False, True)}
    wanted -= {"scales, AT_ONCE=True"}  # of keys of 16 bits alone
    assert wanted <= met, wanted - met
