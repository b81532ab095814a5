"""SGLang's pool of latents, layers over it, and what attention over them has to be, dense in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integrations import sglang_batch
from tests.integrations.sglang_batch import CONTEXT, SLOTS, ForwardBatch

from paged_attn.integrations.sglang.latent import LatentBackend  # isort: skip
from sglang.srt.layers.radix_attention import RadixAttention  # isort: skip
from sglang.srt.mem_cache import memory_pool  # isort: skip
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, ReqToTokenPool  # isort: skip

CLOSE = {"atol": 2e-5, "rtol": 2e-5}  # float32, sums in another order
HEADS, RANK, ROPE, NOPE, VALUE = 4, 32, 16, 24, 20
DIMS, SCALE = RANK + ROPE, (NOPE + ROPE) ** -0.5
FRESH = [(20, 20), (5, 5), (1, 1)]


def settled(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The settings of sglang_batch, and those that the pool of latents asks for."""
    chosen = sglang_batch.settled(monkeypatch)
    chosen.parallel.dcp_enabled, chosen.parallel.attn_dcp_rank = False, 0
    monkeypatch.setattr(memory_pool, "get_parallel", lambda: chosen.parallel)
    return chosen


def runner(page_size: int = 1, dtype: torch.dtype = torch.float32, **others: Any) -> Any:
    """What of a model runner the backend looks at: SGLang's own pool of latents."""
    pool = MLATokenToKVPool(
        size=SLOTS, page_size=page_size, dtype=dtype, kv_lora_rank=RANK, qk_rope_head_dim=ROPE, layer_num=1,
        device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    pool.write_loc_is_dcp_resolved = True  # nothing to resolve: one rank
    rng = torch.Generator().manual_seed(2)
    pool.get_key_buffer(0).copy_(torch.randn(pool.kv_buffer[0].shape, generator=rng).to(dtype))
    given = dict(
        token_to_kv_pool=pool,
        req_to_token_pool=ReqToTokenPool(8, CONTEXT, "cpu", False),
        page_size=page_size,
        model_config=SimpleNamespace(is_encoder_decoder=False),
        use_mla_backend=True,
        kv_index_translator=SimpleNamespace(is_translating=False),
    )
    return SimpleNamespace(**given | others)


def absorbed(**options: Any) -> RadixAttention:
    """attn_mqa of DeepSeek's layers."""
    return RadixAttention(HEADS, DIMS, SCALE, 1, layer_id=0, v_head_dim=RANK, **options)


def expanded(**options: Any) -> RadixAttention:
    """attn_mha of the same layer."""
    return RadixAttention(HEADS, NOPE + ROPE, SCALE, HEADS, layer_id=0, v_head_dim=VALUE, **options)


def random(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def matrices() -> tuple[Tensor, Tensor]:
    """Matrices of each head, for keys [heads, nope, rank] and for values [heads, value, rank]."""
    return random(HEADS, NOPE, RANK, seed=5) / RANK**0.5, random(HEADS, VALUE, RANK, seed=6) / RANK**0.5


def made_of(latents: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [n, heads, nope + rope] and values [n, heads, value] of latents with their rotated part [n, rank + rope]."""
    for_keys, for_values = matrices()
    keys = torch.einsum("tr,hnr->thn", latents[:, :RANK], for_keys)
    rotated = latents[:, None, RANK:].expand(-1, HEADS, -1)
    return torch.cat([keys, rotated], -1), torch.einsum("tr,hvr->thv", latents[:, :RANK], for_values)


def latents_of(of: Any, made: ForwardBatch, sequence: int, scale: float = 1.0) -> Tensor:
    """[keys, rank + rope] of one sequence, as the pool has them now."""
    slots = of.req_to_token_pool.req_to_token[made.req_pool_indices[sequence], : int(made.seq_lens[sequence])]
    return of.token_to_kv_pool.get_key_buffer(0)[slots.long(), 0].float() * scale


def spans(made: ForwardBatch) -> list[tuple[int, int]]:
    """Rows of each sequence's queries."""
    counts = [1] * made.batch_size if made.extend_seq_lens is None else made.extend_seq_lens.tolist()
    ends = torch.tensor(counts).cumsum(0).tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Dense, in float64: q [n, heads, d], the last of which stands beside the last of k [m, heads or 1, d]."""
    n, m = len(q), len(k)
    k, v = k.expand(m, HEADS, -1).double(), v.expand(m, HEADS, -1).double()
    scores = SCALE * torch.einsum("nhd,mhd->hnm", q.double(), k)
    if cap := options.get("softcap"):
        scores = cap * torch.tanh(scores / cap)
    places, queries = torch.arange(m), torch.arange(m - n, m)[:, None]
    hidden = (places > queries) | (places < queries - options.get("before", m))
    scores = scores.masked_fill(hidden, -torch.inf)
    if (sinks := options.get("sinks")) is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, n, 1)], -1)
        v = torch.cat([v, torch.zeros_like(v[:1])])
    return torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v).float()


def started(of: Any, made: ForwardBatch) -> LatentBackend:
    backend = LatentBackend(of)
    backend.init_forward_metadata(made)
    return backend


def with_contexts(made: ForwardBatch, **others: Any) -> ForwardBatch:
    """What a batch tells of its contexts."""
    lengths = [(int(keys) - int(new)) for new, keys in zip(made.extend_seq_lens, made.seq_lens, strict=True)]
    made.extend_prefix_lens, made.extend_prefix_lens_cpu = torch.tensor(lengths, dtype=torch.int32), lengths
    for name, value in others.items():
        setattr(made, name, value)
    return made
