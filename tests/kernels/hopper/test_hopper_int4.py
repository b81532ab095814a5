"""int4 caches in the Hopper kernels: on a Hopper GPU, or simulated."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import paged_attn
from paged_attn.planning import planner
from tests.support import hopper_plans
from tests.support.cases import E4M3, E5M2, INT4, build, compare, problem_of, run
from tests.support.formats import with_zero
from tests.support.hopper_cases import CAPPED, DEVICE, FEATURES, quick_of, sized
from tests.support.hopper_cases.short import BESIDE, DECODES, LONG, MIXED, OF_8, OF_32

pytestmark = [pytest.mark.simulated, pytest.mark.hopper]
on_hopper = pytest.mark.usefixtures("on_hopper")

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
OVER_COPIES: dict[str, dict[str, Any]] = {
    "long": LONG,
    "long, softcap, float16": LONG | CAPPED | dict(dtype=torch.float16),
    "long, head_dim 96, HND": LONG | dict(head_dim=96, layout="HND"),
    "long, window": LONG | dict(window_size=(150, -1)),
    "mixed": MIXED | dict(padding=5),
    "mixed, features": MIXED | FEATURES,
    "mixed, prefills only": MIXED | dict(only="prefill"),
    "decodes beside a chunk, pages of 8": BESIDE | dict(page_size=8, table="ragged"),
    "decodes beside a chunk, shard, head_dim 64": BESIDE | dict(shard=(1, 2, 16), head_dim=64),
}
QUICK = {"decodes", "decodes, head_dim 64", "decodes, float16", "drafts of 8, tree", "mixed"}


@on_hopper
@pytest.mark.parametrize("name", quick_of(COLUMNS, QUICK))
def test_columns_give_the_results_of_the_reference(name: str) -> None:
    case = sized(name, **OF_INT4 | COLUMNS[name])
    assert all(x.dialect == "hopper" and x.pipe.COLUMNS for x in planner.plan(problem_of(build(case, DEVICE))).launches)
    run(case, DEVICE)
    run(case, DEVICE)  # with counters as the first run left them


@on_hopper
@hopper_plans.copied()
@pytest.mark.parametrize("name", quick_of(OVER_COPIES, QUICK))
def test_long_queries_read_copies_of_16_bits(name: str) -> None:
    case = sized(name, **OF_INT4 | OVER_COPIES[name])
    made = planner.plan(problem_of(build(case, DEVICE)))
    assert made.copies is not None
    assert [x.copied for x in made.launches] == [False] * (len(made.launches) - 1) + [True]
    assert all(x.dialect == "hopper" for x in made.launches)
    run(case, DEVICE)


@on_hopper
@pytest.mark.quick
@pytest.mark.parametrize("large", [1.0, 2.0**20, 2.0**-40])
def test_scales_may_differ_by_orders_of_magnitude(large: float) -> None:
    """Values of some tokens are far larger than others, and some heads are zero."""
    case = sized("magnitudes", **DECODES, **OF_INT4)
    inputs = build(case, DEVICE)
    for name, by in (("v_scale", large), ("k_scale", 1.0)):
        words = inputs[name].view(torch.int32)
        scale, zero = (words & -16).view(torch.float32), words & 15
        scale.view(-1)[::7] *= by
        scale.view(-1)[3::11] = 0.0
        inputs[name] = with_zero(scale, zero)
    compare(case, *paged_attn.paged_attention(**inputs), inputs)


@on_hopper
@pytest.mark.quick
@pytest.mark.parametrize("large", [2.0**-20, 2.0**12])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_queries_of_any_size_keep_their_digits(dtype: torch.dtype, large: float) -> None:
    """Odd dims of queries are divided by 16, which would cost subnormal numbers of float16 their digits."""
    case = sized("sizes", **DECODES, **OF_INT4 | dict(dtype=dtype, softmax_scale=0.09 / large))
    inputs = build(case, DEVICE)
    inputs["q"] = (inputs["q"].float() * large).to(dtype)
    compare(case, *paged_attn.paged_attention(**inputs), inputs)


@on_hopper
def test_values_all_of_one_sign_keep_their_digits() -> None:
    """Zero points of 15 and of 0: sums of stored numbers, and of zero points, are then far larger than results."""
    case = sized("signs", **DECODES, **OF_INT4)
    inputs = build(case, DEVICE)
    for zero in (0, 15):
        for name in ("k_scale", "v_scale"):
            words = inputs[name].view(torch.int32)
            scale = (words & -16).view(torch.float32)
            inputs[name] = with_zero(scale, torch.full_like(words, zero))
        compare(case, *paged_attn.paged_attention(**inputs), inputs)
