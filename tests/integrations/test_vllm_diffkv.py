"""Values of another width than keys in vLLM, by the name of its own backend for them, which its models ask for."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm", reason="needs vLLM: make hosts", exc_type=ImportError)
    from vllm.v1.attention.backends import registry
    from vllm.v1.attention.backends.triton_attn_diffkv import TritonAttentionDiffKVBackend

    import paged_attn
    from paged_attn.integrations import vllm as adapter
    from tests.integrations import vllm_batch as made

CLOSE = {"atol": 1e-5, "rtol": 1e-5}  # float32, sums in another order
VALUE = 16


@pytest.fixture
def backend() -> Any:
    """The backend as MiMo-V2 takes it: the class of the member, with the width of values set."""
    adapter.unregister()
    member = registry.AttentionBackendEnum[adapter.register("TRITON_ATTN_DIFFKV")]
    found = member.get_class()
    found.set_head_size_v(VALUE)
    yield found
    adapter.unregister()
    assert member.get_class() is TritonAttentionDiffKVBackend


@pytest.mark.parametrize("kind", ["auto", "fp8"])
@pytest.mark.parametrize("lengths", [made.DECODE, made.MIXED])
def test_new_keys_and_values_are_written_and_attended_where_vllm_keeps_them(
    backend: Any, lengths: Any, kind: str
) -> None:
    shape = (made.PAGES, made.KV_HEADS, made.PAGE, made.DIM + VALUE)
    kv = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    kv = kv if kind == "auto" else kv.to(torch.float8_e4m3fn).view(torch.uint8)
    impl = backend.get_impl_cls()(
        num_heads=made.HEADS, head_size=made.DIM, scale=made.DIM**-0.5, num_kv_heads=made.KV_HEADS,
        kv_cache_dtype=kind, sinks=torch.tensor([1.0, -1.0, 0.5, 2.0]), sliding_window=8,
    )  # fmt: skip
    common = made.batch(lengths)
    q, k, v = made.tensors(common.num_actual_tokens)
    v, layer, metadata = v[..., :VALUE].contiguous(), made.layer(0.5), made.build(common)
    impl.do_kv_cache_update(layer, k, v, kv, metadata.slot_mapping)
    out = impl.forward(layer, q, k, v, kv, metadata, torch.empty(len(q), made.HEADS * VALUE))
    pages = kv if kind == "auto" else kv.view(torch.float8_e4m3fn)
    slots = common.slot_mapping
    if kind == "auto":
        written = kv.transpose(1, 2)[slots // made.PAGE, slots % made.PAGE]
        assert torch.equal(written, torch.cat([k, v], -1))
    scales = {} if kind == "auto" else {"k_scale": 0.5, "v_scale": 0.5}
    want = paged_attn.reference.paged_attention(
        q, pages[..., : made.DIM], pages[..., made.DIM :], common.block_table_tensor, common.seq_lens,
        common.query_start_loc, kv_layout="HND", window_size=(7, 0), sinks=impl.sinks, **scales,
    )  # fmt: skip
    torch.testing.assert_close(out.view(len(q), made.HEADS, VALUE), want.float(), **CLOSE)  # type: ignore[union-attr]


def test_caches_are_as_wide_as_vllm_has_them(backend: Any) -> None:
    assert backend.get_name() == "TRITON_ATTN_DIFFKV"
    assert backend.get_kv_cache_shape(7, 16, 2, 64) == (7, 2, 16, 64 + VALUE)
    assert backend.supports_attn_type("decoder")
    assert not backend.supports_attn_type("encoder_only")
    assert backend.supports_head_size(192)


@pytest.mark.parametrize("named, taken", [(None, False), ("paged_attn", False), ("paged_attn,paged_attn_diffkv", True)])
def test_vllms_own_backend_is_replaced_only_where_that_is_said(
    named: str | None, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter.unregister()
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if named is not None:
        monkeypatch.setenv("VLLM_PLUGINS", named)
    adapter.plugin_diffkv()
    assert registry.AttentionBackendEnum.TRITON_ATTN_DIFFKV.is_overridden() is taken
    adapter.unregister()
    assert not registry.AttentionBackendEnum.TRITON_ATTN_DIFFKV.is_overridden()
