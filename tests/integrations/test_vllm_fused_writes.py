"""Hooks of vLLM's passes that fuse norms and rotary embeddings with the cache update: one launch, vLLM's numbers."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm", reason="needs vLLM: make hosts", exc_type=ImportError)
    from vllm.config.compilation import PassConfig
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
    from vllm.v1.attention.backend import AttentionImpl

    from paged_attn.integrations.vllm import impl as adapter
    from paged_attn.integrations.vllm.backend import DiffKVBackend, DiffKVImpl
    from tests.integrations import vllm_batch as made

CLOSE = {"atol": 1e-5, "rtol": 1e-5}  # float32, sums in another order
HOOKS = ("do_rope_and_kv_cache_update", "do_qk_norm_rope_kvcache_update")
PAD, EPS, PLACES = 3, 1e-5, 64


def packed(tokens: int, value_dim: int = made.DIM) -> Tensor:
    rng = torch.Generator().manual_seed(3)
    width = made.HEADS * made.DIM + made.KV_HEADS * (made.DIM + value_dim)
    return torch.randn(tokens + PAD, width, generator=rng)


def parts(qkv: Tensor, value_dim: int = made.DIM) -> list[Tensor]:
    """q, k and v [tokens, heads, dims], views as vLLM's graphs hand them over."""
    heads, dims = (made.HEADS, made.KV_HEADS, made.KV_HEADS), (made.DIM, made.DIM, value_dim)
    split = qkv.split([h * d for h, d in zip(heads, dims, strict=True)], -1)
    return [x.view(len(x), h, d) for x, h, d in zip(split, heads, dims, strict=True)]


def cos_sin(rotary_dim: int) -> Tensor:
    angles = torch.arange(PLACES)[:, None] / 100 ** (torch.arange(rotary_dim // 2) / (rotary_dim // 2))
    return torch.cat([angles.cos(), angles.sin()], -1)


def rotated(positions: Tensor, q: Tensor, k: Tensor, table: Tensor, is_neox: bool) -> tuple[Tensor, Tensor]:
    """Queries and keys as vLLM's own layer rotates them, in torch."""
    q, k = RotaryEmbedding.forward_static(positions, q, k, made.DIM, table.shape[-1], table, is_neox)
    return q, k


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_have_the_arguments_that_vllm_passes(name: str) -> None:
    assert made.parameters(getattr(made.Impl, name)) == made.parameters(getattr(AttentionImpl, name))


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("rotary_dim", [made.DIM, made.DIM // 2])
@pytest.mark.parametrize("kind", ["auto", "fp8", "int8_per_token_head"])
@pytest.mark.parametrize("with_norm", [False, True])
def test_one_launch_writes_what_separate_operators_write(
    is_neox: bool, rotary_dim: int, kind: str, with_norm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(adapter, "write_qkv", lambda *x, told=adapter.write_qkv, **y: calls.append(told(*x, **y)))
    common, of, table = made.batch(made.MIXED), made.layer(0.5), cos_sin(rotary_dim)
    tokens, metadata = common.num_actual_tokens, made.build(common)
    slots = metadata.slot_mapping.clone()
    slots[::5] = -1  # keys of other ranks, whose queries are this rank's all the same
    positions = torch.arange(tokens + PAD) * 7 % PLACES
    weights = [1 + torch.rand(made.DIM, generator=torch.Generator().manual_seed(i)) for i in (0, 1)]
    impl = made.implementation(kv_cache_dtype=kind)
    assert impl.fused_qk_norm_rope_kvcache_supported() is impl.fused_rope_kvcache_supported() is True

    qkv = packed(tokens)
    q, k, v = (x.clone() for x in parts(qkv))
    if with_norm:
        q, k = normed(q, weights[0]), normed(k, weights[1])
    q, k = rotated(positions, q.clone(), k.clone(), table, is_neox)
    dtype = {"auto": torch.float32, "fp8": torch.float8_e4m3fn}.get(kind, torch.int8)
    want = made.cache(dtype=dtype, tail=4 * (dtype == torch.int8))
    found = want.clone()
    impl.do_kv_cache_update(of, k, v, want, slots)

    if with_norm:
        got = torch.full((tokens + PAD, made.HEADS * made.DIM), torch.nan)
        unused = torch.full((tokens + PAD, made.KV_HEADS * made.DIM), torch.nan)
        impl.do_qk_norm_rope_kvcache_update(
            of, qkv, got, unused, positions, *weights, EPS, table, is_neox, found, slots
        )  # fmt: skip
        got = got.view(tokens + PAD, made.HEADS, made.DIM)
    else:
        got, key, value = parts(qkv)
        impl.do_rope_and_kv_cache_update(of, got, key, value, positions, table, is_neox, found, slots)
        assert torch.equal(got[tokens:], parts(packed(tokens))[0][tokens:]), "rows without a slot are padding"
    torch.testing.assert_close(got[:tokens], q[:tokens], **CLOSE)
    if kind == "auto":
        torch.testing.assert_close(found, want, **CLOSE)
    else:  # a sum in another order may round to the next number, and a scale to the next float32
        assert (found != want).float().mean() < 2e-3
    assert len(calls) == 1


def test_attention_after_a_hook_is_attention_after_separate_operators() -> None:
    common, table = made.batch(made.MIXED), cos_sin(made.DIM)
    tokens, metadata = common.num_actual_tokens, made.build(common)
    positions, impl, results = torch.arange(tokens + PAD) % PLACES, made.implementation(), []
    for fused in (True, False):
        q, k, v = parts(packed(tokens))
        kv, out = made.cache(), torch.full((tokens + PAD, made.HEADS, made.DIM), 7.0)
        if fused:
            impl.do_rope_and_kv_cache_update(made.layer(), q, k, v, positions, table, True, kv, metadata.slot_mapping)
        else:
            q, k = rotated(positions, q.clone(), k.clone(), table, True)
            impl.do_kv_cache_update(made.layer(), k, v, kv, metadata.slot_mapping)
        results.append(impl.forward(made.layer(), q, k, v, kv, metadata, out))
    torch.testing.assert_close(*results, **CLOSE)


def test_values_of_another_width_than_keys_are_written_too() -> None:
    DiffKVBackend.set_head_size_v(16)
    impl = DiffKVImpl(made.HEADS, made.DIM, 1.0, made.KV_HEADS)
    kv = torch.zeros(made.PAGES, made.KV_HEADS, made.PAGE, made.DIM + 16)
    common, table = made.batch(made.DECODE), cos_sin(made.DIM)
    q, k, v = parts(packed(3, 16), 16)
    want = rotated(torch.arange(6), q.clone(), k.clone(), table, True)[1]
    impl.do_rope_and_kv_cache_update(made.layer(), q, k, v, torch.arange(6), table, True, kv, common.slot_mapping)
    written = kv.transpose(1, 2)[common.slot_mapping // made.PAGE, common.slot_mapping % made.PAGE]
    torch.testing.assert_close(written, torch.cat([want, v], -1)[:3], **CLOSE)


@pytest.mark.parametrize("attn_type", ["encoder_only", "encoder_decoder"])
def test_attention_to_encoders_rotates_nothing(attn_type: str) -> None:
    assert not made.implementation(attn_type=attn_type).fused_rope_kvcache_supported()


@pytest.mark.parametrize("name", ["fuse_rope_kvcache", "fuse_qk_norm_rope_kvcache"])
def test_the_page_tells_how_the_passes_are_switched_on(name: str) -> None:
    """Off a ROCm machine, vLLM takes back what the constructor is given, and keeps what is set later."""
    passes = PassConfig(**{name: True})
    assert getattr(passes, name) is False
    setattr(passes, name, True)
    assert getattr(passes, name) is True
