"""The batches whose kernels are prepared: others within their bounds need no kernel that these do not."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch

from paged_attn.launching.platform import Device
from paged_attn.planning import planner
from paged_attn.preparation.model import Lengths, Model, batches_up_to, distinct, problem_of, variants_of
from tests.preparation.models import E4M3, LLAMA, MODELS
from tests.preparation.traffic import KEYS, SEQS, TOKENS, lengths_of, steps

H200 = Device("sm90", 132)
# Of tokens, each number with heads in groups of 4 and others.
BOUNDS = (
    ("llama", 3000), ("llama", 10000), ("window and sinks", 3000), ("10 KV heads", 8192), ("3 KV heads", 3000),
    ("exact softcap", 6000), ("head_dim 64", 10000), ("int8 by token", 3000), ("int8 by token", 10000),
)  # fmt: skip


@functools.cache
def batches_ahead(seqs: int, tokens: int, keys: int) -> tuple[list[Lengths], torch.Tensor]:
    """What is prepared within the bounds, and where each of these lies: [batches, 5], by orders of magnitude."""
    batches = list(batches_up_to(seqs, tokens, keys))
    return batches, torch.tensor(batches, dtype=torch.float32).log1p()


class Ready:
    """A model, and the kernels that are prepared for it: of batches within the bounds.

    Planning all of these takes seconds, so those like a batch whose kernels are asked for are planned first, and others
    where they do not need all of its kernels.
    """

    def __init__(self, model: Model, tokens: int, seqs: int = SEQS, keys: int = KEYS) -> None:
        self.model, self.tokens = model, tokens  # of a step, at most
        self.batches, self.places = batches_ahead(seqs, tokens, keys)
        self.kernels: set[Any] = set()  # of those that were planned

    def lacks(self, batch: Lengths) -> set[Any]:
        """Kernels of a batch that no batch within the bounds needs."""
        missing = variants_of(self.model, batch, H200) - self.kernels
        if missing:
            distance = (self.places - torch.tensor(batch, dtype=torch.float32).log1p()).square().sum(1)
            for i in distance.argsort().tolist():
                self.kernels |= variants_of(self.model, self.batches[i], H200)
                missing -= self.kernels
                if not missing:
                    break
        return missing


# Parameters of a module: all tests of one follow each other, and find the kernels that others have asked for.
ONE_IN_THREE = [
    pytest.param(name, marks=[pytest.mark.thorough] * (number % 3 > 0)) for number, name in enumerate(MODELS)
]


@pytest.fixture(scope="module", params=ONE_IN_THREE)
def ready(request: pytest.FixtureRequest) -> Ready:
    return Ready(Model(**MODELS[request.param]), TOKENS)


@pytest.fixture(scope="module", params=BOUNDS, ids=str)
def bounded(request: pytest.FixtureRequest) -> Ready:
    name, tokens = request.param
    return Ready(Model(**MODELS[name]), tokens)


@pytest.mark.parametrize("draws", [300, pytest.param(1500, marks=pytest.mark.thorough)])
def test_no_even_batch_of_prefills_needs_a_kernel_that_was_not_prepared(bounded: Ready, draws: int) -> None:
    rng = random.Random(0)
    for _ in range(draws):
        queries = rng.randint(16, bounded.tokens)
        seqs = rng.randint(1, min(SEQS, bounded.tokens // queries))
        context = rng.choice([0, rng.randint(0, KEYS - queries)])
        batch = Lengths(True, seqs, seqs * queries, queries, queries + context)
        assert not bounded.lacks(batch), batch


def test_no_sequence_alone_needs_a_kernel_that_was_not_prepared(bounded: Ready) -> None:
    lengths = ((n, n + context) for n in range(1, bounded.tokens, 13) for context in (0, 5000, KEYS - n))
    for queries, keys in lengths:
        assert not bounded.lacks(Lengths(True, 1, queries, queries, keys)), (queries, keys)


# A shard of a model, of few heads: (heads, KV heads), the most keys, and a batch of decodes beside a prefill of some.
SHARDS = {
    (8, 1): (20000, Lengths(True, 29, 540, 512, 20000)),
    (8, 1, "no bounds"): (20000, Lengths(True, 30, 2077, 2077, 20000)),
    (16, 2): (10000, Lengths(True, 30, 2077, 2077, 10000)),
    (8, 1, "more"): (5000, Lengths(True, 120, 2167, 2048, 5000)),
}


@pytest.mark.parametrize("sizes", SHARDS, ids=str)
def test_no_shard_of_a_model_needs_a_kernel_that_was_not_prepared(sizes: tuple[Any, ...]) -> None:
    """Few rows over fp8 have a launch of their own only where there is much to read, which few heads seldom have."""
    keys, batch = SHARDS[sizes]
    model = Model(**MODELS["fp8"] | dict(heads=sizes[0], kv_heads=sizes[1]))
    assert not Ready(model, 8192, 256, keys).lacks(batch)


@functools.cache
def lengths_of_a_trace() -> list[Lengths]:
    return list(dict.fromkeys(lengths for parts in steps(requests=400) for lengths in lengths_of(parts)))


@pytest.mark.parametrize("one_in", [20, pytest.param(1, marks=pytest.mark.thorough)])
def test_no_step_of_a_trace_needs_a_kernel_that_was_not_prepared(ready: Ready, one_in: int) -> None:
    for batch in lengths_of_a_trace()[::one_in]:
        assert not ready.lacks(batch), batch
    assert len(ready.kernels) > 3


@pytest.mark.parametrize("draws", [150, pytest.param(4000, marks=pytest.mark.thorough)])
def test_no_batch_within_the_bounds_needs_a_kernel_that_was_not_prepared(ready: Ready, draws: int) -> None:
    rng = random.Random(0)
    for _ in range(draws):
        seqs, keys = (round(most ** rng.random()) for most in (SEQS, KEYS))
        longest = round((TOKENS - seqs + 1) ** rng.random())
        tokens = rng.randint(longest, min(TOKENS, seqs * longest))
        if rng.random() < 0.5:  # sequences of as many queries are planned in another way
            longest = max(1, longest // seqs)
            tokens = seqs * longest
        batches = [
            Lengths(True, seqs, tokens, rng.choice([longest, tokens]), keys),
            Lengths(False, seqs, seqs, 1, keys),
        ]
        for batch in batches:
            assert not ready.lacks(batch), batch


def test_few_of_the_batches_need_all_kernels_that_the_batches_need() -> None:
    model, batches = Model(**MODELS["llama"]), list(batches_up_to(8, 128, 2048))
    few = distinct(model, batches, H200)
    kernels, every = (set().union(*(variants_of(model, x, H200) for x in some)) for some in (few, batches))
    assert kernels == every
    assert len(few) <= len(every)
    assert len(every) > 3


def test_one_batch_prepares_decodes_whose_shares_have_other_least_sizes() -> None:
    """The least number of a share's tiles follows the bound on keys; the portable kernel is compiled for all alike."""
    model, device = Model(**LLAMA), Device("sm80", 108)
    batches = [Lengths(False, 1, 1, 1, keys) for keys in (512, 1024, 1536, 2048)]
    plans = [planner.plan.__wrapped__(problem_of(model, batch, device)) for batch in batches]
    assert [launch.least for plan in plans for launch in plan.launches] == [1, 2, 3, 4]
    assert distinct(model, batches, device) == batches[:1]


ONE_KV_HEAD = LLAMA | dict(heads=8, kv_heads=1)
ODD_BOUNDS = {
    "none": ONE_KV_HEAD,
    "of 1024": ONE_KV_HEAD | dict(window_size=(1023, -1)),
    "of 192 over fp8": ONE_KV_HEAD | dict(head_dim=64, cache_dtype=E4M3, window_size=(191, -1)),
}


@pytest.mark.parametrize("window", ODD_BOUNDS)
def test_bounds_need_be_no_powers_of_two(window: str) -> None:
    """30 sequences of 20000 keys are more than 24, and than 16384, and no power of two."""
    ready, rng = Ready(Model(**ODD_BOUNDS[window]), 8192, 100, 20000), random.Random(9)
    for _ in range(1000):
        seqs, keys = rng.randint(1, 100), max(1, round(20000 * rng.random() ** 0.5))
        for batch in (Lengths(False, seqs, seqs, 1, keys), Lengths(True, seqs, 8 * seqs, rng.randint(8, 64), keys)):
            assert not ready.lacks(batch), batch
