"""What vLLM's layers will ask for is known when its builders are made: nothing is compiled behind the first request."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support import warm

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm", reason="needs vLLM: make hosts", exc_type=ImportError)
    from vllm import config as vllm_config
    from vllm.model_executor.layers.attention.attention import Attention

    from paged_attn.integrations.engine_kernels import OF_HOST
    from paged_attn.integrations.vllm import ready
    from paged_attn.preparation.engine_steps import plain
    from tests.integrations import vllm_asked, vllm_batch

pytestmark = pytest.mark.kernels

QUICK = ("llama", "gemma2, sliding", "gpt-oss, sliding", "fp8 cache and queries", "mimo", "llama, 2 ranks")
OTHERS = [name for name in vllm_asked.LAYERS if name not in QUICK]
TOGETHER = 9  # layers that one process asks for


def asked(module: str, *names: str) -> dict[str, Any]:
    """What the program says of each."""
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    arguments = ["-m", f"tests.integrations.{module}", *names]
    done = warm.run(arguments, environment, Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-4000:]
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    assert len(told) == len(names)
    return {x["name"]: x for x in told}


def layers() -> Iterator[Any]:
    """Names of layers, a process for each list."""
    yield QUICK
    for begin in range(0, len(OTHERS), TOGETHER):
        yield pytest.param(OTHERS[begin : begin + TOGETHER], marks=pytest.mark.thorough)


@pytest.mark.parametrize("names", list(layers()), ids=lambda x: x[0])
def test_no_step_asks_for_a_kernel_that_was_not_made_ready(names: Sequence[str]) -> None:
    for told in asked("vllm_asked", *names).values():
        assert told["missing"] == [], told["name"]
        assert told["ready"] >= told["asked"] > 3


def test_no_step_of_latent_layers_asks_for_a_kernel_that_was_not_made_ready() -> None:
    names = "deepseek", "deepseek, drafts", "deepseek, fp8 cache", "deepseek, drafts, 2 ranks"
    for told in asked("vllm_latent_asked", *names).values():
        assert told["missing"] == [], told["name"]
        assert told["ready"] >= told["asked"] > 3


def test_kernels_of_another_layer_are_missed() -> None:
    """Layers with another dtype of cache, or another layout of pages, miss kernels."""
    for told in asked("vllm_asked", "llama as fp8 cache", "llama as llama, NHD").values():
        assert len(told["missing"]) > 3


@pytest.mark.parametrize(
    "kind, names",
    [
        ("ModelConfig", ("max_model_len", "dtype")),
        ("SchedulerConfig", ("max_num_seqs", "max_num_batched_tokens")),
        ("CacheConfig", ("block_size",)),
        ("SpeculativeConfig", ("num_speculative_tokens",)),
        ("CompilationConfig", ("static_forward_context", "pass_config")),
        ("PassConfig", ("fuse_attn_quant",)),
    ],
)
def test_vllm_has_what_is_asked_of_its_config(kind: str, names: tuple[str, ...]) -> None:
    owner = getattr(vllm_config, kind, None) or getattr(vllm_config.compilation, kind)
    assert {*names} <= {x.name for x in dataclasses.fields(owner)}
    assert hasattr(vllm_config.ModelConfig, "is_mm_prefix_lm")
    assert "self.query_quant" in inspect.getsource(Attention)


def layer_of(**options: Any) -> Any:
    return SimpleNamespace(impl=vllm_batch.implementation(**options))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is made ready, each time."""
    calls: list[Any] = []
    monkeypatch.setattr(ready, "ready", lambda served, device, *_: calls.append((list(served()), device)))
    monkeypatch.setattr(ready, "_layout", lambda _: "HND")
    return calls


def test_a_builder_makes_layers_of_all_groups_ready(made: list[Any]) -> None:
    other = SimpleNamespace(impl=object())  # a layer of a backend of vLLM's
    layers = {"full": layer_of(), "other": other, "sliding": layer_of(sliding_window=8), "same": layer_of()}
    of = vllm_asked.config(context=layers)
    spec = SimpleNamespace(block_size=vllm_asked.PAGE)
    vllm_asked.Builder(spec, ["full", "same"], of, torch.device("cpu"))  # type: ignore[arg-type]
    served, device = made[0]
    assert [x.model.window_size for x in served] == [(-1, -1), (7, -1), (-1, -1)]
    assert served[0] == served[2]
    assert device == torch.device("cpu")
    spec.block_size *= 2  # of a group of its own, whose pages are others
    vllm_asked.Builder(spec, ["sliding"], of, torch.device("cpu"))  # type: ignore[arg-type]
    assert [(x.model.window_size, x.model.page_size) for x in made[1][0]] == [((7, -1), 32)]


def test_bounds_of_steps_are_those_of_the_config(made: list[Any]) -> None:
    of = vllm_asked.config(drafts=3, context={"a": layer_of()})
    of.model_config.max_model_len = 8190
    spec = SimpleNamespace(block_size=16, attention_chunk_size=None)
    vllm_asked.Builder(spec, ["a"], of, torch.device("cpu"))  # type: ignore[arg-type]
    one = made[0][0][0]
    assert (one.max_seqs, one.max_tokens, one.max_seqlen, one.decode) == (64, 2048, 8192, 4)
    sizes = dict(heads=vllm_batch.HEADS, kv_heads=vllm_batch.KV_HEADS, head_dim=vllm_batch.DIM, page_size=16)
    assert one.model == plain(**sizes, dtype=torch.bfloat16, **OF_HOST["vllm"]), "what the command makes for an image"
    spec.attention_chunk_size = 100  # of which vLLM makes sequences
    vllm_asked.Builder(spec, ["a"], of, torch.device("cpu"))  # type: ignore[arg-type]
    one = made[1][0][0]
    assert (one.max_seqs, one.max_seqlen) == (2 * 64 + 2048 // 100, 112)


def test_on_the_cpu_nothing_is_looked_at() -> None:
    """Nor where vLLM's config has another form: no engine is to stop for it."""
    vllm_asked.Builder(None, ["layer"], vllm_batch.config(), torch.device("cpu"))  # type: ignore[arg-type]
