"""Many KV heads: a few come with all of a sequence's blocks before the next ones do, and every item has its turn."""

from __future__ import annotations

from typing import Any

import pytest

from paged_attn.kernels.hopper.planning import coverage as hopper
from paged_attn.planning import planner
from tests.kernels.hopper.planned import even
from tests.support.cases import Case, build, problem_of, run
from tests.support.hopper_cases import DEVICE, ragged, sized
from tests.support.hopper_plans import planned

pytestmark = [pytest.mark.simulated, pytest.mark.hopper, pytest.mark.usefixtures("on_hopper")]

UNEVEN = ragged((130, 200), (1, 0), (0, 70), (70, 20), (300, 300))
CASES: dict[str, dict[str, Any]] = {
    "uneven, 2 of 6 KV heads": UNEVEN | dict(heads=6, kv_heads=6),
    "uneven, 3 of 9 KV heads, groups of 2": UNEVEN | dict(heads=18, kv_heads=9),
}


def abreast(case: Case) -> list[int]:
    return [x.pipe.HEADS_ABREAST for x in planner.plan(problem_of(build(case, DEVICE))).launches]


@pytest.mark.quick
@pytest.mark.parametrize("name", CASES)
def test_items_of_a_few_heads_at_a_time_give_the_results_of_the_reference(name: str) -> None:
    case = sized(name, **CASES[name])
    with planned(MAX_HEADS_ABREAST=3 if "9" in name else 2, BYTES_THAT_LEAVE_L2=0, MIN_TILES_PER_PIECE=1000):
        assert abreast(case) == [3 if case.kv_heads == 9 else 2]
        run(case, DEVICE)
        run(case, DEVICE)  # with counters as the first run left them


@pytest.mark.parametrize("kv_heads, expected", [(8, 0), (16, 4), (18, 3), (128, 4), (71, 0)])
def test_as_many_heads_are_abreast_as_divide_all(kv_heads: int, expected: int) -> None:
    call = even(1, 4096, 4096)._replace(heads=kv_heads, kv_heads=kv_heads)
    assert [x.pipe.HEADS_ABREAST for x in hopper.launches(call)] == [expected]
