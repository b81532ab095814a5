"""Latent attention (MLA) in SGLang, absorbed: queries to its own pool of latents."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.integrations import sglang_latent
from tests.integrations.sglang_batch import DECODE, EXTEND, ForwardBatch, ForwardMode, batch
from tests.integrations.sglang_latent import (
    CLOSE,
    DIMS,
    HEADS,
    RANK,
    LatentBackend,
    absorbed,
    attention,
    latents_of,
    random,
    runner,
    spans,
    started,
)

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool  # isort: skip


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> Any:
    return sglang_latent.settled(monkeypatch)


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("lengths", [DECODE, EXTEND])
def test_new_latents_are_stored_and_attended_where_sglang_keeps_them(
    lengths: Any, page_size: int, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both of SGLang's forms work: rotated parts apart, or behind latents and absorbed queries."""
    of = runner(page_size)
    made = batch(of, lengths)
    backend, tokens = started(of, made), len(made.input_ids)
    q, new = random(tokens, HEADS, DIMS), random(tokens, 1, DIMS, seed=4)
    if apart:
        rotated = {"q_rope": q[..., RANK:], "k_rope": new[..., RANK:]}
        told = q[..., :RANK].flatten(1), new[..., :RANK], new[..., :RANK]
        out = backend.forward(*told, absorbed(), made, **rotated)
    else:
        out = backend.forward(q.flatten(1), new, new[..., :RANK], absorbed(), made)
    assert torch.equal(of.token_to_kv_pool.get_key_buffer(0)[made.out_cache_loc], new)
    assert out.shape == (tokens, HEADS * RANK)
    for s, (a, b) in enumerate(spans(made)):
        keys = latents_of(of, made, s)[:, None]
        torch.testing.assert_close(
            out[a:b].view(b - a, HEADS, RANK), attention(q[a:b], keys, keys[..., :RANK]), **CLOSE
        )


def test_options_of_a_layer_are_those_of_paged_attention() -> None:
    sinks = torch.tensor([1.0, -1.0, 0.5, 2.0])
    for options, others, same in (
        ({"sliding_window_size": 7}, {}, {"before": 7}),
        ({"logit_cap": 2.0}, {}, {"softcap": 2.0}),
        ({}, {"sinks": sinks}, {"sinks": sinks}),
    ):
        of = runner()
        made = batch(of, EXTEND)
        q = random(len(made.input_ids), HEADS, DIMS)
        out = started(of, made).forward(q.flatten(1), None, None, absorbed(**options), made, **others)
        for s, (a, b) in enumerate(spans(made)):
            keys = latents_of(of, made, s)[:, None]
            want = attention(q[a:b], keys, keys[..., :RANK], **same)
            torch.testing.assert_close(out[a:b].view(b - a, HEADS, RANK), want, **CLOSE)


@pytest.mark.parametrize("scale", [None, 0.5])
def test_fp8_latents_have_one_scale_or_none(scale: float | None) -> None:
    of, layer = runner(dtype=torch.float8_e4m3fn), absorbed()
    if scale is not None:
        layer.k_scale, layer.k_scale_float = torch.tensor(scale), scale
    made = batch(of, DECODE)
    q, new = random(3, HEADS, DIMS), random(3, 1, DIMS, seed=4)
    kept = new.clone()
    for apart in (True, False):
        backend = started(of, made)
        of.token_to_kv_pool.kv_buffer[0][made.out_cache_loc] = 0
        if apart:
            parts = (x[..., :RANK] for x in (new, new))
            out = backend.forward(q[..., :RANK], *parts, layer, made, q_rope=q[..., RANK:], k_rope=new[..., RANK:])
        else:
            out = backend.forward(q.flatten(1), new, new[..., :RANK], layer, made)
        assert torch.equal(new, kept), "a model may read its latents again"
        stored = of.token_to_kv_pool.get_key_buffer(0)[made.out_cache_loc]
        assert torch.equal(stored.view(torch.uint8), (new / (scale or 1)).to(torch.float8_e4m3fn).view(torch.uint8))
        for s in range(3):
            keys = latents_of(of, made, s, scale or 1.0)[:, None]
            want = attention(q[s : s + 1], keys, keys[..., :RANK])
            torch.testing.assert_close(out[s : s + 1].view(1, HEADS, RANK), want, **CLOSE)


def test_nothing_is_stored_where_sglang_has_stored_it() -> None:
    of = runner()
    made = batch(of, EXTEND)
    before, tokens = of.token_to_kv_pool.kv_buffer[0].clone(), len(made.input_ids)
    q, new = random(tokens, HEADS, DIMS), random(tokens, 1, DIMS, seed=4)
    started(of, made).forward(q.flatten(1), new, new[..., :RANK], absorbed(), made, save_kv_cache=False)
    assert torch.equal(of.token_to_kv_pool.kv_buffer[0], before)


@pytest.mark.parametrize("page_size", [1, 4])
def test_graphs_of_decodes_read_tables_at_addresses_that_stay(page_size: int) -> None:
    of = runner(page_size)
    backend = LatentBackend(of)
    backend.init_cuda_graph_state(8, 8)
    nothing = batch(of, [(1, 1)] * 3, req_pool_indices=torch.zeros(3, dtype=torch.int64))
    backend.init_forward_metadata_out_graph(nothing, in_capture=True)
    captured = backend.forward_metadata
    made = batch(of, DECODE)
    backend.init_forward_metadata_out_graph(made)
    backend.forward_metadata = captured
    q = random(3, HEADS, DIMS)
    out = backend.forward(q.flatten(1), None, None, absorbed(), made)
    for s in range(3):
        keys = latents_of(of, made, s)[:, None]
        want = attention(q[s : s + 1], keys, keys[..., :RANK])
        torch.testing.assert_close(out[s : s + 1].view(1, HEADS, RANK), want, **CLOSE)


def test_deterministic_servers_get_the_same_bits_in_any_batch(settings: Any) -> None:
    settings.exec.deterministic.enable_deterministic_inference = True
    of = runner()
    made = batch(of, EXTEND)
    q = random(len(made.input_ids), HEADS, DIMS)
    together = started(of, made).forward(q.flatten(1), None, None, absorbed(), made)
    row = EXTEND[0][0]
    single = ForwardBatch(
        forward_mode=ForwardMode.DECODE, batch_size=1, input_ids=torch.zeros(1, dtype=torch.int64),
        req_pool_indices=made.req_pool_indices[:1], seq_lens=made.seq_lens[:1], seq_lens_cpu=made.seq_lens[:1],
        seq_lens_sum=37, out_cache_loc=made.out_cache_loc[row - 1 : row],
    )  # fmt: skip
    alone = started(of, single).forward(q[row - 1 : row].flatten(1), None, None, absorbed(), single)
    assert torch.equal(alone[0], together[row - 1])


def test_pools_of_another_kind_are_refused_by_name() -> None:
    plain = MHATokenToKVPool(
        size=8, page_size=1, dtype=torch.float32, head_num=1, head_dim=8, layer_num=1, device="cpu",
        enable_memory_saver=False, enable_alt_stream=False,
    )  # fmt: skip
    for change, word in (
        ({"use_dsa": True}, "sparse latent attention"),
        ({"kv_scale_buffer": [0]}, "fp4"),
        ({"layers_mapping": {}, "translate_loc_from_full_to_swa": None}, "sliding layers"),
    ):
        of = runner()
        for name, value in change.items():
            setattr(of.token_to_kv_pool, name, value)
        with pytest.raises(NotImplementedError, match=word):
            LatentBackend(of)
    with pytest.raises(NotImplementedError, match="latent attention over MHATokenToKVPool"):
        LatentBackend(runner(token_to_kv_pool=plain))
