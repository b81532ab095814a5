"""Batches of vLLM's latent attention: its own builder and base class, a cache of latents, what results have to be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.model_executor.layers.attention import mla_attention as frame
from vllm.utils import torch_utils

from paged_attn.integrations.vllm.latent import Builder, Impl
from paged_attn.integrations.vllm.prefill import Prefill
from tests.integrations.vllm_batch import PAGE, PAGES, batch

# vLLM's metadata knows caches of 320, 512 and 576 dims.
HEADS, RANK, ROPE, NOPE, VALUE = 2, 256, 64, 48, 32
SCALE = (NOPE + ROPE) ** -0.5
DIMS: dict[str, Any] = dict(
    q_lora_rank=None, kv_lora_rank=RANK, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, v_head_dim=VALUE
)


class Model:
    """One layer's matrices, and what a frame asks of the layer and of the config."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, drafts: int = 0, dtype: str = "auto", parallel: Any = None
    ) -> None:
        rng = torch.Generator().manual_seed(0)
        self.weight = torch.randn(HEADS * (NOPE + VALUE), RANK, generator=rng) / RANK**0.5
        parallel = parallel or SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1, cp_kv_cache_interleave_size=1,
            tensor_parallel_size=1,
        )  # fmt: skip
        config = SimpleNamespace(
            model_config=SimpleNamespace(
                max_model_len=256, dtype=torch.float32, get_head_size=lambda: RANK + ROPE,
                get_num_attention_heads=lambda _: HEADS, hf_text_config=SimpleNamespace(**DIMS),
            ),
            scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=64),
            cache_config=SimpleNamespace(block_size=PAGE, cache_dtype=dtype),
            attention_config=SimpleNamespace(use_prefill_query_quantization=False, trtllm_ragged_backend=None),
            parallel_config=parallel,
            speculative_config=None if not drafts else SimpleNamespace(
                num_speculative_tokens=drafts, parallel_drafting=False, method="draft_model", use_eagle=lambda: False
            ),
            compilation_config=None,
        )  # fmt: skip
        monkeypatch.setattr(frame, "get_current_vllm_config", lambda: config)
        for module in (frame, torch_utils):  # there is nothing to pin memory for
            monkeypatch.setattr(module, "PIN_MEMORY", False, raising=False)
        self.impl = Impl(
            HEADS, RANK + ROPE, SCALE, 1, None, None, dtype, None, "decoder", None, **DIMS, qk_head_dim=NOPE + ROPE,
            kv_b_proj=self.expand,
        )  # fmt: skip
        world = parallel.decode_context_parallel_size
        self.impl.dcp_world_size = world  # as vLLM 0.26 sets it before the first step
        manager = getattr(frame, "MLADCPManager", None)  # of vLLM's collectives, from about 0.33 on
        if manager is not None:
            monkeypatch.setattr(manager, "init_kv_gather", lambda *_: None)
            manager = manager.__new__(manager)
        backend = Prefill(HEADS, SCALE, RANK, NOPE, ROPE, VALUE, config)  # type: ignore[arg-type]
        layer = SimpleNamespace(
            prefill_backend=backend, _prefill_backend=backend, **DIMS, num_heads=HEADS, dcp_manager=manager
        )  # fmt: skip
        config.compilation_config = SimpleNamespace(static_forward_context={"layer": layer})
        monkeypatch.setattr(
            frame, "get_num_attention_heads_from_layers", lambda *_: HEADS, raising=False
        )  # which looks for layers of vLLM's classes
        monkeypatch.setattr(frame, "get_layers_from_vllm_config", lambda *_: {"layer": layer}, raising=False)
        self.builder = Builder(SimpleNamespace(block_size=PAGE), ["layer"], config, torch.device("cpu"))  # type: ignore[arg-type]

    def expand(self, latents: Tensor) -> tuple[Tensor]:
        return (latents @ self.weight.T,)

    def absorb(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [tokens, heads, NOPE + ROPE] as the frame hands them to decodes."""
        keys = self.weight.view(HEADS, NOPE + VALUE, RANK)[:, :NOPE]
        return torch.einsum("thn,hnr->thr", q[..., :NOPE], keys), q[..., NOPE:]

    def build(self, lengths: list[tuple[int, int]], given: Any = None) -> tuple[Any, Any]:
        """(vLLM's batch, its builder's metadata); given: the batch, in place of one of these lengths."""
        made = given or batch(lengths)
        made.seq_lens_cpu_upper_bound = made.seq_lens
        made._seq_lens_cpu = made.seq_lens  # type: ignore[attr-defined]
        return made, self.builder.build(0, made)


def cache(dtype: torch.dtype = torch.float32) -> Tensor:
    rng = torch.Generator().manual_seed(2)
    return torch.randn(PAGES, PAGE, RANK + ROPE, generator=rng).to(dtype)


def keys_of(kv: Tensor, made: Any, sequence: int) -> Tensor:
    """A sequence's latents and rotated keys [keys, rank + rope]."""
    n = int(made.seq_lens[sequence])
    places = torch.arange(n)
    pages = made.block_table_tensor[sequence].long()[places // PAGE]
    return kv[pages, places % PAGE]


def attention(q: Tensor, k: Tensor, v: Tensor, context: int) -> Tensor:
    """q [n, heads, d] over keys [m, heads or 1, d], of which the first query sees context + 1."""
    n, m = q.shape[0], k.shape[0]
    scores = SCALE * torch.einsum("nhd,mhd->hnm", q.double(), k.expand(m, HEADS, -1).double())
    hidden = torch.arange(m)[None] > torch.arange(n)[:, None] + context
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hnm,mhd->nhd", weights, v.expand(m, HEADS, -1).double()).float()
