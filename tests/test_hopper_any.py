"""The Hopper kernels on calls of anything: sizes, types, layouts, features and lengths drawn one by one."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from paged_attn import plan
from tests import hopper_plans
from tests.cases import E4M3, E5M2, Case, build, problem_of, run
from tests.hopper_cases import DEVICE
from tests.random_batches import random_decodes, random_lengths

pytestmark = [pytest.mark.hopper]
BF16, FP16 = torch.bfloat16, torch.float16
WAYS = (hopper_plans.mixed, hopper_plans.two_lists, hopper_plans.apart, hopper_plans.long, hopper_plans.wide)
BATCHES = 6  # of a seed


def any_fields(rng: random.Random) -> dict[str, Any]:
    """All but the lengths, of few heads."""
    group = rng.choice([1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 20, 24, 32, 33, 40, 48, 64])
    kv_heads = rng.choice([n for n in (1, 2, 3, 4) if n * group <= 64])
    dtype = rng.choice([BF16, BF16, FP16, E4M3])
    cache = E4M3 if dtype == E4M3 else rng.choice([dtype, dtype, dtype, E4M3, E5M2])
    fields: dict[str, Any] = dict(
        heads=group * kv_heads,
        kv_heads=kv_heads,
        head_dim=rng.choice([40, 64, 64, 80, 96, 128, 128, 128, 192, 256]),
        page_size=rng.choice([8, 16, 16, 24, 32, 64, 128, 544]),
        dtype=dtype,
        cache_dtype=cache,
        layout=rng.choice(["NHD", "NHD", "HND", "x"]),
        new=rng.random() < 0.2,
        window_size=(rng.choice([-1, -1, -1, 0, 100, 1200]), -1),
        softcap=rng.choice([0.0, 0.0, 0.0, 10.0, 25.0]),
        alibi=rng.random() < 0.1,
        sinks=rng.random() < 0.2,
        lse=rng.random() < 0.4,
        strided=rng.random() < 0.1,
        scales=rng.choice(["none", "float", "tensor", "per_head"]),
        batch_invariant=rng.random() < 0.1,
    )
    if cache.itemsize == 2:
        fields["scales"] = "none"
    if rng.random() < 0.1:
        fields |= dict(causal=False, window_size=(fields["window_size"][0], rng.choice([-1, 0, 50])))
    return fields


def any_case(rng: random.Random) -> Case | None:
    """None where the call would be an error, or is not these kernels'."""
    fields = any_fields(rng)
    draw = rng.choice([random_decodes, random_lengths, random_lengths])
    lengths = draw(rng, **({"drafts": rng.random() < 0.5} if draw is random_decodes else {"even": rng.random() < 0.3}))
    fields |= dict(seed=rng.randrange(1000), **lengths)
    if "decode_form" in fields:
        fields["padding"] = 0
    if fields["batch_invariant"] and fields["new"]:
        return None
    return Case(str(fields), **fields)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("seed", [pytest.param(n, marks=[pytest.mark.quick] * (n < 2)) for n in range(40)])
def test_any_call_gives_the_results_of_the_reference(seed: int) -> None:
    rng, left = random.Random(f"any {seed}"), BATCHES
    while left:
        case, way = any_case(rng), rng.choice(WAYS)
        if case is None:
            continue
        with way():
            if any(x.pipe is None for x in plan.plan(problem_of(build(case, DEVICE))).launches):
                continue
            left -= 1
            run(case, DEVICE)
