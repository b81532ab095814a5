"""The backend over SGLang's own pools, layers and batches, in the interpreter: results, beside the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.integrations import sglang_batch
from tests.integrations.sglang_batch import (
    CLOSE,
    DECODE,
    EXTEND,
    SLOTS,
    Backend,
    ForwardBatch,
    ForwardMode,
    batch,
    layer,
    run,
    runner,
    tensors,
    wanted,
)

from sglang.srt.layers.radix_attention import AttentionType  # isort: skip


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> Any:
    return sglang_batch.settled(monkeypatch)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("lengths", [DECODE, EXTEND])
def test_new_keys_are_stored_and_attended_where_sglang_keeps_them(page_size: int, lengths: Any) -> None:
    of = runner(page_size)
    made = batch(of, lengths)
    out, q = run(of, made, layer())
    torch.testing.assert_close(out, wanted(of, made, q), **CLOSE)
    assert torch.equal(of.token_to_kv_pool.get_key_buffer(0)[made.out_cache_loc], tensors(len(q))[1])


def test_a_mixed_batch_is_one_of_extends() -> None:
    of = runner()
    made = batch(of, EXTEND, forward_mode=ForwardMode.MIXED)
    out, q = run(of, made, layer())
    torch.testing.assert_close(out, wanted(of, made, q), **CLOSE)


@pytest.mark.parametrize("lengths", [DECODE, EXTEND])
def test_values_may_be_of_another_width(lengths: Any) -> None:
    of = runner(value_dim=16)
    made = batch(of, lengths)
    backend = Backend(of)
    backend.init_forward_metadata(made)
    q, k, v = tensors(len(made.input_ids))
    out = backend.forward(q, k, v[..., :16].contiguous(), layer(v_head_dim=16), made)
    torch.testing.assert_close(out, wanted(of, made, q), **CLOSE)


def test_options_of_a_layer_are_those_of_paged_attention() -> None:
    sinks = torch.tensor([1.0, -1.0, 0.5, 2.0])
    for options, others, same in (
        ({"sliding_window_size": 7}, {}, {"window_size": (7, 0)}),  # keys before the query's own, as SGLang counts
        ({"logit_cap": 2.0}, {}, {"softcap": 2.0}),
        ({}, {"sinks": sinks}, {"sinks": sinks}),
    ):
        of = runner()
        made = batch(of, EXTEND)
        out, q = run(of, made, layer(**options), **others)
        torch.testing.assert_close(out, wanted(of, made, q, **same), **CLOSE)


@pytest.mark.parametrize("kind", [AttentionType.ENCODER_ONLY, AttentionType.DECODER_BIDIRECTIONAL])
def test_prompts_of_encoders_are_seen_both_ways(kind: Any) -> None:
    """Results equal SGLang's FlashAttention, also for windows; a decode's query is the last of its keys anyway."""
    for options, same in (({}, {}), ({"sliding_window_size": 7}, {"window_size": (7, 7)})):
        for lengths in ([(20, 20), (5, 5)], DECODE):
            of = runner()
            made = batch(of, lengths)
            out, q = run(of, made, layer(attn_type=kind, **options))
            torch.testing.assert_close(out, wanted(of, made, q, causal=False, **same), **CLOSE)


@pytest.mark.parametrize("lengths", [DECODE, EXTEND])
def test_a_temperature_grows_behind_a_length_and_a_softcap(lengths: Any) -> None:
    """The temperature is that of SGLang's Triton kernels."""
    of, made_layer = runner(), layer(logit_cap=2.0)
    made_layer.xai_temperature_len = 16

    def grown(score: torch.Tensor, query: torch.Tensor, *_: Any) -> torch.Tensor:
        return score * torch.where(query > 16, query.double().log2() / 4, 1.0)

    made = batch(of, lengths)
    out, q = run(of, made, made_layer)
    torch.testing.assert_close(out, wanted(of, made, q, softcap=2.0, score_mod=grown), **CLOSE)
    assert not torch.allclose(out, wanted(of, made, q, softcap=2.0))


def test_windows_are_those_of_sglangs_own_attention() -> None:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    seen = TorchNativeAttnBackend._make_sliding_window_mask(
        q_len=1, kv_len=20, sliding_window_size=7, device=torch.device("cpu"), query_offset=12
    )
    assert seen.sum() == 7 + 1
    assert seen[0, 12 - 7 : 12 + 1].all()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_pools_have_a_scale_or_one(dtype: torch.dtype) -> None:
    for scale in (None, 0.5):
        of, made_layer = runner(dtype=dtype), layer()
        if scale is not None:
            made_layer.k_scale = made_layer.v_scale = torch.tensor(scale)
            made_layer.k_scale_float = made_layer.v_scale_float = scale
        made = batch(of, EXTEND)
        out, q = run(of, made, made_layer)
        torch.testing.assert_close(out, wanted(of, made, q, k_scale=scale or 1.0, v_scale=scale or 1.0), **CLOSE)


def test_nothing_is_stored_where_a_layer_reads_anothers_cache() -> None:
    of = runner()
    made = batch(of, DECODE)
    before = of.token_to_kv_pool.get_key_buffer(0).clone()
    out, q = run(of, made, layer(), save_kv_cache=False)
    assert torch.equal(of.token_to_kv_pool.get_key_buffer(0), before)
    torch.testing.assert_close(out, wanted(of, made, q), **CLOSE)


def test_layers_with_a_pool_of_their_own_read_it_by_its_slots() -> None:
    """A hybrid pool: slots of sliding layers are others than those of full ones."""
    of = runner()
    made = batch(of, EXTEND)
    moved = torch.cat([torch.zeros(1, dtype=torch.int64), 1 + torch.randperm(SLOTS, generator=torch.Generator())])
    pool = of.token_to_kv_pool
    pool.layers_mapping = {0: (0, True)}
    pool.translate_loc_from_full_to_swa = lambda slots: moved[slots.long() % len(moved)]
    stored = []
    whole = pool.set_kv_buffer

    def store(to_layer: Any, where: Any, k: Any, v: Any) -> None:
        stored.append(where.swa_loc)
        whole(to_layer, where.swa_loc, k, v)

    pool.set_kv_buffer = store
    out, q = run(of, made, layer(sliding_window_size=7))
    assert torch.equal(stored[0], moved[made.out_cache_loc])
    table = of.req_to_token_pool.req_to_token
    table.copy_(moved[table.long() % len(moved)])
    torch.testing.assert_close(out, wanted(of, made, q, window_size=(7, 0)), **CLOSE)


def test_deterministic_servers_get_the_same_bits_in_any_batch(settings: Any) -> None:
    settings.exec.deterministic.enable_deterministic_inference = True
    of = runner()
    assert Backend(of).batch_invariant
    together, q = run(of, batch(of, EXTEND), layer())
    alone = batch(of, EXTEND)
    row = EXTEND[0][0]
    backend = Backend(of)
    single = ForwardBatch(
        forward_mode=ForwardMode.DECODE, batch_size=1, input_ids=torch.zeros(1, dtype=torch.int64),
        req_pool_indices=alone.req_pool_indices[:1], seq_lens=alone.seq_lens[:1], seq_lens_cpu=alone.seq_lens[:1],
        seq_lens_sum=37, out_cache_loc=alone.out_cache_loc[row - 1 : row],
    )  # fmt: skip
    backend.init_forward_metadata(single)
    out = backend.forward(q[row - 1 : row], None, None, layer(), single)
    assert torch.equal(out[0], together[row - 1])


# ---- what is refused -----------------------------------------------------------------------------
