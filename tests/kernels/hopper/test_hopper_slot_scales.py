"""int8 caches, and scales of cached tokens, in the Hopper kernels: on a Hopper GPU, or simulated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import paged_attn
from paged_attn.planning import planner
from paged_attn.records.copies import copies_of
from tests.simulator import SIMULATES
from tests.support import hopper_plans
from tests.support.cases import E4M3, E5M2, INT4, build, compare, problem_of, run
from tests.support.hopper_cases import ALL_E4M3, CAPPED, DEVICE, FEATURES, PACKED, quick_of, sized
from tests.support.hopper_cases.short import BESIDE, DECODES, LONG, MIXED, OF_8, OF_32

pytestmark = [pytest.mark.simulated, pytest.mark.hopper]
on_hopper = pytest.mark.usefixtures("on_hopper")

INT8 = torch.int8
MLA: dict[str, Any] = dict(heads=16, kv_heads=1, head_dim=576, value_dim=512, latent=True)
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
OVER_COPIES: dict[str, dict[str, Any]] = {
    "long, int8": LONG | dict(cache_dtype=INT8),
    "long, int8, scales by head": LONG | dict(cache_dtype=INT8, scales="per_head"),
    "mixed, int8, scales by head": MIXED | dict(cache_dtype=INT8, scales="per_head", padding=5),
    "long, e4m3, softcap": LONG | CAPPED | dict(cache_dtype=E4M3),
    "long, e5m2, float16": LONG | dict(cache_dtype=E5M2, dtype=torch.float16, scales="per_token, float16"),
    "long, int8, head_dim 96, HND": LONG | dict(cache_dtype=INT8, head_dim=96, layout="HND"),
    "long, int8, window": LONG | dict(cache_dtype=INT8, window_size=(150, -1)),
    "long, e4m3, one scale": LONG | dict(cache_dtype=E4M3, scales="float"),
    "long, e5m2, scales by head, float16": LONG | dict(cache_dtype=E5M2, dtype=torch.float16, scales="per_head"),
    "mixed, e4m3, scales by sequence": MIXED | dict(cache_dtype=E4M3, scales="per_seq", lse=False),
    "mixed, int8": MIXED | dict(cache_dtype=INT8, padding=5),
    "mixed, e4m3, features": MIXED | FEATURES | dict(cache_dtype=E4M3),
    "mixed, int8, prefills only": MIXED | dict(cache_dtype=INT8, only="prefill"),
    "mixed, int8, decodes only": MIXED | dict(cache_dtype=INT8, only="decode"),
    "decodes beside a chunk, int8, pages of 8": BESIDE | dict(cache_dtype=INT8, page_size=8, table="ragged"),
    "decodes beside a chunk, int8, shard": BESIDE | dict(cache_dtype=INT8, shard=(1, 2, 16)),
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
    "decodes, latents": DECODES | MLA,
    "drafts of 8, latents": OF_8 | MLA,
    "long, latents": LONG | MLA,
    "long, head_dim 256": LONG | dict(head_dim=256),
}
BESIDE_SINKS: dict[str, dict[str, Any]] = {
    "decodes, int8": DECODES | dict(cache_dtype=INT8),
    "decodes, e4m3": DECODES | dict(cache_dtype=E4M3),
    "decodes, int4": DECODES | dict(cache_dtype=INT4),
    "drafts of 8, int8": OF_8 | dict(cache_dtype=INT8),
}
QUICK = {
    "decodes, int8",
    "decodes, e4m3, of all e4m3",
    "drafts of 8, e4m3, tree",
    "long",
    "decodes, x-packed",
    "mixed, int8",
}


@on_hopper
@pytest.mark.parametrize("name", quick_of(COLUMNS, QUICK))
def test_scales_of_tokens_give_the_results_of_the_reference(name: str) -> None:
    case = sized(name, **BY_TOKEN | COLUMNS[name])
    assert all(x.dialect == "hopper" and x.pipe.COLUMNS for x in planner.plan(problem_of(build(case, DEVICE))).launches)
    run(case, DEVICE)
    run(case, DEVICE)  # with counters as the first run left them


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("name", quick_of(OVER_COPIES, QUICK))
def test_long_queries_read_copies_of_16_bits(name: str, large: bool) -> None:
    """large: copies of all sequences would be too large, so only those of many tokens have copies."""
    case = sized(name, **BY_TOKEN | OVER_COPIES[name])
    problem = problem_of(build(case, DEVICE))
    changes: dict[str, Any] = {}
    if large:
        found = copies_of(problem)._replace(dtype=case.dtype)
        changes = dict(MIN_TOKENS_OF_A_COPY=64, MAX_BYTES_OF_COPIES=found.bytes // found.most * (case.tokens // 64))
    with hopper_plans.copied(**changes):
        made = planner.plan(problem)
        assert [x.copied for x in made.launches] == [False] * (len(made.launches) - 1) + [case.only != "decode"]
        assert (made.copies is None) == (case.only == "decode")
        if made.copies is not None and large and any(x < 64 for x in case.query_lens):
            assert [x.dialect for x in made.launches][-2:] == ["portable", "hopper"]
        if not (SIMULATES and any(x.dialect == "portable" for x in made.launches)):
            run(case, DEVICE)


@on_hopper
@pytest.mark.parametrize("name", quick_of(ONE_SCALE, QUICK))
@hopper_plans.mixed()
def test_int8_caches_of_one_scale_a_head_give_the_results_of_the_reference(name: str) -> None:
    case = sized(name, **ONE_SCALE[name] | dict(cache_dtype=INT8, scales="per_head"))
    assert all(x.dialect == "hopper" for x in planner.plan(problem_of(build(case, DEVICE))).launches)
    run(case, DEVICE)


@on_hopper
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


@on_hopper
@pytest.mark.quick
@pytest.mark.parametrize("above, size", [(7.0, 2.0**-10), (60.0, 2.0**-10), (0.0, 2.0**40), (-7.0, 2.0**90)])
@pytest.mark.parametrize("name", quick_of(BESIDE_SINKS, {"decodes, int8"}))
def test_values_of_any_size_keep_their_digits_beside_a_sink(name: str, above: float, size: float) -> None:
    """Weights contain the scales of values, but a sink's weight does not."""
    case = sized(name, **BY_TOKEN | BESIDE_SINKS[name] | dict(sinks=True, lse=True))
    inputs = build(case, DEVICE)
    inputs["sinks"] += above
    inputs["v_scale"] *= size
    assert all(x.pipe.COLUMNS for x in planner.plan(problem_of(inputs)).launches)
    compare(case, *paged_attn.paged_attention(**inputs), inputs)
