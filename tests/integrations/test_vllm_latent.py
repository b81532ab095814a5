"""Latent attention among vLLM's own classes: its builder's metadata, cache updates, decodes, prefills, choices."""

from __future__ import annotations

import inspect
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm", reason="needs vLLM: make hosts", exc_type=ImportError)
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backends import registry
    from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum

    from paged_attn.integrations import vllm as adapter
    from paged_attn.integrations.vllm import backend, host, latent
    from paged_attn.integrations.vllm.prefill import Prefill
    from tests.integrations import vllm_latent as made

CLOSE = {"atol": 2e-5, "rtol": 2e-5}  # float32, sums in another order
DECODE, DRAFTS = [(1, 34), (1, 5), (1, 17)], [(3, 40), (1, 23), (2, 19)]
MIXED = [(1, 34), (1, 5), (20, 20), (7, 7)]
LAYER = SimpleNamespace(_k_scale=torch.tensor(1.0))


def queries(tokens: int) -> Any:
    return torch.randn(tokens, made.HEADS, made.NOPE + made.ROPE, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("lengths, drafts", [(DECODE, 0), (DRAFTS, 2), (MIXED, 0)])
def test_decodes_read_latents_where_vllm_keeps_them(lengths: Any, drafts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, kv = made.Model(monkeypatch, drafts), made.cache()
    told, metadata = model.build(lengths)
    tokens = metadata.num_decode_tokens
    assert metadata.num_decodes == (2 if lengths is MIXED else 3)
    q = queries(tokens)
    absorbed = model.absorb(q)
    parts = [model.impl.forward_mqa(x, kv, metadata, LAYER)[0] for x in (absorbed, torch.cat(absorbed, -1))]
    assert torch.equal(*parts)
    whole = torch.cat(absorbed, -1)
    for s in range(metadata.num_decodes):
        a, b = told.query_start_loc[s : s + 2].tolist()
        keys = made.keys_of(kv, told, s)[:, None]
        want = made.attention(whole[a:b], keys, keys[..., : made.RANK], len(keys) - (b - a))
        torch.testing.assert_close(parts[0][a:b], want, **CLOSE)


def test_absorbed_decodes_say_what_expanded_keys_say(monkeypatch: pytest.MonkeyPatch) -> None:
    model, kv = made.Model(monkeypatch), made.cache()
    told, metadata = model.build(DECODE)
    q = queries(3)
    out, _ = model.impl.forward_mqa(model.absorb(q), kv, metadata, LAYER)
    values = model.weight.view(made.HEADS, -1, made.RANK)[:, made.NOPE :]
    out = torch.einsum("thr,hvr->thv", out, values)
    for s in range(3):
        keys = made.keys_of(kv, told, s)
        both = model.expand(keys[:, : made.RANK])[0].view(len(keys), made.HEADS, -1)
        rotated = keys[:, None, made.RANK :].expand(-1, made.HEADS, -1)
        want = made.attention(
            q[s : s + 1], torch.cat([both[..., : made.NOPE], rotated], -1), both[..., made.NOPE :], len(keys) - 1
        )
        torch.testing.assert_close(out[s : s + 1], want, **CLOSE)


@pytest.mark.parametrize("kind", ["auto", "fp8"])
def test_latents_and_rotated_keys_go_to_their_slots_and_nowhere_else(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made.Model(monkeypatch, dtype=kind)
    kv = made.cache() if kind == "auto" else made.cache(torch.float8_e4m3fn).view(torch.uint8)
    before = kv.clone()
    told, _ = model.build(MIXED)
    tokens = told.num_actual_tokens
    new = torch.randn(tokens + 2, made.RANK + made.ROPE)
    slots = torch.cat([told.slot_mapping, torch.tensor([-1, -1])])
    scale = torch.tensor(0.5)
    model.impl.do_kv_cache_update(new[:, : made.RANK], new[:, None, made.RANK :], kv, slots, kind, k_scale=scale)  # type: ignore[call-arg]
    at = told.slot_mapping
    written = kv[at // made.PAGE, at % made.PAGE]
    want = new[:tokens] if kind == "auto" else (new[:tokens] / scale).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(written, want)
    assert len((kv != before).any(-1).nonzero()) == tokens


def test_latents_without_a_rotated_part_are_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    model, kv = made.Model(monkeypatch), made.cache()[..., : made.RANK].contiguous()
    model.impl.head_size = made.RANK
    told, metadata = model.build(DECODE)
    new, scale = torch.randn(3, made.RANK), torch.tensor(1.0)
    model.impl.do_kv_cache_update(new, new[:, None, :0], kv, told.slot_mapping, "auto", k_scale=scale)
    at = told.slot_mapping
    assert torch.equal(kv[at // made.PAGE, at % made.PAGE], new)
    q = torch.randn(3, made.HEADS, made.RANK)
    out, _ = model.impl.forward_mqa((q, q[..., :0]), kv, metadata, LAYER)
    for s in range(3):
        keys = made.keys_of(kv, told, s)[:, None]
        torch.testing.assert_close(out[s : s + 1], made.attention(q[s : s + 1], keys, keys, len(keys) - 1), **CLOSE)


def test_a_frame_that_differs_is_refused_by_name() -> None:
    class Other:
        def forward_mqa(self, q: Any, cache: Any, attn_metadata: Any, layer: Any) -> None: ...

    with pytest.raises(RuntimeError, match="forward_mqa differs in cache, kv_c_and_k_pe_cache"):
        host.check_latent(Other)


def test_fp8_latents_have_one_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    model, kv = made.Model(monkeypatch, dtype="fp8"), made.cache(torch.float8_e4m3fn)
    told, metadata = model.build(DECODE)
    whole = torch.cat(model.absorb(queries(3)), -1)
    layer = SimpleNamespace(_k_scale=torch.tensor(0.25))
    out, _ = model.impl.forward_mqa(whole, kv, metadata, layer)
    for s in range(3):
        keys = 0.25 * made.keys_of(kv.float(), told, s)[:, None]
        want = made.attention(whole[s : s + 1], keys, keys[..., : made.RANK], len(keys) - 1)
        torch.testing.assert_close(out[s : s + 1], want, **CLOSE)


def test_prefills_attend_to_expanded_keys_of_other_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through vLLM's own forward_mha, which expands the step's latents."""
    model, kv = made.Model(monkeypatch), made.cache()
    told, metadata = model.build(MIXED)
    first, tokens = metadata.num_decode_tokens, told.num_actual_tokens
    q, new = queries(tokens - first), torch.randn(tokens - first, made.RANK + made.ROPE)
    out = torch.full((tokens - first, made.HEADS * made.VALUE), torch.nan)
    model.impl.forward_mha(q, new[:, : made.RANK], new[:, None, made.RANK :], kv, metadata, None, output=out)
    begin = 0
    for n, _ in MIXED[2:]:
        rows = slice(begin, begin + n)
        both = model.expand(new[rows, : made.RANK])[0].view(n, made.HEADS, -1)
        rotated = new[rows, None, made.RANK :].expand(-1, made.HEADS, -1)
        want = made.attention(q[rows], torch.cat([both[..., : made.NOPE], rotated], -1), both[..., made.NOPE :], 0)
        torch.testing.assert_close(out[rows].view(n, made.HEADS, -1), want, **CLOSE)
        begin += n


def test_contexts_are_attended_to_without_a_mask_and_tell_their_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the chunk that vLLM's builder describes, by either of vLLM's contracts."""
    model = made.Model(monkeypatch)
    keys, prefill = [16, 5], model.builder._prefill_backend
    q = queries(10)
    if "chunk_idx" in inspect.signature(MLAPrefillBackend.run_prefill_context_chunk).parameters:
        # The builder of this vLLM pins memory for contexts on every device.
        ends = torch.tensor([0, 4, 10], dtype=torch.int32), [torch.tensor([0, 16, 21], dtype=torch.int32)]
        context = SimpleNamespace(cu_seq_lens=ends[1], max_seq_lens=[16])
        told: Any = SimpleNamespace(query_start_loc=ends[0], max_query_len=6, chunked_context=context)
        prefill.prepare_metadata(told)
        chunk: dict[str, Any] = {"chunk_idx": 0}
    else:
        _, metadata = model.build([(1, 34), (4, 20), (6, 11)])
        chunk = {"chunk": metadata.prefill.chunked_context.chunks[0]}
    k = torch.randn(sum(keys), made.HEADS, made.NOPE + made.ROPE)
    v = torch.randn(sum(keys), made.HEADS, made.VALUE + 8)[..., 8:]
    out, lse = prefill.run_prefill_context_chunk(q=q, k=k, v=v, **chunk)
    assert (out.shape, lse.shape) == ((10, made.HEADS, made.VALUE), (made.HEADS, 10))
    for rows, mine in ((slice(0, 4), slice(0, 16)), (slice(4, 10), slice(16, 21))):
        want = made.attention(q[rows], k[mine], v[mine], len(k))
        torch.testing.assert_close(out[rows], want, **CLOSE)
        scores = made.SCALE * torch.einsum("nhd,mhd->hnm", q[rows], k[mine])
        torch.testing.assert_close(lse[:, rows], scores.logsumexp(-1), **CLOSE)


def test_bounds_of_a_captured_graph_hold_for_the_longest_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made.Model(monkeypatch)
    told, _ = model.build(DECODE)
    assert model.builder.build_for_cudagraph_capture(told).max_seq_len == 256


@pytest.mark.parametrize(
    "options, text",
    [
        (dict(sliding_window=8), "windows"),
        (dict(logits_soft_cap=2.0), "softcaps"),
        (dict(alibi_slopes=[1.0, 0.5]), "alibi_slopes"),
        (dict(attn_type="encoder"), "attn_type encoder"),
        (dict(indexer=object()), "indexer"),
        (dict(kv_lora_rank=520, head_size=584), r"kv_lora_rank = 520 in head_size = 584"),
    ],
)
def test_layers_that_ask_for_more_are_refused_by_name(
    options: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.Model(monkeypatch)
    given = dict(
        num_heads=2, head_size=320, scale=1.0, num_kv_heads=1, alibi_slopes=None, sliding_window=None,
        kv_cache_dtype="auto", logits_soft_cap=None, attn_type="decoder", kv_sharing_target_layer_name=None,
        qk_head_dim=112, kv_b_proj=None, **made.DIMS,
    )  # fmt: skip
    with pytest.raises(NotImplementedError, match=text):
        latent.Impl(**given | options)


def test_caches_and_batches_that_are_not_known_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made.Model(monkeypatch)
    _, metadata = model.build(DECODE)
    with pytest.raises(
        NotImplementedError, match=r"knows caches of latents \[blocks, block, 320\], got \[1, 16, 1, 320\]"
    ):
        model.impl.caches(torch.zeros(1, 16, 1, 320))
    q, prefill = queries(3).to(torch.float8_e4m3fn), model.builder._prefill_backend
    prefill._prefill_metadata = SimpleNamespace(query_start_loc=None, max_query_len=1)
    with pytest.raises(NotImplementedError, match="use_prefill_query_quantization"):
        prefill.run_prefill_new_tokens(q, q, q, False)
    metadata.causal = False
    with pytest.raises(NotImplementedError, match="without causality"):
        model.impl.forward_mqa(queries(3), made.cache(), metadata, LAYER)


@pytest.fixture
def registered() -> Any:
    adapter.unregister()
    yield adapter.register()
    adapter.unregister()


@pytest.mark.parametrize("use_mla, of", [(True, latent), (False, backend)])
def test_custom_is_of_latent_attention_where_the_model_is(
    use_mla: bool, of: Any, registered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SimpleNamespace(model_config=SimpleNamespace(use_mla=use_mla))
    monkeypatch.setattr("vllm.config.get_current_vllm_config_or_none", lambda: config)
    found = registry.AttentionBackendEnum[registered].get_class()
    assert found is of.Backend is adapter.Backend
    assert found.is_mla() is use_mla
    assert MLAPrefillBackendEnum.CUSTOM.get_class() is Prefill
    adapter.unregister()
    assert not MLAPrefillBackendEnum.CUSTOM.is_overridden()


def test_vllm_finds_nothing_against_it() -> None:
    known = inspect.signature(latent.Backend.validate_configuration).parameters
    given = dict.fromkeys((x for x in known if x.startswith(("use_", "has_"))), False) | dict(use_mla=True)
    given |= dict(head_size=576, dtype=torch.bfloat16, kv_cache_dtype="fp8", block_size=64, attn_type="decoder")
    assert latent.Backend.validate_configuration(**given, device_capability=DeviceCapability(9, 0)) == []
    wrong = latent.Backend.validate_configuration(
        **given | dict(use_mla=False, block_size=12), device_capability=DeviceCapability(9, 0)
    )
    assert wrong == ["block_size not supported", "non-MLA not supported"]
