"""The Hopper kernels on calls of anything: sizes, types, layouts, features and lengths drawn one by one."""

from __future__ import annotations

import random

import pytest

from paged_attn.planning import planner
from tests.support import hopper_plans
from tests.support.cases import build, problem_of, run
from tests.support.hopper_cases import DEVICE
from tests.support.random_calls import any_case

pytestmark = [pytest.mark.simulated, pytest.mark.hopper]
WAYS = (hopper_plans.mixed, hopper_plans.two_lists, hopper_plans.apart, hopper_plans.long, hopper_plans.wide)
BATCHES = 6  # of a seed


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("seed", [pytest.param(n, marks=[pytest.mark.quick] * (n < 2)) for n in range(12)])
def test_any_call_gives_the_results_of_the_reference(seed: int) -> None:
    rng, left = random.Random(f"any {seed}"), BATCHES
    while left:
        case, way = any_case(rng), rng.choice(WAYS)
        with way():
            if any(x.pipe is None for x in planner.plan(problem_of(build(case, DEVICE))).launches):
                continue
            left -= 1
            run(case, DEVICE)
