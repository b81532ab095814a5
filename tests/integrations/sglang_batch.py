"""Batches of SGLang's own classes over its own pools, and what attention over them has to be."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        import torchvision  # noqa: F401
    except ImportError:
        pass
    except RuntimeError:  # a wheel whose operators are for another torch: none of them is called here
        _operators = torch.library.Library("torchvision", "FRAGMENT")
        for _name in ("nms", "qnms"):
            _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    pytest.importorskip("sglang", reason="needs SGLang: make hosts")
    pytest.importorskip("sglang.srt.layers.attention.attention_registry", exc_type=ImportError)
    from sglang.srt import runtime_context
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

    import paged_attn
    from paged_attn.integrations.sglang.backend import Backend

CLOSE = {"atol": 1e-5, "rtol": 1e-5}  # float32, sums in another order
HEADS, KV_HEADS, DIM, CONTEXT, SLOTS = 4, 2, 32, 96, 512
# (new tokens, keys with them) of each sequence
DECODE = [(1, 34), (1, 5), (1, 17)]
EXTEND = [(20, 37), (5, 5), (1, 40)]


def settled(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What SGLang keeps of a server's arguments, as its defaults are."""
    chosen = SimpleNamespace(
        spec=SimpleNamespace(speculative_algorithm=None),
        exec=SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=False)),
        parallel=SimpleNamespace(attn_dcp_size=1),
    )
    for name in vars(chosen):
        monkeypatch.setattr(runtime_context, f"get_{name}", lambda name=name: getattr(chosen, name))
    return chosen


def runner(page_size: int = 1, dtype: torch.dtype = torch.float32, value_dim: int = DIM, **others: Any) -> Any:
    """What of a model runner the backend looks at: SGLang's own pools."""
    pool = MHATokenToKVPool(
        size=SLOTS, page_size=page_size, dtype=dtype, head_num=KV_HEADS, head_dim=DIM, layer_num=1, device="cpu",
        v_head_dim=value_dim, enable_memory_saver=False, enable_alt_stream=False,
    )  # fmt: skip
    rng = torch.Generator().manual_seed(2)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.view(dtype).copy_(torch.randn(buffer.shape, generator=rng).to(dtype))
    given = dict(
        token_to_kv_pool=pool,
        req_to_token_pool=ReqToTokenPool(8, CONTEXT, "cpu", False),
        page_size=page_size,
        model_config=SimpleNamespace(is_encoder_decoder=False),
        use_mla_backend=False,
        kv_index_translator=SimpleNamespace(is_translating=False),
    )
    return SimpleNamespace(**given | others)


def batch(of: Any, lengths: list[tuple[int, int]], **others: Any) -> ForwardBatch:
    """Requests in rows of no order; pages of slots in no order; tails of rows far out of range."""
    page = of.page_size
    ids = 1 + torch.randperm(SLOTS // page - 1, generator=torch.Generator().manual_seed(1))
    rows = torch.tensor([5, 2, 7])[: len(lengths)]
    table, new, used = of.req_to_token_pool.req_to_token, [], 0
    table.fill_(2**31 - 1)
    for row, (fresh, keys) in zip(rows.tolist(), lengths, strict=True):
        own = ids[used : (used := used + -(-keys // page))]
        places = torch.arange(keys)
        slots = own[places // page] * page + places % page
        table[row, :keys] = slots.int()
        new.append(slots[keys - fresh :])
    decodes = all(n == 1 for n, _ in lengths)
    counts = torch.tensor([n for n, _ in lengths], dtype=torch.int32)
    given: dict[str, Any] = dict(
        forward_mode=ForwardMode.DECODE if decodes else ForwardMode.EXTEND,
        batch_size=len(lengths),
        input_ids=torch.zeros(int(counts.sum()), dtype=torch.int64),
        req_pool_indices=rows,
        seq_lens=torch.tensor([keys for _, keys in lengths]),
        seq_lens_cpu=torch.tensor([keys for _, keys in lengths]),
        seq_lens_sum=sum(keys for _, keys in lengths),
        out_cache_loc=torch.cat(new),
        extend_seq_lens=None if decodes else counts,
        extend_seq_lens_cpu=None if decodes else counts.tolist(),
    )
    return ForwardBatch(**given | others)


def layer(**options: Any) -> RadixAttention:
    return RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, layer_id=0, **options)


def tensors(tokens: int) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(tokens, heads, DIM, generator=rng) for heads in (HEADS, KV_HEADS, KV_HEADS))
    return [q.flatten(1), k, v]


def wanted(of: Any, made: ForwardBatch, q: torch.Tensor, **options: Any) -> torch.Tensor:
    """The reference over the pool, a slot at a time."""
    k, v = of.token_to_kv_pool.get_kv_buffer(0)
    counts = torch.ones(made.batch_size) if made.extend_seq_lens is None else made.extend_seq_lens
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    table = of.req_to_token_pool.req_to_token[made.req_pool_indices]
    out = paged_attn.reference.paged_attention(
        q.view(-1, HEADS, DIM), k[:, None], v[:, None], table, made.seq_lens, starts, **options
    )
    return out.flatten(1).float()  # type: ignore[union-attr]


def run(of: Any, made: ForwardBatch, of_layer: Any, **others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(result, queries) through the base class, as a model calls it."""
    backend = Backend(of)
    backend.init_forward_metadata(made)
    q, k, v = tensors(len(made.input_ids))
    return backend.forward(q, k, v, of_layer, made, **others), q
