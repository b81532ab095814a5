"""Attention backends of the engine: small classes over one paged cache, each checked before it is timed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import paged_attn
from benchmarks.serve.model import Shape

AGREE = 2e-2  # upper bound of |out - reference| / |reference|; 16-bit weights and results give some 3e-3


@dataclass(frozen=True)
class Batch:
    """Sequences of a step.  The lengths on the host, the last two fields, are None during a graph capture."""

    page_table: Tensor  # [seqs, columns] int32
    seq_lens: Tensor  # [seqs] int32
    starts: Tensor | None  # [seqs + 1] int32; None: one query token each
    max_q: int
    max_k: int
    query_lens: list[int] | None = None
    key_lens: list[int] | None = None


class Backend:
    """An attention backend: the engine calls `prepare` once a step and `attend` once a layer."""

    graphs = True  # whether a step of decodes can be captured, with lengths on the device alone

    def page_size(self, wanted: int) -> int:
        return wanted

    def prepare(self, batch: Batch) -> Any:
        """Return what all layers of a step share."""

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, prepared: Any) -> Tensor:
        """Attend causally over the cache: q [tokens, heads, head_dim] -> the same shape."""
        raise NotImplementedError


class PagedAttn(Backend):
    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, prepared: Any) -> Tensor:
        out = paged_attn.paged_attention(
            q, k_cache, v_cache, batch.page_table, batch.seq_lens, batch.starts,
            max_seqlen_q=batch.max_q, max_seqlen_k=batch.max_k,
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out


class Sdpa(Backend):
    """torch's scaled_dot_product_attention over gathered pages.

    Decodes of similar lengths share a call; each sequence with several query tokens has its own.
    """

    graphs = False  # the host has to know how many keys to gather
    GATHERED = 1 << 19  # upper bound of the keys of one call of several decodes, padding included

    def __init__(self, page_size: int, dtype: torch.dtype) -> None:
        self.size, self.dtype = page_size, dtype

    def prepare(self, batch: Batch) -> Any:
        assert batch.query_lens is not None
        assert batch.key_lens is not None
        device, page_size = batch.page_table.device, self.size
        firsts = [0, *torch.tensor(batch.query_lens).cumsum(0).tolist()]
        decodes = sorted((n, i) for i, n in enumerate(batch.key_lens) if batch.query_lens[i] == 1)
        groups = []
        while decodes:
            longest = -(-decodes[-1][0] // page_size) * page_size
            some = decodes[-max(1, self.GATHERED // longest) :]
            del decodes[-len(some) :]
            which = torch.tensor([i for _, i in some], device=device)
            rows = torch.tensor([firsts[i] for _, i in some], device=device)
            dead = torch.arange(longest, device=device) >= batch.seq_lens[which, None]
            mask = torch.zeros(dead.shape, dtype=self.dtype, device=device).masked_fill_(dead, -torch.inf)
            groups.append((rows, batch.page_table[which, : longest // page_size].long().clamp(min=0), mask))
        prompts = [
            (firsts[i], firsts[i + 1], batch.page_table[i, : -(-batch.key_lens[i] // page_size)].long(), n)
            for i, n in enumerate(batch.key_lens)
            if batch.query_lens[i] > 1
        ]
        return groups, prompts

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, prepared: Any) -> Tensor:
        from torch.nn.attention.bias import causal_lower_right

        groups, prompts = prepared
        out, kv_heads = torch.empty_like(q), k_cache.shape[2]
        group = q.shape[1] // kv_heads
        for rows, pages, mask in groups:
            k, v = (cache[pages].flatten(1, 2).transpose(1, 2) for cache in (k_cache, v_cache))
            # The query heads of a KV head become rows of one head, so keys are not repeated.
            asked = q[rows].unflatten(1, (kv_heads, group))
            shared = mask[:, None, None].expand(-1, kv_heads, group, -1)
            out[rows] = F.scaled_dot_product_attention(asked, k, v, attn_mask=shared).flatten(1, 2)
        for first, end, pages, keys in prompts:
            k, v = (
                cache[pages].flatten(0, 1)[:keys].repeat_interleave(group, dim=1).transpose(0, 1)[None]
                for cache in (k_cache, v_cache)
            )
            asked = q[first:end].transpose(0, 1)[None]
            if keys == end - first:
                part = F.scaled_dot_product_attention(asked, k, v, is_causal=True)
            else:
                part = F.scaled_dot_product_attention(asked, k, v, attn_mask=causal_lower_right(end - first, keys))
            out[first:end] = part[0].transpose(0, 1)
        return out


class FlashAttn2(Backend):
    """The package flash-attn; it takes pages of multiples of 256 tokens."""

    def __init__(self) -> None:
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        self.varlen, self.decode = flash_attn_varlen_func, flash_attn_with_kvcache

    def page_size(self, wanted: int) -> int:
        return -(-wanted // 256) * 256

    def prepare(self, batch: Batch) -> Any:
        return F.pad(batch.seq_lens.cumsum(0), (1, 0)).int() if batch.starts is not None else None

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, prepared: Any) -> Tensor:
        options = dict(causal=True, block_table=batch.page_table)
        if batch.starts is None:
            return self.decode(q[:, None], k_cache, v_cache, cache_seqlens=batch.seq_lens, **options)[:, 0]
        return self.varlen(q, k_cache, v_cache, batch.starts, prepared, batch.max_q, batch.max_k, **options)


class FlashAttn3(Backend):
    """FlashAttention's Hopper kernels, from their own package."""

    def __init__(self) -> None:
        from flash_attn_interface import flash_attn_with_kvcache

        self.call = flash_attn_with_kvcache

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, prepared: Any) -> Tensor:
        options = dict(cache_seqlens=batch.seq_lens, page_table=batch.page_table, causal=True)
        if batch.starts is None:
            out = self.call(q[:, None], k_cache, v_cache, **options)
        else:
            out = self.call(q, k_cache, v_cache, cu_seqlens_q=batch.starts, max_seqlen_q=batch.max_q, **options)
        out = out[0] if isinstance(out, tuple) else out
        return out[:, 0] if batch.starts is None else out


class VllmFlashAttn(Backend):
    """FlashAttention as vLLM builds it: version 3 if the card supports it, else version 2."""

    def __init__(self) -> None:
        from vllm.vllm_flash_attn import flash_attn_varlen_func, is_fa_version_supported

        self.call, self.version = flash_attn_varlen_func, 3 if is_fa_version_supported(3) else 2

    def prepare(self, batch: Batch) -> Any:
        seqs = batch.seq_lens.shape[0]
        return torch.arange(seqs + 1, dtype=torch.int32, device=batch.seq_lens.device)

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, prepared: Any) -> Tensor:
        return self.call(
            q, k_cache, v_cache, cu_seqlens_q=prepared if batch.starts is None else batch.starts,
            max_seqlen_q=batch.max_q, max_seqlen_k=batch.max_k, seqused_k=batch.seq_lens, causal=True,
            block_table=batch.page_table, fa_version=self.version,
        )  # fmt: skip


class TorchVarlen(Backend):
    """torch.nn.attention.varlen: over pages if this torch takes a block table, else over gathered keys."""

    def __init__(self, page_size: int) -> None:
        from torch.nn.attention.varlen import varlen_attn

        self.call, known = varlen_attn, inspect.signature(varlen_attn).parameters
        self.graphs = self.paged = "block_table" in known
        self.size = self.page_size(page_size)
        self.options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
        if "enable_gqa" in known:
            self.options["enable_gqa"] = True

    def page_size(self, wanted: int) -> int:
        return -(-wanted // 256) * 256 if self.paged else wanted  # torch contains FlashAttention 2 and its limit

    def prepare(self, batch: Batch) -> Any:
        device, seqs = batch.seq_lens.device, batch.seq_lens.shape[0]
        starts = batch.starts
        if starts is None:
            starts = torch.arange(seqs + 1, dtype=torch.int32, device=device)
        if self.paged:
            return starts, None, None
        assert batch.key_lens is not None
        keys = F.pad(batch.seq_lens.cumsum(0), (1, 0)).int()
        total = sum(batch.key_lens)
        places = paged_attn.positions(batch.seq_lens, keys, tokens=total)
        return starts, keys, paged_attn.slots(batch.page_table, places, self.size, keys)

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, prepared: Any) -> Tensor:
        starts, keys, slots = prepared
        options = self.options
        if self.paged:
            options = options | dict(seqused_k=batch.seq_lens, block_table=batch.page_table)
        else:
            k_cache, v_cache = (cache.flatten(0, 1)[slots] for cache in (k_cache, v_cache))
        out = self.call(q, k_cache, v_cache, starts, keys, batch.max_q, batch.max_k, **options)
        assert isinstance(out, Tensor)
        return out


OURS = "paged_attn"
BACKENDS: dict[str, Callable[[int, torch.dtype], Backend]] = {
    OURS: lambda page_size, dtype: PagedAttn(),
    "sdpa": Sdpa,
    "torch_varlen": lambda page_size, dtype: TorchVarlen(page_size),
    "flash_attn": lambda page_size, dtype: FlashAttn2(),
    "flash_attn_3": lambda page_size, dtype: FlashAttn3(),
    "vllm_flash_attn": lambda page_size, dtype: VllmFlashAttn(),
}


@torch.no_grad()
def error_of(backend: Backend, shape: Shape, page_size: int, dtype: torch.dtype, device: torch.device) -> float:
    """Return the larger relative error of two small steps: decodes, and chunks beside decodes."""
    worst = 0.0
    for query_lens in ([1, 1, 1], [1, 19, 40, 1]):
        key_lens = [3 * page_size + 5, 19, 2 * page_size + 40, 7][: len(query_lens)]
        key_lens[1] = max(key_lens[1], query_lens[1])
        columns = max(paged_attn.pages_needed(n, page_size) for n in key_lens)
        table = torch.randperm(len(key_lens) * columns, device=device).int().view(len(key_lens), columns)
        lens = torch.tensor(key_lens, dtype=torch.int32, device=device)
        starts = torch.tensor([0, *query_lens], device=device).cumsum(0).int()
        q = torch.randn(sum(query_lens), shape.heads, shape.head_dim, device=device).to(dtype)
        cache = torch.randn(2, table.numel(), page_size, shape.kv_heads, shape.head_dim, device=device).to(dtype)
        decodes = set(query_lens) == {1}
        batch = Batch(
            table, lens, None if decodes else starts, max(query_lens), max(key_lens), list(query_lens), key_lens
        )
        out = backend.attend(q, cache[0], cache[1], batch, backend.prepare(batch)).double()
        wanted = paged_attn.reference.paged_attention(q, cache[0], cache[1], table, lens, starts)
        assert isinstance(wanted, Tensor)
        worst = max(worst, float((out - wanted.double()).norm() / wanted.double().norm()))
    return worst
