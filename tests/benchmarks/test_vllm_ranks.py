"""Engines of vLLM on two GPUs: comparisons of tokens, and rates, from engines that answer at once."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.hosts import vllm_ranks


class Answers:
    """An engine that stands in for vllm_8b.Engine, and answers every workload."""

    def __init__(self, attention: str, arguments: list[str], log: Path, **environment: str) -> None:
        log.write_text("paged_attn: 3 kernels\nother\n")
        self.log, self.environment = log, environment
        self.faster = 2 if attention == "paged_attn" else 1

    def read(self, seconds: float) -> dict[str, Any]:
        return {"loaded": 1.0}

    def ask(self, workload: str, seconds: float) -> dict[str, Any]:
        return {"seconds": {"context": 1.0, "context-long": 1 + 2 / self.faster}.get(workload, 4 / self.faster),
                "tokens": [[1, 2]] * 8}  # fmt: skip

    def close(self) -> None:
        """Nothing to end."""


def test_rates_are_new_tokens_of_a_batch_and_of_decodes_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_ranks, "Engine", Answers)
    rates = vllm_ranks.Rates(["tp2", "dcp2"], tmp_path, False, lambda: None)
    rates.load(10)
    rates.measure(2, time.monotonic() + 60)
    assert rates.rates["tp2"] == {"CUSTOM": [8.0, 8.0], "FLASH_ATTN": [4.0, 4.0]}
    decodes = 8 * vllm_ranks.MORE
    assert rates.rates["dcp2"]["CUSTOM"] == [decodes / 1.0] * 2
    assert rates.rates["dcp2"]["FLASH_ATTN"] == [decodes / 2.0] * 2
    assert rates.equal["tp2"]["batch"] == {"FLASH_ATTN": (1.0, 1.0)}
    assert rates.loaded["tp2 CUSTOM"]["log"] == ["paged_attn: 3 kernels"]
    assert "2.00x FLASH_ATTN" in "\n".join(rates.summary())


def test_each_run_has_a_process_that_is_ended_and_its_tokens_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {"dense": {"tokens": [[1, 2], [3, 4]]}, "one": {"tokens": [[1, 2], [3, 5]]}, "tp2-eager": None}
    ended = []

    class OneAnswer(Answers):
        def __init__(self, name: str, arguments: list[str], log: Path, module: str, **environment: str) -> None:
            super().__init__(name, arguments, log, **environment)
            self.name = name

        def read(self, seconds: float) -> Any:
            return said[self.name]

        def close(self) -> None:
            ended.append(self.name)

    monkeypatch.setattr(vllm_ranks, "Engine", OneAnswer)
    tokens = vllm_ranks.Tokens([*said], tmp_path, time.monotonic() + 60, 2, lambda: None)
    tokens.join()
    assert {*ended} == {*said}
    assert tokens.compared == {"one like dense": {"equal": "1 of 2", "first_differing": {1: 1}}}
    assert tokens.found["tp2-eager"] == {"error": "no answer"}
    assert next(tokens.summary()) == "tokens: 0 of 1 comparisons equal; failed: ['tp2-eager']"


def test_the_first_position_that_differs_is_named_by_prompt() -> None:
    found = vllm_ranks.compared([[1, 2], [3, 4], [5, 6]], [[1, 2], [3, 5], [7, 6]])
    assert found == {"equal": "1 of 3", "first_differing": {1: 1, 2: 0}}


def test_every_run_is_compared_with_runs_that_exist() -> None:
    assert {other for run in vllm_ranks.RUNS.values() for other in run.like} <= {*vllm_ranks.RUNS}


def test_no_process_may_use_multicast() -> None:
    for more in ({}, vllm_ranks.V1):
        told = vllm_ranks.environment("0", True, more)
        assert (told["NCCL_NVLS_ENABLE"], told["TORCH_SYMM_MEM_DISABLE_MULTICAST"]) == ("0", "1")
        assert (told["NVSHMEM_DISABLE_NVLS"], told["VLLM_ALLREDUCE_USE_SYMM_MEM"]) == ("1", "0")
