"""Latent attention (MLA) in SGLang, expanded: keys of every head, which models make of latents, and when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.integrations import sglang_latent
from tests.integrations.sglang_batch import DECODE, EXTEND, ForwardBatch, ForwardMode, batch
from tests.integrations.sglang_latent import (
    CLOSE,
    FRESH,
    HEADS,
    NOPE,
    RANK,
    ROPE,
    VALUE,
    LatentBackend,
    absorbed,
    attention,
    expanded,
    latents_of,
    made_of,
    matrices,
    random,
    runner,
    spans,
    started,
    with_contexts,
)

from paged_attn.integrations import sglang as adapter  # isort: skip
from sglang.srt.layers.attention import attention_registry  # isort: skip


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> Any:
    return sglang_latent.settled(monkeypatch)


def test_prompts_attend_to_keys_of_every_head_of_other_widths() -> None:
    """SGLang's MHA: the call's own keys, stored as latents before."""
    of = runner()
    made = batch(of, FRESH, forward_mode=ForwardMode.EXTEND)
    made.extend_seq_lens = torch.tensor([n for n, _ in FRESH], dtype=torch.int32)
    made.extend_seq_lens_cpu = made.extend_seq_lens.tolist()
    q = random(len(made.input_ids), HEADS, NOPE + ROPE)
    k, v = made_of(torch.cat([latents_of(of, made, s) for s in range(3)]))
    for options, same in (
        ({}, {}),
        ({"sliding_window_size": 7}, {"before": 7}),
        ({"logit_cap": 2.0}, {"softcap": 2.0}),
    ):
        out = started(of, made).forward(q, k, v, expanded(**options), made, save_kv_cache=False)
        assert out.shape == (len(q), HEADS * VALUE)
        for a, b in spans(made):
            want = attention(q[a:b], k[a:b], v[a:b], **same)
            torch.testing.assert_close(out[a:b].view(b - a, HEADS, VALUE), want, **CLOSE)


@pytest.mark.parametrize("lengths", [EXTEND, [(40, 90), (5, 5), (1, 40)]])
def test_keys_of_whole_sequences_are_attended_at_once(lengths: Any) -> None:
    """SGLang's one-shot MHA: keys of contexts and of the call, sequence after sequence."""
    of = runner()
    made = with_contexts(batch(of, lengths), mha_one_shot=True)
    made.set_attn_attend_prefix_cache(False)
    q = random(len(made.input_ids), HEADS, NOPE + ROPE)
    k, v = made_of(torch.cat([latents_of(of, made, s) for s in range(3)]))
    out = started(of, made).forward(q, k, v, expanded(), made, save_kv_cache=False)
    ends = [0, *made.seq_lens.cumsum(0).tolist()]
    for s, (a, b) in enumerate(spans(made)):
        mine = slice(ends[s], ends[s + 1])
        want = attention(q[a:b], k[mine], v[mine])
        torch.testing.assert_close(out[a:b].view(b - a, HEADS, VALUE), want, **CLOSE)


def test_chunks_of_contexts_are_merged_by_sglang_to_what_absorbed_queries_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's chunked MHA through its own merge and its own lists of chunks, beside the absorbed way of the layer."""
    from sglang.srt.layers.attention import merge_state
    from sglang.srt.model_executor import forward_batch_deepseek_mha_mixin as mixin

    of = runner()
    made = with_contexts(batch(of, [(20, 37), (5, 5), (1, 40)]))
    backend, tokens = started(of, made), len(made.input_ids)
    for name, value in (
        ("token_to_kv_pool", of.token_to_kv_pool),
        ("req_to_token_pool", of.req_to_token_pool),
        ("attn_backend", backend),
    ):
        monkeypatch.setattr(mixin, f"get_{name}", lambda value=value: value)
    of.kv_index_translator.reads_are_translated = False
    of.kv_index_translator.translate_dcp_read_ids = lambda ids: ids
    monkeypatch.setattr(mixin, "filter_dcp_local_chunk_kv_indices", lambda ids, *_: ids)
    monkeypatch.setattr(ForwardBatch, "get_max_chunk_capacity", lambda self: 48)
    made.prepare_chunked_prefix_cache_info(torch.device("cpu"))
    assert made.num_prefix_chunks == 3
    q = random(tokens, HEADS, NOPE + ROPE)
    own = [latents_of(of, made, s)[int(made.seq_lens[s]) - n :] for s, n in enumerate(made.extend_seq_lens.tolist())]
    made.mha_return_lse = True
    made.set_attn_attend_prefix_cache(False)
    out, lse = backend.forward(q, *made_of(torch.cat(own)), expanded(), made, save_kv_cache=False)
    assert (out.shape, lse.shape, lse.is_contiguous()) == ((tokens, HEADS, VALUE), (tokens, HEADS), True)
    made.set_attn_attend_prefix_cache(True)
    for chunk in range(made.num_prefix_chunks):
        made.set_prefix_chunk_idx(chunk)
        latents = of.token_to_kv_pool.get_key_buffer(0)[made.prefix_chunk_kv_indices[chunk].long(), 0]
        part = backend.forward(q, *made_of(latents), expanded(), made, save_kv_cache=False)
        merged = torch.empty_like(out), torch.empty_like(lse)
        merge_state.merge_state(*part, out, lse, *merged)
        out, lse = merged
    for_keys, for_values = matrices()
    into = torch.cat([torch.einsum("thn,hnr->thr", q[..., :NOPE], for_keys), q[..., NOPE:]], -1)
    said = backend.forward(into.flatten(1), None, None, absorbed(), made).view(tokens, HEADS, RANK)
    torch.testing.assert_close(out, torch.einsum("thr,hvr->thv", said, for_values), **CLOSE)


def test_prompts_come_expanded_and_decodes_absorbed(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's models ask the handler that is registered with a latent model."""
    from sglang.srt.models.deepseek_common import attention_backend_handler as handler

    monkeypatch.setattr(handler.AttentionBackendRegistry, "_handlers", dict(handler.AttentionBackendRegistry._handlers))
    monkeypatch.setattr(handler, "get_exec", lambda: settings.exec)
    monkeypatch.setattr(handler, "is_cp_active", lambda batch: False)
    backend = attention_registry.ATTENTION_BACKENDS[adapter.register()](runner())
    assert isinstance(backend, LatentBackend)
    ask = handler.AttentionBackendRegistry.get_handler(adapter.NAME)
    layer = SimpleNamespace(
        chunked_prefix_cache_threshold=8, disable_chunked_prefix_cache=False, qk_rope_head_dim=ROPE,
        rocm_fused_decode_mla=False,
    )  # fmt: skip
    of = runner()
    said = {}
    for name, lengths in (("decode", DECODE), ("fresh", FRESH[:2]), ("context", EXTEND), ("short", [(3, 7), (1, 1)])):
        made = batch(of, lengths)
        if made.extend_seq_lens is not None:
            with_contexts(made)
        said[name] = ask(layer, made).name
    assert said == {"decode": "MLA", "fresh": "MHA_ONE_SHOT", "context": "MHA_ONE_SHOT", "short": "MLA"}
    monkeypatch.setattr(ForwardBatch, "get_max_chunk_capacity", lambda self: 48)
    assert ask(layer, with_contexts(batch(of, EXTEND))).name == "MHA_CHUNKED_KV"
    settings.exec.deterministic.enable_deterministic_inference = True
    assert ask(layer, with_contexts(batch(of, EXTEND))).name == "MLA"


def test_contexts_are_offered_in_chunks() -> None:
    from sglang.srt import server_args

    adapter.register()
    assert server_args.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS.count(adapter.NAME) == 1


def test_calls_of_another_kind_are_refused_by_name() -> None:
    of = runner()
    made = batch(of, FRESH[:2])
    backend, tokens = started(of, made), len(made.input_ids)
    q, k, v = random(tokens, HEADS, NOPE + ROPE), random(tokens, HEADS, NOPE + ROPE), random(tokens, HEADS, VALUE)
    with pytest.raises(NotImplementedError, match=r"topk_indices"):
        backend.forward(q, k, v, expanded(), made, topk_indices=torch.zeros(1))
    with pytest.raises(NotImplementedError, match=r"\[1, 48, 32\] in this pool.*\[4, 40, 20\]"):
        backend.forward(q, k, v, expanded(), made)
    warmer = expanded()
    warmer.xai_temperature_len = 16
    with pytest.raises(NotImplementedError, match="xai_temperature_len 16 of latent attention"):
        backend.forward(q, k, v, warmer, made)
    made.mha_return_lse = True
    with pytest.raises(NotImplementedError, match="sinks and windows of latent attention in chunks"):
        backend.forward(q, k, v, expanded(sliding_window_size=4), made, save_kv_cache=False)
