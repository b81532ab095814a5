"""Ranks that are processes on one machine's CPU, over gloo: results, refusals, ranks that are lost."""

from __future__ import annotations

import pytest

from tests.distributed import spawned, works

pytestmark = pytest.mark.host

RIGHT = [
    works.merges_by_collectives,
    works.attends_to_keys_of_all_ranks,
    works.attends_to_a_prompt_in_zigzag,
    works.falls_back_to_collectives,
    works.refuses_other_lengths_of_a_rank,
]


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_have_the_results_of_one_process(world: int) -> None:
    answers = spawned.run(RIGHT, world)
    spawned.results(answers)
    assert {(x.rank, x.work) for x in answers} == {(rank, work.__name__) for rank in range(world) for work in RIGHT}


@pytest.mark.kernels  # loses ranks in the same way in every dialect
@pytest.mark.parametrize(("how", "patience"), [("killed", 60.0), ("hung", 3.0)])
def test_a_rank_that_is_lost_is_an_error_on_the_others(how: str, patience: float) -> None:
    """Of a killed one gloo tells at once, of one that hangs within the group's timeout."""
    answers = spawned.run([works.loses_a_rank], 2, how, timeout=3600, patience=patience, wanted=1)
    assert [x.rank for x in answers] == [0], answers
    assert answers[0].result, "the merge ended as if all ranks were there"
