"""Kernels ahead of time: the enumeration misses none that a server needs, and what it compiles is found again."""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

import paged_attn
from paged_attn.calls import attend
from paged_attn.launching import backend
from paged_attn.launching.backend import Device
from paged_attn.preparation.model import Lengths, Model, batches_up_to, call_of, distinct, problem_of, variants_of
from paged_attn.preparation.named import Named
from paged_attn.serving import trace
from paged_attn.serving.batch import batch_of
from paged_attn.serving.pages import Pages
from paged_attn.serving.scheduler import Scheduler, StepPart
from tests import warm

H200 = Device("sm90", 132)
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
LLAMA: dict[str, Any] = dict(
    heads=32, kv_heads=8, head_dim=128, page_size=16, dtype=BF16, cache_dtype=BF16, out_dtype=BF16, kv_layout="NHD",
    new=False, causal=True, window_size=(-1, -1), softcap=0.0, alibi=False, sinks=None, gate=None, qq_bias=0,
    query_positions=False, scales="number", return_lse=False,
)  # fmt: skip
LATENT: dict[str, Any] = dict(heads=16, kv_heads=1, head_dim=576, value_dim=512, latent=True)
MODELS = {
    "llama": LLAMA,
    "window and sinks": LLAMA | dict(heads=64, head_dim=64, window_size=(127, -1), sinks=BF16),
    "page 128, softcap": LLAMA | dict(page_size=128, softcap=30.0, head_dim=256, heads=16),
    "x-packed": LLAMA | dict(kv_layout="x"),
    "fp8": LLAMA | dict(cache_dtype=E4M3),
    "fp8, x-packed": LLAMA | dict(cache_dtype=E4M3, kv_layout="x"),
    "fp8, x-packed, new": LLAMA | dict(cache_dtype=E4M3, kv_layout="x", new=True),
    "head_dim 64": LLAMA | dict(head_dim=64),
    "one KV head": LLAMA | dict(heads=64, kv_heads=1),
    "10 KV heads": LLAMA | dict(heads=40, kv_heads=10),
    "3 KV heads": LLAMA | dict(heads=24, kv_heads=3),
    "exact softcap": LLAMA | dict(heads=12, kv_heads=4, softcap=30.0, return_lse=True),
    "71 heads on one": LLAMA | dict(heads=71, kv_heads=1, head_dim=64),
    "48 heads on one": LLAMA | dict(heads=48, kv_heads=1),
    "96 heads on two, fp8": LLAMA | dict(heads=96, kv_heads=2, cache_dtype=E4M3),
    "values of another width": LLAMA | dict(heads=16, kv_heads=16, head_dim=192, value_dim=128, new=True),
    "head_dim 512": LLAMA | dict(heads=16, kv_heads=4, head_dim=512, value_dim=512),
    "latent": LLAMA | LATENT,
    "128 heads, latent, fp8, new": LLAMA | LATENT | dict(heads=128, cache_dtype=E4M3, new=True),
    "ragged page table": LLAMA | dict(page_indices=torch.int64),
    "pages of 4": LLAMA | dict(page_size=4),
    "pages of one, fp8, window": LLAMA
    | dict(page_size=1, page_indices=torch.int32, cache_dtype=E4M3, window_size=(1023, -1)),
    "a user's function": LLAMA | dict(score_mod=Named("tests.score_mods", "relative", (torch.float32, 37))),
}
HANGS = 3600  # seconds after which a process is taken for one that never ends, on however loaded a machine
SEQS, TOKENS, KEYS = 256, 4096, 32768
# Of tokens, each number with heads in groups of 4 and others.
BOUNDS = (
    ("llama", 3000), ("llama", 10000), ("window and sinks", 3000), ("10 KV heads", 8192), ("3 KV heads", 3000),
    ("exact softcap", 6000), ("head_dim 64", 10000),
)  # fmt: skip


def steps(requests: int, seed: int = 0) -> Iterator[list[StepPart]]:
    """Steps of a continuous-batching schedule, a few requests arriving at each."""
    scheduler = Scheduler(Pages(30_000), 16, budget=TOKENS, max_seqs=SEQS)
    waiting = iter(itertools.islice(trace.CONVERSATION.requests(seed), requests))
    while True:
        for request in itertools.islice(waiting, 6):
            scheduler.submit(request)
        if scheduler.idle:
            return
        parts, _ = scheduler.plan()
        yield parts
        scheduler.complete(parts)


def lengths_of(parts: list[StepPart]) -> list[Lengths]:
    """A step as calls with bounds and without, and its decodes alone."""
    queries, keys = [x.query_len for x in parts], [x.seq_len for x in parts]
    seqs, tokens, width = len(parts), sum(queries), -(-max(keys) // 16) * 16
    found = [Lengths(True, seqs, tokens, max(queries), max(keys)), Lengths(True, seqs, tokens, tokens, width)]
    decodes = [x.seq_len for x in parts if x.decode]
    return found + ([Lengths(False, len(decodes), len(decodes), 1, max(decodes))] if decodes else [])


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
@pytest.fixture(scope="module", params=MODELS)
def ready(request: pytest.FixtureRequest) -> Ready:
    return Ready(Model(**MODELS[request.param]), TOKENS)


@pytest.fixture(scope="module", params=BOUNDS, ids=str)
def bounded(request: pytest.FixtureRequest) -> Ready:
    name, tokens = request.param
    return Ready(Model(**MODELS[name]), tokens)


class Planned(Exception):
    """Carries what the planner was told."""


@pytest.mark.skipif(not backend.INTERPRET, reason="a model's calls are made of tensors on the CPU")
@pytest.mark.parametrize(
    "batch", [Lengths(False, 3, 3, 1, 200), Lengths(True, 3, 70, 64, 200)], ids=["decode", "ragged"]
)
@pytest.mark.parametrize("name", MODELS)
def test_the_planner_is_told_of_a_model_what_it_is_told_of_its_calls(
    name: str, batch: Lengths, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(problem: Any) -> Any:
        raise Planned(problem)

    monkeypatch.setattr(attend, "plan", told)
    model, device = Model(**MODELS[name]), backend.device_of(torch.device("cpu"))
    with pytest.raises(Planned) as planned:
        paged_attn.paged_attention(**call_of(model, batch))
    want = problem_of(model, batch, device)
    # the interpreter computes in float32, and the page table has room for whole pages
    got = planned.value.args[0]._replace(compute=want.compute, max_seqlen_k=want.max_seqlen_k)
    assert got == want


def test_no_even_batch_of_prefills_needs_a_kernel_that_was_not_prepared(bounded: Ready) -> None:
    rng = random.Random(0)
    for _ in range(1500):
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


@pytest.mark.parametrize("one_in", [6, pytest.param(1, marks=pytest.mark.thorough)])
def test_no_step_of_a_trace_needs_a_kernel_that_was_not_prepared(ready: Ready, one_in: int) -> None:
    for batch in lengths_of_a_trace()[::one_in]:
        assert not ready.lacks(batch), batch
    assert len(ready.kernels) > 3


@pytest.mark.parametrize("draws", [500, pytest.param(4000, marks=pytest.mark.thorough)])
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


def moved(value: Any, device: str) -> Any:
    """An argument with its tensors on a device."""
    if isinstance(value, tuple):
        return tuple([moved(x, device) for x in value])
    return value.to(device) if isinstance(value, torch.Tensor) else value


def test_a_call_of_every_model_is_a_legal_one(device: str) -> None:
    for fields in MODELS.values():
        call = call_of(Model(**fields), Lengths(True, 2, 9, 5, 40))
        call |= {name: call[name].zero_() for name in ("seq_lens", "cu_seqlens_q")}
        held = call["k_cache"].data_ptr() == call["v_cache"].data_ptr()  # keys hold their values
        values = call["v_cache"].shape[-1]
        call = {name: moved(x, device) for name, x in call.items()}
        if held:
            call["v_cache"] = call["k_cache"][..., :values]
        paged_attn.paged_attention(**call)


PREPARE = """
import json, sys
import torch
import paged_attn
from paged_attn.launching.backend import Device
from tests.score_mods import relative

if __name__ == "__main__":
    for options in ({}, dict(score_mod=relative, score_mod_args=(torch.empty(1), 37))):
        print(json.dumps(paged_attn.prepare(
            heads=2, kv_heads=1, head_dim=16, max_seqs=1, max_tokens=1, max_seqlen=16, device=Device("sm90", 132),
            processes=int(sys.argv[1]), **options,
        )))
"""


@pytest.mark.skipif("nvidia" not in triton.backends.backends, reason="this Triton does not compile for nvidia")
def test_what_was_compiled_for_another_machine_is_found_on_disk(tmp_path: Path) -> None:
    script = tmp_path / "prepare_ahead.py"
    script.write_text(PREPARE)
    environment = os.environ | {
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }

    def prepare(processes: int) -> list[list[int]]:
        done = warm.run([str(script), str(processes)], environment, timeout=HANGS)
        assert done.returncode == 0, done.stderr[-4000:]
        return [json.loads(line)[:2] for line in done.stdout.splitlines()[-2:]]

    (kernels, compiled), (with_function, more) = prepare(2)
    assert kernels == compiled > 3  # attention, a write of both caches, and one of each
    assert with_function > more > 0  # attention alone: writes know of no function
    assert prepare(1) == [[kernels, 0], [with_function, 0]]


# ---- on a GPU ----------------------------------------------------------------------------------------------------

SIZES: dict[str, Any] = dict(heads=32, kv_heads=8, head_dim=128, page_size=16)
SERVE = """
import torch
import triton
import paged_attn

compiled = []
triton.knobs.compilation.listener = lambda *, metadata, cache_hit, **_: compiled.extend([metadata["name"]][cache_hit:])

if __name__ == "__main__":
    q = torch.randn(4, 32, 128, dtype=torch.bfloat16, device="cuda")
    k, v = torch.randn(2, 64, 16, 8, 128, dtype=torch.bfloat16, device="cuda")
    table = torch.arange(64, dtype=torch.int32, device="cuda").view(4, 16)
    lens = torch.tensor([256, 100, 1, 30], dtype=torch.int32, device="cuda")
    paged_attn.paged_attention(q, k, v, table, lens, out=torch.empty_like(q), max_seqlen_k=256)
    torch.cuda.synchronize()
    print(compiled)
"""


@pytest.fixture(scope="module")
def prepared_here() -> paged_attn.preparation.prepare.Summary:
    """Kernels of the sizes below on disk, for the GPU of this machine."""
    return paged_attn.prepare(**SIZES, max_seqs=SEQS, max_tokens=TOKENS, max_seqlen=16384, processes=4)


@pytest.mark.gpu
@pytest.mark.long
def test_nothing_is_compiled_while_a_trace_is_served(
    prepared_here: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []

    def listener(*, metadata: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            compiled.append(metadata["name"])

    monkeypatch.setattr(triton.knobs.compilation, "listener", listener)
    k, v = torch.zeros(2, 30_000, 16, 8, 128, dtype=BF16, device=device)
    for number, parts in enumerate(steps(requests=300)):
        batch = batch_of(parts, 16, torch.device(device))
        tokens = batch.slot_mapping.shape[0]
        q = torch.zeros(tokens, 32, 128, dtype=BF16, device=device)
        new = torch.zeros(tokens, 8, 128, dtype=BF16, device=device)
        write = torch.ops.paged_attn
        for written in (paged_attn.write_kv, write.write_keys, write.write_values):
            written(new, new, k, v, batch.slot_mapping)
        bounds = dict(max_seqlen_q=batch.max_seqlen_q, max_seqlen_k=batch.max_seqlen_k) if number % 2 else {}
        paged_attn.paged_attention(q, k, v, batch.page_table, batch.seq_lens, batch.cu_seqlens_q, **bounds)
        decodes = sum(part.decode for part in parts)
        if decodes:
            paged_attn.paged_attention(q[:decodes], k, v, batch.page_table[:decodes], batch.seq_lens[:decodes])
    torch.cuda.synchronize()
    assert compiled == []


@pytest.mark.gpu
@pytest.mark.long
def test_the_first_call_of_a_process_compiles_nothing_where_kernels_lie_on_disk(
    prepared_here: Any, tmp_path: Path
) -> None:
    """How long it takes is a benchmark's to say."""
    script = tmp_path / "serve.py"
    script.write_text(SERVE)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("integers", [torch.int32, torch.int64], ids=str)
def test_calls_of_a_model_have_its_integers(integers: torch.dtype) -> None:
    model = Model(**next(iter(MODELS.values())))._replace(integers=integers)
    call = call_of(model, Lengths(True, 2, 3, 2, 20))
    assert {call[name].dtype for name in ("page_table", "seq_lens", "cu_seqlens_q")} == {integers}
