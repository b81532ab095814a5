"""transformers itself, tiny models, on the CPU: both ways of generating say what its own eager attention says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", "5.17", reason="needs transformers >= 5.17: make hosts")

from transformers import cache_utils

from paged_attn.integrations import transformers as adapter
from paged_attn.integrations.transformers import continuous, plain, registration
from paged_attn.integrations.transformers.plain import Scores
from tests.integrations import tiny

# A cache that the host has not filled holds any numbers; what the interpreter multiplies of them is masked afterwards.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered in matmul:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def name() -> Iterator[str]:
    yield adapter.register()
    adapter.unregister()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the adapter asked of paged_attention, in turn."""
    seen: list[dict[str, Any]] = []
    real = continuous.paged_attention

    def attention(*args: Any, **kwargs: Any) -> Any:
        seen.append({**kwargs, "args": args})
        return real(*args, **kwargs)

    monkeypatch.setattr(continuous, "paged_attention", attention)
    return seen


# 16 tokens cut the longer prompts into chunks beside decodes; 64 take all of them at once.
@pytest.mark.parametrize("kind, tokens, page", [*((kind, 16, 16) for kind in tiny.KINDS), ("qwen3", 64, 32)])
def test_a_continuous_batch_says_what_eager_says_of_each_prompt(
    kind: str, tokens: int, page: int, name: str, calls: list[Any]
) -> None:
    got = tiny.batched(kind, name, max_batch_tokens=tokens, page_size=page)
    assert got == tiny.wanted(kind)
    assert calls


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_plain_generation_says_what_eager_says(kind: str, name: str) -> None:
    assert tiny.plain(kind, name, tiny.PROMPTS[2:3]) == tiny.wanted(kind)[2:3]


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_prompts_padded_on_the_left_say_what_they_say_alone(kind: str, name: str) -> None:
    assert tiny.plain(kind, name, tiny.PROMPTS) == tiny.wanted(kind)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_a_static_cache_says_what_a_growing_one_says(kind: str, name: str) -> None:
    got = tiny.plain(kind, name, tiny.PROMPTS, cache_implementation="static", disable_compile=True)
    assert got == tiny.wanted(kind)


# 32 keys are read as pages of 16, 33 as pages of one token; views of [B, T, heads, D] and of wider heads lie elsewhere.
@pytest.mark.skipif(not hasattr(cache_utils, "Fp8QuantizedLayer"), reason="its quantised caches need other packages")
def test_a_quantised_cache_says_what_it_says_under_eager(name: str) -> None:
    """The host hands over what it has dequantised, and knows no format by token."""
    options: dict[str, Any] = dict(cache_implementation="quantized", cache_config={"backend": "fp8"})
    got, want = (tiny.plain("llama", attention, tiny.PROMPTS, **options) for attention in (name, "eager"))
    assert got == want != tiny.wanted("llama")


@pytest.mark.parametrize("keys", [32, 33])
@pytest.mark.parametrize("lies", ["contiguous", "transposed", "cut", "unlike"])
def test_keys_are_read_where_they_lie(keys: int, lies: str) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 4, 5, 16)
    k, v = torch.randn(2, 2, 2, keys, 16)
    if lies in ("transposed", "unlike"):
        k = k.transpose(1, 2).contiguous().transpose(1, 2)
    if lies == "transposed":
        v = v.transpose(1, 2).contiguous().transpose(1, 2)
    if lies == "cut":
        k, v = (torch.cat([x, x], -1)[..., :16] for x in (k, v))
    out = plain.attend(q, k, v, None, None, Scores(0.5, 0.0, None))
    mask = torch.ones(5, keys, dtype=torch.bool).tril(keys - 5)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=0.5, enable_gqa=True)
    torch.testing.assert_close(out, want.transpose(1, 2), atol=1e-5, rtol=1e-5)


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str], list[Any]]:
    """heard(owner, method): what the host's method returns from now on."""

    def listen(owner: Any, method: str) -> list[Any]:
        real, said = getattr(owner, method), []

        def spy(*args: Any, **kwargs: Any) -> Any:
            said.append(real(*args, **kwargs))
            return said[-1]

        monkeypatch.setattr(owner, method, spy)
        return said

    return listen


def test_more_requests_than_fit_are_preempted_and_come_back(name: str, heard: Callable[[Any, str], list[Any]]) -> None:
    from transformers.generation.continuous_batching import offloading_manager

    preempted = heard(offloading_manager.OffloadingManager, "offload_requests")
    # Both fit when they come, in four pages, or five if the host takes one ahead; each comes to want seven.
    prompts = [[*range(first, first + 15)] for first in (10, 50)]
    want = [tiny.plain("llama", "eager", [p], new=12)[0] for p in prompts]
    assert tiny.batched("llama", name, prompts, new=12, num_blocks=11, page_size=4) == want
    assert any(preempted), "all fitted"


def test_a_prefix_that_is_cached_is_shared(name: str, heard: Callable[[Any, str], list[Any]]) -> None:
    from transformers.generation.continuous_batching import cache

    shared = heard(cache.PagedAttentionCache, "search_prefix_match")
    long = tiny.PROMPTS[3]
    prompts = [long, [*long[:32], 7, 9], [*long[:32], 8]]
    want = [tiny.plain("llama", "eager", [p])[0] for p in prompts]
    assert tiny.batched("llama", name, prompts, max_batch_tokens=35) == want
    assert any(shared), "nothing was shared"


def test_tokens_stream_as_they_come(name: str) -> None:
    with tiny.choosing(tiny.model("llama"), name) as model, torch.no_grad():
        manager = model.init_continuous_batching(
            generation_config=tiny.greedy(), continuous_batching_config=tiny.settings()
        )
        manager.start()
        try:
            request = manager.add_request(tiny.PROMPTS[0], max_new_tokens=tiny.NEW, streaming=True)
            lengths, last = [], None
            for chunk in manager.request_id_iter(request):
                lengths.append(len(chunk.generated_tokens))
                last = list(chunk.generated_tokens)
                if chunk.is_finished():
                    break
        finally:
            manager.stop(block=True)
    assert last == tiny.wanted("llama")[0]
    assert len(lengths) > 2


def test_decodes_by_block_table_say_the_same(
    name: str, calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.generation.continuous_batching import initialization

    # The host takes its fast path on CUDA only; what it does then is the same on a CPU.
    monkeypatch.setattr(initialization, "ensure_decode_fast_path_is_available", lambda *a, **k: None)
    got = tiny.batched("llama", name, max_blocks_per_request=4, page_size=16)
    assert got == tiny.wanted("llama")
    assert any(c["args"][5] is None for c in calls), "no call was by block table"


def test_the_host_offers_block_tables_to_this_name_alone() -> None:
    from transformers.generation.continuous_batching import initialization

    attribute = registration._offer_block_tables(initialization)[0]
    answer = getattr(initialization, attribute)(registration.NAME)
    assert registration.forward in (answer[1], answer[0][2] if answer[0] else None)


def test_layers_of_a_group_share_what_is_derived_of_a_step(
    name: str, monkeypatch: pytest.MonkeyPatch, calls: list[Any]
) -> None:
    derived = []
    real = continuous._of_index
    monkeypatch.setattr(continuous, "_of_index", lambda *args: derived.append(1) or real(*args))
    tiny.batched("llama", name)
    assert len(calls) == 2 * len(derived)


def test_a_second_pass_over_the_same_tensors_derives_anew() -> None:
    from types import SimpleNamespace

    layer: Any = SimpleNamespace(group=0, kind="full_attention", page_size=4, stride=4, window=None)
    kwargs = {
        "cu_seq_lens_q": torch.tensor([0, 1]),
        "cu_seq_lens_k": torch.tensor([0, 5]),
        "max_length_q": 1,
        "max_length_k": 5,
        "read_index": [torch.tensor([8, 9, 10, 11, 20])],
        "write_index": [torch.tensor([20])],
    }
    first = continuous.tables_of(layer, 0, kwargs)
    assert continuous.tables_of(layer, 1, kwargs) is first
    assert first.page_table[0, :2].tolist() == [2, 5]
    kwargs["read_index"][0].copy_(torch.tensor([4, 5, 6, 7, 24]))  # as a captured graph's storage is filled again
    assert continuous.tables_of(layer, 0, kwargs).page_table[0, :2].tolist() == [1, 6]


def test_padding_of_a_block_table_writes_nowhere() -> None:
    from types import SimpleNamespace

    layer: Any = SimpleNamespace(group=0, kind="full_attention", page_size=4, stride=4)
    kwargs = {
        "cu_seq_lens_k": {"full_attention": torch.tensor([0, 6, 10, 10], dtype=torch.int32)},
        "block_table": torch.tensor([[[3, 5], [7, -1], [-1, -1]]], dtype=torch.int32),
    }
    tables = continuous._of_block_table(layer, kwargs)
    assert tables.slots.tolist() == [5 * 4 + 1, 7 * 4 + 3, -1]
    assert tables.seq_lens.tolist() == [6, 4, 0]


def test_unregistering_leaves_the_host_as_it_was(name: str) -> None:
    import transformers
    from transformers import masking_utils
    from transformers.generation.continuous_batching import cache, continuous_api, initialization

    def looks() -> list[Any]:
        asked = registration._offer_block_tables(initialization)[0]
        model = transformers.PreTrainedModel
        return [
            cache.PagedAttentionCache.update,
            masking_utils.is_flash_attention_requested,
            model._check_and_adjust_attn_implementation,
            getattr(initialization, asked),
            continuous_api.resolve_continuous_batching_config,
            continuous_api.ContinuousBatchingManager.__init__,
            continuous_api.ContinuousMixin.generate_batch,
            sorted(transformers.AttentionInterface._global_mapping),
        ]

    changed = looks()
    adapter.unregister()
    before = looks()
    assert name in changed[-1]
    assert name not in before[-1]
    adapter.register()
    adapter.register()  # once more is no change
    adapter.unregister()
    assert looks() == before


def test_importing_the_adapter_imports_no_host() -> None:
    import subprocess
    import sys

    code = "import sys, paged_attn.integrations.transformers; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "options, word",
    [
        ({"dropout": 0.1}, "dropout"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"output_attentions": True}, "output_attentions"),
        ({"is_causal": False}, "is_causal"),
        ({"attention_mask": torch.zeros(1, 1, 4, 4)}, "mask"),
    ],
)
def test_what_is_not_known_is_refused_by_name(options: dict[str, Any], word: str) -> None:
    q, k = torch.zeros(1, 2, 4, 16), torch.zeros(1, 1, 4, 16)
    with pytest.raises(ValueError, match=word):
        registration.forward(torch.nn.Module(), q, k, k, **options)


def test_padding_on_the_right_is_refused(name: str) -> None:
    with tiny.choosing(tiny.model("llama"), name) as model, pytest.raises(ValueError, match="left"):
        model(torch.ones(1, 4, dtype=torch.long), attention_mask=torch.tensor([[1, 1, 1, 0]]))


def test_masks_that_are_not_causal_are_refused_by_name() -> None:
    from transformers import masking_utils

    from paged_attn.integrations.transformers.plain import mask

    with pytest.raises(ValueError, match="bidirectional_mask_function"):
        mask(1, 4, 4, mask_function=masking_utils.bidirectional_mask_function)
    packed = masking_utils.packed_sequence_mask_function(torch.zeros(1, 4))
    with pytest.raises(ValueError, match="packed_sequence_mask_function"):
        mask(1, 4, 4, mask_function=masking_utils.and_masks(masking_utils.causal_mask_function, packed))


def test_a_host_of_another_shape_is_refused_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.generation.continuous_batching import cache

    adapter.unregister()

    def update(self: Any, key_states: Any, value_states: Any, somewhere: Any) -> None: ...

    monkeypatch.setattr(cache.PagedAttentionCache, "update", update)
    with pytest.raises(RuntimeError, match="somewhere"):
        adapter.register()
    assert not registration._undo
