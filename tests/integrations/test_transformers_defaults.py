"""What transformers does where nothing but the attention's name is said: graphs, its warm-up, kernels beforehand."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", "5.17", reason="needs transformers >= 5.17: make hosts")

from transformers.generation.configuration_utils import CompileConfig, ContinuousBatchingConfig
from transformers.generation.continuous_batching import continuous_api

from paged_attn.integrations import transformers as adapter
from paged_attn.integrations.transformers import continuous, ready, registration
from paged_attn.preparation.engine_steps import Padded
from tests.integrations import tiny
from tests.support import warm

# A cache that the host has not filled holds any numbers; what the interpreter multiplies of them is masked afterwards.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered in matmul:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning"),
]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapter takes the machine for one with CUDA; the host does not."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.fixture
def name(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    yield adapter.register()
    adapter.unregister()


def config_of(kind: str, attention: str) -> Any:
    config = tiny.model(kind).config.__class__(**tiny.model(kind).config.to_dict())
    config._attn_implementation = attention
    return config


# ---- graphs --------------------------------------------------------------------------------------------------------


def resolved(kind: str, attention: str, **options: Any) -> tuple[Any, Any]:
    """The user's settings, and those that the host completes."""
    seen: list[Any] = []
    resolve = registration._capture_decodes(lambda config, cb_config, hints: seen.append(cb_config), registration.NAMES)
    given = ContinuousBatchingConfig(**options)
    resolve(config=config_of(kind, attention), cb_config=given, hints=None)
    return given, seen[0]


@pytest.mark.parametrize("attention", registration.NAMES)
def test_decodes_alone_are_captured_where_nothing_is_said(attention: str, cuda: None) -> None:
    given, seen = resolved("llama", attention)
    assert seen.use_cuda_graph == (False, True)
    assert given.use_cuda_graph is None


OTHERWISE = [
    {"use_cuda_graph": False},
    {"use_cuda_graph": (False, False)},
    {"q_padding_interval_size": 128},
    {"kv_padding_interval_size": 4096},
    {"default_compile_level": 1},
    {"decode_compile_config": CompileConfig()},
    {"varlen_compile_config": CompileConfig()},
]


@pytest.mark.parametrize("options", OTHERWISE, ids=str)
def test_what_the_user_says_stays(options: dict[str, Any], cuda: None) -> None:
    given, seen = resolved("llama", registration.NAME, **options)
    assert seen is given


@pytest.mark.parametrize("kind, attention", [("llama", "sdpa"), ("llama", "paged|eager"), ("qwen3", registration.NAME)])
def test_other_attention_and_other_layers_are_left_alone(kind: str, attention: str, cuda: None) -> None:
    given, seen = resolved(kind, attention)
    assert seen is given
    assert seen.use_cuda_graph is None


def test_without_cuda_nothing_is_asked_of_the_host() -> None:
    given, seen = resolved("llama", registration.NAME)
    assert seen is given


@pytest.mark.parametrize("graphs", [True, (True, False), (True, True)])
def test_graphs_of_prompts_are_warned_of_with_the_cure(graphs: Any, cuda: None) -> None:
    with pytest.warns(
        UserWarning, match=r"use_cuda_graph = .*True.*leave it out, or say use_cuda_graph=\(False, True\)"
    ):
        given, seen = resolved("llama", registration.NAME, use_cuda_graph=graphs)
    assert seen is given


def test_a_warning_comes_once(cuda: None) -> None:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("default")
        for _ in range(3):
            resolved("llama", registration.NAME, use_cuda_graph=True)
    assert len(heard) == 1


# ---- the warm-up ---------------------------------------------------------------------------------------------------


def asked_of(attention: str, *args: Any, kind: str = "llama", **kwargs: Any) -> dict[str, Any]:
    """The keywords that the host's `generate_batch` gets."""

    def generate_batch(
        self: Any, inputs: Any, generation_config: Any = None, continuous_batching_config: Any = None,
        record_timestamps: bool = False, progress_bar: bool = False, persistent_manager: bool = False,
        warmup: bool = True, **kwargs: Any,
    ) -> dict[str, Any]:  # fmt: skip
        return {"warmup": warmup, "settings": continuous_batching_config, **kwargs}

    model = SimpleNamespace(config=config_of(kind, attention))
    return registration._leave_out_warmup(generate_batch, registration.NAMES)(model, [[1]], *args, **kwargs)


@pytest.mark.parametrize("settings", [None, {}, {"use_cuda_graph": (False, True)}, {"use_cuda_graph": False}])
def test_a_call_captures_decodes_as_they_come(settings: dict[str, Any] | None, cuda: None) -> None:
    given = None if settings is None else ContinuousBatchingConfig(**settings)
    got = asked_of(registration.NAME, continuous_batching_config=given, max_new_tokens=3)
    assert got == {"warmup": False, "settings": given, "max_new_tokens": 3}


@pytest.mark.parametrize("warmup", [True, False])
def test_a_warm_up_that_is_asked_for_stays(warmup: bool, cuda: None) -> None:
    assert asked_of(registration.NAME, warmup=warmup)["warmup"] == warmup
    assert asked_of(registration.NAME, None, None, False, False, False, warmup)["warmup"] == warmup


@pytest.mark.parametrize(
    "attention, options",
    [
        ("sdpa", {}),
        (registration.NAME, {"kind": "qwen3"}),
        (registration.NAME, {"continuous_batching_config": ContinuousBatchingConfig(use_cuda_graph=True)}),
    ],
)
def test_others_keep_their_warm_up(attention: str, options: dict[str, Any], cuda: None) -> None:
    assert asked_of(attention, **options)["warmup"]


def test_the_host_has_what_is_steered() -> None:
    """Settings by name, and the arguments of the functions that are replaced."""
    fields = {*ContinuousBatchingConfig.__dataclass_fields__}
    sizes = {"q_padding_interval_size", "kv_padding_interval_size"}
    assert {"use_cuda_graph", "max_blocks_per_request", *sizes, *registration.COMPILES} <= fields
    plainly = [
        attribute for _, attribute, _ in registration.batching_changes(continuous_api, registration.NAMES, getattr)
    ]
    assert plainly == ["resolve_continuous_batching_config", "__init__", "generate_batch"]


def test_a_batch_by_the_hosts_own_settings_says_what_eager_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "_by_block_table", lambda _: True)
    warmed: list[Any] = []
    monkeypatch.setattr(continuous_api.ContinuousBatchingManager, "warmup", warmed.append)
    assert tiny.batched("llama", name) == tiny.wanted("llama")
    assert not warmed


# ---- kernels -------------------------------------------------------------------------------------------------------


def asked(*names: str) -> dict[str, Any]:
    """What the program says of each."""
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    arguments = ["-m", "tests.integrations.transformers_asked", *names]
    done = warm.run(arguments, environment, Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-4000:]
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    assert len(told) == len(names)
    return {x["name"]: x for x in told}


@pytest.mark.kernels
def test_no_batch_asks_for_a_kernel_that_was_not_made_ready() -> None:
    for told in asked("llama", "llama as general", "gemma2", "gpt_oss").values():
        assert told["missing"] == [], told["name"]
        assert told["asked"] > 3
        assert told["ready"] < 12 or "general" in told["name"], "a call waits for few kernels"


def test_a_manager_begins_with_the_kernels_of_its_prompts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(ready, "prepare_for", lambda manager, hints: told.append((manager.model, hints)))
    for attention in (name, "paged|eager"):
        tiny.batched("llama", attention)
    (model, hints), *others = told
    assert not others
    assert model is tiny.model("llama")
    assert hints.max_prompt_length == max(map(len, tiny.PROMPTS))
    assert hints.max_generated_length == tiny.NEW


def test_the_first_layer_waits_for_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    begun: Any = SimpleNamespace(wait=lambda: events.append("waited"))
    real = continuous.paged_attention

    def attention(*args: Any, **kwargs: Any) -> Any:
        events.append("called")
        return real(*args, **kwargs)

    monkeypatch.setattr(continuous, "paged_attention", attention)
    monkeypatch.setattr(ready, "_begun", [begun])
    tiny.batched("llama", name, tiny.PROMPTS[:1], new=2)
    assert events[0] == "waited"
    assert events.count("waited") == 1
    assert "called" in events


def settings(**options: Any) -> Any:
    """Settings as the host has completed them."""
    given = ContinuousBatchingConfig(use_cuda_graph=(False, True), max_requests_per_batch=3, max_blocks_per_request=4)
    for option, value in options.items():
        setattr(given, option, value)
    return given


HINTS = SimpleNamespace(max_prompt_length=400, max_generated_length=100)


def test_kernels_are_those_of_the_models_layers() -> None:
    (llama,) = ready.served_by(tiny.model("llama"), settings(), HINTS)
    page = ready._page_size(settings())
    assert (llama.max_seqs, llama.max_tokens, llama.max_seqlen, llama.widths) == (3, ready.TOKENS, 500, (4 * page,))
    model = llama.model
    assert (model.heads, model.kv_heads, model.head_dim, model.dtype) == (4, 2, 16, torch.float32)
    full, ring, empty = ready.served_by(tiny.model("gpt_oss"), settings(), HINTS)
    assert full.widths == ring.widths == empty.widths == ()
    assert full.model.sinks == torch.float32
    assert [x.model.page_size for x in (full, ring, empty)] == [page, 1, page]
    assert ring.model.window_size == empty.model.window_size == (7, 0)
    assert ring.model.new
    (gemma, *_) = ready.served_by(tiny.model("gemma2"), settings(), HINTS)
    assert gemma.model.softcap == 2.0


def test_bounds_are_those_of_the_settings() -> None:
    def one(hints: Any = HINTS, **options: Any) -> Padded:
        return next(iter(ready.served_by(tiny.model("llama"), settings(**options), hints)))

    page = ready._page_size(settings())
    assert one(None).max_seqlen == 4 * page
    assert one(None, max_blocks_per_request=0).max_seqlen == ready.TOKENS
    assert one(max_blocks_per_request=0).widths == ()
    assert one(use_cuda_graph=(True, True)).max_seqlen == 512
    assert one(max_batch_tokens=256).max_tokens == 256
    assert one(max_batch_tokens=2).max_seqs == 2


@pytest.mark.parametrize(
    "graphs, ranks, begins", [((False, True), 1, 1), ((False, False), 1, 0), ((False, True), 2, 0)]
)
def test_only_padded_batches_of_whole_heads_are_foreseen(
    graphs: Any, ranks: int, begins: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paged_attn.integrations import engine_kernels as home

    found: list[Any] = []
    monkeypatch.setattr(home, "begin", lambda served, *_: found.append([*served()]))
    manager = SimpleNamespace(
        continuous_batching_config=settings(use_cuda_graph=graphs), model=tiny.model("llama"),
        distributed_helper=SimpleNamespace(tp_size=ranks),
    )  # fmt: skip
    ready.prepare_for(manager, HINTS)
    assert len(found) == begins


def test_registering_a_model_waits_for_kernels_of_any_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    from paged_attn.integrations import engine_kernels as home

    found: list[Any] = []
    waited: list[str] = []
    begun = SimpleNamespace(wait=lambda: waited.append("waited"))
    monkeypatch.setattr(home, "begin", lambda served, *_: found.append([*served()]) or begun)
    model = tiny.model("llama")
    before = model.config._attn_implementation
    try:
        assert adapter.register(model) == adapter.register() == registration.NAME
    finally:
        adapter.unregister()
    ((general,),) = found
    assert waited == ["waited"]
    assert model.config._attn_implementation == before
    (own,) = ready.served_by(model, settings(), HINTS)
    assert general.covers(own)
    assert not own.covers(general)
    (longer,) = ready.served_by(model, settings(max_blocks_per_request=4000), HINTS)
    assert not general.covers(longer)
