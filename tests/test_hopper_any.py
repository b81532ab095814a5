"""The Hopper kernels on calls of anything: sizes, types, layouts, features and lengths drawn one by one."""

from __future__ import annotations

import random

import pytest

from paged_attn import plan
from tests import hopper_plans
from tests.cases import Case, build, problem_of, run
from tests.hopper_cases import DEVICE
from tests.random_batches import random_decodes, random_layout, random_lengths, random_sizes

pytestmark = [pytest.mark.hopper]
WAYS = (hopper_plans.mixed, hopper_plans.two_lists, hopper_plans.apart, hopper_plans.long, hopper_plans.wide)
BATCHES = 6  # of a seed


def any_case(rng: random.Random) -> Case:
    """Of few heads."""
    fields = random_sizes(rng)
    group = rng.choice([1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 20, 24, 32, 33, 40, 48, 64])
    kv_heads = rng.choice([n for n in (1, 2, 3, 4) if n * group <= 64])
    fields |= dict(
        heads=group * kv_heads,
        kv_heads=kv_heads,
        layout=random_layout(rng),
        sinks=rng.random() < 0.2,
        lse=rng.random() < 0.4,
        strided=rng.random() < 0.1,
        scales=rng.choice(["none", "float", "tensor", "per_head"]) if fields["cache_dtype"].itemsize == 1 else "none",
        batch_invariant=rng.random() < 0.1 and not fields["new"],
        seed=rng.randrange(1000),
    )
    if rng.random() < 0.1:
        fields |= dict(causal=False, window_size=(fields["window_size"][0], rng.choice([-1, 0, 50])))
    if rng.random() < 0.2:
        fields |= dict(positions="tree")
        if rng.random() < 0.5:
            fields |= dict(qq_bias=rng.choice([4, 16, 64]), tree=True)
    if rng.random() < 0.3:
        fields |= random_decodes(rng, drafts=rng.random() < 0.5)
    else:
        fields |= random_lengths(rng, even=rng.random() < 0.3)
    return Case(str(fields), **fields)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("seed", [pytest.param(n, marks=[pytest.mark.quick] * (n < 2)) for n in range(40)])
def test_any_call_gives_the_results_of_the_reference(seed: int) -> None:
    rng, left = random.Random(f"any {seed}"), BATCHES
    while left:
        case, way = any_case(rng), rng.choice(WAYS)
        with way():
            if any(x.pipe is None for x in plan.plan(problem_of(build(case, DEVICE))).launches):
                continue
            left -= 1
            run(case, DEVICE)
