"""Layers of other kinds in vLLM, through its own wrappers of a backend: encoders, attention to these, local chunks."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm", reason="needs vLLM: make hosts", exc_type=ImportError)
    from vllm import envs
    from vllm.model_executor.layers.attention import chunked_local_attention, cross_attention, encoder_only_attention
    from vllm.v1.attention.backend import AttentionType
    from vllm.v1.attention.backends import utils
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, CrossAttentionSpec

    import paged_attn
    from paged_attn.integrations.vllm.backend import Backend
    from tests.integrations import vllm_batch as made

CLOSE = {"atol": 1e-5, "rtol": 1e-5}  # float32, sums in another order
SIZES = dict(block_size=made.PAGE, num_kv_heads=made.KV_HEADS, head_size=made.DIM, dtype=torch.float32)


def builder(backend: Any, spec: Any = None) -> Any:
    return backend.get_builder_cls()(spec, ["layer"], made.config(), torch.device("cpu"))


@pytest.mark.parametrize(("window", "slopes"), [(None, None), (4, None), (None, [0.5, 0.25, 0.1, 1.0])])
@pytest.mark.parametrize("kind", [AttentionType.ENCODER_ONLY, AttentionType.ENCODER])
def test_encoders_attend_to_all_tokens_of_the_call_and_cache_nothing(
    kind: Any, window: int | None, slopes: list[float] | None
) -> None:
    """ALiBi lowers keys on both sides, as vLLM's FlashAttention has it."""
    backend = encoder_only_attention.create_encoder_only_attention_backend(Backend)
    assert backend.supports_attn_type(kind)
    common = made.batch([(20, 20), (5, 5), (1, 1)], block_table_tensor=torch.zeros(3, 1, dtype=torch.int32))
    metadata = builder(backend).build(0, common)
    impl = made.implementation(attn_type=kind, sliding_window=window, kv_cache_dtype="fp8", alibi_slopes=slopes)
    tokens, pad = common.num_actual_tokens, 3
    q, k, v = made.tensors(tokens + pad)
    nothing = torch.empty(0)
    impl.do_kv_cache_update(made.layer(), k, v, nothing, common.slot_mapping)
    out = impl.forward(made.layer(), q, k, v, nothing, metadata, torch.full_like(q, 7.0))
    assert not out[tokens:].any()
    sides = (-1, -1) if window is None else (window - 1, window - 1)
    for s in range(3):
        rows = slice(*common.query_start_loc[s : s + 2].tolist())
        n = rows.stop - rows.start
        want = paged_attn.reference.paged_attention(
            q[rows], k[rows][None], v[rows][None], torch.zeros(1, 1, dtype=torch.int32), torch.tensor([n]),
            torch.tensor([0, n]), causal=False, window_size=sides,
            alibi_slopes=None if slopes is None else torch.tensor(slopes), alibi_symmetric=True,
        )  # fmt: skip
        torch.testing.assert_close(out[rows], want.float(), **CLOSE)  # type: ignore[union-attr]


def test_decoders_attend_to_what_an_encoder_left_in_their_cache() -> None:
    """Two requests whose encoder runs in this step, one of them of more queries than keys, and a later token."""
    backend = cross_attention.create_cross_attention_backend(Backend)
    assert backend.supports_attn_type(AttentionType.ENCODER_DECODER)
    lens = np.array([20, 3, 17], dtype=np.int32)
    common = made.batch(
        [(4, 4), (6, 6), (1, 9)], encoder_seq_lens=torch.from_numpy(lens), encoder_seq_lens_cpu=lens.copy(),
        seq_lens_cpu_upper_bound=torch.tensor([4, 6, 9]),
    )  # fmt: skip
    ids = torch.randperm(made.PAGES, generator=torch.Generator().manual_seed(5)).int()
    common.block_table_tensor = torch.stack([ids[:2], ids[2:4], ids[4:6]])
    metadata = builder(backend, CrossAttentionSpec(**SIZES)).build(0, common)
    assert len(metadata.slot_mapping) == 23
    made_of = backend.get_impl_cls()
    impl = made_of(
        num_heads=made.HEADS, head_size=made.DIM, scale=made.DIM**-0.5, num_kv_heads=made.KV_HEADS,
        attn_type=AttentionType.ENCODER_DECODER,
    )  # fmt: skip
    kv, layer = made.cache(), made.layer()
    layer.kv_sharing_target_layer_name = None
    _, k, v = made.tensors(23)
    q = made.tensors(11)[0]
    out = impl.forward(layer, q, k, v, kv, metadata, torch.empty_like(q))
    pages = (common.block_table_tensor[0], common.block_table_tensor[1])
    places = torch.cat([p[torch.arange(n) // made.PAGE].long() * made.PAGE + torch.arange(n) % made.PAGE
                        for p, n in zip(pages, (20, 3), strict=True)])  # fmt: skip
    stored = kv.transpose(1, 2).reshape(-1, made.KV_HEADS, 2 * made.DIM)[places]
    assert torch.equal(stored, torch.cat([k, v], -1))
    want = paged_attn.reference.paged_attention(
        q, kv[..., : made.DIM], kv[..., made.DIM :], common.block_table_tensor, torch.from_numpy(lens),
        common.query_start_loc, kv_layout="HND", causal=False,
    )  # fmt: skip
    torch.testing.assert_close(out, want.float(), **CLOSE)  # type: ignore[union-attr]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what vLLM 0.26 itself reads
@pytest.mark.parametrize("lengths", [made.DECODE, made.MIXED, [(33, 50), (4, 16), (1, 48)]])
def test_chunks_of_local_layers_are_sequences_of_vllms_own_making(
    lengths: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama 4's: a query sees keys of its own chunk."""
    chunk = 16
    monkeypatch.setattr("vllm.utils.torch_utils.PIN_MEMORY", False, raising=False)
    monkeypatch.setattr(utils, "PIN_MEMORY", False, raising=False)
    backend = chunked_local_attention.create_chunked_local_attention_backend(Backend, chunk)
    common = made.batch(lengths)
    common.seq_lens_cpu_upper_bound = common.seq_lens
    common._seq_lens_cpu = common.seq_lens  # type: ignore[attr-defined]
    common.block_table_tensor = common.block_table_tensor.clamp(max=made.PAGES - 1)  # vLLM gathers what it is to copy
    metadata = builder(backend, ChunkedLocalAttentionSpec(**SIZES, attention_chunk_size=chunk)).build(0, common)
    kv, q = made.cache(), made.tensors(common.num_actual_tokens)[0]
    out = made.implementation().forward(made.layer(), q, q, q, kv, metadata, torch.empty_like(q))
    want = paged_attn.reference.paged_attention(
        q, kv[..., : made.DIM], kv[..., made.DIM :], common.block_table_tensor, common.seq_lens,
        common.query_start_loc, kv_layout="HND", chunk=chunk,
    )  # fmt: skip
    torch.testing.assert_close(out, want.float(), **CLOSE)  # type: ignore[union-attr]
    again = builder(backend).update_block_table(metadata, common.block_table_tensor, common.slot_mapping)
    assert torch.equal(again.block_table, metadata.block_table)


def test_what_encoders_are_not_served_with_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", True, raising=False)
    with pytest.raises(NotImplementedError, match="VLLM_BATCH_INVARIANT of encoders"):
        made.implementation(attn_type=AttentionType.ENCODER_ONLY)
