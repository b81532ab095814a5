"""int4 caches in the Hopper kernels: on a Hopper GPU, or simulated."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import paged_attn
from paged_attn.kernels.hopper.planning.operands import slot_scales_have_columns
from paged_attn.planning import planner
from tests.support import hopper_plans
from tests.support.cases import E4M3, E5M2, INT4, build, compare, problem_of, run
from tests.support.formats import with_zero
from tests.support.hopper_cases import CAPPED, DEVICE, FEATURES, sized
from tests.support.hopper_cases.short import DECODES, OF_8, OF_32

pytestmark = [pytest.mark.simulated, pytest.mark.hopper]
on_hopper = pytest.mark.usefixtures("on_hopper")
forced = hopper_plans.planned(takes_int4=slot_scales_have_columns)

OF_INT4: dict[str, Any] = dict(cache_dtype=INT4, scales="per_token")
COLUMNS: dict[str, dict[str, Any]] = {
    "decodes": DECODES,
    "decodes, features": DECODES | FEATURES,
    "decodes, head_dim 64": DECODES | dict(head_dim=64),
    "decodes, head_dim 96": DECODES | dict(head_dim=96),
    "decodes, head_dim 256": DECODES | dict(head_dim=256),
    "decodes, HND, pages of 64": DECODES | dict(layout="HND", page_size=64),
    "decodes, pages of 8, ragged table": DECODES | dict(page_size=8, table="ragged"),
    "decodes, softcap, sinks": DECODES | CAPPED | dict(sinks=True),
    "decodes, windows": DECODES | dict(window_size=(99, -1)),
    "decodes, float16": DECODES | dict(dtype=torch.float16),
    "decodes, of e4m3": DECODES | dict(dtype=E4M3, out_dtype=torch.bfloat16, scales="per_token"),
    "decodes, of e5m2, head_dim 64": DECODES | dict(dtype=E5M2, out_dtype=torch.float16, head_dim=64),
    "decodes, shard": DECODES | dict(shard=(1, 2, 16)),
    "decodes, a scale below zero": DECODES | dict(softmax_scale=-0.2),
    "decodes, 3 heads": DECODES | dict(heads=24),
    "drafts of 8": OF_8,
    "drafts of 8, head_dim 64": OF_8 | dict(head_dim=64),
    "drafts of 8, tree": OF_8 | dict(qq_bias=8, tree=True),
    "drafts of 8, mask, gate": OF_8 | dict(qq_mask=1, gate=True),
    "drafts of 8, token scales": OF_8 | dict(token_scales=True),
    "drafts of 8, features, HND": OF_8 | FEATURES | dict(layout="HND"),
    "drafts of 32, one head": OF_32 | dict(heads=8),
}
QUICK = {"decodes", "decodes, head_dim 64", "decodes, float16", "drafts of 8, tree"}


@on_hopper
@forced
@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.quick] * (x in QUICK)) for x in COLUMNS])
def test_columns_give_the_results_of_the_reference(name: str) -> None:
    case = sized(name, **OF_INT4 | COLUMNS[name])
    assert all(x.dialect == "hopper" and x.pipe.COLUMNS for x in planner.plan(problem_of(build(case, DEVICE))).launches)
    run(case, DEVICE)
    run(case, DEVICE)  # with counters as the first run left them
