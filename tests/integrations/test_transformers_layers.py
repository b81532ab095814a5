"""Layers that transformers batches by no attention: chunks (Llama 4), latent keys (DeepSeek-V3), unlike widths.

Plain `generate` serves them, and says what the host's own eager attention says.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("transformers", "5.17", reason="needs transformers >= 5.17: make hosts")

from transformers import masking_utils

from paged_attn.calls import checked
from paged_attn.integrations import transformers as adapter
from paged_attn.integrations.transformers import plain, registration
from paged_attn.integrations.transformers.plain import Scores, mask
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


@pytest.mark.parametrize("kind", tiny.PLAIN_KINDS)
def test_a_prompt_alone_says_what_eager_says(kind: str, name: str) -> None:
    assert tiny.plain(kind, name, tiny.PROMPTS[3:]) == tiny.wanted(kind)[3:]


@pytest.mark.parametrize("kind", tiny.PLAIN_KINDS)
def test_prompts_padded_on_the_left_say_what_they_say_alone(kind: str, name: str) -> None:
    assert tiny.plain(kind, name, tiny.PROMPTS) == tiny.wanted(kind)


@pytest.mark.parametrize("kind", tiny.PLAIN_KINDS)
def test_a_static_cache_says_what_a_growing_one_says(kind: str, name: str) -> None:
    if (
        kind == "llama4"
        and "block_sequence_ids" not in inspect.signature(masking_utils.create_chunked_causal_mask).parameters
    ):
        pytest.skip("this host makes no static cache for chunks: its function lacks a keyword that its caller gives")
    got = tiny.plain(kind, name, tiny.PROMPTS, cache_implementation="static", disable_compile=True)
    assert got == tiny.wanted(kind)


def test_queries_that_are_padding_pass_the_checked_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked, "ALWAYS", True)
    got = tiny.plain("llama4", name, tiny.PROMPTS[:2], new=1)
    assert got == [said[:1] for said in tiny.wanted("llama4")[:2]]


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")  # 5.24 calls it cache
def test_several_queries_behind_keys_that_begin_within_a_chunk_see_their_own_chunks(name: str) -> None:
    turns = [torch.tensor([tiny.PROMPTS[3][a:b]]) for a, b in ((0, 21), (21, 35))]  # the host keeps keys 14 to 20
    logits = []
    for attention in (name, "eager"):
        with tiny.choosing(tiny.model("llama4"), attention) as model, torch.no_grad():
            first = model(turns[0], use_cache=True)
            logits.append(model(turns[1], past_key_values=first.past_key_values, use_cache=True).logits)
    # float32 through all layers of a model, whose sums are in another order
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)


def test_a_mask_of_chunks_says_where_in_its_chunk_the_first_key_stands() -> None:
    padding = torch.tensor([0, 5])
    chunks = masking_utils.chunked_causal_mask_function(8, padding)
    seen = torch.arange(21)[None] >= padding[:, None]
    # 20 tokens are behind; the host has kept 7 keys of them, from position 13 on, and there is one query.
    bounds = mask(2, 1, 8, 20, 13, mask_function=chunks, attention_mask=seen)
    assert bounds is not None
    assert bounds[:, 0, 0].tolist() == [[0, 8, 13 % 8], [0, 8, (13 - 5) % 8]]


def test_a_sequence_no_longer_than_a_chunk_has_an_ordinary_mask() -> None:
    chunks = masking_utils.chunked_causal_mask_function(8, torch.tensor([0, 5]))
    seen = torch.arange(8)[None] >= torch.tensor([[0], [5]])
    bounds = mask(2, 1, 8, 7, 0, mask_function=chunks, attention_mask=seen)
    assert bounds is not None
    assert bounds[:, 0, 0].tolist() == [[0, 8], [5, 8]]
    assert mask(2, 1, 8, 7, 0, mask_function=chunks) is None


def test_a_mask_of_chunks_wants_a_layer_that_knows_their_size() -> None:
    q = torch.zeros(1, 2, 4, 16)
    with pytest.raises(ValueError, match="attention_chunk_size"):
        registration.forward(torch.nn.Module(), q, q, q, torch.zeros(1, 1, 1, 3, dtype=torch.int32))


# Two sequences whose values, as of latent attention, are cut out of a wider tensor, lie otherwise than their keys.
@pytest.mark.parametrize("seqs", [1, 2])
@pytest.mark.parametrize("keys", [32, 33])
def test_values_of_another_width_are_read_where_they_lie(seqs: int, keys: int) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(seqs, 4, 5, 24), torch.randn(seqs, 2, keys, 24)
    v = torch.randn(seqs, keys, 2, 40).transpose(1, 2)[..., 24:]
    out = plain.attend(q, k, v, None, None, Scores(0.5, 0.0, None))
    seen = torch.ones(5, keys, dtype=torch.bool).tril(keys - 5)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, scale=0.5, enable_gqa=True)
    torch.testing.assert_close(out, want.transpose(1, 2), atol=1e-5, rtol=1e-5)


def test_the_host_batches_no_chunks(name: str) -> None:
    with pytest.raises(ValueError, match="chunked_attention"):
        tiny.batched("llama4", name, tiny.PROMPTS[:1])


@pytest.mark.parametrize("kind", ["deepseek_v3", "mimo_v2"])
def test_keys_that_the_hosts_paged_cache_has_no_room_for_are_refused_by_name(
    kind: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("ContinuousBatchingLogger")
    logger.addHandler(caplog.handler)
    try:
        assert tiny.batched(kind, name, tiny.PROMPTS[:1]) == [[]]
    finally:
        logger.removeHandler(caplog.handler)
    assert "plain generate serves this model" in caplog.text
