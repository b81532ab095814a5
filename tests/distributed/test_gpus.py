"""Ranks that are GPUs of one host: exchanges through each other's memory and through NCCL.

`make test-gpus`, on a machine with 2 GPUs or more.
"""

from __future__ import annotations

import pytest
import torch

from tests.distributed import spawned, works

pytestmark = pytest.mark.gpus
GPUS = torch.cuda.device_count()
WORLDS = [n for n in (2, 4) if n <= GPUS]

RIGHT = [
    works.merges_by_collectives,
    works.attends_to_keys_of_all_ranks,
    works.attends_to_a_prompt_in_zigzag,
    works.merges_by_peers,
    works.attends_by_peers,
    works.errors_of_merged_states,
    works.replays_with_delays,
]


@pytest.mark.parametrize("world", WORLDS)
def test_ranks_have_the_results_of_one_process(world: int) -> None:
    answers = spawned.run(RIGHT, world, backend="nccl")
    spawned.results(answers)
    assert {(x.rank, x.work) for x in answers} == {(rank, work.__name__) for rank in range(world) for work in RIGHT}


@pytest.mark.parametrize("world", WORLDS)
def test_a_rank_that_does_not_answer_is_named(world: int) -> None:
    said = spawned.results(spawned.run([works.tells_of_a_rank_that_does_not_answer], world, backend="nccl"))
    assert sorted(said) == sorted([""] + [f"rank {world - 1} did not answer within 0.5 s"] * (world - 1))
