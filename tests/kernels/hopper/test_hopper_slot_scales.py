"""int8 caches, and scales of cached tokens, in the Hopper kernels: on a Hopper GPU, or simulated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import paged_attn
from paged_attn.planning import planner
from tests.support import hopper_plans
from tests.support.cases import E4M3, E5M2, build, compare, problem_of, run
from tests.support.hopper_cases import ALL_E4M3, CAPPED, DEVICE, FEATURES, PACKED, sized
from tests.support.hopper_cases.short import BESIDE, DECODES, LONG, MIXED, OF_8, OF_32

pytestmark = [pytest.mark.simulated, pytest.mark.hopper, pytest.mark.usefixtures("on_hopper")]

INT8 = torch.int8
BY_TOKEN: dict[str, Any] = dict(scales="per_token")

COLUMNS: dict[str, dict[str, Any]] = {
    "decodes, int8": DECODES | dict(cache_dtype=INT8),
    "decodes, e4m3": DECODES | dict(cache_dtype=E4M3),
    "decodes, e5m2, float16 scales": DECODES | dict(cache_dtype=E5M2, scales="per_token, float16"),
    "decodes, int8, features": DECODES | FEATURES | dict(cache_dtype=INT8),
    "decodes, int8, head_dim 64": DECODES | dict(cache_dtype=INT8, head_dim=64),
    "decodes, int8, head_dim 96": DECODES | dict(cache_dtype=INT8, head_dim=96),
    "decodes, e4m3, head_dim 256": DECODES | dict(cache_dtype=E4M3, head_dim=256),
    "decodes, int8, HND, pages of 64": DECODES | dict(cache_dtype=INT8, layout="HND", page_size=64),
    "decodes, int8, pages of 8, ragged table": DECODES | dict(cache_dtype=INT8, page_size=8, table="ragged"),
    "decodes, int8, softcap": DECODES | CAPPED | dict(cache_dtype=INT8, sinks=True),
    "decodes, int8, windows": DECODES | dict(cache_dtype=INT8, window_size=(99, -1)),
    "decodes, int8, fp16": DECODES | dict(cache_dtype=INT8, dtype=torch.float16),
    "decodes, e4m3, of all e4m3": DECODES | ALL_E4M3,
    "decodes, int8, shard": DECODES | dict(cache_dtype=INT8, shard=(1, 2, 16)),
    "drafts of 8, int8": OF_8 | dict(cache_dtype=INT8),
    "drafts of 8, e4m3, tree": OF_8 | dict(cache_dtype=E4M3, qq_bias=8, tree=True),
    "drafts of 8, int8, token scales": OF_8 | dict(cache_dtype=INT8, token_scales=True),
}
ONE_SCALE: dict[str, dict[str, Any]] = {
    "decodes": DECODES,
    "decodes, features": DECODES | FEATURES,
    "decodes, x-packed": DECODES | PACKED,
    "decodes, head_dim 64": DECODES | dict(head_dim=64),
    "drafts of 8": OF_8,
    "drafts of 32": OF_32,
    "mixed": MIXED | dict(padding=5),
    "decodes beside a chunk": BESIDE,
    "long": LONG,
    "long, softcap": LONG | CAPPED,
    "long, head_dim 256": LONG | dict(head_dim=256),
}
QUICK = {"decodes, int8", "decodes, e4m3, of all e4m3", "drafts of 8, e4m3, tree", "long", "decodes, x-packed"}


def marked(cases: dict[str, dict[str, Any]]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.quick] * (name in QUICK)) for name in cases]


@pytest.mark.parametrize("name", marked(COLUMNS))
def test_scales_of_tokens_give_the_results_of_the_reference(name: str) -> None:
    case = sized(name, **BY_TOKEN | COLUMNS[name])
    assert all(x.dialect == "hopper" and x.pipe.COLUMNS for x in planner.plan(problem_of(build(case, DEVICE))).launches)
    run(case, DEVICE)
    run(case, DEVICE)  # with counters as the first run left them


@pytest.mark.parametrize("name", marked(ONE_SCALE))
@hopper_plans.mixed()
def test_int8_caches_of_one_scale_a_head_give_the_results_of_the_reference(name: str) -> None:
    case = sized(name, **ONE_SCALE[name] | dict(cache_dtype=INT8, scales="per_head"))
    assert all(x.dialect == "hopper" for x in planner.plan(problem_of(build(case, DEVICE))).launches)
    run(case, DEVICE)


@pytest.mark.quick
@pytest.mark.parametrize("large", [1.0, 2.0**20, 2.0**-40])
def test_scales_may_differ_by_orders_of_magnitude(large: float) -> None:
    """Values of some tokens are far larger than others: their weights alone would leave float16's range."""
    case = sized("magnitudes", **DECODES, **BY_TOKEN, cache_dtype=INT8, lse=True)
    inputs = build(case, DEVICE)
    scale: Tensor = inputs["v_scale"]
    scale.view(-1)[::7] *= large
    scale.view(-1)[3::11] = 0.0
    compare(case, *paged_attn.paged_attention(**inputs), inputs)
